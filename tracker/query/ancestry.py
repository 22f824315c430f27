"""Commit order: by parents if known, else by time.

Nightly runs skip commits, a copied tree only knows one hash, and a shallow clone names unavailable parents. So ancestry
is used as far as it is stored. Otherwise the committer's time decides, or else the first run's time. A wrong clock
never puts a commit before a parent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.store.schema import Commit, Run

_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class CommitNode:
    """The commit facts for ordering."""

    hash: str
    parents: tuple[str, ...] = field(default=())  # including parents that are not stored
    time: datetime | None = None  # committer's time
    first_run: datetime | None = None

    @property
    def when(self) -> datetime:
        return self.time or self.first_run or _NEVER


def commit_order(session: Session) -> list[CommitNode]:
    """Return every stored commit, oldest first. A parent always comes before a child."""
    first = select(Run.commit_id, func.min(Run.started).label("started")).group_by(Run.commit_id).subquery()
    query = select(Commit.hash, Commit.parents, Commit.time, first.c.started)
    query = query.outerjoin(first, first.c.commit_id == Commit.id)
    return ordered(
        CommitNode(hash_, tuple(parents or ()), time, started)
        for hash_, parents, time, started in session.execute(query)
    )


def ordered(commits: Iterable[CommitNode]) -> list[CommitNode]:
    """Return commits with every parent before the child, and otherwise oldest first.

    Parallel branches are interleaved by time. A parent cycle, which git never has but a file may claim, is cut at the
    oldest commit.
    """
    nodes = {node.hash: node for node in commits}
    children = _children(nodes)
    waiting = Counter(child for of_parent in children.values() for child in of_parent)
    rank = {node.hash: (node.when, node.hash) for node in nodes.values()}
    ready = [rank[hash_] for hash_ in nodes if not waiting[hash_]]
    heapq.heapify(ready)
    placed: list[CommitNode] = []
    done: set[str] = set()
    while len(placed) < len(nodes):
        if not ready:
            heapq.heappush(ready, rank[_oldest_of_cycle(nodes, done, rank)])
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


def _children(nodes: Mapping[str, CommitNode]) -> dict[str, list[str]]:
    """Return each commit's children, by hash."""
    children: dict[str, list[str]] = {hash_: [] for hash_ in nodes}
    for node in nodes.values():
        for parent in dict.fromkeys(node.parents):
            if parent in nodes and parent != node.hash:
                children[parent].append(node.hash)
    return children


def _oldest_of_cycle(nodes: dict[str, CommitNode], done: set[str], rank: dict[str, tuple[datetime, str]]) -> str:
    """Return a cycle's oldest commit, if every remaining commit waits for another."""
    here = min(hash_ for hash_ in nodes if hash_ not in done)
    path: dict[str, int] = {}
    while here not in path:
        path[here] = len(path)
        here = min(parent for parent in nodes[here].parents if parent in nodes and parent not in done)
    return min((hash_ for hash_, place in path.items() if place >= path[here]), key=rank.__getitem__)


def ancestors(session: Session, hash_: str) -> set[str]:
    """Return a commit and the stored ancestors, as far as parents are known without a gap."""
    parents = {row.hash: row.parents or () for row in session.execute(select(Commit.hash, Commit.parents))}
    seen: set[str] = set()
    left = [hash_]
    while left:
        each = left.pop()
        if each in parents and each not in seen:
            seen.add(each)
            left.extend(parents[each])
    return seen
