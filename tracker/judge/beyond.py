"""Changes of latency that statistics do not see: those that a stored A/B found, and steps in a short history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import OLD, moved
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.stats import known, young
from groupbench.tracker.stats.histories import SeriesFinding, SeriesHistory, newest_environment
from groupbench.tracker.stats.known import KnownStep
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared


def without_reverted(data: GateData, past: Past, history: SeriesHistory) -> Past:
    """Return a past without the steps that stored A/Bs found and that are over, and otherwise with flat levels."""
    steps = [
        KnownStep(*ends, one.effect)
        for ends, one in _stored(data, past, DIFFERENT)
        if one.effect and abs(one.effect) >= history.min_effect and _decides(data, past, one)
    ]
    if not steps:
        return past
    shifts = known.shifts(history, steps, partial(_is_refuted, data, past))
    return past.shifted(past.alike, shifts) if shifts.any() else past


def _decides(data: GateData, past: Past, compared: Compared) -> bool:
    """Return whether no newer A/B of the same commits came to another verdict."""
    stored = data.comparisons.get(past.series, ())
    newest = comparisons.about(stored, {compared.base}, {compared.head})
    return newest is not None and newest.verdict == compared.verdict


def _is_refuted(data: GateData, past: Past, back: int, effect: float) -> bool:
    """Return whether a return to an earlier level was noise: A/Bs found no difference to later, slow results.

    Args:
        back: The place of the first result that seemed to be back.
    """
    log = past.log[past.alike]
    spans = (ends for ends, _ in _stored(data, past, SAME))
    return any(first >= back and float(log[last] - log[first]) >= effect / 2 for first, last in spans)


@dataclass(frozen=True)
class Measured:
    """A step that an A/B measured, in a history with the results before earlier such steps on the level since."""

    step: SeriesFinding
    history: SeriesHistory
    has_earlier: bool  # whether there are such steps

    @property
    def raised(self) -> SeriesHistory:
        """The history with the results before the step on the level since."""
        return _raised(self.history, [self.step])


def _raised(history: SeriesHistory, steps: Sequence[SeriesFinding], stop: int | None = None) -> SeriesHistory:
    """Return a history with the results before each of some steps, oldest first, shifted to the level since.

    Args:
        stop: The end of the level after the newest of them, a place in the newest environment; None for the newest
            result.
    """
    ends = [_at(history, step) for step in steps]
    if ends and stop is None:
        last = ends[-1][1]
        stop = last + known.beginning(len(newest_environment(history.environment)) - last)
    stops = [first + 1 for first, _ in ends[1:]] + [stop]
    for (first, last), end in zip(ends, stops, strict=False):  # without steps, there is a stop alone
        level = young.step_between(history, first, last, stop=end)
        assert level.index is not None and level.effect is not None
        log_ms = history.log_ms.copy()
        log_ms[: level.index] += level.effect
        history = replace(history, log_ms=log_ms)
    return history


def _at(history: SeriesHistory, step: SeriesFinding) -> tuple[int, int]:
    """Return the places of the results before and after a step, among those in the newest environment."""
    assert step.first is not None and step.last is not None
    first, last = np.searchsorted(newest_environment(history.environment), [step.first, step.last]).tolist()
    return first, last


def with_other_evidence(
    history: SeriesHistory, finding: SeriesFinding, measured: Measured | None, raised: SeriesFinding | None
) -> SeriesFinding:
    """Return the finding on a series by all evidence.

    Args:
        finding: The statistics' finding.
        measured: The step that an A/B measured, if its level is still there.
        raised: The statistics' finding on the history raised to the level since.
    """
    if measured is None:
        return finding if moved(finding) else young.find_step(history) or finding
    step, settled = measured.step, young.is_settled(history, measured.step)
    later = raised if moved(raised) and _is_after(raised, step) else None
    if settled and later is not None and not _is_clear(later):
        later = None
    if later is None and moved(finding) and _is_after(finding, step):
        return finding
    if later is None and not settled:
        later = young.find_step(history, since=step.last or 0)
    if later is None:
        return finding if moved(finding) and not _merges(finding, measured) else step
    return replace(later, left=_left(measured, later))


def _is_clear(finding: SeriesFinding) -> bool:
    """Return whether a finding on a raised history is beyond the uncertainty of its levels."""
    assert finding.effect is not None
    return abs(finding.effect) >= young.SIGMAS * finding.sigma


def _merges(finding: SeriesFinding, measured: Measured) -> bool:
    """Return whether the statistics' change may be several, of which an A/B measured the newest."""
    assert finding.index is not None and measured.step.index is not None
    same = finding.index == measured.step.index
    return finding.index < measured.step.index or (same and measured.has_earlier)


