"""Page data: plain input for `figures` and the tables, independent from the database.

`gather` makes these from stored rows. A run's place is an index into one tuple of RunLabel, oldest first, shared by all
histories on a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from groupbench.tracker.facts.metrics import GBPS, TFLOPS, rate
from groupbench.tracker.query.rows import PointRow, RunRow, SeriesRow, speedup_over

NOISY = 0.05
"""Largest noise, as a logarithm, at which a speed-up is always shown. Bursts of a quiet GPU differ by a thousandth."""

MarkKind = Literal["change", "environment", "alert", "closed", "verdict"]
"""change: the series reached a new level. environment: the machine or the toolchain changed.
alert: an open alert. closed: a closed alert. verdict: a change that the gate lists, if history alone shows none there
yet."""


class RunLabel(NamedTuple):
    """The run facts in a plot. A named tuple, because a page looks up the text thousands of times."""

    run: str  # its id
    commit: str  # ten digits of the hash, with + for a dirty tree
    started: str  # 2026-01-31 03:00, UTC
    subject: str = ""

    @property
    def text(self) -> str:
        return f"{self.commit} · {self.started}"


@lru_cache(maxsize=8192)
def label_of(run: RunRow) -> RunLabel:
    return RunLabel(run.id, str(run.state), f"{run.started:%Y-%m-%d %H:%M}", run.subject or "")


@dataclass(frozen=True)
class Mark:
    """An event in a series' history, between two runs."""

    kind: MarkKind
    at: int  # place of the first run after the event
    text: str
    good: bool = False  # the event is an improvement


@dataclass(frozen=True)
class ShownLevel:
    """Consecutive results in one environment without a change, on one chart line."""

    first: int  # place of its first run
    last: int
    ms: float  # median
    line: int = 0  # place in the history's toolchains


@dataclass(frozen=True)
class ResultBursts:
    """One result's samples, by burst."""

    run: int  # place of its run
    ms: tuple[tuple[float, ...], ...]

    @property
    def samples(self) -> list[float]:
        return [ms for burst in self.ms for ms in burst]


@dataclass(frozen=True)
class ShownHistory:
    """One series' history over a page's runs. Lists are [n], an entry for each result, oldest first."""

    series: SeriesRow
    runs: tuple[int, ...]  # places
    ms: tuple[float | None, ...]  # median of the bursts' medians
    low: tuple[float | None, ...]  # smallest of the bursts' medians
    high: tuple[float | None, ...]  # largest of the bursts' medians
    rms: tuple[float | None, ...]  # relative to the reference
    further: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # of other metrics, by name
    status: Mapping[int, str] = field(default_factory=dict)  # of results that are not ok, by index in the lists
    message: Mapping[int, str] = field(default_factory=dict)
    interpreted: bool = False  # its latencies do not measure speed
    marks: tuple[Mark, ...] = ()
    levels: tuple[ShownLevel, ...] = ()
    bursts: tuple[ResultBursts, ...] = ()  # of the newest two timed results, newest last
    toolchains: tuple[str, ...] = ()  # name of each line, if several toolchains are measured alternately; else empty
    lines: tuple[int, ...] = ()  # index in `toolchains` of each result; empty if `toolchains` is
    measured_with: tuple[str, ...] = ()  # toolchain of each result, as one line may have several; empty like `lines`

    def ok(self, values: Sequence[float | None], places: Iterable[int] | None = None) -> list[int]:
        """Return the places, all or some, with an ok result and a value."""
        every = range(len(values)) if places is None else places
        return [i for i in every if values[i] is not None and i not in self.status]

    def split(self, places: Sequence[int]) -> list[tuple[str | None, list[int]]]:
        """Return (toolchain, places among `places`) for each line. A single line has the name None."""
        if not self.toolchains:
            return [(None, list(places))]
        return [(name, [i for i in places if self.lines[i] == line]) for line, name in enumerate(self.toolchains)]


def is_noisy(speedup: float, *spreads: float | None) -> bool:
    """Return whether both sides' noise exceeds both their speed-up and `NOISY`.

    spreads half the burst medians' range on each side, relative to the median; None counts as 0
    """
    noise = sum(math.log1p(spread or 0.0) for spread in spreads)
    return noise > max(NOISY, abs(math.log(speedup)))


def shown_speedup(point: PointRow, baseline: PointRow | None) -> tuple[float | None, bool]:
    """Return (the speed-up over a baseline or None, whether the noise hides it)."""
    speedup = speedup_over(point, baseline)
    if speedup is None or baseline is None or point is baseline:
        return speedup, False
    return speedup, is_noisy(speedup, point.half_spread, baseline.half_spread)


@dataclass(frozen=True)
class SpeedRow:
    """Each backend's latency on one problem, in one run and environment."""

    label: str  # short enough for an axis
    problem: str  # in full
    run: RunLabel
    older: bool  # from an earlier run than the page's
    ms: Mapping[str, float]  # by backend
    why: Mapping[str, str]  # status and message of backends without a latency
    spread: Mapping[str, float] = field(default_factory=dict)  # half the range of the bursts' medians, relative

    def speedup(self, backend: str, baseline: str) -> float | None:
        """Return the speed-up over a baseline; None if a latency is missing or the noise exceeds the effect."""
        ms, over = self.ms.get(backend), self.ms.get(baseline)
        if ms is None or over is None or self.noisy(backend, baseline):
            return None
        return over / ms

    def noisy(self, backend: str, baseline: str) -> bool:
        """Return whether the two backends' noise hides their speed-up (`is_noisy`)."""
        ms, over = self.ms.get(backend), self.ms.get(baseline)
        if ms is None or over is None or backend == baseline:
            return False
        return is_noisy(over / ms, self.spread.get(backend), self.spread.get(baseline))


@dataclass(frozen=True)
class SpeedMap:
    """Backend latencies on problems measured in the same way."""

    title: str  # hardware, host and protocol
    backends: tuple[str, ...]  # baselines first
    rows: tuple[SpeedRow, ...]


@dataclass(frozen=True)
class CanaryCeilings:
    """The canaries' throughput in a run."""

    run: RunLabel
    tflops: float  # of the fastest matrix product
    gbps: float  # of the fastest copy, counting bytes read and written
    dtype: str  # of the product


@dataclass(frozen=True)
class RoofPoint:
    """One backend's result on one problem."""

    backend: str
    problem: str
    dtype: str
    flops: int
    min_bytes: int  # each input read once, each output written once
    ms: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.min_bytes

    @property
    def tflops(self) -> float:
        return rate(self.flops, self.ms, TFLOPS) or 0.0

    @property
    def gbps(self) -> float:
        return rate(self.min_bytes, self.ms, GBPS) or 0.0

    def share(self, ceilings: CanaryCeilings) -> float:
        """Return the throughput as a share of the ceilings' maximum at this intensity."""
        return self.tflops / min(ceilings.tflops, ceilings.gbps * self.intensity / 1e3)


@dataclass(frozen=True)
class Roofline:
    """One run's points and ceilings, or the reason why they are missing."""

    points: tuple[RoofPoint, ...] = ()
    ceilings: CanaryCeilings | None = None
    missing: str | None = None  # the reason, if there is nothing to draw
    note: str | None = None  # a remark on the plot


@dataclass(frozen=True)
class OperatorPage:
    """One operator's page data."""

    name: str
    speeds: tuple[SpeedMap, ...]
    roofline: Roofline | None  # None if the operator cannot have one
    histories: tuple[ShownHistory, ...]
