"""`groupbench night`: run the nightly job: measure, store, confirm suspects, judge, report and post."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from groupbench.tracker.ab.toolchains import interpreter_of, module_path
from groupbench.tracker.ab.worktree import run_setup
from groupbench.tracker.cli.declared import argument, command, option, options
from groupbench.tracker.cli.here import hold_device, seconds_of, this_project, traffic_of, wait_option
from groupbench.tracker.cli.options import plan_device_option, toolchain_option, writing
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import ReportPackageError, TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.identity import plan_with
from groupbench.tracker.facts.measured_tree import add_to_path, with_folders
from groupbench.tracker.night.files import NightFiles, run_of
from groupbench.tracker.night.measuring import Unmeasured, interrupted, measure
from groupbench.tracker.outputs import FORMATS
from groupbench.tracker.project import NAME, Project, ProjectError
from groupbench.tracker.store.sqlite_file import check_file
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.tools import git, signals
from groupbench.tracker.tools.parameters import Duration

PRINTS = ("--version", "--list-operators", "--list-backends", "--list-metrics")
OWN_OPTIONS = {"--records": "set the folder with GROUPBENCH_RECORDS or `records` in groupbench.toml",
               "--plan-name": "set `name` in groupbench.toml",
               "--plan": "name another groupbench.toml with `groupbench --config FILE night`",
               "--resume": "an interrupted run is always continued"}  # fmt: skip
"""Options of `tritonbench` that `night` sets itself, each with the alternative."""


@dataclass(frozen=True)
class NightOptions:
    """Options for `night`; None is groupbench.toml's setting. Times are in seconds."""

    device: str | None = plan_device_option
    budget: float | None = option(
        "--budget",
        type=Duration(most=6e6, above=True),
        help="Start no further cell after this time. Default: `budget` of groupbench.toml, or no limit.",
    )
    confirm: float | None = option(
        "--confirm",
        type=Duration(most=6e6),
        help="Confirm suspects for up to this long; 0 skips this. Default: GROUPBENCH_CONFIRM_MINUTES, `confirm` of "
        "groupbench.toml, or a tenth of the time of the measuring, at least 3m.",
    )
    toolchain: str | None = toolchain_option


@command(context_settings={"ignore_unknown_options": True})
@wait_option()
def night(
    context: click.Context,
    options: NightOptions = options(NightOptions),
    rest: tuple[str, ...] = argument(nargs=-1, type=click.UNPROCESSED, metavar="[OPTION ...]"),
) -> None:
    """Measure everything in groupbench.toml, store it, confirm suspects, judge, report and post.

    \b
    groupbench night
    groupbench night --budget 2h --device cpu
    groupbench night && groupbench night --toolchain nightly

    Other options are passed to `tritonbench`. To continue an interrupted run, repeat the command on the same commit
    within a day; a run of uncommitted changes cannot continue. The next run starts with the cells left out by
    this run's budget.

    Writes these files. An environment variable or a field of groupbench.toml changes each path:

    \b
    groupbench.db  every result         GROUPBENCH_DB         database
    records/       the run's records    GROUPBENCH_RECORDS    records
    artifacts/     the verdict for CI   GROUPBENCH_ARTIFACTS  artifacts
    report.html    the report           GROUPBENCH_REPORT     report

    GROUPBENCH_POST is the number of a pull request or issue: a comment there shows the newest verdict.

    With --toolchain NAME, the verdict and the report are written to artifacts/NAME/. The plan of the run is then
    PLAN@NAME.

    \b
    Exit codes:
    0    nothing got worse
    1    a regression, or a wrong result
    2    usage error
    3    incomplete: something is undecided, failed or was not measured
    4    not comparable: a change on a new machine
    75   another run uses this device
    130  interrupted
    """
    context.exit(_night(context, options, rest))


def _night(context: click.Context, options: NightOptions, rest: tuple[str, ...]) -> int:
    """Run the nightly job and return the exit code."""
    project = here(context)
    _check(rest)
    traffic_of(context)  # an error in its file comes before an hour of measuring
    settings, toolchain = project.settings, options.toolchain
    device = options.device or settings.device
    python = None
    if toolchain is not None:  # before the device is locked: an environment takes minutes to install
        python = interpreter_of(toolchain, project, say)
    lock = hold_device(context, device)
    places = Places.of(context, project, toolchain)
    os.chdir(project.folder)
    places.make()
    places.clear()
    if "://" not in places.database and not check_file(Path(places.database), create=True) and git.is_shallow():
        say("groupbench: this is a shallow clone, so commits cannot be put in order; run `git fetch --unshallow`")
    dirty = bool(git.ask(project.folder, "status", "--porcelain", "--untracked-files=no"))
    if dirty:
        say("groupbench: uncommitted changes: no commit has this code, so a change cannot be confirmed; commit first")
    files = NightFiles(places.records, lock.stem, toolchain)
    files.claim()
    limit = [] if options.budget is None else ["--budget", f"{options.budget:.6f}s"]
    run = Night(context, project, places, files, ["--device", device, *limit, *rest], toolchain, python)
    given = options.confirm is not None or os.environ.get("GROUPBENCH_CONFIRM_MINUTES") or settings.confirm is not None
    confirm = seconds_of("GROUPBENCH_CONFIRM_MINUTES", options.confirm, settings.confirm) if given else None

    def kept() -> str:
        if not files.has_begun:
            return "nothing was measured"
        if dirty:
            return "a run of uncommitted changes cannot continue: a repeated command begins a new run"
        return "repeat the command to continue this run"

    with signals.keeping(kept, at_once=False):
        return run(confirm)


