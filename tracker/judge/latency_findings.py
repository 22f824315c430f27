"""Find out whether the latencies of a run's points moved: by their histories, and by stored A/B comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from groupbench.tracker.judge import beyond
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.levels import latency_history
from groupbench.tracker.judge.parts import Q
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.verdicts import CANARY
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats import scan as scans

CLEAR = 6.0
"""Distance in sigma from one level at which a result certainly belongs to the other."""


@dataclass(frozen=True)
class LatencyFinding:
    """The statistics' finding on a point's latency."""

    past: Past  # in any environment, on the accepted level, without steps that are over
    measured: Past  # with them
    finding: scans.SeriesFinding
    least: float  # smallest change that counts, as a logarithm

    @property
    def moved(self) -> bool:
        return self.finding.moved

    @property
    def slower(self) -> bool:
        return self.finding.effect is not None and self.finding.effect > 0

    @property
    def with_toolchain(self) -> bool:
        """Return whether the toolchain changed along with the latency."""
        used = self.past.toolchain
        return self.finding.index is not None and bool(used[self.ends[0]] != used[self.ends[1]])

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The places of the last result certainly before the change and of the first certainly after it.

        The statistics locate a change by its step, and a single new result locates it poorly. To tell toolchains
        apart, a result that is on one level and far from the other counts as certain.
        """
        finding = self.finding
        assert finding.first is not None and finding.last is not None and finding.index is not None
        assert finding.effect is not None and finding.before is not None
        first, last, clear = finding.first, finding.last, CLEAR * finding.sigma
        if self.past.toolchain[first] == self.past.toolchain[last]:
            return first, last
        far = np.abs(self.past.log - finding.before)
        while first + 1 < finding.index and far[first + 1] < min(abs(finding.effect) / 2, abs(finding.effect) - clear):
            first += 1
        far = np.abs(self.past.log - finding.before - finding.effect)
        while last > finding.index and far[last - 1] < min(abs(finding.effect) / 2, abs(finding.effect) - clear):
            last -= 1
        return first, last

    def before(self) -> list[int]:
        """Return the runs certainly on the level before the change, newest last.

        Those of a slowdown that is over were measured on another level, so they are left out.
        """
        if self.finding.index is None or self.finding.first is None:
            return []
        alike = self.past.alike
        start = int(np.searchsorted(alike, self.finding.index)) - self.finding.n_before
        level = alike[max(start, 0) :]
        level = level[level <= self.ends[0]]
        own = level[self.past.log[level] == self.measured.log[level]]
        return self.past.run[own if len(own) else level].tolist()

    def after(self) -> list[int]:
        """Return the runs certainly after the change, oldest first."""
        alike = self.past.alike
        return self.past.run[alike[alike >= (0 if self.finding.index is None else self.ends[1])]].tolist()


def latency_findings(data: GateData) -> dict[int, LatencyFinding]:
    """Return the finding on each timed point, by the point's key."""
    pasts: dict[int, tuple[Past, Past]] = {}
    histories: list[scans.SeriesHistory] = []
    for point in data.points:
        if point.timed and point.timing is not None:
            past = data.on_accepted_level(data.pasts.latency(point.series.pk), "latency")
            kept, history = _without_reverted(data, past, point, point.timing)
            pasts[point.pk] = kept, past
            histories.append(history)
    measured = {
        at: one
        for at, ((kept, _), history) in enumerate(zip(pasts.values(), histories, strict=True))
        if (one := beyond.measured_step(data, kept, history)) is not None
    }
    raised = {at: one.raised for at, one in measured.items()}
    findings = scans.scan([*histories, *raised.values()], q=Q)
    of_raised = dict(zip(raised, findings[len(histories) :], strict=True))
    return {
        key: LatencyFinding(
            kept,
            past,
            beyond.with_other_evidence(histories[at], findings[at], measured.get(at), of_raised.get(at)),
            histories[at].min_effect,
        )
        for at, (key, (kept, past)) in enumerate(pasts.items())
    }


def _without_reverted(data: GateData, past: Past, point: PointRow, timing: str) -> tuple[Past, scans.SeriesHistory]:
    """Return a past without slowdowns that were reverted, also as input for the statistics."""

    def history(of: Past) -> scans.SeriesHistory:
        canary, least = point.series.operator == CANARY, data.min_effect
        return latency_history(of, timing, canary=canary, min_effect=least, pool=_pool(point))

    whole = history(past)
    kept = beyond.without_reverted(data, past, whole)
    return kept, whole if kept is past else history(kept)


def _pool(point: PointRow) -> tuple[object, ...]:
    """Return the pool of series with similar noise: same hardware, host and protocol, within a factor of ten."""
    series = point.series
    assert point.median_ms is not None
    return (point.timing, series.hardware, series.host, series.protocol, math.floor(math.log10(point.median_ms)))
