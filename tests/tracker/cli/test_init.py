"""Test `groupbench init`: other commands can read its files."""

from __future__ import annotations

import ast
import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from repositories import git
from ruamel.yaml import YAML

from groupbench.tracker import project
from groupbench.tracker.cli.init import init
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.night.backfill import commits_of
from groupbench.tracker.project import ProjectError


@pytest.fixture(scope="module", autouse=True)
def each_operator_asked_once() -> Iterator[None]:
    """Ask once for each name whether it is groupbench's: a process of the measuring side answers."""
    module = sys.modules[init.callback.__module__]  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_ours", cache(module._is_ours))
        yield


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(init, list(arguments))
    assert done.exit_code == 0, done.output
    return done


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path)}


def test_it_writes_what_a_night_reads(repository: Path) -> None:
    run("--operator", "my_norm")
    loaded = project.load()
    assert loaded.settings.plugins == loaded.settings.benchmarks == ("bench_my_norm.py",)
    assert [entry.operator for entry in loaded.settings.measure] == ["my_norm"]
    compile((repository / "bench_my_norm.py").read_text(), "bench", "exec")
    assert not any(
        mark in path.read_text()
        for path in repository.glob("*.*")
        if path.is_file()
        for mark in ("@OPERATOR@", "@BENCHMARK@")
    )
    assert files(repository) == {
        *("groupbench.toml", "bench_my_norm.py", ".gitignore"),
        *(".github/workflows/groupbench.yml", ".github/actions/groupbench/action.yml"),
    }


def test_outside_a_repository_it_says_that_git_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    warning = "groupbench: no git repository here, "
    outside = run("--ci", "none").stderr
    assert outside.startswith(warning) and "next:\n  git init #" in outside
    subprocess.run(["git", "init", "-q", "."], check=True)
    done = run("--ci", "none")
    assert warning not in done.stderr
    assert "next:\n  " in done.stderr and "\n  groupbench night #" in done.stderr
    assert "runner" not in done.stderr  # without CI it adds no runner


@pytest.mark.parametrize("commits", [0, 1, 2, 25])
def test_the_backfill_it_prints_names_commits_that_exist(repository: Path, commits: int) -> None:
    for number in range(commits):
        git(repository, "commit", "-q", "--allow-empty", "-m", str(number))
    (*_, line) = [None, *(line for line in run("--ci", "none").stderr.splitlines() if "backfill" in line)]
    assert (line is None) == (commits == 0)
    git(repository, "commit", "-q", "--allow-empty", "-m", "Measure with groupbench")
    if line is not None:
        newest, *earlier = commits_of(repository, line.split()[2])
        assert newest.subject == "Measure with groupbench" and len(earlier) == min(commits, 20)
        measured = "the earlier commit" if commits == 1 else f"the newest {len(earlier)} earlier commits"
        assert line.endswith(f" # measure {measured} too")


def test_an_operator_of_groupbench_needs_no_benchmark(repository: Path) -> None:
    done = run("--operator", "grouped_gemm", "--ci", "none")
    loaded = project.load()
    assert loaded.settings.plugins == loaded.settings.benchmarks == ()
    assert [entry.operator for entry in loaded.settings.measure] == ["grouped_gemm"]
    assert files(repository) == {"groupbench.toml", ".gitignore"}
    assert "tritonbench --op grouped_gemm" in done.output
    refused = CliRunner().invoke(init, ["--operator", "grouped_gemm", "--benchmark", "bench.py"])
    assert refused.exit_code == 2 and "--operator grouped_gemm is groupbench's own" in refused.output


def test_the_workflow_is_short_and_calls_the_action(repository: Path) -> None:
    run()
    text = (repository / ".github/workflows/groupbench.yml").read_text()
    assert sum(not line.startswith("#") for line in text.splitlines()) <= 15
    (job,) = YAML(typ="safe").load(text)["jobs"].values()
    assert job["steps"][1] == {"uses": "./.github/actions/groupbench", "with": {"folder": "."}}
    action = YAML(typ="safe").load((repository / ".github/actions/groupbench/action.yml").read_text())
    assert not [step for step in action["runs"]["steps"] if "${{" in step.get("run", "")]  # text of others in a script


