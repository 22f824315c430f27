"""`groupbench night`: measure what groupbench.toml holds, store it, confirm suspects, judge, report, post."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.here import this_project
from groupbench.tracker.cli.output import say
from groupbench.tracker.durations import Duration
from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.project import NAME, Project, ProjectError, add_to_path, in_seconds

if TYPE_CHECKING:
    from groupbench.tracker.night.files import NightFiles

ARTIFACTS = {
    "summary": ("summary.md",),
    "comment": ("comment.md",),
    "junit": ("gate.xml",),
    "sarif": ("gate.sarif",),
    "json": ("verdict.json",),
    "badge": ("badge.svg", "badge.json"),
    "atom": ("alerts.atom",),
}
"""What CI shows, by the gate's name of its format."""

PRINTS = ("--version", "--list-operators", "--list-backends", "--list-metrics")
OURS = {"--records": "GROUPBENCH_RECORDS or `records` in groupbench.toml names the folder",
        "--plan": "name another groupbench.toml by `groupbench --config FILE night`",
        "--resume": "a run that was interrupted is always continued"}  # fmt: skip


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--device", "-d", type=click.Choice(["auto", "cuda", "cpu"]), help="Where to measure. Default: auto.")
@click.option("--wait", type=Duration("m", most=6e5), help="Wait so long for another run on the device to end.")
@click.option(
    "--confirm", type=Duration("m", most=6e6), help="Time for suspects; 0 leaves them suspects. Default: 30m."
)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION ...]")
@click.pass_context
def night(
    context: click.Context, device: str | None, wait: float | None, confirm: float | None, rest: tuple[str, ...]
) -> None:
    """Measure what groupbench.toml holds, store it, confirm suspects, judge, report and post.

    \b
    groupbench night
    groupbench night --budget 2h --device cpu

    Other options go to `tritonbench`. A run that is interrupted is continued by the same command, on the same commit
    and within a day; what a budget left out is what the next run begins with. One run at a time measures on a device.

    Leaves the database, report.html, the run's records in records/, and the verdict in CI's formats in artifacts/. The
    fields of groupbench.toml and GROUPBENCH_DB, _RECORDS, _ARTIFACTS, _REPORT, _CONFIRM_MINUTES, _WAIT_MINUTES, _POST,
    _WEBHOOK name other places and times.

    Exit codes: the gate's (0 nothing got worse, 1 a regression or a wrong result, 2 usage, 3 incomplete, 4 not
    comparable), 75 another run measures on this device, 130 interrupted.
    """
    from groupbench.tracker.night.files import NightFiles
    from groupbench.tracker.night.measuring import ensure_alone

    project = here(context)
    _check(rest)
    settings = project.settings
    wait_s = _seconds("GROUPBENCH_WAIT_MINUTES", wait, settings.wait)
    device = device or settings.device
    lock = ensure_alone(device, wait_s, sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupt)
    places = Places.of(context, project)
    os.chdir(project.folder)
    places.make()
    places.clear()
    run = Night(context, project, places, NightFiles(places.records, lock.stem), ["--device", device, *rest])
    confirm_s = _seconds("GROUPBENCH_CONFIRM_MINUTES", confirm, settings.confirm)
    try:
        code = run(confirm_s)
    except KeyboardInterrupt:
        say("groupbench: interrupted; the same command continues this run")
        raise
    context.exit(code)


def here(context: click.Context) -> Project:
    """Return the project of this invocation. Raises ProjectError where there is no groupbench.toml."""
    project = this_project(context)
    if project.file is None:
        raise ProjectError(f"no {NAME} here or above; `groupbench init` writes one, --config names one elsewhere")
    if not project.settings.measure:
        raise ProjectError(f"{project.file}: no [[measure]] says what to measure")
    return project


def _check(rest: tuple[str, ...]) -> None:
    """Raises UsageError for options of `tritonbench` that are not for here."""
    for flag in (option.partition("=")[0] for option in rest):
        if flag in PRINTS:
            raise click.UsageError(f"{flag} prints, and measures nothing: tritonbench {flag}")
        if flag in OURS:
            raise click.UsageError(f"{flag} does not go with `night`: {OURS[flag]}")


def _seconds(variable: str, option: float | None, field: Any) -> float:
    """Return a time of an option, else of an environment variable in minutes, else of the file."""
    if option is not None:
        return option
    try:
        return in_seconds(os.environ.get(variable) or field)
    except ValueError as error:
        raise click.UsageError(f"{variable}: {error}") from error


def interrupt(number: int, frame: Any) -> None:
    """As a handler of SIGTERM: what CI sends to end a job is an interrupt."""
    raise KeyboardInterrupt


def run_command(context: click.Context, database: str, name: str, *arguments: str) -> int:
    """Run another command of `groupbench`, as if it had been typed. Returns its exit code."""
    above = context.parent
    assert above is not None and isinstance(above.command, click.Group)
    above.obj = database
    command = above.command.get_command(above, name)
    assert command is not None
    try:
        with command.make_context(name, list(arguments), parent=above) as inner:
            command.invoke(inner)
    except click.exceptions.Exit as done:
        return done.exit_code
    finally:
        sys.stdout.flush()
    return ExitCode.OK


