"""The commit line up to a run's commit: first parents, as far as known.

A run is judged by the commits before it, not by the measurements before it. So results from other branches do not
count, a commit measured again or late takes a place among the neighbours, and a branch continues the merge base's
history. Parents come from the database, and further back from a look-up, such as git in a checkout. Runs without a
known place are ordered by time and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.record import UNKNOWN_COMMIT
from groupbench.tracker.query.ancestry import commit_order
from groupbench.tracker.query.rewritten import Rewritten
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.store.decisions import rejected
from groupbench.tracker.store.schema import Commit, Run
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools.counterparts import Counterparts, counterparts

FirstParents = Callable[[str], tuple[Sequence[str], bool] | None]
"""Maps a commit to (itself and its first parents, newest first; whether they end at a root), or None if unknown.

Git also answers for a branch and for `HEAD`.
"""

CommitsBetween = Callable[[str, str], Collection[str] | None]
"""Maps two commits to the hashes after the first, up to the second, or to None if unknown."""


@dataclass(frozen=True)
class CommitLine:
    """The runs along one commit line."""

    runs: tuple[int, ...]  # keys, newest first: by commit, and within one commit by time
    unknown: int = 0  # number of these runs that are placed by time
    known: bool = True  # whether any ancestry is known
    rewritten: Rewritten | None = None  # the runs of commits that the branch no longer has

    def along(self, points: Iterable[PointRow]) -> list[PointRow]:
        """Return the points on the line by series, oldest first."""
        on_line = (point for point in points if point.run.pk in self._places)
        return sorted(on_line, key=lambda point: (point.series.sort_key, self.place(point.run)))

    def place(self, run: RunRow) -> int:
        """Return a run's place, larger for newer runs; -1 for a run not on the line."""
        return self._places.get(run.pk, -1)

    def newest(self, number: int) -> tuple[int, ...]:
        """Return the newest runs' keys, newest first."""
        return self.runs[:number]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {run: number for number, run in enumerate(reversed(self.runs))}

    @property
    def note(self) -> str | None:
        """A warning about unknown ancestry or a rewritten branch, or None."""
        rewritten = None if self.rewritten is None else self.rewritten.note
        if not self.unknown:
            return rewritten
        of = counted(self.unknown, "earlier run") if self.known else "earlier runs"
        note = f"ancestry unknown: {of} ordered by time, possibly including other branches"
        return note if rewritten is None else f"{note}; {rewritten}"


@dataclass(frozen=True)
class _Stored:
    """Stored runs that were not rejected, with the commits' stored ancestry."""

    runs: tuple[tuple[int, datetime, str], ...]  # key, start, commit
    parents: Mapping[str, tuple[str, ...]]
    branches: Mapping[str, str | None]

    @classmethod
    def read(cls, session: Session, run: int | None = None, committed: bool = False) -> _Stored:
        """Read every run but the rejected ones, except `run`; with `committed`, also none of uncommitted code."""
        columns = (Run.id, Run.started, Commit.hash, Commit.parents, Commit.branch)
        without = rejected(session) - {run}
        query = select(*columns).join(Commit, Run.commit_id == Commit.id)
        query = query.where(Run.dirty.is_(False) | (Run.id == run)) if committed else query
        rows = [row for row in session.execute(query) if row[0] not in without]
        return cls(
            tuple((row[0], row[1], row[2]) for row in rows),
            {row[2]: tuple(row[3] or ()) for row in rows},
            {row[2]: row[4] for row in rows},
        )


def line_of(session: Session, run: RunRow, first_parents: FirstParents | None = None) -> CommitLine:
    """Return the line up to a run: earlier runs at the same commit, and runs at the commits before.

    Uncommitted code has no place among the commits: only another run of such code is compared with it.
    """
    return _line_to(run.commit, run, _Stored.read(session, run.pk, not run.state.dirty), first_parents)


def line_through(
    session: Session, run: RunRow, first_parents: FirstParents | None = None, branch: str | None = None
) -> CommitLine:
    """Return a run's line, extended to the newest commit after it.

    A backfill measures the newest commit first, so the latest run may have an old commit. `branch` is the branch to
    follow; then runs with unknown ancestry count only if they are on it.
    """
    stored = _Stored.read(session, run.pk)
    tip = _tip(run.commit, stored, first_parents, branch)
    return _line_to(tip, run, stored, first_parents, branch)


def every_line(session: Session) -> CommitLine:
    """Return all branches' runs, by commit, and within a commit by time."""
    place = {node.hash: number for number, node in enumerate(commit_order(session))}
    runs = sorted(((place[commit], started, key) for key, started, commit in _Stored.read(session).runs), reverse=True)
    return CommitLine(tuple(key for *_, key in runs))


def _tip(commit: str, stored: _Stored, first_parents: FirstParents | None, branch: str | None) -> str:
    """Return the newest measured descendant on the branch, or on the checkout's branch if git knows it."""
    by_git = first_parents(branch or "HEAD") if first_parents is not None else None
    if by_git is not None and commit in by_git[0]:
        return next(each for each in by_git[0] if each in stored.parents)
    return _newest_descendant(commit, stored, branch)


