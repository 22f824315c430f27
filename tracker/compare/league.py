"""Which backend is fastest, on what, by how much, and how sure that is.

A match is one problem (operator, mode, dtype, shape, protocol) on one card at one state of the code: every backend that
was measured there, the newest point of each, the fastest first. Nothing is compared across cards or commits. A table is
of the matches of one operator, mode, dtype and GPU model; losses are in it like wins.

The lead is the second's latency over the first's, with the interval of stats/ratios.py. Where that holds 1, or the lead
is below the smallest change that counts, the two are level, and both have won.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from groupbench.tracker.metrics import METRICS
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.query.series import narrowed
from groupbench.tracker.record import PACKAGE
from groupbench.tracker.stats.ratios import GeometricMean, Interval, geometric_mean, ratio_interval
from groupbench.tracker.stats.thresholds import least_effect

_DYNAMIC = METRICS["dynamic_routing"]
_MEMORY = METRICS["workspace_mib"], METRICS["kept_mib"]


@dataclass(frozen=True)
class Match:
    """One problem on one card at one commit. `entries` are right and timed, the fastest first; `out` are the others."""

    entries: tuple[PointRow, ...]
    out: tuple[PointRow, ...]

    @property
    def shape(self) -> str:
        return self.entries[0].series.shape

    @property
    def first(self) -> PointRow:
        return self.entries[0]

    def behind(self, point: PointRow) -> float:
        """Return the point's latency over the fastest's."""
        assert point.median_ms and self.first.median_ms
        return point.median_ms / self.first.median_ms

    def lead_over(self, point: PointRow) -> Interval | None:
        """Return the interval of `behind`, or None where nothing shows the noise."""
        assert point.median_ms and self.first.median_ms and point.timing
        errors = [[math.nan if p.error is None else p.error] for p in (self.first, point)]
        return ratio_interval([self.first.median_ms], errors[0], [point.median_ms], errors[1], timing=point.timing)

    def level(self, point: PointRow) -> bool:
        """Whether the point cannot be told from the fastest, or not by as much as counts."""
        if point is self.first:
            return True
        bounds, least = self.lead_over(point), least_effect(point.timing or "gpu", self.first.median_ms or 1.0)
        return bounds is None or bounds.low <= 1 or self.behind(point) < 1 + least


@dataclass(frozen=True)
class Standing:
    """One backend over the matches that it took part in.

    won      matches in which it was fastest or level with the fastest
    matches  in which it was measured and right
    wrong, absent  in which its result was wrong; in which it was not measured for another reason
    behind   geometric mean of its latency over the fastest's
    worst    the largest of these, and its shape
    """

    backend: str
    won: int
    matches: int
    wrong: int
    absent: int
    behind: GeometricMean
    worst: float
    worst_shape: str
    rms: float | None  # the largest
    memory_mib: float | None  # most of workspace and what preparing keeps, where measured
    prepare_ms: float | None  # the longest
    routing: str  # dynamic, fixed, mixed; empty where it is not known
    packages: tuple[str, ...]


@dataclass(frozen=True)
class LeagueTable:
    """The matches of one operator, mode, dtype, protocol and GPU model, and where each backend stands."""

    operator: str
    mode: str
    dtype: str
    protocol: str
    hardware: str
    matches: tuple[Match, ...]

    @property
    def title(self) -> str:
        return f"{self.operator}, {self.mode}, {self.dtype}, {self.hardware}"

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Every backend that was right somewhere: the smallest geometric mean first, those with more matches ahead."""
        names = dict.fromkeys(point.series.backend for match in self.matches for point in match.entries)
        found = [_standing(name, self.matches) for name in names]
        most = max(standing.matches for standing in found)
        return tuple(sorted(found, key=lambda s: (2 * s.matches < most, s.behind.ratio, s.backend)))

    @property
    def provenance(self) -> list[str]:
        """A line for each commit and toolchain."""
        points = (point for match in self.matches for point in match.entries)
        return list(dict.fromkeys(_provenance(point) for point in points))