def here(context: click.Context) -> Project:
    """Return this invocation's project. Raises ProjectError if it measures nothing or lacks a file."""
    project = this_project(context)
    if project.file is None:
        raise ProjectError(
            f"no {NAME} in this folder or a parent; `groupbench init` writes one, `groupbench --config FILE` names one"
        )
    if not project.settings.measure:
        raise ProjectError(f"{project.file}: nothing to measure; add a [[measure]] table")
    project.check_benchmarks()
    return project


def _check(rest: tuple[str, ...]) -> None:
    """Refuse options of `tritonbench` with no place in a nightly run. Raises UsageError."""
    for name in (word.partition("=")[0] for word in rest):
        if name in PRINTS:
            raise click.UsageError(f"{name} only prints and measures nothing; use `tritonbench {name}`")
        if name in OWN_OPTIONS:
            raise click.UsageError(f"{name} cannot be used with `night`: {OWN_OPTIONS[name]}")


def run_command(context: click.Context, database: str, name: str, *arguments: str) -> int:
    """Run another command of `groupbench` as if it had been typed, and return the exit code."""
    parent = context.parent
    assert parent is not None and isinstance(parent.command, click.Group)
    parent.obj = database
    command = parent.command.get_command(parent, name)
    assert command is not None
    try:
        with command.make_context(name, list(arguments), parent=parent) as inner:
            command.invoke(inner)
    except click.exceptions.Exit as done:
        return done.exit_code
    finally:
        sys.stdout.flush()
    return ExitCode.OK


class Places:
    """Paths of the results, relative to the project's folder.

    A path on the command line is relative to the folder in which the command runs.
    """

    def __init__(self, database: str, records: Path, artifacts: Path, report: str) -> None:
        self.database, self.records, self.artifacts, self.report = database, records, artifacts, report

    @classmethod
    def of(cls, context: click.Context, project: Project, toolchain: str | None = None) -> Places:
        """Return the paths from environment variables, else from the file.

        Args:
            toolchain: Subfolder in `artifacts` for the verdict and the report.
        """

        def named(variable: str, field: str) -> str:
            path = os.environ.get(variable)
            return field if not path else path if Path.cwd() == project.folder else str(Path(path).absolute())

        settings, database = project.settings, str(context.obj)
        if database == project.database:
            database = settings.database
        elif "://" not in database and Path.cwd() != project.folder:
            database = str(Path(database).absolute())
        artifacts = Path(named("GROUPBENCH_ARTIFACTS", settings.artifacts))
        report = named("GROUPBENCH_REPORT", settings.report)
        if toolchain is not None:
            artifacts /= toolchain
            report = str(artifacts / Path(report).name)
        return cls(database, Path(named("GROUPBENCH_RECORDS", settings.records)), artifacts, report)

    def make(self) -> None:
        """Create the folders for records and database. Raises ProjectError."""
        folders = [self.records] if "://" in self.database else [self.records, Path(self.database).parent]
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProjectError(f"cannot write {error.filename}: {error.strerror}") from error
        for folder in folders:
            _must_be_writable(folder)
        if Path(self.database).is_dir():  # checked now rather than after hours of measuring
            raise ProjectError(f"{self.database}: is a directory, not a database")
        if Path(self.database).is_file() and not os.access(self.database, os.W_OK):
            raise ProjectError(f"cannot write to the database {self.database}: change its permissions")

    def clear(self) -> None:
        """Remove an earlier run's verdict, which CI could mistake for this run's. Raises ProjectError."""
        try:
            self.artifacts.mkdir(parents=True, exist_ok=True)
            _must_be_writable(self.artifacts)
            for form in FORMATS.values():
                for name in form.nightly:
                    (self.artifacts / name).unlink(missing_ok=True)
        except OSError as error:
            raise ProjectError(f"cannot write {error.filename}: {error.strerror}") from error


def _must_be_writable(folder: Path) -> None:
    """Raise ProjectError if files cannot be written to a folder."""
    if not os.access(folder, os.W_OK):
        raise ProjectError(f"cannot write to the folder {folder.absolute()}: change its permissions")


