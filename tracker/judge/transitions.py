"""Transitions: how far a series moved when its toolchain or machine changed, and how much the code contributed.

A series continues across a new torch, Triton, Helion, CUDA, Python or driver, so the statistics see a step there just
as for a code change. If both changed, two A/B comparisons separate them: the old code in both toolchains, and both
commits in the new one. Their effects add up to the total. A series does not continue on another machine, because cards
of one model differ. Its first results there are compared with the last ones on the earlier machine, and a person
accepts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.environment import (
    machine_differences,
    software_identity,
    toolchain_differences,
)
from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.causes import Cause, some
from groupbench.tracker.judge.evidence import AB, Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import Case, ab_text, percent, why_undecided
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span, Transition
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.judge.verdicts import Effect, Judged
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.student import quantile
from groupbench.tracker.stats.thresholds import FLOOR, step_scatter
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared
from groupbench.tracker.text.unchecked import merged
from groupbench.tracker.text.wording import joined, signed_change, signed_ends

NIGHTS = 10
"""Largest number of results before a transition whose median is the earlier level."""

YOUNG = 3
"""Number of earlier results on a machine that form a history of their own."""

ACCEPT = "`groupbench incidents accept-transition` accepts the new levels"


def size(
    old: NDArray[np.float64],  # [n] logarithms, the newest last
    new: NDArray[np.float64],  # [m]
    sigma: float,  # scatter of one result; NaN if unknown
    floor: float,
    nights: int = NIGHTS,  # number of old results that define the earlier level
) -> tuple[float, float | None, float | None]:
    """Return (effect, low, high) of the new results against the last old ones: logarithms and a 95 % interval.

    The interval is Student's t with the scatter between successive old results; None with a single old result.
    """
    old = old[-NIGHTS:]
    level = old[-nights:]
    effect = float(np.median(new) - np.median(level))
    if len(old) < 2:
        return effect, None, None
    scatter = max(step_scatter(old) if math.isnan(sigma) else sigma, floor)
    half = quantile(0.025, len(old) - 1) * scatter * math.sqrt(1 / len(level) + 1 / len(new))
    return effect, effect - half, effect + half


def newest(data: GateData, point: PointRow, past: Past, sigma: float) -> Transition | None:
    """Return the transition at a series' newest result, or None if its toolchain is not new."""
    alike = past.alike
    if len(alike) < 2 or past.toolchain[alike[-2]] == past.toolchain[alike[-1]]:
        return None
    assert point.timing is not None
    run = data.runs[int(past.run[alike[-2]])]
    effects = size(past.log[alike[:-1]], past.log[alike[-1:]], sigma, FLOOR[point.timing])
    return _transition(data, point, run, data.run, effects)


def across(data: GateData, point: PointRow, span: Span, row: Judged) -> Transition | None:
    """Return the transition between the ends of a change, or None if the toolchain is the same at both."""
    if span.base is None or row.change is None:
        return None
    ends = [None if end is None else math.log1p(end) for end in (row.change, row.effect.low, row.effect.high)]
    assert ends[0] is not None
    return _transition(data, point, span.base, span.head, (ends[0], ends[1], ends[2]))


def _transition(
    data: GateData, point: PointRow, base: RunRow, head: RunRow, effects: tuple[float, float | None, float | None]
) -> Transition | None:
    """Return the transition between two runs of a point's series, or None if their toolchains are equal.

    Args:
        effects: Change of the latency and the ends of its interval, as logarithms.
    """
    before, after = data.facts_of(point, Span(base, head))
    if before is None or before.environment is None or after.environment is None:
        return None
    old, changed = before.environment, toolchain_differences(before.environment, after.environment)
    if not changed:
        return None
    effect, low, high = effects
    return Transition(
        base, head, changed, not head.state.same_code(base.state), math.expm1(effect), relative(low), relative(high),
        old, point.environment.facts,
    )  # fmt: skip


