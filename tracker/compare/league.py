"""The league table: which backend is fastest on which problem, by how much, and how certain that is.

A match is one problem (operator, mode, dtype, shape, protocol) on one card at one state of the code, with the newest
point of every backend measured there, fastest first. Nothing is compared across cards or commits. A table contains the
matches of one operator, mode, dtype and GPU model, losses as well as wins.

The lead is the second's latency over the first's, with the interval of `ratios`. If the interval contains 1, or the
lead is below the smallest change that counts, the two are level and both win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from groupbench.tracker.compare.ratios import GeometricMean, Interval, geometric_mean, ratio_interval
from groupbench.tracker.compare.sides import narrowed_points
from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.facts.record import PACKAGE
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.thresholds import least_effect

_PROPERTIES = {
    "dynamic_routing": ("dynamic", "fixed routing"),
    "batch_invariant": ("batch invariant", "depends on the batch"),
    "fresh_output": ("", "reuses its output"),
    "special_values": ("", "fragile"),
}
"""Metric -> a backend with and without that property, in the table; the usual one is empty."""
_MEMORY = METRICS["workspace_mib"], METRICS["kept_mib"]


@dataclass(frozen=True)
class Match:
    """A problem on one card at one commit. `entries` are correct and timed, fastest first; `out` are the others."""

    entries: tuple[PointRow, ...]
    out: tuple[PointRow, ...]

    @property
    def shape(self) -> str:
        return self.entries[0].series.shape

    @property
    def first(self) -> PointRow:
        return self.entries[0]

    def behind(self, point: PointRow) -> float:
        """Return a point's latency over the fastest one's."""
        assert point.median_ms and self.first.median_ms
        return point.median_ms / self.first.median_ms

    def lead_over(self, point: PointRow) -> Interval | None:
        """Return the interval of `behind`, or None if nothing shows the noise."""
        assert point.median_ms and self.first.median_ms and point.timing
        errors = [[math.nan if p.error is None else p.error] for p in (self.first, point)]
        return ratio_interval([self.first.median_ms], errors[0], [point.median_ms], errors[1], timing=point.timing)

    def level(self, point: PointRow) -> bool:
        """Return whether a point is level with the fastest: not significantly or not relevantly slower."""
        if point is self.first:
            return True
        bounds, least = self.lead_over(point), least_effect(point.timing or "gpu", self.first.median_ms or 1.0)
        return bounds is None or bounds.low <= 1 or self.behind(point) < 1 + least


@dataclass(frozen=True)
class Standing:
    """One backend's results over all matches.

    Attributes:
        won: Matches in which it was fastest or level with the fastest.
        matches: Matches in which it was measured and correct.
        wrong: Matches in which its result was wrong.
        absent: Matches in which it was not measured for another reason.
        behind: Geometric mean of its latency over the fastest's; at least 1, as are the ends of its interval.
        worst: The largest of these ratios, with `worst_shape`.
    """

    backend: str
    won: int
    matches: int
    wrong: int
    absent: int
    behind: GeometricMean
    worst: float
    worst_shape: str
    rms: float | None  # largest
    memory_mib: float | None  # largest sum of workspace and memory kept by preparation, if measured
    prepare_ms: float | None  # longest
    properties: tuple[str, ...]  # of its callables, as far as they were measured
    packages: tuple[str, ...]


@dataclass(frozen=True)
class LeagueTable:
    """The matches of one operator, mode, dtype, protocol and GPU model, with the backends' standings."""

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
        """The standings by geometric mean; backends with fewer than half of the most matches come last."""
        names = dict.fromkeys(point.series.backend for match in self.matches for point in match.entries)
        standings = [_standing(name, self.matches) for name in names]
        most = max(standing.matches for standing in standings)
        return tuple(sorted(standings, key=lambda s: (2 * s.matches < most, s.behind.ratio, s.backend)))

    @property
    def untimed(self) -> dict[str, str]:
        """The backends without a latency in any match, each with a status, or `interpreted` if it was right."""
        timed = {point.series.backend for match in self.matches for point in match.entries}
        return {
            point.series.backend: "interpreted" if point.status == "ok" else point.status
            for match in self.matches
            for point in match.out
            if point.series.backend not in timed
        }

    @property
    def provenance(self) -> list[str]:
        """One line for each commit and toolchain."""
        points = (point for match in self.matches for point in match.entries)
        return list(dict.fromkeys(_provenance(point) for point in points))


