"""Import many files: each is read and hashed in a process, and stored in a transaction of its own.

So an interrupt keeps the stored files, and the largest files bound the memory. A second import passes over the files
whose runs are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.formats import Options, UnknownFormat, checked, one_line, read
from groupbench.tracker.formats.common import Noted
from groupbench.tracker.formats.sources import Source
from groupbench.tracker.store.processes import mapped, processes
from groupbench.tracker.store.staged import Part, part_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_FILES_AHEAD = 3
"""Files waiting for a process or for the store."""

_SHARED_FROM_BYTES = 4 << 20
"""Bytes of all files together for which processes pay."""


@dataclass
class Summary:
    """Results read from one or several files."""

    titles: Counter[str] = field(default_factory=Counter)  # files by format
    results: int = 0
    failed: int = 0  # results without a correct value
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)  # by reason and name
    merged: dict[str, None] = field(default_factory=dict)
    notes: dict[str, Noted] = field(default_factory=dict)  # by text

    def add(self, other: Summary) -> None:
        self.titles += other.titles
        self.results += other.results
        self.failed += other.failed
        self.left_out += other.left_out
        self.merged |= other.merged
        self.notes = other.notes | self.notes


@dataclass(frozen=True)
class Prepared:
    """One file, ready to be stored."""

    source: Source
    summary: Summary
    part: Part | None = None  # None if its runs are stored, or if it cannot be read
    problem: str | None = None  # why it cannot be read
    unknown: bool = False  # whether it has no known format


def stored_runs(session: Session) -> dict[str, int]:
    """Return the number of results of each imported run in the database."""
    from sqlalchemy import func, select

    from groupbench.tracker.store import schema

    query = (
        select(schema.Run.uuid, func.count(schema.Point.id))
        .join(schema.Point, schema.Point.run_id == schema.Run.id)
        .where(schema.Run.trigger == "import")
        .group_by(schema.Run.uuid)
    )
    return {key: count for key, count in session.execute(query).all()}  # noqa: C416 - rows, not pairs


def prepare(source: Source, format_name: str | None, options: Options, stored: Mapping[str, int]) -> Prepared:
    """Read and hash one file. An error is part of the result, because other files follow."""
    summary = Summary()
    try:
        with one_line(source.name):
            loaded = read(source.path, format_name, options)
            summary.titles[loaded.title] = 1
            summary.results = len(loaded.records)
            summary.failed = sum(record.status != "ok" for record in loaded.records)
            summary.left_out.update((one.reason, one.name) for one in loaded.left_out)
            summary.merged = dict.fromkeys(loaded.merged)
            summary.notes = {note.text: note for note in loaded.noted}
            counts = Counter(record.run.id for record in loaded.records) if stored else Counter()
            if counts and all(stored.get(run) == count for run, count in counts.items()):
                return Prepared(source, summary)
            return Prepared(source, summary, part_of(checked(loaded.records)))
    except IngestError as error:
        return Prepared(source, summary, None, error.message, isinstance(error.__cause__, UnknownFormat))


@contextmanager
def preparing(
    sources: Sequence[Source], format_name: str | None, options: Options, stored: Mapping[str, int]
) -> Iterator[Iterator[Prepared]]:
    """Enter a context in which files are read ahead, by processes if they are many, and iterate over them in order."""
    work = partial(prepare, format_name=format_name, options=options, stored=stored)
    with ExitStack() as stack:
        prepared: Iterator[Prepared] = map(work, sources)
        if len(sources) > 1 and processes() > 1 and sum(map(_size, sources)) >= _SHARED_FROM_BYTES:
            try:
                prepared = stack.enter_context(mapped(work, sources, ahead=_FILES_AHEAD))
            except (OSError, NotImplementedError):
                prepared = map(work, sources)  # none can be started
        yield prepared


def _size(source: Source) -> int:
    try:
        return source.path.stat().st_size
    except OSError:
        return 0
