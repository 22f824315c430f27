"""Turn alerts and stored A/Bs of a series into marks for `stats.walk`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from operator import itemgetter

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.metrics import LATENCY, REPEATABLE, Metric
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.stats.walk import Kind, Mark
from groupbench.tracker.store.comparisons import DIFFERENT, Compared

Marks = dict[int, list[Mark]]


def marks_of(data: GateData, past: Past, metric: Metric, counts: float = 0.0) -> Marks:
    """Return the marks of a metric of a series by place.

    Args:
        data: The night's data.
        past: Results on one machine, oldest first.
        metric: The metric; A/Bs are of latencies.
        counts: Smallest distance that counts.
    """
    alerts = [each for each in data.alerts.get(past.series, ()) if each.metric == metric.judged_as]
    stored = data.comparisons.get(past.series, ()) if metric is LATENCY else ()
    if not alerts and not stored:
        return {}
    runs = past.run.tolist()
    placed = [each for alert in alerts if (each := _of_alert(data, alert, runs, metric)) is not None]
    placed += _of_comparisons(data, past, counts) if stored else []
    return {place: [mark for _, mark in each] for place, each in grouped(placed, itemgetter(0)).items()}


def code_marks(codes: Sequence[Hashable | None]) -> Marks:
    """Return a mark wherever the code of an earlier result is back, after other code. None is unknown."""
    marks: Marks = {}
    newest: dict[Hashable, int] = {}  # place of each code's newest result
    current: Hashable | None = None
    for place, code in enumerate(codes):
        if code is None:
            continue
        if code != current and code in newest:
            marks[place] = [Mark("code", newest[code])]
        current, newest[code] = code, place
    return marks


def _of_alert(data: GateData, alert: MemberRow, runs: list[int], metric: Metric) -> tuple[int, Mark] | None:
    """Return the mark of an alert and its place. One about runs before the past begins on the past's first level."""
    place = runs.index(alert.run.pk) if alert.run.pk in runs else None
    if data.accepted(alert):
        return None if place is None else (place, Mark("reference", tag=alert.pk))
    level = 1.0 if metric is REPEATABLE else alert.before
    distance = None if alert.distance is None else metric.sign * alert.distance
    if metric is LATENCY and alert.compared is not None and alert.compared.verdict == DIFFERENT:
        distance = alert.compared.effect
    before = None if place or level is None else metric.sign * metric.log(level)
    if place is None:
        older = alert.run.pk in data.line.runs and alert.state != "fixed" and before is not None
        return (0, Mark("slower", None, distance, None, before, alert.pk)) if older else None
    before_run = alert.span.base
    base = None if before_run is None or before_run.pk not in runs else runs.index(before_run.pk)
    return place, Mark("slower", base, distance, None, before, alert.pk)


def _of_comparisons(data: GateData, past: Past, counts: float) -> list[tuple[int, Mark]]:
    runs = [data.runs[run] for run in past.run.tolist()]
    commits = [run.commit if run.state.clean else None for run in runs]
    marks = comparison_marks(commits, of_one_toolchain(data.evidence(past.series, [], past.run.tolist())), counts)
    used = past.toolchain  # across an upgrade, an A/B of the commits alone does not decide
    return [(at, mark) for at, mark in marks if mark.base is None or used[mark.base] == used[at]]


def comparison_marks(
    commits: Sequence[str | None],  # of each result, oldest first; None for a dirty tree
    stored: Iterable[Compared],  # the newest first
    counts: float,  # smallest distance that counts
) -> list[tuple[int, Mark]]:
    """Return the marks for two commits' A/Bs, each at the first result of its head after one of its base."""
    newest: dict[tuple[int, int], Compared] = {}
    for one in stored:
        if not one.decided or one.toolchains is not None or one.base not in commits:
            continue
        start = commits.index(one.base)
        head = next((at for at in range(start + 1, len(commits)) if commits[at] == one.head), None)
        if head is not None:
            base = max(at for at in range(head) if commits[at] == one.base)
            newest.setdefault((base, head), one)
    ordered = sorted(newest.items(), key=lambda each: (each[0][1], -each[0][0]))
    return [(head, _mark(base, one, counts)) for (base, head), one in ordered]


def _mark(base: int, one: Compared, counts: float) -> Mark:
    effect = one.effect or 0.0
    kind: Kind = "same"
    if one.verdict == DIFFERENT and abs(effect) >= counts:
        kind = "slower" if effect > 0 else "faster"
    level = math.log(one.head_ms) if one.head_ms else None
    half = ((one.high or 0.0) - (one.low or 0.0)) / 2
    return Mark(kind, base, effect if kind != "same" else None, level, half=half)
