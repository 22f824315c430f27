"""Handle one invocation in both hosts: write records, show progress and the table, and choose the exit code."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import libraries, resume, table
from groupbench.operators.ceilings import Ceilings
from groupbench.operators.errors import Incomplete, UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.logs import Logs, logs_for
from groupbench.operators.measure.commit import find_commit
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.wire import Job
from groupbench.operators.vet import vetted
from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.loaded import ListsOnce
from groupbench.tracker.facts.physics import unusual
from groupbench.tracker.facts.record import (
    UNKNOWN_COMMIT,
    Commit,
    Environment,
    Record,
    RecordError,
    Run,
    cut,
    encode,
    read,
)
from groupbench.tracker.text import wording
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import commit_text, counted
from groupbench.tracker.tools import device_lock

FEW_PROBLEMS = 3
LONG_LINE = 200
"""Most problems and characters of a list of skipped cells. A longer list is replaced by counts."""


@dataclass
class Session:
    """An invocation's records so far, and options other than the cell selection."""

    records_path: Path | None = None
    csv: bool = False
    output: Path | None = None
    output_json: Path | None = None
    metrics: tuple[str, ...] = table.DEFAULT_METRICS
    baseline: str | None = None
    commit: str | None = None
    branch: str | None = None
    trigger: str = "manual"
    plan: str | None = None
    builds: bool = True  # False for a plan without `setup`
    timeout_s: float = 300
    quiet: bool = False
    plot: bool = False  # the first metric, in the terminal
    resume: bool = False  # continue the last run of the record file
    previous: Path | None = None  # records of the previous run: cells that it skipped are measured first
    budget_s: float = math.inf
    logs_path: Path | None = None  # folder for the output of every cell
    show_output: bool = False  # show the output of cells
    shows_table: bool = True  # False if the host has shown its own
    records: list[Record] = field(default_factory=list)
    run: Run | None = None
    unwritten: bool = False  # a requested file could not be written
    lacking: bool = False  # a record lacks something that was asked for

    def open(
        self, host: str, environment: Environment, fleet: bool = False, planned: Iterable[Job] | None = None
    ) -> None:
        """Print the environment, and check before measuring whether results can be written.

        With `resume`, `records` then holds the cells measured before, which must be among the `planned` ones. For a
        `fleet`, `environment` comes from one GPU. Raises UsageError, CannotResume.
        """
        commit = find_commit(self.commit)
        if self.branch:
            commit = msgspec.structs.replace(commit, branch=storable(self.branch))
        self._check_files()
        resumed = None
        if self.resume and self.records_path is not None:
            resumed = resume.go_on(self.records_path, commit, environment, self.plan, fleet, planned)
        self.run, self.records = resumed or (self._new_run(commit), [])
        self.say(
            " · ".join(
                [f"groupbench: {host}", *_named(environment), f"commit {commit_text(commit.hash, commit.dirty)}"]
            )
        )
        if not fleet:  # the processes of a fleet hold the locks of their GPUs
            device_lock.warn_if_shared("tritonbench", environment.device, environment.gpu_uuid)
        if self.records_path is not None and commit.hash == UNKNOWN_COMMIT:
            print(
                'tritonbench: no git commit here: the records name the commit "unknown", and the gate cannot name '
                "the commit of a change; run in a git checkout, or add --commit HASH",
                file=sys.stderr,
            )
        if resumed:
            done = counted(len(self.records), "cell")
            other = self.run.command and _unresumed(self.run.command) != _unresumed(_command())
            began = f"; it began as: tritonbench {self.run.command}" if other else ""
            self.say(f"resuming the run of {self.run.started:%H:%M} UTC: {done} already measured{began}")

    def _check_files(self) -> None:
        """Raise UsageError for an unwritable file, or one with other content than records."""
        for path in (self.records_path, self.output, self.output_json):
            if path is not None:
                check_writable(path)
        if self.records_path is not None and not self.resume:
            _check_records(self.records_path)

    def _new_run(self, commit: Commit) -> Run:
        return Run(
            id=uuid.uuid4().hex,
            started=datetime.now(UTC),
            commit=commit,
            trigger=storable(self.trigger),
            plan=self.plan,
            command=_command() or None,
        )

    @property
    def logs(self) -> Logs:
        """The folder for cell output, and the rules for keeping it."""
        assert self.run is not None
        return logs_for(self.records_path, self.run.id, self.logs_path, self.show_output)

    @property
    def kept(self) -> str:
        """The finished cells, which an interrupt keeps, as text."""
        if not self.records:
            return "nothing was measured yet"
        cells = counted(len(self.records), "cell")
        if self.records_path is None:
            return f"{cells} measured; --records FILE would keep them"
        return f"{cells} kept in {self.records_path}; --resume continues the run"

    def say(self, text: str) -> None:
        """Print a line on standard output; with --csv on standard error, since standard output holds only the table."""
        print(storable(text), file=sys.stderr if self.csv else sys.stdout, flush=True)

    def collect(self, produce: Callable[[Run, Progress], Iterator[Record]], total: int) -> int:
        """Write each record as it is produced, then show the table. Returns the exit code.

        After an interrupt, the records so far are kept, and shown unless another command began the run: it reports
        the interrupt. Raises Incomplete, after showing the table, if the host gave up or a record cannot be written.
        """
        assert self.run is not None
        interrupted, ended = False, None
        ceilings = Ceilings()
        for record in self.records:  # of the resumed run
            ceilings.see(record)
        with self._writer() as write, _progress(total, self.quiet) as progress:
            progress.printed, progress.missed = self.logs.keep, self._missed
            try:
                for record in map(vetted, produce(self.run, progress)):
                    record = ceilings.see(record)
                    self.records.append(record)
                    write(record)
                    progress.finished(record)
            except KeyboardInterrupt:
                interrupted = True
            except Incomplete as error:
                ended = error
        if (self.records or not ended) and not (interrupted and self.trigger != "manual"):
            self.show()
        if ended:
            raise ended
        return ExitCode.INTERRUPTED if interrupted else self.exit_code()

    def _missed(self, text: str) -> None:
        self.lacking = True
        print(storable(f"tritonbench: {text}"), file=sys.stderr)

    def show(self) -> None:
        """Print the table in the requested formats, and a line with counts."""
        if self.shows_table:
            self._show_table()
        if self.plot:
            self._draw()
        counts = Counter(record.status for record in self.records)
        statuses = ", ".join(f"{n} {status}" for status, n in counts.most_common())
        self.say(f"{counted(len(self.records), 'cell')}: {statuses}")
        for line in (*self._warnings(), *self._files()):
            self.say(line)

    def _warnings(self) -> Iterator[str]:
        """Yield a line for each reason why results cannot be used or are missing."""
        restless = sum(table.is_restless(record) for record in self.records)
        if restless:
            yield (
                f"unsteady: {counted(restless, 'cell')} "
                f"(bursts vary by more than {100 * table.UNUSABLE_SPREAD:.0f} %)"
                "; is another process using this machine? Check with `groupbench doctor`"
            )
        for record in self.records:
            if (warning := _unusual(record)) is not None:
                yield warning
                break
        unloaded = next((record for record in self.records if libraries.does_not_load(record.message or "")), None)
        if unloaded is not None and not self.builds:
            yield f"{unloaded.cell.backend} cannot load a module or a library: {libraries.BUILD}"
        skipped = [record for record in self.records if record.status == "skipped"]
        if skipped:
            yield f"skipped: {_problems(skipped)}"

    def _files(self) -> Iterator[str]:
        """Yield a line for each place with results."""
        if self.records_path is not None:
            yield f"records: {self.records_path}"
        if self.run is not None and (logs := self.logs).written(self.records):
            yield f"{'logs' if logs.every else 'logs of failed cells'}: {logs.folder}"

    def _draw(self) -> None:
        from groupbench.tracker.tools import plots

        out = sys.stderr if self.csv else sys.stdout
        plots.draw(table.panels(self.records, self.metrics[0], self.baseline), out)

    def _show_table(self) -> None:
        from rich.console import Console

        if self.csv:
            table.write_csv(self.records, self.metrics, self.baseline, sys.stdout)
        else:
            console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
            with console.capture() as screen:  # Rich would exit with 1 if the pipe is closed
                console.print(table.screen_table(self.records, self.metrics, self.baseline))
            print(*(line.rstrip() for line in screen.get().splitlines()), sep="\n")  # Rich pads the last column
        for path, write in ((self.output, table.write_csv), (self.output_json, table.write_json)):
            if path is not None:
                text = io.StringIO(newline="")
                try:
                    with whole_file(path, UsageError) as file:
                        write(self.records, self.metrics, self.baseline, text)
                        file.write(text.getvalue().encode(errors="backslashreplace"))
                except UsageError as error:  # the other results are still shown
                    self.unwritten = True
                    print(storable(f"tritonbench: {error}"), file=sys.stderr)

    def exit_code(self) -> int:
        """Return 0; 1 if a result is wrong; 3 if a planned cell was not measured, or a file not written."""
        statuses = {record.status for record in self.records}
        if "wrong" in statuses:
            return ExitCode.FAILED
        if self.unwritten or self.lacking or statuses & {"error", "oom", "timeout", "skipped"} or "ok" not in statuses:
            return ExitCode.INCOMPLETE
        return ExitCode.OK

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Callable[[Record], None]]:
        if self.records_path is None:
            yield lambda record: None
            return
        with self.records_path.open("ab", buffering=0) as file:
            lists_once = ListsOnce()
            yield lambda record: _append(file, encode(lists_once(record)))


