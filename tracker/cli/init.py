"""`groupbench init`: write the files to measure a repository."""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import click

from groupbench.tracker.cli.declared import command, flag, option
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.measured_tree import USUAL_FOLDERS
from groupbench.tracker.facts.vocabulary import OPERATOR
from groupbench.tracker.night import origin
from groupbench.tracker.night.measuring import PROGRAM
from groupbench.tracker.project import NAME, ProjectError
from groupbench.tracker.text.wording import counted, printable
from groupbench.tracker.tools import git

IGNORED = ("groupbench.db*", "records/", "artifacts/", "report.html", ".groupbench/", "__pycache__/")
"""Files that runs write and git should ignore. A tracked file that a run changes would make its commit dirty."""

_BUILT = ("build/", "*.so")
"""Files that the build of an extension writes."""

_BYTECODE = {"__pycache__", "**/__pycache__", "**/__pycache__/", "*.pyc", "*.py[co]", "*.py[cod]"}
"""Other lines that ignore `__pycache__/`."""

_PLAIN = re.compile(r"[\w./+ -]+")
"""A path that means the same in YAML, TOML and a quoted word of a shell."""

_TEMPLATE_NAMES = {"mine", "np", "operator", "reference", "torch"}
"""Names that the benchmark's templates use themselves."""

_EXTENSION = re.compile(r"ext_modules|(?:CUDA|Cpp)Extension|cythonize")
"""Text of a setup.py that builds an extension."""

_REQUIREMENT = re.compile(r"[\w./:+@%~#=\[\], -]+")
"""A requirement that means the same in all of these."""

_ASK_GITLAB = "${GROUPBENCH_INSTALL:?set this CI variable to the address of a groupbench wheel or repository}"
"""A word of a shell that ends the job until the variable is set."""


@command()
def init(
    operator: str = option(*OPERATOR, default="my_softmax", help="Name of the operator."),
    benchmark: str | None = option(
        "--benchmark",
        metavar="FILE",
        help=("Benchmark file (.py) to use or, if it does not exist, to write. Default: bench_NAME.py."),
    ),
    numpy: bool = flag("--numpy", help="Write a benchmark of NumPy arrays, without torch. Implies --cpu."),
    cpu: bool = flag("--cpu", help="Write a workflow for a runner without a GPU."),
    ci: str | None = option(
        "--ci",
        type=click.Choice(["github", "gitlab", "none"]),
        help=("CI service to write a workflow for. Default: gitlab if the remote is on GitLab, else github."),
    ),
    install: str | None = option(
        "--install",
        metavar="REQUIREMENT",
        help="Requirement that CI installs: a wheel or its address, or "
        "git+URL@COMMIT. Default: where this groupbench was installed from.",
    ),
) -> None:
    """Write groupbench.toml, a benchmark to edit and a CI workflow, in this folder of a repository.

    Existing files are kept. Output files are added to .gitignore. An operator of groupbench, such as
    grouped_gemm, needs no benchmark, so none is written. If setup.py builds an extension, the build command
    becomes `setup` of groupbench.toml.
    """
    folder = Path.cwd()
    repository = git.ask(folder, "rev-parse", "--show-toplevel")
    if repository is None:
        say("groupbench: no git repository here, so runs have no commit; run `git init` first")
    top = folder if repository is None else Path(repository.strip())
    within = folder.resolve().relative_to(top.resolve()).as_posix()
    bench = benchmark or f"bench_{operator}.py"
    _refuse_names(operator, within, bench)
    words = {
        "OPERATOR": operator,
        "BENCHMARK": bench,
        "WITHIN": within,
        "SETUP": _setup(folder),
        "FOLDER": "" if within == "." else f"{within}/",
    }
    ours = _is_ours(operator)
    if ours and benchmark:
        problem = f"--operator {operator} is groupbench's own and has a benchmark already"
        raise click.UsageError(f"{problem}; choose another name, or omit --benchmark")
    service = ci or _service(folder)
    words |= _runner(service, cpu or numpy)
    requirement = None if service == "none" else _install(install)
    words["INSTALL"] = requirement or ("" if service == "github" else _ASK_GITLAB)
    plan, made = _write_plan(folder, bench, ours, numpy, words)
    ci_steps = _write_workflow(service, folder, top, words, requirement is not None, cpu or numpy)
    _ignore(folder / ".gitignore", IGNORED + (() if _built_in(folder) is None else _BUILT))
    steps = [] if repository else ["git init # a run records its commit"]
    steps += [] if plan else _planning_steps(operator, folder, None if ours else bench)
    steps += [f"edit {bench}: make the inputs, and call your kernel"] if made else []
    steps += [*_measuring_steps(operator, folder), *ci_steps]
    click.echo("\n  ".join(["next:", *map(printable, steps)]), err=True)


