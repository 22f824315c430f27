"""The verdict on a run: reads the store, asks `judge`, and says what a CI job should do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from groupbench.tracker import query
from groupbench.tracker.environment import environment_differences
from groupbench.tracker.judge import MIN_HISTORY, Verdict, judge_latency, judge_rms
from groupbench.tracker.rows import MEASURED, Earlier, PointRow, RunRow, SeriesRow, finite

OK, REGRESSION, INCOMPLETE, INCOMPARABLE = 0, 1, 3, 4
"""Exit codes; 2 is usage. Where several hold, the first of 1, 3, 4, 0."""

WINDOW = 20

CANARY = "canary"
"""Operator whose series watch the machine: the code under test is no part of them."""

# In the order in which the first line counts them, and in which the table shows them: the gravest first.
ORDER: tuple[Verdict, ...] = (
    "wrong",
    "regressed",
    "missing",
    "unresolved",
    "suspect",
    "incomparable",
    "improved",
    "ok",
    "new",
    "insufficient",
    "unavailable",
)
QUIET = ("ok", "new", "insufficient", "unavailable")
"""Verdicts that are only counted."""


@dataclass(frozen=True)
class Judged:
    """One series of the run."""

    series: SeriesRow
    verdict: Verdict
    point: PointRow | None  # None where the run lacks the series
    cause: str | None = None  # latency, accuracy, repeatability, or what the status says
    note: str | None = None
    before_ms: float | None = None  # centre of the history
    change: float | None = None  # relative
    threshold: float | None = None  # relative
    n: int = 0  # results in the history


@dataclass(frozen=True)
class Gate:
    """The verdict on a run."""

    run: RunRow
    rows: tuple[Judged, ...]
    exit_code: int
    summary: str  # the first line

    @property
    def counts(self) -> dict[str, int]:
        return count(self.rows)

    @property
    def word(self) -> str:
        return {OK: "ok", REGRESSION: "regression", INCOMPLETE: "incomplete", INCOMPARABLE: "incomparable"}[
            self.exit_code
        ]

    @property
    def told(self) -> tuple[Judged, ...]:
        """What changed or could not be judged, gravest first."""
        loud = [row for row in self.rows if row.verdict not in QUIET]
        return tuple(sorted(loud, key=lambda row: (ORDER.index(row.verdict), row.series.sort_key)))


def judge_run(
    session: Session,
    run: RunRow,
    *,
    window: int = WINDOW,
    min_effect: float | None = None,  # relative; None takes that of the timing
    strict: bool = False,
) -> Gate:
    """Judge each series that a run holds or should hold."""
    points = query.points_of_run(session, run)
    previous = query.previous_of_plan(session, run, {point.series.hardware for point in points})
    expected = {} if previous is None else {p.series.pk: p for p in query.points_of_run(session, previous)}
    histories = query.earlier(session, run, window)
    rows = [judge_point(point, histories[point.pk], expected.get(point.series.pk), min_effect) for point in points]
    rows += _absent(points, list(expected.values()))
    rows = _doubt_machine(rows)
    exit_code = _exit_code(rows, strict)
    same_commit = previous is not None and previous.state == run.state and not run.dirty
    return Gate(run, tuple(rows), exit_code, _summary(rows, exit_code, same_commit))


def judge_point(
    point: PointRow,
    earlier: Earlier,
    expected: PointRow | None,  # of the same series, in the previous run of the plan
    min_effect: float | None = None,
) -> Judged:
    """The verdict on one point."""
    series = point.series
    if point.status == "wrong":
        return Judged(series, "wrong", point, "accuracy", point.message)
    if point.status == "unavailable":
        if expected is not None and expected.status == "ok":
            return Judged(series, "missing", point, "unavailable", f"ran in the previous run: {point.message}")
        return Judged(series, "unavailable", point, "unavailable", point.message)
    if point.status != "ok":
        return Judged(series, "missing", point, point.status, point.message)

    accuracy = _judge_accuracy(point, earlier.alike)
    if accuracy is not None:
        return accuracy
    if not point.timed:
        if expected is not None and expected.timed:
            return Judged(series, "missing", point, "latency", "the previous run has a latency, this one has none")
        seen = earlier.alike or earlier.elsewhere
        return Judged(series, "ok" if seen else "new", point, n=len(earlier.alike))

    history = [before for before in earlier.alike if before.timed]
    if not history and earlier.elsewhere is not None and earlier.elsewhere.timed:
        changed = environment_differences(earlier.elsewhere.environment.facts, point.environment.facts)
        return Judged(series, "incomparable", point, "environment", "; ".join(changed) or "other timing")
    assert point.median_ms is not None and point.timing is not None
    found = judge_latency(
        point.median_ms,
        point.error,
        [before.median_ms for before in history if before.median_ms is not None],
        finite(before.error for before in history),
        timing=point.timing,
        min_effect=min_effect,
    )
    judged = Judged(series, found.verdict, point, n=found.n)
    if found.change is None or found.threshold is None:
        return judged
    return replace(
        judged,
        cause="latency" if found.verdict in ("regressed", "improved") else None,
        note=_kernel_note(point, history) if found.verdict in ("regressed", "improved") else None,
        before_ms=point.median_ms / (1 + found.relative_change),
        change=found.relative_change,
        threshold=found.relative_threshold,
    )


def _judge_accuracy(point: PointRow, alike: Sequence[PointRow]) -> Judged | None:
    """A result that is within tolerance, yet worse than it was."""
    rms = judge_rms(point.rms, finite(before.rms for before in alike))
    if rms.verdict == "regressed":
        before = sorted(before.rms for before in alike if before.rms is not None)
        note = f"rms {before[len(before) // 2]:.3g} → {point.rms:.3g}"
        return Judged(point.series, "regressed", point, "accuracy", note, n=rms.n)
    told = [before.repeatable for before in alike if before.repeatable is not None]
    if point.repeatable is False and told and told[0]:
        note = "two executions no longer agree bit by bit"
        return Judged(point.series, "regressed", point, "repeatability", note, n=len(told))
    return None


def _kernel_note(point: PointRow, history: Sequence[PointRow]) -> str | None:
    """A kernel that did not change points at the machine; said, not concluded from."""
    before = history[0].kernel_hash
    if before is None or point.kernel_hash is None:
        return None
    return "compiled kernel as the last run's" if before == point.kernel_hash else "compiled kernel changed"


def _absent(points: Sequence[PointRow], expected: Sequence[PointRow]) -> list[Judged]:
    """Series that the previous run of the plan measured on this hardware, and this one does not hold."""
    here = {point.series.pk for point in points}
    hardware = {point.series.hardware for point in points}
    note = "measured in the previous run of the plan, absent from this one"
    return [
        Judged(before.series, "missing", None, "absent", note)
        for before in expected
        if before.status == "ok" and before.series.pk not in here and before.series.hardware in hardware
    ]


def _doubt_machine(rows: list[Judged]) -> list[Judged]:
    """A canary that moved makes the machine suspect: then no latency of the run counts against the code."""
    slower = False
    judged = []
    for row in rows:
        if row.series.operator == CANARY and row.cause == "latency":
            slower = slower or row.verdict == "regressed"
            row = replace(row, verdict="suspect", note="machine suspect: the canary moved")
        judged.append(row)
    if not slower:
        return judged
    note = "canary moved: the machine, not the code"
    return [
        replace(row, verdict="unresolved", note=note) if row.verdict == "regressed" and row.cause == "latency" else row
        for row in judged
    ]


def count(rows: Sequence[Judged]) -> dict[str, int]:
    """How many series have each verdict, in the order of ORDER."""
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in ORDER if found[verdict]}


def _measured(rows: Sequence[Judged]) -> bool:
    return any(row.point is not None and row.point.status in MEASURED for row in rows)


def _exit_code(rows: Sequence[Judged], strict: bool) -> int:
    found = {row.verdict for row in rows}
    if found & {"regressed", "wrong"}:
        return REGRESSION
    if not _measured(rows) or found & {"missing", "unresolved"}:
        return INCOMPLETE
    if "incomparable" in found:
        return INCOMPARABLE
    return INCOMPLETE if strict and found & {"new", "insufficient"} else OK


def _summary(rows: Sequence[Judged], exit_code: int, same_commit: bool) -> str:
    counts = count(rows)
    if exit_code == REGRESSION:
        told = []
        if "wrong" in counts:
            told.append(f"{_results(counts['wrong'])} wrong")
        if "regressed" in counts:
            told.append(f"{counts['regressed']} series regressed")
        head = "GATE regression: " + ", ".join(told)
    elif exit_code == INCOMPLETE:
        if not _measured(rows):
            told = ["nothing was measured"]
        else:
            told = [f"{counts[v]} series {v}" for v in ("missing", "unresolved") if v in counts]
            told = told or ["strict, and some series are too young to judge"]
        head = "GATE incomplete: " + ", ".join(told)
    elif exit_code == INCOMPARABLE:
        head = f"GATE incomparable: {counts['incomparable']} series have results only from unlike environments"
    elif "improved" in counts:
        head = f"GATE ok: {counts['improved']} series improved"
    elif set(counts) <= {"new", "unavailable"}:
        head = "GATE ok: nothing to compare with yet"
    elif "ok" not in counts and "insufficient" in counts:
        head = f"GATE ok: nothing changed that could be told, fewer than {MIN_HISTORY} earlier results"
    else:
        head = "GATE ok: nothing changed"
    if same_commit:
        head += "; same commit as the previous run"
    return f"{head}. " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


def _results(number: int) -> str:
    return "1 result is" if number == 1 else f"{number} results are"