class Places:
    """Where the results go, as the project's folder has it. What a command line names is relative to where it runs."""

    def __init__(self, database: str, records: Path, artifacts: Path, report: str) -> None:
        self.database, self.records, self.artifacts, self.report = database, records, artifacts, report

    @classmethod
    def of(cls, context: click.Context, project: Project) -> Places:
        """By environment variables, else by the file."""

        def named(variable: str, field: str) -> str:
            given = os.environ.get(variable)
            return field if not given else given if Path.cwd() == project.folder else str(Path(given).absolute())

        settings, database = project.settings, str(context.obj)
        if database == project.database:
            database = settings.database
        elif "://" not in database and Path.cwd() != project.folder:
            database = str(Path(database).absolute())
        return cls(
            database,
            Path(named("GROUPBENCH_RECORDS", settings.records)),
            Path(named("GROUPBENCH_ARTIFACTS", settings.artifacts)),
            named("GROUPBENCH_REPORT", settings.report),
        )

    def make(self) -> None:
        """Make the folders of what is kept. Raises ProjectError."""
        try:
            self.records.mkdir(parents=True, exist_ok=True)
            if "://" not in self.database:
                Path(self.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProjectError(f"{error.filename}: {error.strerror}") from error
        if Path(self.database).is_dir():  # found out now, not when everything is measured
            raise ProjectError(f"{self.database}: is a directory, not a database")

    def clear(self) -> None:
        """Remove an earlier verdict, which could be taken for this run's. Raises ProjectError."""
        try:
            self.artifacts.mkdir(parents=True, exist_ok=True)
            for name in (name for names in ARTIFACTS.values() for name in names):
                (self.artifacts / name).unlink(missing_ok=True)
        except OSError as error:
            raise ProjectError(f"{error.filename}: {error.strerror}") from error


class Night:
    """One run, from measuring to its comment."""

    def __init__(
        self, context: click.Context, project: Project, places: Places, files: NightFiles, options: list[str]
    ) -> None:
        self._context, self._project, self._places, self._files = context, project, places, files
        self._options = options
        self._new = False

    def __call__(self, confirm_s: float) -> int:
        """Return the exit code."""
        for path in self._files.set_aside_unreadable():
            say(f"groupbench: set aside as {path}, which cannot be read; a new run begins")
        measured, file = self._measure()
        run = self._store(file)
        if confirm_s > 0:
            with self._going_on():  # what stays undecided is the gate's to say
                self.step("confirm", run, "--budget", f"{confirm_s}s")
        judged = self.step("gate", "--update", "--run", run, *self._outputs())
        self.step("report", "--run", run, "-o", self._places.report)
        with self._going_on():  # the run is judged: that a server is away does not change the verdict
            self._post()
        self._files.end()
        return measured if judged == ExitCode.OK else judged

    def _measure(self) -> tuple[int, Path]:
        """Return the exit code of measuring, and the file of records. Raises Unmeasured."""
        from groupbench.tracker.ab.worktree import run_setup
        from groupbench.tracker.night.measuring import Unmeasured

        if self._project.settings.setup:
            say(f"groupbench: {self._project.settings.setup}")
            run_setup(Path(), self._project.settings.setup, "this checkout")
        file = self._files.unfinished or self._begin()
        code = self._tritonbench(file)
        if code == ExitCode.INCOMPARABLE:  # another commit's: stored as far as it came, and a new one begins
            self.step("ingest", str(file))
            file = self._begin()
            code = self._tritonbench(file)
        if code == ExitCode.USAGE or not file.is_file() or not file.stat().st_size:
            if self._new:
                self._files.forget()
            else:  # a misspelled word must not cost what was measured
                say(f"groupbench: the interrupted run is kept; to begin another, remove {self._files.pointer}")
            raise Unmeasured("nothing was measured")
        return code, file

    def _begin(self) -> Path:
        self._new = True
        return self._files.begin()

    def _tritonbench(self, file: Path) -> int:
        from groupbench.tracker.night.measuring import interrupted, measure

        assert self._project.file is not None
        previous = self._files.newest
        environment = add_to_path(self._project.python_path(), dict(os.environ))
        options = ["--plan", str(self._project.file), "--trigger", "nightly", "--records", str(file), "--resume"]
        options += ["--previous", str(previous)] if previous is not None else []
        code = measure([*options, *self._options], Path.cwd(), environment)
        if interrupted(code):
            raise KeyboardInterrupt
        return code

    def _store(self, file: Path) -> str:
        """Return the id of the run: the database may hold other machines' runs, whose clocks may be ahead."""
        from groupbench.tracker.night.files import run_of

        click.echo()
        self.step("ingest", str(file))
        return str(run_of(file))

    def _outputs(self) -> list[str]:
        targets = [f"{form}={self._places.artifacts / name}" for form, names in ARTIFACTS.items() for name in names]
        targets += ["summary"] if os.environ.get("GITHUB_STEP_SUMMARY") else []
        targets += ["webhook"] if os.environ.get("GROUPBENCH_WEBHOOK") else []
        return [word for target in targets for word in ("-o", target)]

    def _post(self) -> None:
        post, number = self._project.settings.post, os.environ.get("GROUPBENCH_POST")
        if post is None and not number:
            return
        options = ["--pr", number or str(post and post.number)]
        options += ["--on", post.on] if post and post.on else []
        options += ["--repo", post.repo] if post and post.repo else []
        self.step("post", str(self._places.artifacts / "comment.md"), *options)

    def step(self, name: str, *arguments: str) -> int:
        return run_command(self._context, self._places.database, name, *arguments)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Print an error of a step that the verdict does not depend on."""
        try:
            yield
        except (TrackerError, click.ClickException) as error:
            say(f"groupbench: {error.message}")