def _write_plan(
    folder: Path, bench: str, ours: bool, numpy: bool, words: dict[str, str]
) -> tuple[str | None, str | None]:
    """Write groupbench.toml and, unless the operator is groupbench's, the benchmark. Return the names of new files."""
    plan = _write(folder / NAME, "own_operator.toml" if ours else "groupbench.toml", words)
    if ours:
        return plan, None
    return plan, _write(folder / bench, "benchmark_numpy.txt" if numpy else "benchmark.txt", words)


def _refuse_names(operator: str, within: str, bench: str) -> None:
    """Raise UsageError for an operator name that conflicts with the template, or a name with a meaning in YAML."""
    if not operator.isidentifier() or keyword.iskeyword(operator):
        raise click.UsageError(f"--operator {operator!r} is not a Python identifier")
    if operator in _TEMPLATE_NAMES:
        raise click.UsageError(f"--operator {operator}: the benchmark uses this name itself; choose another one")
    if not bench.endswith(".py"):
        raise click.UsageError(f"--benchmark {bench}: a benchmark is a Python file; add .py")
    for name in (within, bench):
        if not _PLAIN.fullmatch(name):
            raise click.UsageError(
                f"the name {name!r} has characters that a shell or YAML would interpret: rename it, "
                "with letters, digits, spaces, dots, dashes and underscores only"
            )


def _setup(folder: Path) -> str:
    """Return the `setup` line: the folder's build command, or a commented example.

    `[build-system]` does not find modules next to setup.py, such as an old versioneer.py: -P leaves them out.
    """
    built = _built_in(folder)
    if built is None:
        return '# setup = "make"'
    flag = " -P" if _build_backend(folder / built) == "setuptools.build_meta" else ""
    return f'setup = "{built and f"cd {built} && "}python{flag} setup.py build_ext --inplace"'


def _build_backend(folder: Path) -> str | None:
    """Return the build backend that pyproject.toml names, or None."""
    try:
        system = tomllib.loads((folder / "pyproject.toml").read_text()).get("build-system")
    except (OSError, ValueError):
        return None
    return system.get("build-backend") if isinstance(system, dict) and not system.get("backend-path") else None


def _built_in(folder: Path) -> str | None:
    """Return the folder, "" for this one, whose setup.py builds an extension, or None."""
    scripts = {name: folder / name / "setup.py" for name in reversed(USUAL_FOLDERS)}
    has = (
        name
        for name, script in scripts.items()
        if script.is_file() and _EXTENSION.search(script.read_text(errors="replace"))
    )
    return next(has, None)


def _service(folder: Path) -> str:
    """Return the remote's CI service."""
    return "gitlab" if "gitlab" in (git.ask(folder, "remote", "get-url", "origin") or "") else "github"


def _runner(ci: str, cpu: bool) -> dict[str, str]:
    """Return the words of a workflow that choose the runner and describe it."""
    if ci == "gitlab":
        described = "a shared runner, without a GPU" if cpu else "your own runner with a GPU and the tag `gpu`"
        return {"RUNNER": described, "TAGS": "" if cpu else "  tags: [gpu]\n"}
    if cpu:
        note = (
            "a runner of\n# GitHub, without a GPU. Its machines differ, so use a runner of your own to find small "
            "changes."
        )
        return {"RUNNER": note, "RUNS_ON": "ubuntu-latest"}
    note = (
        "your own\n# runner with a GPU and the labels self-hosted, linux and gpu. The code of a pull request runs "
        "there too, so let\n# requests from outside wait for approval (Settings, Actions, "
        '"Require approval for all external contributors").'
    )
    return {"RUNNER": note, "RUNS_ON": "[self-hosted, linux, gpu]"}


def _write_workflow(ci: str, folder: Path, top: Path, words: dict[str, str], installs: bool, cpu: bool) -> list[str]:
    """Write the workflow of a CI service. Return the remaining manual steps."""
    if ci == "none":
        return []
    setting = "the input `install` of the action" if ci == "github" else "the CI variable GROUPBENCH_INSTALL"
    steps = ["in the CI files: add the packages that your kernels need"]
    if not installs:
        steps.insert(0, f"in the CI files: set {setting} to the address of a groupbench wheel or repository")
    if ci == "github":
        # GitHub looks for workflows only at the top level; the action is next to groupbench.toml.
        _write(_workflow(top / ".github/workflows", words), "workflow.yml", words)
        _write(folder / ".github/actions/groupbench/action.yml", "action.yml", words)
        return (
            steps if cpu else [*steps, "in GitHub: add a runner of your own with the labels self-hosted, linux and gpu"]
        )
    place = f"{words['FOLDER']}groupbench.gitlab.yml"
    _write(folder / "groupbench.gitlab.yml", "gitlab.yml", words | {"PLACE": place, "JOB": _job(words["WITHIN"])})
    return [
        *steps,
        f"in .gitlab-ci.yml: include: [{{local: {place}}}]",
        f"in GitLab: {'' if cpu else 'add a runner of your own with the tag gpu, and '}create a pipeline schedule",
    ]


