"""Changes of latency that statistics do not see: those that a stored A/B found, and steps in a short history."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import OLD, moved
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.stats import young
from groupbench.tracker.stats.histories import SeriesFinding, SeriesHistory, newest_environment
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, Compared


def with_other_evidence(data: GateData, past: Past, history: SeriesHistory, finding: SeriesFinding) -> SeriesFinding:
    """Return the statistics' finding, or if it is no change, one that an A/B or a short history shows."""
    if moved(finding):
        return finding
    measured = _measured_step(data, past, history)
    if measured is None:
        return young.find_step(history) or finding
    return _with_later_step(history, measured)


def _with_later_step(history: SeriesHistory, measured: SeriesFinding) -> SeriesFinding:
    """Return a clear step after the one that an A/B measured, with this as what is left; without one, the latter."""
    assert measured.first is not None and measured.last is not None and measured.effect is not None
    later = young.find_step(history, since=measured.last)
    if later is None or later.index is None:
        return measured
    place = newest_environment(history.environment)
    first, last, stop = np.searchsorted(place, [measured.first, measured.last, later.index]).tolist()
    earlier = young.step_between(history, first, last, stop=stop)
    assert earlier.effect is not None
    stays = earlier.effect * measured.effect > 0 and abs(earlier.effect) >= history.min_effect
    return replace(later, left=earlier if stays else None)


def _measured_step(data: GateData, past: Past, history: SeriesHistory) -> SeriesFinding | None:
    """Return the change that a stored A/B found between two commits of the history, if its level is still there.

    A slowdown comes before an improvement. Of several A/Bs, the one that spans the fewest results decides.
    """
    stored = [one for one in data.comparisons.get(past.series, ()) if one.verdict == DIFFERENT and not one.toolchains]
    if not stored:
        return None
    steps = [step for one in stored if (step := _step(data, past, history, one)) is not None]
    return max(steps, key=_weight, default=None)


def _weight(step: SeriesFinding) -> tuple[bool, int, int]:
    assert step.effect is not None and step.first is not None and step.last is not None
    return step.effect > 0, step.first - step.last, step.last


def _step(data: GateData, past: Past, history: SeriesHistory, compared: Compared) -> SeriesFinding | None:
    """Return the step between the commits of an A/B, or None if the results or a newer A/B contradict it."""
    if not compared.effect or abs(compared.effect) < history.min_effect:
        return None
    runs = past.run[past.alike].tolist()
    ends = _ends(data, runs, compared)
    if ends is None:
        return None
    first, last = ends
    step = young.step_between(history, first, last)
    before, after = runs[: first + 1], runs[last:]
    evidence = data.evidence(past.series, before, after)
    decisive = comparisons.about(evidence, data.clean_commits(before), data.clean_commits(after))
    if decisive is None or decisive.verdict != DIFFERENT or not decisive.effect:
        return None
    return step if young.is_still_there(history, step, decisive.effect) else None


def _ends(data: GateData, runs: list[int], compared: Compared) -> tuple[int, int] | None:
    """Return the places of the last run of an A/B's base and the first of its head; None if they are old or missing."""
    measured = [data.runs[run].commit if data.runs[run].state.clean else None for run in runs]
    if compared.base not in measured:
        return None
    start = measured.index(compared.base)
    last = next((at for at in range(start + 1, len(runs)) if measured[at] == compared.head), None)
    if last is None or len(runs) - last > OLD:
        return None
    return max(at for at in range(last) if measured[at] == compared.base), last
