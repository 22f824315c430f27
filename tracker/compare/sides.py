"""Resolve the sides of `compare`: a commit, a run, the newest run by a date, or a file of records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.record import Record
from groupbench.tracker.query import filters
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.points import by_series_and_time, points_of_run, points_of_state, points_where
from groupbench.tracker.query.resolve import find_run, newest_run, resolve_commit, run_at
from groupbench.tracker.query.rows import PointRow, RunRow, State
from groupbench.tracker.query.series import narrowed
from groupbench.tracker.store.decisions import rejected
from groupbench.tracker.tools import git

if TYPE_CHECKING:
    from groupbench.tracker.formats import Options

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv")


@dataclass(frozen=True)
class ComparedSide:
    """One comparison side, with points by series and time."""

    title: str
    points: tuple[PointRow, ...]
    state: State | None = None  # for a commit or a run

    def __str__(self) -> str:
        return self.title


def is_file(word: str) -> bool:
    """Return whether a word names an existing file by a folder or a known suffix.

    Raises QueryError if a word has such a suffix and the file does not exist.
    """
    is_there = Path(word).is_file()
    if word.endswith(FILE_SUFFIXES) and not is_there:
        raise QueryError(f"no such file: {word}")
    return is_there and (os.sep in word or word.endswith(FILE_SUFFIXES))


def find_side(session: Session | None, word: str, options: Options | None = None) -> ComparedSide:
    """Return the side that a word names. Without a session, only files are possible. Raises QueryError.

    The first that applies of: a file; `run:ID`; `@` and a date; `latest`, `previous`, a branch, a hash prefix or a
    commit known to git; a date, for the newest run started by the end.
    """
    if is_file(word) or (session is None and Path(word).is_file()):
        return _of_file(word, options)
    if session is None:
        raise QueryError(f"no file {word!r}, and no database to look it up in")
    try:
        return _stored(session, word)
    except QueryError as error:
        if not Path(word).is_file():
            raise
        raise QueryError(
            f"{word} is not a file of records ({', '.join(FILE_SUFFIXES)}), and {error.message}"
        ) from error


def find_sides(
    session: Session | None, a: str, b: str, options: Options | None = None
) -> tuple[ComparedSide, ComparedSide]:
    """Return two sides as `find_side` does. Raises QueryError if they are the same."""
    side_a, side_b = (find_side(session, word, options) for word in (a, b))
    if side_a.points == side_b.points:
        commit = "commit " if side_a.title == str(side_a.state) else ""
        raise QueryError(f"{a!r} and {b!r} are the same {commit}{side_a}; give two different ones")
    return side_a, side_b


def narrowed_side(side: ComparedSide, where: Filter) -> ComparedSide:
    """Return a side with the series that a filter selects. Raises QueryError if it names something that it lacks."""
    return replace(side, points=tuple(narrowed_points(side.points, where)))


def narrowed_points(points: Sequence[PointRow], where: Filter) -> list[PointRow]:
    """Return the points of the series that a filter selects. Raises QueryError if it names something that none has."""
    wanted = {row.sort_key for row in narrowed([point.series for point in points], where, exact=True)}
    return [point for point in points if point.series.sort_key in wanted]


def _stored(session: Session, word: str) -> ComparedSide:
    """Return the side in the database that a word names, as for `find_side`. Raises QueryError."""
    if word.startswith("run:"):
        return _of_run(session, find_run(session, word.removeprefix("run:") or None))
    if word.startswith("@"):
        return _of_run(session, run_at(session, filters.instant(word[1:], end=True)))
    try:
        state = resolve_commit(session, word, git.rev_parse)
    except QueryError as error:
        if word in ("latest", "previous"):
            raise QueryError(f"{error}; `run:ID` names a single run, `groupbench list runs` lists them") from error
        if not filters.looks_like_date(word):
            raise
        return _of_run(session, run_at(session, filters.instant(word, end=True)))
    if not state.has_commit:  # earlier runs there may be of other code
        return _of_run(session, newest_run(session, state))
    without = rejected(session)
    points = tuple(point for point in points_of_state(session, state) if point.run.pk not in without)
    if not points and without:
        raise QueryError(
            f"every run at {state} was rejected; `run:ID` names one, and `db reject --undo` counts it again"
        )
    return ComparedSide(str(state), points, state)


def _of_run(session: Session, run: RunRow) -> ComparedSide:
    title = f"run {run.id[:12]} of {run.started:%Y-%m-%d %H:%M} at {run.state}"
    return ComparedSide(title, tuple(points_of_run(session, run)), run.state)


def _of_file(name: str, options: Options | None) -> ComparedSide:
    from groupbench.tracker.formats import Options, load

    # These points are not stored, so any commit, date and device can replace missing ones.
    unknown = Options(commit=name, date=datetime.fromtimestamp(0, UTC), device="cuda")
    loaded = load(Path(name), options=options or unknown)
    return ComparedSide(name, tuple(points_of(loaded.records, name)))


def points_of(records: Iterable[Record], name: str) -> list[PointRow]:
    """Return records as a database would give them, by series and time. Their keys refer to no other database.

    Raises IngestError for records that contradict each other.
    """
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.ingest import ingest

    with open_store("sqlite://", create=True) as store:
        ingest(store, enumerate(records, 1), name)
        with store.read() as session:
            return by_series_and_time(points_where(session))