WHEEL = "https://wheels.example.org/groupbench-7.8.9-py3-none-any.whl"
ORIGINS = {
    "a repository": (
        {"url": "ssh://git@git.example.org/kernels/groupbench.git", "vcs_info": {"vcs": "git", "commit_id": "f" * 40}},
        "groupbench[measure,report] @ git+ssh://git@git.example.org/kernels/groupbench.git@" + "f" * 40,
    ),
    "a wheel": (
        {"url": WHEEL, "archive_info": {"hashes": {"sha256": "abc"}}},
        f"groupbench[measure,report] @ {WHEEL}#sha256=abc",
    ),
    "a wheel on this machine": ({"url": "file:///home/ada/groupbench.whl", "archive_info": {}}, None),
    "a folder": ({"url": "file:///home/ada/groupbench", "dir_info": {"editable": True}}, None),
    "an index": (None, None),
    "an address that YAML would interpret": ({"url": 'x" # y', "vcs_info": {"vcs": "git", "commit_id": "f"}}, None),
    "an address with a password": ({"url": "https://a:b@example.org/g.whl", "archive_info": {}}, None),
}


@pytest.mark.parametrize(("origin", "expected"), ORIGINS.values(), ids=ORIGINS)
@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_the_workflow_installs_this_groupbench_or_waits_for_an_address(
    ci: str, origin: object, expected: str | None, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never installs a bare name, which anyone may register."""
    install_from(origin, monkeypatch)
    done = run("--ci", ci)
    assert installs(repository, ci) == (expected or ("" if ci == "github" else "${GROUPBENCH_INSTALL"))
    assert ("to the address of a groupbench wheel" in done.stderr) == (expected is None)
    written = "".join(path.read_text() for path in repository.rglob("*") if path.is_file() and ".git/" not in str(path))
    assert "groupbench==" not in written and "]==" not in written


def install_from(origin: object, monkeypatch: pytest.MonkeyPatch) -> None:
    text = None if origin is None else json.dumps(origin)
    installed = SimpleNamespace(version="7.8.9", read_text=lambda name: text)
    monkeypatch.setattr("groupbench.tracker.night.origin.distribution", lambda name: installed)


def installs(repository: Path, ci: str) -> str:
    if ci == "github":
        action = YAML(typ="safe").load((repository / ".github/actions/groupbench/action.yml").read_text())
        return str(action["inputs"]["install"]["default"])
    job = YAML(typ="safe").load((repository / "groupbench.gitlab.yml").read_text())["groupbench"]
    (line,) = [line for line in job["script"] if "pip install" in line]
    return str(line.removeprefix('pip install --quiet "').removesuffix('"').partition(":?")[0])


REMOTES = {
    "https": ("https://git.example.org/groupbench.git", "git+https://git.example.org/groupbench.git"),
    "ssh": ("git@git.example.org:kernels/groupbench.git", "git+ssh://git@git.example.org/kernels/groupbench.git"),
    "a folder": ("/srv/groupbench.git", None),
    "none": (None, None),
}


@pytest.mark.parametrize(("remote", "expected"), REMOTES.values(), ids=REMOTES)
def test_a_clone_is_installed_from_its_remote(
    remote: str | None, expected: str | None, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "the clone"
    clone.mkdir()
    git(clone, "init", "-q")
    (clone / "pyproject.toml").touch()
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "x")
    if remote is not None:
        git(clone, "remote", "add", "origin", remote)
    install_from({"url": clone.as_uri(), "dir_info": {"editable": True}}, monkeypatch)
    run("--ci", "github")
    commit = git(clone, "rev-parse", "HEAD")
    wanted = "" if expected is None else f"groupbench[measure,report] @ {expected}@{commit}"
    assert installs(repository, "github") == wanted


@pytest.mark.parametrize("ci", ["github", "gitlab"])
def test_a_wheel_of_the_users_own(ci: str, repository: Path) -> None:
    run("--ci", ci, "--install", "./wheels/groupbench-0.1.0-py3-none-any.whl[measure]")
    assert installs(repository, ci) == "./wheels/groupbench-0.1.0-py3-none-any.whl[measure]"


@pytest.mark.parametrize("name", ["groupbench", "groupbench==0.1.0", "groupbench[measure] >= 0.1", 'x"; rm -rf /'])
def test_a_bare_name_is_refused(name: str, repository: Path) -> None:
    done = CliRunner().invoke(init, ["--install", name])
    assert done.exit_code == 2 and "--install" in done.output
    assert files(repository) == set()


def test_in_a_folder_of_a_monorepo(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = repository / "libs" / "kernels"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    run()
    workflow = YAML(typ="safe").load((repository / ".github/workflows/groupbench.yml").read_text())
    step = workflow["jobs"]["groupbench"]["steps"][1]
    assert step == {"uses": "./libs/kernels/.github/actions/groupbench", "with": {"folder": "libs/kernels"}}
    assert (inside / ".github/actions/groupbench/action.yml").exists() and (inside / "groupbench.toml").exists()


def test_each_folder_of_a_monorepo_has_a_job(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b c", "a", "b c"):
        (repository / name).mkdir(exist_ok=True)
        monkeypatch.chdir(repository / name)
        run()
        run("--ci", "gitlab")
    load = YAML(typ="safe").load
    workflows = [load(path.read_text()) for path in (repository / ".github/workflows").iterdir()]
    steps = [workflow["jobs"]["groupbench"]["steps"][1] for workflow in workflows]
    assert sorted(step["with"]["folder"] for step in steps) == ["a", "b c"]
    jobs = [load(path.read_text()) for path in repository.glob("*/groupbench.gitlab.yml")]
    assert sorted(name for job in jobs for name in job) == ["groupbench-a", "groupbench-b-c"]
    assert len({job["cache"]["key"] for of_file in jobs for job in of_file.values()}) == 2


def test_gitlab(repository: Path) -> None:
    done = run("--ci", "gitlab")
    job = YAML(typ="safe").load((repository / "groupbench.gitlab.yml").read_text())["groupbench"]
    assert "groupbench night" in job["script"][-1] and job["artifacts"]["paths"] == ["artifacts/", "report.html"]
    assert not (repository / ".github").exists()
    assert "include: [{local: groupbench.gitlab.yml}]" in done.stderr
    # A merge request may read the cache, but must not replace the database in it.
    policies = {rule["if"].split('"')[1]: rule["variables"]["CACHE_POLICY"] for rule in job["rules"]}
    assert policies == {"schedule": "pull-push", "merge_request_event": "pull"}
    assert job["cache"]["policy"] == "$CACHE_POLICY"


def test_what_exists_is_kept(repository: Path) -> None:
    (repository / "groupbench.toml").write_text("mine")
    (repository / ".gitignore").write_text("*.o")
    run()
    once = (repository / ".gitignore").read_text()
    run()
    assert (repository / "groupbench.toml").read_text() == "mine"
    assert once.startswith("*.o\n") and (repository / ".gitignore").read_text() == once


def test_the_names_that_the_template_uses_are_refused() -> None:
    used: set[str] = set()
    for name in ("benchmark.txt", "benchmark_numpy.txt"):
        template = (resources.files("groupbench.tracker.night") / "templates" / name).read_text()
        tree = ast.parse(template.replace("@@OPERATOR@", "@X").replace("@OPERATOR@", "X"))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        used |= {name.asname or name.name for node in imports for name in node.names}
        used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} - {"X"}
    assert used == sys.modules["groupbench.tracker.cli.init"]._TEMPLATE_NAMES


def test_a_benchmark_of_numpy_arrays(repository: Path) -> None:
    """Both backends compute the same for inputs of the first shape."""
    run("--operator", "my_norm", "--numpy", "--ci", "none")
    text = (repository / "bench_my_norm.py").read_text()
    assert "torch" not in text
    module: dict[str, Any] = {}
    exec(compile(text, "bench", "exec"), module)
    norm = module["my_norm"].operator
    x = norm.make_inputs(norm.suites["smoke"][0], "fp32", "cpu", 0)
    results = [backend.prepare(x)() for backend in norm.backends]
    assert len(results) == 2 and (results[0] == results[1]).all() and results[0].shape == (256, 4096)


SETUPS = {
    "setup(ext_modules=[Extension('a', ['a.c'])])": "python setup.py build_ext --inplace",
    "setup(ext_modules=cythonize('a.pyx'))": "python setup.py build_ext --inplace",
    "setup(packages=['a'])": None,
    None: None,
}


@pytest.mark.parametrize("before", ["", "*.o\n", "*.py[cod]\n", "__pycache__/  \n", "__pycache__"])
def test_bytecode_is_not_committed(before: str, repository: Path) -> None:
    """`git add -A` is the next step, and a tracked file of bytecode would change in every run."""
    (repository / ".gitignore").write_text(before)
    run("--ci", "none")
    for folder in (repository, repository / "package"):
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__/bench.cpython-311.pyc").touch()
    git(repository, "add", "-A")
    assert set(git(repository, "ls-files").split()) == {".gitignore", "bench_my_softmax.py", "groupbench.toml"}
    assert (repository / ".gitignore").read_text().count("py") == 1


@pytest.mark.parametrize(("script", "setup"), SETUPS.items())
def test_the_build_of_an_extension_is_found(script: str | None, setup: str | None, repository: Path) -> None:
    if script is not None:
        (repository / "setup.py").write_text(script)
    run("--ci", "none")
    assert project.load().settings.setup == setup
    assert ("# setup = " in (repository / "groupbench.toml").read_text()) == (setup is None)
    assert ("\nbuild/\n*.so\n" in (repository / ".gitignore").read_text()) == (setup is not None)


def test_a_second_operator_is_to_be_added_to_the_file_that_is_kept(repository: Path) -> None:
    run("--operator", "first")
    again = run("--operator", "first")
    second = run("--operator", "second")
    assert "  add to groupbench.toml" not in again.output
    assert 'a [[measure]] with operator = "second", and bench_second.py to plugins' in second.output
    assert (repository / "bench_second.py").exists()


@pytest.mark.parametrize(
    "name", ["groupbench.toml", "bench_my_softmax.py", ".github/workflows/groupbench.yml", ".gitignore"]
)
def test_a_file_that_cannot_be_written(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if path == repository / name:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ProjectError, match=f"^cannot write {repository / name}: Read-only file system$") as caught:
        CliRunner().invoke(init, [], catch_exceptions=False)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "options", [["--operator", "my-norm"], ["--operator", "torch"], ["--benchmark", "bench.txt"]], ids=" ".join
)
def test_a_name_that_is_no_name(options: list[str], repository: Path) -> None:
    assert CliRunner().invoke(init, options).exit_code == 2
    assert files(repository) == set()


@pytest.mark.parametrize("name", ["x$(touch y)", "${{ github.token }}", "n: [z]", 'a"b'])
def test_a_folder_that_a_workflow_would_interpret(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / name).mkdir()
    monkeypatch.chdir(repository / name)
    done = CliRunner().invoke(init, [])
    assert done.exit_code == 2 and "a shell or YAML would interpret" in done.output
    assert not list((repository / name).iterdir())


@pytest.mark.parametrize("service", ["github", "gitlab"])
def test_a_project_without_a_gpu_needs_no_gpu_runner(service: str, repository: Path) -> None:
    done = run("--operator", "my_norm", "--numpy", "--ci", service, "--install", "git+https://example.org/g@abc")
    name = ".github/workflows/groupbench.yml" if service == "github" else "groupbench.gitlab.yml"
    text = (repository / name).read_text()
    assert (
        "[gpu]" not in text and "self-hosted" not in text and "@" not in text.replace("checkout@", "").replace("g@", "")
    )
    assert "add a runner" not in done.output


def test_a_build_in_a_usual_folder_is_found(repository: Path) -> None:
    (repository / "python").mkdir()
    (repository / "python/setup.py").write_text("setup(ext_modules=[Extension('a', ['a.c'])])")
    run("--ci", "none")
    assert project.load().settings.setup == "cd python && python setup.py build_ext --inplace"


@pytest.mark.parametrize(
    ("system", "flag"),
    [
        ('[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"', " -P"),
        ('[build-system]\nrequires = ["setuptools"]', ""),
        ("[project]\nname = 'a'", ""),
        ("not toml", ""),
    ],
)
def test_the_build_follows_the_build_system(system: str, flag: str, repository: Path) -> None:
    (repository / "setup.py").write_text("setup(ext_modules=[Extension('a', ['a.c'])])")
    (repository / "pyproject.toml").write_text(system)
    run("--ci", "none")
    assert f'setup = "python{flag} setup.py build_ext --inplace"' in (repository / "groupbench.toml").read_text()