def _is_after(finding: SeriesFinding, step: SeriesFinding) -> bool:
    """Return whether a finding's change is certainly later than a step."""
    return finding.first is not None and step.last is not None and finding.first >= step.last


def _left(measured: Measured, later: SeriesFinding) -> SeriesFinding | None:
    """Return a step as what is left of it after a later one, or None if the level between was not far enough off."""
    history, step = measured.history, measured.step
    assert later.index is not None
    stop = int(np.searchsorted(newest_environment(history.environment), later.index))
    earlier = young.step_between(history, *_at(history, step), stop=stop)
    assert earlier.effect is not None and step.effect is not None
    stays = earlier.effect * step.effect > 0 and abs(earlier.effect) >= history.min_effect
    return earlier if stays else None


def measured_step(data: GateData, past: Past, history: SeriesHistory) -> Measured | None:
    """Return the change that a stored A/B found between two commits of the history, if its level is still there.

    A slowdown comes before an improvement. Of several A/Bs, the one that spans the fewest results decides.
    """
    standing: list[Measured] = []
    for ends, one in sorted(_stored(data, past, DIFFERENT), key=lambda span: span[0]):
        first = int(past.alike[ends[0]])
        earlier = [each.step for each in standing if each.step.last is not None and each.step.last <= first]
        own = _raised(history, earlier, ends[0] + 1)
        step = _step(data, past, own, one, ends)
        if step is not None:
            standing.append(Measured(step, own, bool(earlier)))
    return max(standing, key=lambda each: _weight(each.step), default=None)


def _stored(data: GateData, past: Past, verdict: str) -> list[tuple[tuple[int, int], Compared]]:
    """Return the A/Bs of a series with a verdict, under one toolchain, each after its `_ends`."""
    stored = [one for one in data.comparisons.get(past.series, ()) if one.verdict == verdict and not one.toolchains]
    if not stored:
        return []
    runs = [data.runs[run] for run in past.run[past.alike].tolist()]
    commits = [run.commit if run.state.clean else None for run in runs]
    return [(ends, one) for one in stored if (ends := _ends(commits, one)) is not None]


def _weight(step: SeriesFinding) -> tuple[bool, int, int]:
    assert step.effect is not None and step.first is not None and step.last is not None
    return step.effect > 0, step.first - step.last, step.last


def _step(
    data: GateData, past: Past, history: SeriesHistory, compared: Compared, ends: tuple[int, int]
) -> SeriesFinding | None:
    """Return the step between the commits of an A/B, or None if the results or a newer A/B contradict it."""
    if not compared.effect or abs(compared.effect) < history.min_effect:
        return None
    runs = past.run[past.alike].tolist()
    first, last = ends
    step = young.step_between(history, first, last)
    before, after = runs[: first + 1], runs[last:]
    evidence = data.evidence(past.series, before, after)
    decisive = comparisons.about(evidence, data.clean_commits(before), data.clean_commits(after))
    if decisive is None or decisive.verdict != DIFFERENT or not decisive.effect:
        return None
    return step if young.is_still_there(history, step, decisive.effect) else None


def _ends(commits: list[str | None], compared: Compared) -> tuple[int, int] | None:
    """Return the places of the last run of an A/B's base and the first of its head; None if they are old or missing."""
    if compared.base not in commits:
        return None
    start = commits.index(compared.base)
    last = next((at for at in range(start + 1, len(commits)) if commits[at] == compared.head), None)
    if last is None or len(commits) - last > OLD:
        return None
    return max(at for at in range(last) if commits[at] == compared.base), last
