"""Pinned commits: a fixed reference besides the history, so that small steps cannot add up unnoticed.

A history adapts: a series that slows down by 0.1 % every night never differs from the night before. A pin names a
commit and the largest slowdown that is allowed since then.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import toolchain_differences
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.record import LONGEST_NAME
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.causes import some
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import Case, percent
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.judge.verdicts import CANARY, PIN, Effect, Judged
from groupbench.tracker.query import filters
from groupbench.tracker.query.points import by_series_and_time, points_where
from groupbench.tracker.query.resolve import resolve_commit
from groupbench.tracker.query.rows import PointRow, RunRow, named_difference
from groupbench.tracker.query.tables import FlatRow, of_row
from groupbench.tracker.stats.thresholds import POOL_FLOOR, step_scatter
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared
from groupbench.tracker.store.schema import TIMED_POINT, Commit, Pin, Point, Run
from groupbench.tracker.text.wording import no_such
from groupbench.tracker.tools import git

NEWEST = 5
"""Number of results whose median is compared with the pinned level."""

SIGMAS = 3.0
"""Standard errors by which a regression exceeds the limit; anything closer is a suspect."""

_MOVES = re.compile(r"[~^:]|@\{|^(@|\w*HEAD|latest|previous)$", re.ASCII)
"""Finds what names a commit only for now, such as HEAD~2."""


@dataclass(frozen=True)
class PinRow(FlatRow):
    """A pinned commit with a limit."""

    pk: int
    name: str
    commit: str
    max_slowdown: float  # relative
    created: datetime
    who: str
    ended: datetime | None = None

    COLUMNS: ClassVar[Mapping[str, str]] = of_row("name", "commit", "max_slowdown", "created", "who", "ended")


def find(session: Session, *, ended: bool = False) -> list[PinRow]:
    """Return the pins in force, oldest first; `ended` includes removed pins."""
    rows = session.scalars(select(Pin).order_by(Pin.id))
    pins = [PinRow(row.id, **{name: getattr(row, name) for name in PinRow.columns()}) for row in rows]
    return [each for each in pins if ended or each.ended is None]


def pin(session: Session, commit: str, max_slowdown: float, name: str | None, who: str) -> PinRow:
    """Pin a measured commit, replacing a pin of the same name. Raises QueryError.

    Args:
        name: By default `commit`, or the short hash if that would move.
    """
    state = resolve_commit(session, commit, git.rev_parse)
    if not state.has_commit:
        raise QueryError(f"{state} is not a commit: the code that its runs measured is not known")
    if state.dirty:
        raise QueryError(f"{state} is a dirty tree; pin a commit instead")
    if max_slowdown <= 0:
        raise QueryError("--max-slowdown must be larger than 0")
    filters.refuse_longer("name", name, LONGEST_NAME)
    filters.refuse_longer("who", who, LONGEST_NAME)
    if name is not None and not name.strip():
        raise QueryError("--name is empty")
    now = datetime.now(UTC)
    name = name or (state.commit[:10] if _MOVES.search(commit) else commit)
    for row in session.scalars(select(Pin).where(Pin.name == name, Pin.ended.is_(None))):
        row.ended = now
    session.add(Pin(name=name, commit=state.commit, max_slowdown=max_slowdown, created=now, who=who))
    session.flush()
    return find(session)[-1]


def unpin(session: Session, name: str) -> PinRow:
    """Remove a pin by name. Raises QueryError."""
    for each in find(session):
        if each.name == name:
            session.get_one(Pin, each.pk).ended = datetime.now(UTC)
            session.flush()
            return each
    raise QueryError(no_such("no pin", name, [each.name for each in find(session)]))


class _Level(NamedTuple):
    run: RunRow  # the newest
    log: float
    error: float  # standard error
    n: int


def _other_toolchain(results: Sequence[PointRow], point: PointRow) -> str | None:
    """Return how the newest result on a point's machine differs from it in its toolchain, or None without one."""
    for newest in reversed(results):
        if newest.environment.machine == point.environment.machine:
            differences = toolchain_differences(newest.environment.facts, point.environment.facts)
            return some(differences or named_difference(newest.run, point.run))
    return None


def _level(results: Sequence[PointRow], point: PointRow) -> _Level | None:
    """Return the level of the results in a point's environment and with its toolchain, or None without one."""
    alike = [
        each for each in results
        if each.environment.identity == point.environment.identity
        and each.run.toolchain in (point.run.toolchain or "", None)
    ]  # fmt: skip
    if not alike:
        return None
    log = float(np.median([math.log(each.median_ms or math.nan) for each in alike]))
    error = float(np.median([each.error or 0.0 for each in alike]))
    return _Level(alike[-1].run, log, error / math.sqrt(len(alike)), len(alike))