class Night:
    """One run, from measuring to the comment.

    Args:
        toolchain: Name of the toolchain in groupbench.toml, and `python` its interpreter; None for this interpreter.
    """

    def __init__(
        self,
        context: click.Context,
        project: Project,
        places: Places,
        files: NightFiles,
        options: list[str],
        toolchain: str | None = None,
        python: str | None = None,
    ) -> None:
        self._context, self._project, self._places, self._files = context, project, places, files
        self._options, self._toolchain, self._python = options, toolchain, python
        self._new = False

    def __call__(self, confirm_s: float | None) -> int:
        """Run every step and return the exit code. `confirm_s` is None for a share of the time of the measuring."""
        from groupbench.tracker.ab.confirm import enough

        begun = time.monotonic()
        for path in self._files.set_aside_unreadable():
            say(f"groupbench: unreadable records were moved to {path}; a new run begins")
        measured, file = self._measure()
        budget_s = enough(time.monotonic() - begun) if confirm_s is None else confirm_s
        run = self._store(file)
        self._store_plan(run)
        if budget_s > 0:
            with self._errors_printed():  # the gate reports undecided suspects
                named = [] if self._toolchain is None else ["--toolchain", self._toolchain]
                self.step("confirm", run, "--budget", f"{budget_s:.3f}s", *named)
        judged = self.step("gate", "--update", "--run", run, *self._outputs())
        reported = False
        with self._errors_printed():  # the run is judged: a report that cannot be made does not change the verdict
            self._report(run)
            reported = True
        with self._errors_printed():  # nor does a server that cannot be reached
            self._post()
        self._files.end()
        code = measured if judged == ExitCode.OK else judged
        return code if reported or code != ExitCode.OK else ExitCode.USAGE

    def _report(self, run: str) -> None:
        try:
            self.step("report", "--run", run, "-o", self._places.report)
        except ReportPackageError as error:
            say(f"no report: {error.message}")

    def _measure(self) -> tuple[int, Path]:
        """Measure; return the exit code and the file of records. Raises Unmeasured if nothing was measured."""
        if self._project.settings.setup:
            say(f"groupbench: {self._project.settings.setup}")
            run_setup(Path(), self._project.settings.setup, "this checkout", python=self._python or sys.executable)
        file = self._files.unfinished or self._begin()
        code = self._tritonbench(file)
        if code == ExitCode.INCOMPARABLE:  # such as another commit's: store its part and begin a new one
            self.step("ingest", str(file))
            file = self._begin()
            code = self._tritonbench(file)
        if code == ExitCode.USAGE or not self._files.has_begun:
            if self._new:
                self._files.forget()
            else:  # a misspelled option must not discard results
                say(f"groupbench: the interrupted run is kept; to begin a new one, remove {self._files.pointer}")
            if code == ExitCode.USAGE:  # `tritonbench` has printed the reason
                self._context.exit(code)
            raise Unmeasured("nothing was measured")
        return code, file

    def _begin(self) -> Path:
        self._new = True
        return self._files.begin()

    def _tritonbench(self, file: Path) -> int:
        assert self._project.file is not None
        previous = self._files.newest
        environment = with_folders(self._project.python_path(), os.environ)
        options = ["--plan", str(self._project.file), "--trigger", "nightly", "--records", str(file), "--resume"]
        options += ["--previous", str(previous)] if previous is not None else []
        if self._toolchain is not None:
            options += ["--plan-name", plan_with(self._project.settings.name, self._toolchain)]
        options += self._options
        if self._python is None:
            code = measure(options, Path.cwd(), environment)
        else:
            with Scratch("toolchain") as folder:
                environment = add_to_path(module_path(folder), environment)
                code = measure(options, Path.cwd(), environment, python=self._python)
        if interrupted(code):
            raise KeyboardInterrupt
        return code

    def _store(self, file: Path) -> str:
        """Store the records; return the run's id. The newest run may be another machine's, whose clock is ahead."""
        click.echo()
        self.step("ingest", str(file))
        return str(run_of(file))

    def _store_plan(self, run: str) -> None:
        """Store the decisions of the plan about the series of a run."""
        from groupbench.tracker.night.plan import store_plan
        from groupbench.tracker.query.resolve import find_run

        with writing(self._places.database) as session:
            plan, now = self._project.settings, datetime.now(UTC)
            store_plan(session, find_run(session, run), plan.measure, now, git.first_parents, plan.renamed)

    def _outputs(self) -> list[str]:
        folder = self._places.artifacts
        targets = [f"{name}={folder / file}" for name, form in FORMATS.items() for file in form.nightly]
        targets += ["summary"] if os.environ.get("GITHUB_STEP_SUMMARY") else []
        return [word for target in targets for word in ("-o", target)]

    def _post(self) -> None:
        post, number = self._project.settings.post, os.environ.get("GROUPBENCH_POST")
        options = ["--on", post.on] if post and post.on else []
        options += ["--repo", post.repo] if post and post.repo else []
        number = number or (str(post.number) if post and post.number else None)
        if number:
            self.step("post", str(self._places.artifacts / "comment.md"), "--pr", number, *options)
        if post and post.issues:
            self.step("post", "--issues", *options)

    def step(self, name: str, *arguments: str) -> int:
        return run_command(self._context, self._places.database, name, *arguments)

    @contextmanager
    def _errors_printed(self) -> Iterator[None]:
        """Print an error instead of raising it, in a step without effect on the verdict."""
        try:
            yield
        except (TrackerError, click.ClickException) as error:
            say(f"groupbench: {error.message}")