def parts(data: GateData, row: Judged, before: Sequence[int], after: Sequence[int]) -> dict[str, Compared | None]:
    """Return the stored A/Bs of the toolchain and, if it changed, of the code; `before` and `after` are run keys."""
    transition, span = row.transition, row.span
    assert transition is not None and span is not None
    stored = data.evidence(row.series.pk, before, after)
    old, new = data.clean_commits(before), data.clean_commits(after)
    head = data.facts.get((row.series.pk, span.head.pk))
    after_ids = {software_identity(transition.new)}
    if head is not None and head.environment is not None:
        after_ids.add(software_identity(head.environment))
    made = {
        "toolchain": comparisons.about_toolchains(stored, {software_identity(transition.old)}, after_ids, old | new)
    }
    return made | ({"code": comparisons.about(of_one_toolchain(stored), old, new)} if transition.code_changed else {})


def with_parts(data: GateData, case: Case, before: Sequence[int], after: Sequence[int]) -> Case:
    """Return the case of a change across a transition, with what A/Bs of toolchains and commits found.

    Args:
        data: The night's data.
        case: The case, with its transition.
        before: Keys of the runs certainly before the change.
        after: Keys of the runs since.
    """
    evidence, row = case.evidence, case.row
    transition = row.transition
    assert transition is not None
    made, changed = parts(data, row, before, after), some(transition.differences)
    different, same = (
        {part: one for part, one in made.items() if one is not None and one.verdict == verdict}
        for verdict in (DIFFERENT, SAME)
    )
    undecided = {part: one for part, one in made.items() if part not in different.keys() | same.keys()}
    if different:
        compared = _sum(different.values())
        each = [f"{changed if part == 'toolchain' else 'code'}: {_effect(one)}" for part, one in different.items()]
        unknown = f"not separated from the {next(iter(undecided))}, which also changed" if undecided else None
        note = joined(ab_text(compared), row.note, "; ".join(each) if len(made) > 1 else changed, unknown)
        parts_found = " and ".join(sorted(different))
        ab: AB = "worse" if (compared.effect or 0.0) > 0 else "better"
        if (ab == "worse") != (evidence.distance > 0):
            return case.knowing(ab="undecided").showing(compared=compared, note=joined(CONTRADICT, note))
        return case.knowing(ab=ab, cause=parts_found).showing(cause=parts_found, compared=compared, note=note)
    cause = Cause("toolchain", transition.text)
    if transition.code_changed:
        cause = Cause("code and toolchain", f"{transition.text}, and the code changed")
    if not undecided:
        sides = "both toolchains" if len(same) == 1 else "toolchains and commits"
        note = joined(f"A/B of {sides}: no difference", changed)
        return case.knowing(ab="same").showing(cause=cause.word, compared=_sum(same.values()), note=note)
    one = next((one for one in undecided.values() if one is not None), None)
    if same and list(undecided) == ["toolchain"]:
        cause = Cause("toolchain", f"{transition.text}; A/B of the commits: no difference")
    elif same:
        cause = Cause("code", f"A/B of the toolchains ({changed}): no difference")
    note = joined(None if one is None else why_undecided(one), row.note, cause.note)
    if not transition.replaceable:
        note = joined(note, ACCEPT)
    case = case.knowing(ab=None if one is None else "undecided", cause=cause.word)
    return case.showing(cause=cause.word, compared=one, note=note)


CONTRADICT = "history and A/B contradict each other"


def _effect(compared: Compared) -> str:
    return "different" if compared.effect is None else percent(compared.effect)


def _sum(comparisons_made: Iterable[Compared]) -> Compared:
    """Return one comparison with the summed effects of several successive ones."""
    each = list(comparisons_made)
    if len(each) == 1:
        return each[0]

    def total(name: str) -> float | None:
        values = [getattr(one, name) for one in each]
        return None if None in values else math.fsum(values)

    effect, low, high = total("effect"), total("low"), total("high")
    details = {**each[0].details, "unchecked": merged([one.unchecked for one in each])}
    pairs = sum(one.pairs or 0 for one in each)
    return replace(each[0], effect=effect, low=low, high=high, pairs=pairs, details=details)


# ---- another machine


