"""Plain data that pages show: the input of `figures` and of the tables, independent of the database.

`gather` makes these from rows of the store. Places of runs are indices into
one tuple of RunLabel, the oldest first, which all histories of a page share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from groupbench.tracker.query.rows import RunRow, SeriesRow

NOISY = 0.05
"""Scatter of a speed-up, as a logarithm, up to which it is shown: bursts of a quiet GPU differ by a thousandth."""

MarkKind = Literal["change", "environment", "alert", "closed", "verdict"]
"""change: history shows a new level. environment: another one, so results before and after are not compared.
alert: an open one. closed: an alert that was dealt with. verdict: the gate's on the newest change, if history alone
shows no change yet."""


@dataclass(frozen=True)
class RunLabel:
    """A run in the words that a plot has room for."""

    run: str  # its id
    commit: str  # ten digits, and + where the tree differed from it
    started: str  # 2026-01-31 03:00, UTC
    subject: str = ""

    @property
    def text(self) -> str:
        return f"{self.commit} · {self.started}"


def label_of(run: RunRow) -> RunLabel:
    return RunLabel(run.id, str(run.state), f"{run.started:%Y-%m-%d %H:%M}", run.subject or "")


@dataclass(frozen=True)
class Mark:
    """Something that happened to a series between two runs."""

    kind: MarkKind
    at: int  # place of the first run after it
    text: str
    good: bool = False  # a change for the better


@dataclass(frozen=True)
class ShownLevel:
    """A stretch of a history within one environment and without a change, on one line of the chart."""

    first: int  # place of its first run
    last: int
    ms: float  # median
    line: int = 0  # place in the history's toolchains


@dataclass(frozen=True)
class ResultBursts:
    """All samples of one result, by burst."""

    run: int  # place of its run
    ms: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ShownHistory:
    """One series over the runs of a page. Lists are [n], one entry for each result, the oldest first."""

    series: SeriesRow
    runs: tuple[int, ...]  # places
    ms: tuple[float | None, ...]  # median of the bursts' medians
    low: tuple[float | None, ...]  # the smallest of these
    high: tuple[float | None, ...]  # the largest
    rms: tuple[float | None, ...]  # relative to the reference
    further: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # of other metrics, by name
    status: Mapping[int, str] = field(default_factory=dict)  # of those that are not ok, by place in the lists
    message: Mapping[int, str] = field(default_factory=dict)
    interpreted: bool = False  # its latencies do not measure speed
    marks: tuple[Mark, ...] = ()
    levels: tuple[ShownLevel, ...] = ()
    bursts: tuple[ResultBursts, ...] = ()  # of the newest timed result, and of the one before it; the newest last
    toolchains: tuple[str, ...] = ()  # differing packages of those measured in turns, a line each; else empty
    lines: tuple[int, ...] = ()  # place in `toolchains` of each result; empty if that is
    measured_with: tuple[str, ...] = ()  # toolchain of each result, of which a line may have several; as `lines`

    def split(self, places: Sequence[int]) -> list[tuple[str | None, list[int]]]:
        """Return (toolchain, those of the places that it was measured at), for each line; None for the only one."""
        if not self.toolchains:
            return [(None, list(places))]
        return [(name, [i for i in places if self.lines[i] == line]) for line, name in enumerate(self.toolchains)]


def is_noisy(speedup: float, *spreads: float | None) -> bool:
    """Return whether the bursts of both sides scatter by more than their speed-up, and by more than `NOISY`.

    `spreads` are half the ranges of the bursts' medians, relative; None counts as none.
    """
    noise = sum(math.log1p(spread or 0.0) for spread in spreads)
    return noise > max(NOISY, abs(math.log(speedup)))


@dataclass(frozen=True)
class SpeedRow:
    """One problem, and how long each backend takes for it in one run and environment."""

    label: str  # short enough for an axis
    problem: str  # in full
    run: RunLabel
    older: bool  # not of the run that the page is about
    ms: Mapping[str, float]  # by backend
    why: Mapping[str, str]  # of backends without a speed: the status and its message
    spread: Mapping[str, float] = field(default_factory=dict)  # half the range of the bursts' medians, relative

    def speedup(self, backend: str, baseline: str) -> float | None:
        """Return the speed-up over a baseline; None where either has no speed, or their noise hides the effect."""
        ms, over = self.ms.get(backend), self.ms.get(baseline)
        if ms is None or over is None or self.noisy(backend, baseline):
            return None
        return over / ms

    def noisy(self, backend: str, baseline: str) -> bool:
        """Return whether the bursts scatter by more than the speed-up, and by more than `NOISY`."""
        ms, over = self.ms.get(backend), self.ms.get(baseline)
        if ms is None or over is None or backend == baseline:
            return False
        return is_noisy(over / ms, self.spread.get(backend), self.spread.get(baseline))


@dataclass(frozen=True)
class SpeedMap:
    """Problems that were measured alike, by backends."""

    title: str  # hardware, host and protocol
    backends: tuple[str, ...]  # baselines first
    rows: tuple[SpeedRow, ...]


@dataclass(frozen=True)
class CanaryCeilings:
    """Throughput that the canaries of a run reached."""

    run: RunLabel
    tflops: float  # of the largest matrix product
    gbps: float  # of a copy, bytes read and written
    dtype: str  # of the product


@dataclass(frozen=True)
class RoofPoint:
    """One result of one backend."""

    backend: str
    problem: str
    dtype: str
    flops: int
    min_bytes: int  # each input read once, each output written once
    ms: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.min_bytes

    @property
    def tflops(self) -> float:
        return self.flops / self.ms / 1e9

    @property
    def gbps(self) -> float:
        return self.min_bytes / self.ms / 1e6

    def share(self, ceilings: CanaryCeilings) -> float:
        """Return the share of the throughput that the ceilings allow at this intensity."""
        return self.tflops / min(ceilings.tflops, ceilings.gbps * self.intensity / 1e3)


@dataclass(frozen=True)
class Roofline:
    """The points and ceilings of one run, or the reason why they are missing."""

    points: tuple[RoofPoint, ...] = ()
    ceilings: CanaryCeilings | None = None
    missing: str | None = None  # the reason, if there is nothing to draw
    note: str | None = None  # a remark on the plot


@dataclass(frozen=True)
class OperatorPage:
    """The data shown of one operator."""

    name: str
    speeds: tuple[SpeedMap, ...]
    roofline: Roofline
    histories: tuple[ShownHistory, ...]
