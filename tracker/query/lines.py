"""The line of commits that a run stands on: the first parents of its commit, as far as they are known.

A run is judged by what came before it in the code, not by what was measured before it. Results of other branches are
left out, a commit that is measured again or for the first time takes its place among its neighbours, and a run of a
branch continues the history of its merge base. Parents are read from the database; where these end, a look-up (git,
where the caller has a checkout) may know more. Runs whose place stays unknown are ordered by time, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.query.ancestry import commit_order
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.store.schema import Commit, Run
from groupbench.tracker.text.wording import counted

FirstParents = Callable[[str], tuple[Sequence[str], bool] | None]
"""Of a commit: itself and its first parents, the newest first, and whether they end at a root. None if unknown.

Git also answers for a branch and for `HEAD`.
"""


@dataclass(frozen=True)
class CommitLine:
    """The runs of one line of commits."""

    runs: tuple[int, ...]  # keys, the newest first: by commit, and within one by time
    unknown: int = 0  # of these, how many are placed by time
    known: bool = True  # whether any ancestry is

    def along(self, points: Iterable[PointRow]) -> list[PointRow]:
        """Return the points of the line by series, the oldest first."""
        place = {run: number for number, run in enumerate(reversed(self.runs))}
        own = (point for point in points if point.run.pk in place)
        return sorted(own, key=lambda point: (point.series.sort_key, place[point.run.pk]))

    @property
    def note(self) -> str | None:
        """Return what a reader must know about the order, or None."""
        if not self.unknown:
            return None
        of = counted(self.unknown, "earlier run") if self.known else "earlier runs"
        return f"ancestry unknown: {of} ordered by time, other branches not told apart"


@dataclass(frozen=True)
class _Stored:
    """Every stored run, and what the database knows of the ancestry of their commits."""

    runs: tuple[tuple[int, datetime, str], ...]  # key, start, commit
    parents: Mapping[str, tuple[str, ...]]
    branches: Mapping[str, str | None]

    @classmethod
    def read(cls, session: Session) -> _Stored:
        columns = (Run.id, Run.started, Commit.hash, Commit.parents, Commit.branch)
        rows = session.execute(select(*columns).join(Commit, Run.commit_id == Commit.id)).all()
        return cls(
            tuple((row[0], row[1], row[2]) for row in rows),
            {row[2]: tuple(row[3] or ()) for row in rows},
            {row[2]: row[4] for row in rows},
        )


def line_of(session: Session, run: RunRow, first_parents: FirstParents | None = None) -> CommitLine:
    """Return the line that ends with a run: runs of its commit up to it, and those of the commits before."""
    return _line_to(run.commit, run, _Stored.read(session), first_parents)


def line_through(
    session: Session, run: RunRow, first_parents: FirstParents | None = None, branch: str | None = None
) -> CommitLine:
    """Return the line of a run up to the newest commit that follows its own.

    A backfill measures the newest commit first, so that the run measured last is of an old one. `branch` is the one
    to follow; of runs whose ancestry is unknown, only those of this branch count then.
    """
    stored = _Stored.read(session)
    tip = _tip(run.commit, stored, first_parents, branch)
    return _line_to(tip, run, stored, first_parents, branch)


def every_line(session: Session) -> CommitLine:
    """Return the runs of all branches, by commit and within one by time."""
    place = {node.hash: number for number, node in enumerate(commit_order(session))}
    runs = sorted(((place[commit], started, key) for key, started, commit in _Stored.read(session).runs), reverse=True)
    return CommitLine(tuple(key for *_, key in runs))


def _tip(commit: str, stored: _Stored, first_parents: FirstParents | None, branch: str | None) -> str:
    """Return the newest measured commit after `commit`: on the branch, or on that of the checkout, if git knows it."""
    known = first_parents(branch or "HEAD") if first_parents is not None else None
    if known is not None and commit in known[0]:
        return next(each for each in known[0] if each in stored.parents)
    children: dict[str, dict[str, None]] = {}
    for _, _, child in sorted(stored.runs, key=lambda run: run[1]):  # the one measured last wins a fork
        if stored.parents[child]:
            children.setdefault(stored.parents[child][0], {})[child] = None
    own = branch or stored.branches.get(commit)
    seen = {commit}
    while True:
        after = [child for child in children.get(commit, ()) if child not in seen]
        same = [child for child in after if stored.branches[child] in (own, None)]
        if branch is None:
            same = same or after
        if not same:
            return commit
        commit = same[-1]
        seen.add(commit)


def _line_to(
    tip: str, run: RunRow, stored: _Stored, first_parents: FirstParents | None, branch: str | None = None
) -> CommitLine:
    """Return the line that ends at a commit, of runs up to `run`."""
    parents = stored.parents
    chain, complete = _chain(tip, parents, first_parents)
    place = {commit: number for number, commit in enumerate(chain)}
    beside = set() if complete else _descendants(place, parents)
    on_line: list[tuple[int, datetime, str]] = []
    by_time: list[tuple[int, datetime, str]] = []
    for one in stored.runs:
        key, started, commit = one
        earlier = (started, key) <= (run.started, run.pk)
        if commit in place:
            if commit != run.commit or earlier:
                on_line.append(one)
        elif complete or commit in beside or not earlier:
            continue
        elif branch is None or stored.branches[commit] == branch:
            by_time.append(one)
    began = _began(on_line, place, run.started)
    keys = [((began[place[commit]], 1, -place[commit], started, key), key) for key, started, commit in on_line]
    keys += [((started, 0, 0, started, key), key) for key, started, _ in by_time]
    keys.sort(reverse=True)
    return CommitLine(tuple(key for _, key in keys), len(by_time), len(chain) > 1)


def _chain(
    commit: str, parents: Mapping[str, tuple[str, ...]], first_parents: FirstParents | None
) -> tuple[list[str], bool]:
    """A commit and its first parents, the newest first, and whether they end at a root."""
    chain: dict[str, None] = {}
    here: str | None = commit
    while here is not None and here not in chain:  # a file may claim parents that go round in a circle
        chain[here] = None
        stored = parents.get(here)
        if stored:
            here = stored[0]
            continue
        answer = None if first_parents is None else first_parents(here)
        if answer is None:
            break
        hashes, complete = answer
        chain.update(dict.fromkeys(hashes))
        if complete:
            return list(chain), True
        last = hashes[-1]
        here = next(iter(parents.get(last, ())), None) if last != here else None
    return list(chain), False


def _descendants(line: Iterable[str], parents: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Stored commits that come after one of a line without being of it: other branches, and what is newer."""
    children: dict[str, list[str]] = {}
    for commit, of_commit in parents.items():
        for parent in of_commit:
            children.setdefault(parent, []).append(commit)
    left, found = list(line), set(line)
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found - set(line)


def _began(
    measured: Iterable[tuple[int, datetime, str]], place: Mapping[str, int], now: datetime
) -> dict[int, datetime]:
    """When the commit at each place of a line was first measured, or one before it was, if that is later.

    The newest counts as measured now: what is placed by time alone is never newer than the run itself.
    """
    first: dict[int, datetime] = {0: now}
    for _, started, commit in measured:
        at = place[commit]
        if at:
            first[at] = min(started, first.get(at, started))
    latest: datetime | None = None
    for at in sorted(first, reverse=True):
        latest = first[at] if latest is None else max(latest, first[at])
        first[at] = latest
    return first
