"""The order of commits: by their parents where these are known, by time otherwise.

A night measures some commits and never sees those in between; a copied tree knows its hash alone; a shallow clone
names parents that nobody has. So ancestry is followed as far as it is stored, and where it says nothing, the
committer's time does, or else the first run's. A clock that was wrong never puts a commit before its parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.store.schema import Commit, Run

_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class CommitNode:
    """A commit as far as its order goes."""

    hash: str
    parents: tuple[str, ...] = field(default=())  # also those that are not stored
    time: datetime | None = None  # the committer's
    first_run: datetime | None = None

    @property
    def when(self) -> datetime:
        return self.time or self.first_run or _NEVER


def commit_order(session: Session) -> list[CommitNode]:
    """Every stored commit, the oldest first: a parent is always before its child."""
    first = select(Run.commit_id, func.min(Run.started).label("started")).group_by(Run.commit_id).subquery()
    query = select(Commit.hash, Commit.parents, Commit.time, first.c.started)
    query = query.outerjoin(first, first.c.commit_id == Commit.id)
    return ordered(
        CommitNode(hash_, tuple(parents or ()), time, started)
        for hash_, parents, time, started in session.execute(query)
    )


def ordered(commits: Iterable[CommitNode]) -> list[CommitNode]:
    """Commits so that none comes before a parent; of those that ancestry leaves free, the oldest first.

    Each is placed at its own time, so that two branches appear interleaved as they were made. Parents that go
    round in a circle, which git cannot make but a file can claim, are cut at the oldest commit.
    """
    nodes = {node.hash: node for node in commits}
    children: dict[str, list[str]] = {hash_: [] for hash_ in nodes}
    waiting: dict[str, int] = {}
    for node in nodes.values():
        known = {parent for parent in node.parents if parent in nodes and parent != node.hash}
        waiting[node.hash] = len(known)
        for parent in known:
            children[parent].append(node.hash)
    rank = {node.hash: (node.when, node.hash) for node in nodes.values()}
    ready = [rank[hash_] for hash_, number in waiting.items() if number == 0]
    heapq.heapify(ready)
    placed: list[CommitNode] = []
    done: set[str] = set()
    while len(placed) < len(nodes):
        if not ready:
            heapq.heappush(ready, rank[_oldest_of_circle(nodes, done, rank)])
        _, hash_ = heapq.heappop(ready)
        if hash_ in done:
            continue
        done.add(hash_)
        placed.append(nodes[hash_])
        for child in children[hash_]:
            waiting[child] -= 1
            if waiting[child] == 0 and child not in done:
                heapq.heappush(ready, rank[child])
    return placed


def _oldest_of_circle(nodes: dict[str, CommitNode], done: set[str], rank: dict[str, tuple[datetime, str]]) -> str:
    """Where every commit that is left waits for another: one of those that wait for themselves."""
    here = min(hash_ for hash_ in nodes if hash_ not in done)
    path: dict[str, int] = {}
    while here not in path:
        path[here] = len(path)
        here = min(parent for parent in nodes[here].parents if parent in nodes and parent not in done)
    return min((hash_ for hash_, place in path.items() if place >= path[here]), key=rank.__getitem__)


def ancestors(session: Session, hash_: str) -> set[str]:
    """The stored ancestors of a commit, as far as parents are known without a gap; itself included."""
    parents = {row.hash: row.parents or () for row in session.execute(select(Commit.hash, Commit.parents))}
    found: set[str] = set()
    left = [hash_]
    while left:
        each = left.pop()
        if each in parents and each not in found:
            found.add(each)
            left.extend(parents[each])
    return found