def _newest_descendant(commit: str, stored: _Stored, branch: str | None) -> str:
    """Return the newest measured descendant by the stored parents, on the branch or the commit's own."""
    children = _first_children(stored)
    branches = (branch or stored.branches.get(commit), None)
    seen = {commit}
    while True:
        after = [child for child in children.get(commit, ()) if child not in seen]
        same = [child for child in after if stored.branches[child] in branches]
        following = same if branch is not None else same or after
        if not following:
            return commit
        commit = following[-1]
        seen.add(commit)


def _first_children(stored: _Stored) -> dict[str, list[str]]:
    """Return the measured commits by their first parent; at a fork, the one measured last comes last."""
    children: dict[str, dict[str, None]] = {}
    for _, _, child in sorted(stored.runs, key=lambda run: run[1]):
        if stored.parents[child]:
            children.setdefault(stored.parents[child][0], {})[child] = None
    return {parent: list(of_parent) for parent, of_parent in children.items()}


def _line_to(
    tip: str, run: RunRow, stored: _Stored, first_parents: FirstParents | None, branch: str | None = None
) -> CommitLine:
    """Return the line up to a commit, with runs up to `run`."""
    parents = stored.parents
    chain, complete = _chain(tip, parents, first_parents)
    place = {commit: number for number, commit in enumerate(chain)}
    elsewhere = set() if complete else _descendants(place, parents)
    earlier = {key for key, started, _ in stored.runs if (started, key) <= run.when}
    outside = [one for one in stored.runs if one[0] in earlier and one[2] not in place]
    replaced = [one for one in outside if complete or one[2] in elsewhere]
    rewritten, matches = _rewritten(tip, chain, replaced, stored, first_parents)
    place |= {commit: place[match] for commit, match in matches.items() if match is not None}
    on_line: list[tuple[int, datetime, str]] = []
    by_time: list[tuple[int, datetime, str]] = []
    for one in stored.runs:
        key, _, commit = one
        if commit in place and (commit != UNKNOWN_COMMIT or key == run.pk):
            if key in earlier or (commit != run.commit and commit not in matches):
                on_line.append(one)
        elif key not in earlier or ((complete or commit in elsewhere) and key not in rewritten.by_time):
            continue
        elif branch is None or stored.branches[commit] == branch:
            by_time.append(one)
    began = _began(on_line, place, run.started)
    keys = [((began[place[commit]], 1, -place[commit], started, key), key) for key, started, commit in on_line]
    keys += [((started, 0, 0, started, key), key) for key, started, _ in by_time]
    keys.sort(reverse=True)
    unknown = len(by_time) - len(rewritten.by_time)
    return CommitLine(tuple(key for _, key in keys), unknown, len(chain) > 1, rewritten if rewritten else None)


def _rewritten(
    tip: str,
    chain: Sequence[str],
    runs: Sequence[tuple[int, datetime, str]],
    stored: _Stored,
    first_parents: FirstParents | None,
) -> tuple[Rewritten, Counterparts]:
    """Return the runs of commits that the branch of `tip` had once, and these commits' counterparts on it.

    Args:
        runs: Earlier runs of commits that are known not to be on the line.
    """
    name = stored.branches.get(tip)
    if name is None or first_parents is None:  # the branch of a detached HEAD is unknown: these may be any others
        return Rewritten(name), {}
    newer = _descendants([tip], stored.parents)
    runs = [one for one in runs if stored.branches[one[2]] == name and one[2] not in newer]
    matches = counterparts({commit for *_, commit in runs}, chain) if runs else {}
    return Rewritten.of(name, [(key, commit) for key, _, commit in runs], matches), matches


def _chain(
    commit: str, parents: Mapping[str, tuple[str, ...]], first_parents: FirstParents | None
) -> tuple[list[str], bool]:
    """Return a commit and the first parents, newest first, and whether they end at a root."""
    chain: dict[str, None] = {}
    here: str | None = commit
    while here is not None and here not in chain:  # a file may claim a cycle of parents
        chain[here] = None
        stored = parents.get(here)
        if stored:
            here = stored[0]
            continue
        looked_up = None if first_parents is None else first_parents(here)
        if looked_up is None:
            break
        hashes, complete = looked_up
        chain.update(dict.fromkeys(hashes))
        if complete:
            return list(chain), True
        last = hashes[-1]
        here = next(iter(parents.get(last, ())), None) if last != here else None
    return list(chain), False


def _descendants(line: Iterable[str], parents: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return a line's stored descendants outside it: other branches and newer commits."""
    children: dict[str, list[str]] = {}
    for commit, of_commit in parents.items():
        for parent in of_commit:
            children.setdefault(parent, []).append(commit)
    left, seen = list(line), set(line)
    while left:
        for child in children.get(left.pop(), ()):
            if child not in seen:
                seen.add(child)
                left.append(child)
    return seen - set(line)


def _began(
    measured: Iterable[tuple[int, datetime, str]], place: Mapping[str, int], now: datetime
) -> dict[int, datetime]:
    """Return the time for each place on a line: the commit's first measurement, or an earlier commit's if later.

    The newest commit counts as measured now, so runs placed by time are never newer than the run itself.
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