class PinRule:
    """Compares the newest level of each series with its level at each pinned commit."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.pins = find(data.session)
        self.results = {each.pk: _results(data.session, each, data.points) for each in self.pins}

    def cases(self, point: PointRow) -> list[Case]:
        """Return a case for each pin whose limit a point's latency exceeds or may exceed."""
        if not point.timed or point.series.operator == CANARY:
            return []
        cases = (self._case(each, point) for each in self.pins)
        return [each for each in cases if each is not None]

    def notes(self) -> tuple[str, ...]:
        """Return a line for each pin that lacks some latencies, since silence would look like a pass."""
        timed = [point for point in self.data.points if point.timed and point.series.operator != CANARY]
        lines = []
        for each in self.pins:
            if each.commit == self.data.run.commit:
                continue
            results = [(self.results[each.pk].get(point.series.pk, ()), point) for point in timed]
            lacking = [pair for pair in results if _level(*pair) is None]
            if not lacking:
                continue
            line = f"pin {each.name}: {len(lacking):,} series have no result at that commit in this environment"
            other = [text for pair in lacking if (text := _other_toolchain(*pair))]
            if other:
                number = "all" if len(other) == len(lacking) else f"{len(other):,}"
                line += (
                    f"; {number} have one with another toolchain ({Counter(other).most_common(1)[0][0]}): "
                    "pin a commit that was measured with this one"
                )
            lines.append(line)
        return tuple(lines)

    def _case(self, pinned: PinRow, point: PointRow) -> Case | None:
        """Return a case if a point is slower than one pin allows: by an A/B of the two, else by their levels."""
        before = _level(self.results[pinned.pk].get(point.series.pk, ()), point)
        if before is None or point.run.state.commit == pinned.commit:
            return None
        past = self.data.pasts.latency(point.series.pk)
        past = past.where(past.alike)
        past = past.where(past.toolchain == past.toolchain[-1])
        limit = math.log1p(pinned.max_slowdown)
        number = min(NEWEST, _on_newest_level(past, point, limit))
        level = past.run[-number:].tolist()
        stored = self.data.evidence(point.series.pk, [], level)
        compared = comparisons.about(of_one_toolchain(stored), {pinned.commit}, self.data.clean_commits(level))
        if compared is not None and compared.verdict == SAME:
            return None
        effect, low, high = _slowdown(past, number, before, point, compared)
        if effect <= limit:
            return None
        base, run = before.run, self.data.run
        note = f"{percent(effect)} since {pinned.name}; the limit is {percent(limit)}"
        shown = Effect(math.exp(before.log), change=math.expm1(effect), low=math.expm1(low), high=math.expm1(high))
        evidence = Evidence("pin", n=before.n, distance=effect, certain=low > limit)
        decides = not evidence.certain and compared is None and run.state.clean
        return Case(evidence, Judged(
            point.series, Verdict.OK, point, PIN, PIN, note, shown, span=Span(base, run), compared=compared,
            ab_base=base if decides else None,
        ))  # fmt: skip


def _on_newest_level(past: Past, point: PointRow, limit: float) -> int:
    """Return how many of the newest results are near the newest: older ones and their A/Bs do not show that level."""
    assert point.timing is not None
    far = max(limit, SIGMAS * max(POOL_FLOOR[point.timing], point.error or 0.0))
    off = np.flatnonzero(np.abs(past.log - past.log[-1]) > far)
    return len(past) - (int(off[-1]) + 1 if len(off) else 0)


def _slowdown(
    past: Past, number: int, before: _Level, point: PointRow, compared: Compared | None
) -> tuple[float, float, float]:
    """Return (effect, low, high) since the pin, from the newest results or an A/B comparison."""
    if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
        low, high = compared.low, compared.high
        return compared.effect, compared.effect if low is None else low, compared.effect if high is None else high
    assert point.timing is not None
    scatter = max(step_scatter(past.log), POOL_FLOOR[point.timing], point.error or 0.0)
    effect = float(np.median(past.log[-number:])) - before.log
    error = math.hypot(scatter / math.sqrt(number), before.error, scatter / math.sqrt(before.n))
    return effect, effect - SIGMAS * error, effect + SIGMAS * error


def _results(session: Session, pinned: PinRow, points: Sequence[PointRow]) -> dict[int, list[PointRow]]:
    """Return the latencies at a pinned commit by series, oldest first."""
    series = {point.series.pk: point.series for point in points}
    at_commit = Commit.hash == pinned.commit, Run.dirty.is_(False), TIMED_POINT
    results = [
        each
        for chunk in chunks(series)
        for each in points_where(session, *at_commit, Point.series_id.in_(chunk), series=series)
    ]
    return grouped(by_series_and_time(results), lambda each: each.series.pk)