def _planning_steps(operator: str, folder: Path, plugin: str | None) -> list[str]:
    """Return the step to add the operator to an existing plan, if the plan lacks it."""
    if f'"{operator}"' in (folder / NAME).read_text():
        return []
    further = "" if plugin is None else f", and {plugin} to plugins"
    return [f'add to {NAME}: a [[measure]] with operator = "{operator}"{further}']


def _measuring_steps(operator: str, folder: Path) -> list[str]:
    """Return the commands to measure the operator, and the newest commits if there are any."""
    earlier = int(git.ask(folder, "rev-list", "--count", "--first-parent", "HEAD") or 0)
    # The new commit of the step before is in the range too; `night` has measured it.
    commits, past = ("HEAD", earlier) if earlier <= 20 else ("HEAD~21..", 20)
    measured = "the earlier commit" if past == 1 else f"the newest {past} earlier commits"
    backfill = f"groupbench backfill {commits} --bisect # measure {measured} too"
    return [
        f"tritonbench --op {operator} # try it",
        "git add -A && git commit -m 'Measure with groupbench'",
        "groupbench night # measure today's level; repeat it after the next commit",
        *([backfill] if earlier else []),
    ]


def _job(within: str) -> str:
    """Return a CI job name unique to a folder of the repository."""
    return "groupbench" if within == "." else "groupbench-" + re.sub(r"\W+", "-", within)


def _workflow(workflows: Path, words: dict[str, str]) -> Path:
    """Return a folder's workflow file: the first one, unless it measures another folder."""
    first = workflows / "groupbench.yml"
    action = f"uses: ./{words['FOLDER']}.github/actions/groupbench"
    measures_another = first.is_file() and action not in first.read_text()
    return workflows / f"{_job(words['WITHIN'])}.yml" if measures_another else first


def _install(option: str | None) -> str | None:
    """Return the requirement by which CI installs groupbench, or None if it is unknown. Raises UsageError."""
    requirement = option or origin.requirement("measure,report")
    if requirement is None and sys.stdin.isatty():
        question = "Address of a groupbench wheel, or of its repository as git+https://..., for CI to install; or empty"
        requirement = click.prompt(question, default="", show_default=False, err=True) or None
    if requirement is not None and origin.is_bare(requirement):
        raise click.UsageError(
            f"--install {requirement}: a package index may have another package of this name; "
            "give the address of a wheel or of a repository"
        )
    if requirement is not None and not _REQUIREMENT.fullmatch(requirement):
        raise click.UsageError(f"--install {requirement!r} has characters that a shell or YAML would interpret")
    return requirement


def _is_ours(operator: str) -> bool:
    """Return whether groupbench has an operator with this name. Without the measuring side, nothing is known."""
    command = [*PROGRAM, "--list-backends", "--op", operator, "--host", "builtin"]
    # Not in this folder, whose plugins are not groupbench's.
    return subprocess.run(command, capture_output=True, cwd="/").returncode == 0


def _write(path: Path, template: str, words: dict[str, str]) -> str | None:
    """Write a file from a template. Returns the printed name, or None if the file existed and was kept.

    Raises ProjectError.
    """
    name = path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(path)
    if path.exists():
        say(f"kept {name}")
        return None
    text = (resources.files("groupbench.tracker.night") / "templates" / template).read_text()
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ProjectError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {name}")
    return name


def _ignore(path: Path, lines: tuple[str, ...]) -> None:
    """Add the missing lines to .gitignore. Raises ProjectError."""
    try:
        before = path.read_text() if path.exists() else ""
        present = {line.rstrip() for line in before.splitlines()}
        present |= {"__pycache__/"} if present & _BYTECODE else set()
        missing = [line for line in lines if line not in present]
        if missing:
            gap = "" if not before or before.endswith("\n") else "\n"
            path.write_text(before + gap + "\n".join(missing) + "\n")
            click.echo(f"wrote {path.name}" if not before else f"added {counted(len(missing), 'line')} to {path.name}")
    except OSError as error:
        raise ProjectError(f"cannot write {path}: {error.strerror}") from error
