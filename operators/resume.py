"""Resume an interrupted run, and start a nightly run with the cells skipped by the previous one.

Both are read from record files. A cell with a record is done, whatever the status; a `skipped` cell is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import msgspec

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.measure.environment import without_packages
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.identity import IDENTITY
from groupbench.tracker.facts.record import Cell, Commit, Environment, Record, RecordError, Run, decode, encode
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import commit_text, counted

Key: TypeAlias = tuple[str | int, ...]
"""The identity of a cell within a run: the values of `_KEY`."""

_KEY = tuple(name for name in IDENTITY if name not in ("host", "hardware"))
"""A run is made by one host on one machine."""

RESUMABLE = timedelta(hours=24)
"""A run that began longer ago belongs to another night; a backfill may take longer."""


class CannotResume(GroupbenchError):
    """The run in the file cannot be resumed: code, machine, plan or cells differ, or it is too old."""

    exit_code = ExitCode.INCOMPARABLE


def key_of_job(job: Job) -> Key:
    return tuple(job.protocol.label if name == "protocol" else getattr(job, name) for name in _KEY)


def key_of_cell(cell: Cell) -> Key:
    return tuple(getattr(cell, name) for name in _KEY)


def read_run(path: Path) -> list[Record]:
    """Return the last run's records in a file, in file order; an empty list without a file.

    An incomplete last line, left by a killed process, is ignored. Raises UsageError for any other invalid line.
    """
    return _split(path)[1]


def _split(path: Path) -> tuple[list[bytes], list[Record]]:
    """Return the earlier runs' lines in a file, and the last run's records. Raises UsageError, as read_run."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines[:-1], 1):  # the last piece is empty or half a record
        if line.strip():
            try:
                records.append((line, decode(line)))
            except RecordError as error:
                raise UsageError(f"{path}: line {number}: {error}") from error
    last = records[-1][1].run.id if records else None
    earlier = [line for line, record in records if record.run.id != last]
    return earlier, [record for _, record in records if record.run.id == last]


def left_out(path: Path) -> frozenset[Key]:
    """Return the cells skipped by the last run in a file. Raises UsageError."""
    return frozenset(key_of_cell(record.cell) for record in read_run(path) if record.status == "skipped")


def go_on(
    path: Path,
    commit: Commit,
    environment: Environment,
    plan: str | None,
    fleet: bool = False,
    planned: Iterable[Job] | None = None,  # the cells of this invocation, which must include those of the run
) -> tuple[Run, list[Record]] | None:
    """Return the interrupted run in a file and the records without the skipped cells; None without a run.

    Rewrites the file without the skipped cells, so a cell measured now has only one record in this run. Earlier runs in
    the file stay as they are. A `fleet`'s GPUs and hosts may have changed since, but not the software. Raises
    CannotResume, UsageError.
    """
    earlier, records = _split(path)
    if not records:
        return None
    run, measured_on = records[0].run, records[0].environment
    if fleet:
        measured_on = _software(measured_on, environment)
    why = _why_another(run, measured_on, commit, environment, plan)
    if why is None and planned is not None:
        why = _other_cells(run, records, planned)
    if why is not None:
        raise CannotResume(f"{path} holds a run that began {run.started:%Y-%m-%d %H:%M} UTC{why}")
    kept = [record for record in records if record.status != "skipped"]
    _rewrite(path, earlier, kept)
    return run, kept


def _why_another(
    run: Run, measured_on: Environment, commit: Commit, environment: Environment, plan: str | None
) -> str | None:
    """Return why this invocation would be another run: a sentence end after the run. None if not."""
    if run.commit.hash != commit.hash or run.commit.dirty or commit.dirty:  # uncommitted changes may differ
        was, now = (commit_text(each.hash, each.dirty) for each in (run.commit, commit))
        text = f" at commit {was}; this is {now}"
        if run.commit.dirty or commit.dirty:
            text += " (+ marks uncommitted changes, as in `git status`: the code may differ)"
        return text
    if run.plan != plan:
        return f" with plan {run.plan}, not {plan}"
    if _alike(measured_on) != _alike(environment):
        unlike = [f for f in environment.__struct_fields__ if getattr(measured_on, f) != getattr(environment, f)]
        return f" in another environment: {', '.join(unlike)} changed"
    if run.trigger != "backfill" and datetime.now(UTC) - run.started > RESUMABLE:
        return f", more than {RESUMABLE.total_seconds() / 3600:.0f} hours ago"
    return None


def _other_cells(run: Run, records: Iterable[Record], planned: Iterable[Job]) -> str | None:
    """Return a sentence end, as `_why_another`, if the run has cells not planned now."""
    others = {key_of_cell(record.cell) for record in records} - {key_of_job(job) for job in planned}
    if not others:
        return None
    began = f" (it began as: tritonbench {run.command})" if run.command else ""
    return (
        f" with {counted(len(others), 'cell')} that this command does not select{began}; select them too, or remove "
        "--resume to add a new run to the file"
    )


def not_done(jobs: Iterable[Job], records: Iterable[Record]) -> list[Job]:
    """Return the jobs without a record."""
    done = {key_of_cell(record.cell) for record in records}
    return [job for job in jobs if key_of_job(job) not in done]


def _alike(environment: Environment) -> Environment:
    """Return the environment without the machine's name and single backends' packages, which may differ."""
    return msgspec.structs.replace(without_packages(environment), host=None)


def _software(measured_on: Environment, environment: Environment) -> Environment:
    """Return `environment` with `measured_on`'s software, for the fields in both."""
    names = ("device", "driver", "cuda", "python", "torch", "triton", "helion", "tritonbench", "settings")
    both = [name for name in names if getattr(measured_on, name) and getattr(environment, name)]
    return msgspec.structs.replace(environment, **{name: getattr(measured_on, name) for name in both})


def _rewrite(path: Path, earlier: list[bytes], records: list[Record]) -> None:
    """Replace a file's contents. Raises UsageError."""
    with whole_file(path, UsageError) as file:
        file.writelines(line + b"\n" for line in earlier)
        file.writelines(map(encode, records))