def _unusual(record: Record) -> str | None:
    if record.status != "ok" or record.latency is None:
        return None
    cell, latency = record.cell, record.latency
    amounts = (cell.flops, cell.min_bytes, cell.dtype)
    return unusual(table.median_ms(latency), *amounts, latency.timing, record.environment.gpu)


def _command() -> str:
    return cut(storable(" ".join(sys.argv[1:])))


def _unresumed(command: str) -> list[str]:
    return [word for word in command.split() if word != "--resume"]


def _append(file: FileIO, line: bytes) -> None:
    """Append the whole line or nothing, since a later run would reject half a record. Raises Incomplete."""
    written = 0
    try:
        while written < len(line):
            written += file.write(line[written:])
    except OSError as error:
        with contextlib.suppress(OSError):  # a pipe, a device
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
        raise Incomplete(f"cannot write {file.name}: {error.strerror}; nothing more is measured") from error


def _named(environment: Environment) -> list[str]:
    """Return the device and the installed packages' versions, for the first line."""
    cpu = f"CPU ({environment.cpu})" if environment.cpu else "CPU"
    device = environment.gpu or ("GPU" if environment.device == "cuda" else cpu)
    versions = {name: getattr(environment, name) for name in ("torch", "triton", "helion", "tritonbench")}
    return [device, *(f"{name} {version}" for name, version in versions.items() if version is not None)]