def league(
    points: Sequence[PointRow],
    where: Filter = Filter(),  # noqa: B008
    line: CommitLine | None = None,
) -> list[LeagueTable]:
    """Return the league tables of points from any number of runs. A match needs at least two backends.

    The runs are ordered by `line`, or by time without it. Only the series fields of `where` apply. Raises QueryError if
    it names something that no point has.
    """

    def key(match: Match) -> tuple[str, str, str, str, str]:
        series = match.first.series
        return series.operator, series.mode, series.dtype, series.protocol, series.hardware

    matches = sorted(_matches(narrowed_points(points, where), line), key=key)
    return [LeagueTable(*key_of, tuple(matches_of_key)) for key_of, matches_of_key in groupby(matches, key)]


def _matches(points: Iterable[PointRow], line: CommitLine | None) -> Iterator[Match]:
    """Return an iterator over matches: for each problem, the newest state of the code with at least two backends."""

    def order(run: RunRow) -> Any:
        return run.when if line is None else line.place(run)

    places: dict[tuple[Any, ...], dict[Any, list[PointRow]]] = {}
    for point in sorted(points, key=lambda p: order(p.run)):
        facts = point.environment.facts
        card = facts.gpu_uuid or facts.host, facts.torch, facts.triton, facts.driver
        by_state = places.setdefault((point.series.problem, card), {})
        by_state.setdefault(point.run.state, []).append(point)
    newest: dict[tuple[str, ...], Match] = {}
    for (problem, _), by_state in places.items():
        for points_of_state in by_state.values():  # oldest first
            last = {point.series.backend: point for point in points_of_state}.values()
            entries = sorted((p for p in last if p.timed), key=lambda p: p.median_ms or 0)
            if len(entries) >= 2:
                match = Match(tuple(entries), tuple(p for p in last if not p.timed))
                newest_match = newest.get(problem)
                if newest_match is None or order(newest_match.first.run) <= order(match.first.run):
                    newest[problem] = match
    return iter(newest.values())


def _standing(backend: str, matches: Sequence[Match]) -> Standing:
    played = [(m, p) for m in matches for p in m.entries if p.series.backend == backend]
    missed = [p for m in matches for p in m.out if p.series.backend == backend]
    behind = geometric_mean([match.behind(point) for match, point in played])
    assert behind is not None
    if behind.low is not None:
        behind = replace(behind, low=max(behind.low, 1.0))  # computed as if ratios below 1 were possible
    last, worst = max(played, key=lambda pair: pair[0].behind(pair[1]))
    return Standing(
        backend=backend,
        won=sum(match.level(point) for match, point in played),
        matches=len(played),
        wrong=sum(p.status == "wrong" for p in missed),
        absent=sum(p.status != "wrong" for p in missed),
        behind=behind,
        worst=last.behind(worst),
        worst_shape=last.shape,
        **_largest_facts([point for _, point in played]),
    )


def _largest_facts(points: Sequence[PointRow]) -> dict[str, Any]:
    """Return the largest error, memory and preparation time over a backend's points, the routing and the packages."""
    memory = [sum(p.value(metric) or 0 for metric in _MEMORY) for p in points if p.value(_MEMORY[0]) is not None]
    return {
        "rms": _largest(p.rms for p in points),
        "memory_mib": max(memory, default=None),
        "prepare_ms": _largest(p.prepare_ms for p in points),
        "properties": tuple(_properties(points)),
        "packages": tuple(dict.fromkeys(text for p in points for text in _packages(p))),
    }


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _properties(points: Sequence[PointRow]) -> Iterator[str]:
    """Yield the properties of a backend's points; one that only some have is `in part`."""
    for name, (held, missing) in _PROPERTIES.items():
        values = {point.value(METRICS[name]) for point in points} - {None}
        text = missing if 0.0 in values else held if values else ""
        if text:
            yield f"{text} in part" if len(values) > 1 else text


def _packages(point: PointRow) -> Iterator[str]:
    """Yield the versions of packages that only this backend needs: `quack-kernels 0.6.5`."""
    for name, version in point.environment.facts.settings.items():
        if name.startswith(PACKAGE):
            yield f"{name.removeprefix(PACKAGE)} {version}"


def _provenance(point: PointRow) -> str:
    facts, run = point.environment.facts, point.run
    versions = [f"{name} {value}" for name in ("torch", "triton", "helion", "cuda") if (value := getattr(facts, name))]
    card = f" ({facts.gpu_uuid[4:12]})" if facts.gpu_uuid else ""
    driver = f", driver {facts.driver}" if facts.driver else ""
    return f"commit {run.state}, {run.started:%Y-%m-%d}, {point.series.hardware}{card}{driver}, {', '.join(versions)}"