def league(points: Sequence[PointRow], where: Filter = Filter()) -> list[LeagueTable]:  # noqa: B008
    """Return the tables of points that may be of many runs. Problems with a single backend are no match.

    Of `where` what says series counts. Raises QueryError where it names what no point has.
    """
    allowed = {row.sort_key for row in narrowed((point.series for point in points), where, exact=True)}

    def key(match: Match) -> tuple[str, str, str, str, str]:
        series = match.first.series
        return series.operator, series.mode, series.dtype, series.protocol, series.hardware

    matches = sorted(_matches(point for point in points if point.series.sort_key in allowed), key=key)
    return [LeagueTable(*key_of, tuple(found)) for key_of, found in groupby(matches, key)]


def _matches(points: Iterable[PointRow]) -> Iterator[Match]:
    """The newest state of the code that two backends have a point of, for each problem and card."""
    places: dict[tuple[Any, ...], dict[Any, list[PointRow]]] = {}
    for point in sorted(points, key=lambda p: (p.run.started, p.run.pk)):
        facts = point.environment.facts
        card = facts.gpu_uuid or facts.host, facts.torch, facts.triton, facts.driver
        by_state = places.setdefault((point.series.problem, card), {})
        by_state.setdefault(point.run.state, []).append(point)
    newest: dict[tuple[str, ...], Match] = {}
    for (problem, _), by_state in places.items():
        for found in by_state.values():  # in order of time
            last = {point.series.backend: point for point in found}.values()
            entries = sorted((p for p in last if p.timed), key=lambda p: p.median_ms or 0)
            if len(entries) >= 2:
                match = Match(tuple(entries), tuple(p for p in last if not p.timed))
                known = newest.get(problem)
                if known is None or known.first.run.started <= match.first.run.started:
                    newest[problem] = match
    return iter(newest.values())


def _standing(backend: str, matches: Sequence[Match]) -> Standing:
    played = [(m, p) for m in matches for p in m.entries if p.series.backend == backend]
    missed = [p for m in matches for p in m.out if p.series.backend == backend]
    behind = geometric_mean([match.behind(point) for match, point in played])
    assert behind is not None
    last, worst = max(played, key=lambda pair: pair[0].behind(pair[1]))
    points = [point for _, point in played]
    dynamic = {value for p in points if (value := p.value(_DYNAMIC)) is not None}
    memory = [sum(p.value(metric) or 0 for metric in _MEMORY) for p in points if p.value(_MEMORY[0]) is not None]
    return Standing(
        backend=backend,
        won=sum(match.level(point) for match, point in played),
        matches=len(played),
        wrong=sum(p.status == "wrong" for p in missed),
        absent=sum(p.status != "wrong" for p in missed),
        behind=behind,
        worst=last.behind(worst),
        worst_shape=last.shape,
        rms=max((p.rms for p in points if p.rms is not None), default=None),
        memory_mib=max(memory, default=None),
        prepare_ms=max((p.prepare_ms for p in points if p.prepare_ms is not None), default=None),
        routing="" if not dynamic else "mixed" if len(dynamic) > 1 else "dynamic" if dynamic == {1.0} else "fixed",
        packages=tuple(dict.fromkeys(text for p in points for text in _packages(p))),
    )


def _packages(point: PointRow) -> Iterator[str]:
    """`quack-kernels 0.6.5`: the versions that this backend alone needs."""
    for name, version in point.environment.facts.settings.items():
        if name.startswith(PACKAGE):
            yield f"{name.removeprefix(PACKAGE)} {version}"


def _provenance(point: PointRow) -> str:
    facts, run = point.environment.facts, point.run
    versions = [f"{name} {value}" for name in ("torch", "triton", "helion", "cuda") if (value := getattr(facts, name))]
    card = f" (`{facts.gpu_uuid[4:12]}`)" if facts.gpu_uuid else ""
    driver = f", driver {facts.driver}" if facts.driver else ""
    commit = f"commit `{run.commit[:10]}`{' with changes' if run.dirty else ''}"
    return f"{commit}, {run.started:%Y-%m-%d}, {point.series.hardware}{card}{driver}, {', '.join(versions)}"
