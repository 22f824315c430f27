"""A run that goes on where it stopped, and a night that begins with what the one before left out.

Both are read from files of records: a cell that has one, whatever came of it, is done; one that was `skipped` is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import msgspec

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.measure.cell import Job
from groupbench.operators.measure.environment import without_packages
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.identity import IDENTITY
from groupbench.tracker.record import Cell, Commit, Environment, Record, RecordError, Run, decode, encode
from groupbench.tracker.text.files import whole_file

Key: TypeAlias = tuple[str | int, ...]
"""What tells the cells of a run apart: the values of _KEY."""

_KEY = tuple(name for name in IDENTITY if name not in ("host", "hardware"))
"""A file holds one run, by one host on one machine."""

LONGEST = timedelta(hours=24)
"""A run that began longer ago is another night's; a backfill may take as long as it likes."""


class CannotResume(GroupbenchError):
    """The file holds a run that this would not go on with: of other code, another machine or plan, or an old one."""

    exit_code = ExitCode.INCOMPARABLE


def key_of_job(job: Job) -> Key:
    return tuple(job.protocol.label if name == "protocol" else getattr(job, name) for name in _KEY)


def key_of_cell(cell: Cell) -> Key:
    return tuple(getattr(cell, name) for name in _KEY)


def read_run(path: Path) -> list[Record]:
    """The records of the run that a file ends with, in its order; nothing where there is no file.

    A last line without its end is what a killed process leaves: it is passed over. Raises UsageError for any other
    line that is no record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines[:-1], 1):  # after the last end of a line is nothing, or half a record
        if line.strip():
            try:
                records.append(decode(line))
            except RecordError as error:
                raise UsageError(f"{path}: line {number}: {error}") from error
    return [record for record in records if record.run.id == records[-1].run.id]


def left_out(path: Path) -> frozenset[Key]:
    """The cells that the run at a file's end planned and did not reach. Raises UsageError."""
    return frozenset(key_of_cell(record.cell) for record in read_run(path) if record.status == "skipped")


def go_on(
    path: Path, commit: Commit, environment: Environment, plan: str | None, fleet: bool = False
) -> tuple[Run, list[Record]] | None:
    """(the run, its records but for what was skipped) of a file that an interrupted run left; None where it left none.

    The file is left with those records alone, so that a cell measured now has one record and not two. The cards and
    hosts of a `fleet` may have changed since, its software not.
    Raises CannotResume, UsageError.
    """
    found = read_run(path)
    if not found:
        return None
    run, measured_on = found[0].run, found[0].environment
    began = f"{path} holds a run that began {run.started:%Y-%m-%d %H:%M} UTC"
    if run.commit.hash != commit.hash or run.commit.dirty or commit.dirty:  # who knows what changed meanwhile
        text = f"{began} at commit {named(run.commit)}; this is {named(commit)}"
        if run.commit.dirty or commit.dirty:
            text += " (+ is for changes that are not committed, as `git status` lists them: the code may be another)"
        raise CannotResume(text)
    if run.plan != plan:
        raise CannotResume(f"{began} by plan {run.plan}, not {plan}")
    if fleet:
        measured_on = _software(measured_on, environment)
    if _alike(measured_on) != _alike(environment):
        unlike = [f for f in environment.__struct_fields__ if getattr(measured_on, f) != getattr(environment, f)]
        raise CannotResume(f"{began} in another environment: {', '.join(unlike)} changed")
    if run.trigger != "backfill" and datetime.now(UTC) - run.started > LONGEST:
        raise CannotResume(f"{began}, more than {LONGEST.total_seconds() / 3600:.0f} hours ago")
    kept = [record for record in found if record.status != "skipped"]
    _rewrite(path, kept)
    return run, kept


def not_done(jobs: Iterable[Job], records: Iterable[Record]) -> list[Job]:
    """The jobs that none of the records is of."""
    done = {key_of_cell(record.cell) for record in records}
    return [job for job in jobs if key_of_job(job) not in done]


def named(commit: Commit) -> str:
    return commit.hash[:10] + ("+" if commit.dirty else "")


def _alike(environment: Environment) -> Environment:
    """Without the machine's name, a container's number, and the packages of single backends."""
    return msgspec.structs.replace(without_packages(environment), host=None)


def _software(measured_on: Environment, environment: Environment) -> Environment:
    """`environment` with the software of `measured_on`, where both are known."""
    names = ("device", "driver", "cuda", "python", "torch", "triton", "helion", "tritonbench", "settings")
    both = [name for name in names if getattr(measured_on, name) and getattr(environment, name)]
    return msgspec.structs.replace(environment, **{name: getattr(measured_on, name) for name in both})


def _rewrite(path: Path, records: list[Record]) -> None:
    """Raises UsageError."""
    with whole_file(path, UsageError) as file:
        file.writelines(map(encode, records))