def elsewhere(data: GateData, point: PointRow, past: Past, least: float) -> tuple[Judged, RunRow, float]:
    """Compare the first results on a machine with the last ones on the earlier machine.

    Returns the row, the last run on the earlier machine, and the distance within which nothing changed. Only a person
    who accepts the change, or an A/B on this machine, can tell how much of it is due to the machine.
    """
    alike = past.alike
    last = int(alike[0]) - 1 if alike[0] else int(np.flatnonzero(past.environment != past.environment[-1])[-1])
    old = np.flatnonzero(past.environment == past.environment[last])
    base = data.runs[int(past.run[last])]
    before, after = data.facts_of(point, Span(base, data.run))
    assert point.timing is not None and before is not None and before.environment is not None
    assert after.environment is not None
    differences = machine_differences(before.environment, after.environment)
    differences += toolchain_differences(before.environment, after.environment)
    effect, low, high = size(past.log[old], past.log[alike], math.nan, FLOOR[point.timing], YOUNG)
    same_code = data.run.state.same_code(base.state)
    transition = Transition(
        base, data.runs.get(int(past.run[alike[0]]), data.run), differences or ("different timing",), not same_code,
        math.expm1(effect), relative(low), relative(high), before.environment, after.environment, machine=True,
    )  # fmt: skip
    half = 0.0 if high is None else high - effect  # too few results for an interval: the threshold alone decides
    level = math.exp(float(np.median(past.log[old][-YOUNG:])))
    row = Judged(
        point.series, Verdict.OK, point, "latency", "environment", "; ".join(transition.differences),
        Effect(level, change=math.expm1(effect), low=relative(low), high=relative(high)), Evidence(n=len(old)),
        len(alike), span=Span(base, data.run), transition=transition,
    )  # fmt: skip
    return row, base, max(least, half)


# ---- the lines of a run


def lines(rows: Sequence[Judged], run: RunRow) -> list[str]:
    """Return a line for each transition that is new or has rows to decide, with the range of the changes."""
    groups: dict[tuple[tuple[str, ...], bool, bool], list[Judged]] = {}
    for row in rows:
        transition = row.transition
        undecided = not (row.verdict.quiet or row.verdict.fails)  # a failing one has an incident
        is_open = transition is not None and (transition.after.pk == run.pk or undecided)
        if transition is not None and is_open and row.what in (None, "latency"):
            key = transition.differences, transition.code_changed, transition.machine
            groups.setdefault(key, []).append(row)
    return [_line(*key, moved_rows) for key, moved_rows in groups.items()]


def _line(differences: tuple[str, ...], code_changed: bool, machine: bool, rows: Sequence[Judged]) -> str:
    """Return the line of one transition: how far its series moved, and how many beyond their noise."""
    changes = [row.transition.change for row in rows if row.transition is not None]
    one, ends = signed_change(median(changes)), signed_ends(min(changes), max(changes))
    reach = one if len(rows) == 1 else f"{ends}, median {one}"
    text = f"{some(differences)}, {'and the code changed' if code_changed else 'code unchanged'}"
    text += f": {len(rows)} series moved by {reach}"
    directions = _directions(rows)
    text += f"; {directions}" if directions else "; none beyond its noise"
    replaceable = any(row.transition.replaceable for row in rows if row.transition is not None)
    return text + (f"; {ACCEPT}" if directions and (machine or not replaceable) else "")


def _directions(rows: Sequence[Judged]) -> str:
    """Return how many series became slower and faster, beyond their noise; empty if none did."""
    moved = [row for row in rows if row.verdict.changed or row.verdict is Verdict.INCOMPARABLE]
    slower = sum(row.change is not None and row.change > 0 for row in moved)
    faster = len(moved) - slower
    return " and ".join(f"{number} {word}" for number, word in ((slower, "slower"), (faster, "faster")) if number)


def facts_needed(past: Past) -> list[int]:
    """Return the runs whose facts show the transition at the newest result."""
    alike = past.alike
    runs: list[int] = []
    if len(alike) > 1 and past.toolchain[alike[-2]] != past.toolchain[alike[-1]]:
        runs.append(int(past.run[alike[-2]]))
    other = np.flatnonzero(past.environment != past.environment[-1:])
    if len(other) and len(alike) <= YOUNG:
        before = other[other < alike[0]]
        runs.append(int(past.run[before[-1] if len(before) else other[-1]]))
    return runs
