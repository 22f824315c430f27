"""Import many files: each is read and hashed in a process, and stored in one transaction.

So an interrupt keeps the stored files, and the largest files bound the memory. A second import does not read the files
whose content and runs are stored.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.formats import Options, Summary, UnknownFormat, checked, one_line, read
from groupbench.tracker.formats.sources import Source
from groupbench.tracker.store.processes import mapped, processes
from groupbench.tracker.store.staged import Part, part_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_READERS = 1
"""Version of the readers. With another one, an import reads stored files again, since it may find more in them."""

_FILES_AHEAD = 3
"""Files waiting for a process or for the store."""

_SHARED_FROM_BYTES = 4 << 20
"""Bytes of all files together for which processes pay."""


@dataclass(frozen=True)
class Prepared:
    """One file, ready to be stored."""

    source: Source
    summary: Summary
    part: Part | None = None  # None if its runs are stored, or if it cannot be read
    problem: str | None = None  # why it cannot be read
    unknown: bool = False  # whether it has no known format
    file: dict[str, Any] | None = None  # a row for the database; None if stored, or to be read every time


@dataclass
class Stored:
    """The imported runs and files in the database."""

    runs: Mapping[str, int] = field(default_factory=dict)  # number of results by run
    files: Mapping[str, tuple[str, int, dict[str, int]]] = field(default_factory=dict)  # title, failed and runs

    def has(self, runs: Mapping[str, int]) -> bool:
        return bool(runs) and all(self.runs.get(run) == count for run, count in runs.items())


_stored = Stored()
"""Set by `preparing` for the processes, which begin as forks: it is too large to be sent with each file."""


def stored_imports(session: Session) -> Stored:
    """Return the imported runs and files in the database."""
    from sqlalchemy import func, select

    from groupbench.tracker.store import schema
    from groupbench.tracker.store.schema import ImportedFile

    counts = (
        select(schema.Run.uuid, func.count(schema.Point.id))
        .join(schema.Point, schema.Point.run_id == schema.Run.id)
        .where(schema.Run.trigger == "import")
        .group_by(schema.Run.uuid)
    )
    files = select(ImportedFile.content, ImportedFile.title, ImportedFile.failed, ImportedFile.runs)
    return Stored(
        {run: count for run, count in session.execute(counts)},  # noqa: C416 - rows, not pairs
        {content: (title, failed, runs) for content, title, failed, runs in session.execute(files)},
    )


def remember(session: Session, files: Sequence[dict[str, Any]]) -> None:
    """Store the rows of newly imported files."""
    from sqlalchemy import select

    from groupbench.tracker.store.bulk import insert_rows
    from groupbench.tracker.store.schema import ImportedFile

    before = set(session.scalars(select(ImportedFile.content)))
    rows = {file["content"]: file for file in files if file["content"] not in before}
    insert_rows(session, ImportedFile, list(rows.values()))


def prepare(source: Source, format_name: str | None, options: Options) -> Prepared:
    """Read and hash one file. An error is part of the result, because other files follow."""
    try:
        with one_line(source.name):
            content = _content(source.path, format_name, options)
            title, failed, runs = _stored.files.get(content, ("", 0, {}))
            if _stored.has(runs):
                return Prepared(source, Summary(Counter([title]), sum(runs.values()), failed))
            loaded = read(source.path, format_name, options)
            summary = loaded.summary
            (title,) = summary.titles
            counts = Counter(record.run.id for record in loaded.records)
            facts = {"content": content, "title": title, "failed": summary.failed, "runs": dict(counts)}
            file = None if summary.notes or summary.merged else facts
            part = None if _stored.has(counts) else part_of(checked(loaded.records))
            return Prepared(source, summary, part, file=file)
    except IngestError as error:
        return Prepared(source, Summary(), None, error.message, isinstance(error.__cause__, UnknownFormat))


def _content(path: Path, format_name: str | None, options: Options) -> str:
    """Return a hash of everything from which a file's records follow."""
    digest = hashlib.sha256(path.read_bytes())
    above = path.parent.parent / "benchmarks.json"  # of asv
    with suppress(OSError):
        digest.update(_hash_of(above, above.stat().st_mtime_ns))
    digest.update(msgspec.json.encode([_READERS, format_name, options.key(), options.device, path.name]))
    return digest.hexdigest()


@lru_cache(maxsize=2)
def _hash_of(path: Path, _: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@contextmanager
def preparing(
    sources: Sequence[Source], format_name: str | None, options: Options, stored: Stored
) -> Iterator[Iterator[Prepared]]:
    """Enter a context in which files are read ahead, by processes if they are many, and iterate over them in order."""
    global _stored
    _stored = stored
    work = partial(prepare, format_name=format_name, options=options)
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