def _problems(records: list[Record]) -> str:
    """Return `grouped_gemm fwd bf16 one_owner (7 cells): why`; many problems are counted by operator and mode."""
    cells = [record.cell for record in records]
    counts = Counter((f"{cell.operator} {cell.mode}", f"{cell.dtype} {cell.shape}") for cell in cells)
    text = ", ".join(f"{operator} {shape} ({counted(n, 'cell')})" for (operator, shape), n in counts.items())
    if len(counts) > FEW_PROBLEMS or len(text) > LONG_LINE:
        problems = Counter(operator for operator, _ in counts)
        sizes = Counter(f"{cell.operator} {cell.mode}" for cell in cells)
        text = ", ".join(
            f"{operator} ({counted(sizes[operator], 'cell')} of {counted(n, 'problem')})"
            for operator, n in problems.items()
        )
    why = "; ".join(dict.fromkeys(record.message or "" for record in records))
    return f"{text}: {why}"


def check_writable(path: Path) -> None:
    """Raise UsageError if `path` cannot be written. Creates the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _check_records(path: Path) -> None:
    """Raise UsageError if the file to append to holds anything but whole records."""
    if not path.is_file():
        return
    lines, _, half = path.read_bytes().rpartition(b"\n")
    try:
        for _ in read(lines.split(b"\n")):
            pass
    except RecordError as error:
        raise UsageError(f"{path} contains a line that is not a record: {error}") from error
    if half:
        raise UsageError(
            f"{path} ends in the middle of a line, because a run was killed: continue that run with --resume, or "
            "choose another file"
        )


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Progress]:
    """Print a line for each finished cell on standard error; on a terminal, also a bar with the current cell."""
    if quiet:
        yield Progress()
        return
    rows = _Rows(total)

    def show(row: str | None, write: Callable[[str], None]) -> None:
        if row is not None:
            write(row)

    if sys.stderr.isatty():
        from rich import progress
        from rich.console import Console

        columns: list[Any] = [
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False),
        ]
        console = Console(stderr=True, highlight=False, markup=False)
        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=total)

            def advance(cells: float) -> None:
                rows.advance(cells)
                bar.advance(task, cells)

            yield Progress(
                describe=lambda text: bar.update(task, description=text),
                advance=advance,
                finished=lambda record: show(rows.of(record), console.print),
            )
    else:
        to_stderr = partial(print, file=sys.stderr, flush=True)
        yield Progress(advance=rows.advance, finished=lambda record: show(rows.of(record), to_stderr))


class _Rows:
    """Make progress lines: finished cells, the last result, and the time left."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._began, self._finished, self._worked = clock(), 0, 0.0

    def advance(self, cells: float) -> None:
        """Count finished work in cells. A problem's cells finish together, so parts of cells are counted as well."""
        self._worked += cells

    def of(self, record: Record) -> str | None:
        """Return a cell's line; None if it was skipped after an interrupt or at the budget's end."""
        if record.status == "skipped":
            return None
        self._finished += 1
        cell, latency = record.cell, record.latency
        ms = "" if latency is None else wording.latency(Bursts.of(latency.bursts_ms).median, latency.timing)
        ms += " ms" if ms and ms != wording.INTERPRETED else ""
        name = f"{cell.operator}/{cell.backend} {cell.shape} {cell.dtype}"
        result = ", ".join(filter(None, [ms, record.status, self._left()]))
        return storable(f"[{self._finished}/{self._total}] {name}: {result}")

    def _left(self) -> str:
        left = self._total - self._worked
        if left < 0.01 or not self._worked:
            return ""
        seconds = (self._clock() - self._began) / self._worked * left
        return f"about {f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'} left"
