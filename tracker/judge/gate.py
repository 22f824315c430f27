"""The verdict on a night: gather every series' evidence, decide by the rule table, and set the exit code.

A row is decided by `rules.RULES` alone. Here, the evidence is gathered: where each series is by its results
(`latency`, `further`), the stored A/Bs and alerts, the moves of the machine, and whether there is a result at all
(`results`). A night is all its runs (`nights`). Stored alerts count: an accepted level is a reference, and a regression
stays a regression while its alert is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from sqlalchemy.orm import Session

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import members, results, transitions
from groupbench.tracker.judge.cases import Cases
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.headline import summary
from groupbench.tracker.judge.members import named_in, number_of_commits
from groupbench.tracker.judge.nights import previous_night, runs_of_night
from groupbench.tracker.judge.parts import Case
from groupbench.tracker.judge.pins import PinRule
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Gate, Judged, exit_code
from groupbench.tracker.query.lines import CommitLine, CommitsBetween, FirstParents, line_of
from groupbench.tracker.query.points import points_of_run
from groupbench.tracker.query.rows import PointOutcome, PointRow, RunRow
from groupbench.tracker.stats.thresholds import least_effect
from groupbench.tracker.text.unchecked import unchecked_lines
from groupbench.tracker.text.wording import change_in_words, counted, joined

__all__ = ["WINDOW", "Gate", "Judged", "judge_run"]

WINDOW = 100
"""Number of a series' earlier results that count: about three months of nightly runs."""


def judge_run(
    session: Session,
    run: RunRow,
    *,
    window: int = WINDOW,
    min_effect: float | None = None,  # relative; None for the timing's default
    strict: bool = False,
    first_parents: FirstParents | None = None,  # ancestry beyond the database, such as git's
    between: CommitsBetween = lambda first, last: None,
) -> Gate:
    """Return the verdict on each series in a run's night, measured or missing. Only reads."""
    night = runs_of_night(session, run)
    lines = [line_of(session, each, first_parents) for each in night]
    points = _newest(session, night)
    hardware = {point.series.hardware for of_run in points for point in of_run}
    previous, expected = previous_night(session, night, hardware, lines[0])
    parts = [
        _Part(session, each, line, of_run, expected, window, min_effect, cache(between))
        for each, line, of_run in zip(night, lines, points, strict=True)
        if of_run or each is run
    ]
    rows = [row for part in parts for row in part.rows()]
    every = [point for of_run in points for point in of_run]
    rows += [case.judged() for case in results.absent(session, every, expected, parts[0].data.decisions)]
    code = exit_code(rows, strict)
    same_commit = bool(previous) and run.state.same_code(previous[0].state)
    first_line = summary(rows, code, strict=strict, same_commit=same_commit, runs=len(parts))
    elsewhere = {key for part in parts for key in part.data.elsewhere}
    alerts = {alert.pk: alert for part in parts for alert in part.stored if alert.pk not in elsewhere}
    notes = dict.fromkeys(note for part in parts for note in part.notes())
    return Gate(
        run, tuple(rows), code, first_line, tuple(alerts.values()),
        frozenset(key for part in parts for key in part.data.lapsed), lines[0],
        (*notes, *_limits(rows, min_effect), *_names(night)),
        tuple(transitions.lines(rows, run)),
        tuple(row for part in parts for row in part.asked),
    )  # fmt: skip


def _newest(session: Session, night: Sequence[RunRow]) -> list[list[PointRow]]:
    """Return the points in each run of a night, only the newest on one machine."""
    seen: set[tuple[int, str, str]] = set()
    points = []
    for run in night:
        of_run = []
        for point in points_of_run(session, run):
            key = point.series.pk, point.environment.machine, point.environment.toolchain
            if key not in seen:
                seen.add(key)
                of_run.append(point)
        points.append(of_run)
    return points


def _limits(rows: Sequence[Judged], min_effect: float | None) -> tuple[str, ...]:
    """Return a note on the smallest change that counts, if it is as large as on a CPU."""
    on_cpu = any(row.judged_latency and row.point is not None and row.point.timing == "cpu" for row in rows)
    if min_effect is not None or not on_cpu:
        return ()
    least = 100 * least_effect("cpu", 1.0)
    return (f"on a CPU, changes of less than {least:.0f} % do not count; `gate --min-effect` sets another limit",)


def _names(night: Sequence[RunRow]) -> tuple[str, ...]:
    """Return a note naming a night's runs, if several."""
    if len(night) < 2:
        return ()
    return (f"the night has {len(night)} runs: {', '.join(each.id[:12] for each in reversed(night))}",)


class _Part:
    """One run's evidence in a night."""

    def __init__(
        self, session: Session, run: RunRow, line: CommitLine, points: Sequence[PointRow],
        expected: Mapping[int, PointOutcome], window: int, min_effect: float | None, between: CommitsBetween,
    ) -> None:  # fmt: skip
        self.stored = members.find(session, series={point.series.pk for point in points}, runs=set(line.runs))
        self.data = GateData(session, run, line, points, expected, self.stored, window, min_effect)
        self.between = between
        self.asked: list[Judged] = []  # worth an A/B besides the rows of their series
        self.cases, self.pins = Cases(self.data), PinRule(self.data)
        places = set(self.cases.places())
        for series, turn in self.data.turns.items():
            places |= {(series, run) for run in (turn.base, turn.head) if run is not None}
        self.data.load_facts(places)

    def notes(self) -> tuple[str, ...]:
        """Return the caveats about the history."""
        copies = self.data.pasts.copies
        left_out = f"{counted(copies, 'result')} ignored: same samples as in another run of the same commit"
        texts = (self.data.line.note, left_out if copies else None, *self.pins.notes())
        return tuple(text for text in texts if text)

    def rows(self) -> list[Judged]:
        """Return the rows of all points, in order."""
        cases = {point.pk: self._cases(point) for point in self.data.points}
        self.cases.machines.ask_once(cases)
        rows = [row for point in self.data.points for row in self._rows(cases[point.pk])]
        noted = ((row, joined(_unknown(row), _unchecked(row))) for row in rows)
        rows = [replace(row, note=joined(row.note, caveat)) if caveat else row for row, caveat in noted]
        return [replace(row, span=self._described(row, row.span)) if row.span else row for row in rows]

    def _described(self, row: Judged, span: Span) -> Span:
        """Return a row's span with the facts about its commits."""
        data = self.data
        stored = data.named.get(row.series.pk, ())
        named = named_in(data.session, stored, span, row.what, row.change, data.line)
        counts = row.verdict.changed or row.verdict in (Verdict.WRONG, Verdict.UNDECIDED)
        return replace(span, named=named, number=number_of_commits(span, self.between) if counts else None)

    def _cases(self, point: PointRow) -> list[Case]:
        """Return all cases for a point, the latency's first."""
        muted = self.data.decisions.muted.get(point.series.pk)
        return [case.unless_muted(muted) for case in self._heard(point)]

    def _heard(self, point: PointRow) -> list[Case]:
        if point.status != "ok":
            return results.of_status(self.data, point)
        if impossible := results.implausible(self.data, point):
            return impossible
        untimed = [] if point.timed else [results.untimed(self.data, point)]
        cases = [*untimed, *self.cases.of(point)]
        return [*cases, *self.pins.cases(point)]

    def _rows(self, cases: Sequence[Case]) -> list[Judged]:
        """Return the row of a point, or several rows if it changed in several ways."""
        rows = _together([case.judged() for case in cases])
        kept = [row for row in rows if not row.verdict.quiet or row.alert or row.loud]
        self.asked += [row for row in rows if row.ab_base and kept and row not in kept]
        return kept or [row for row in rows if row.rule == "old"][:1] or rows[:1]


def _together(rows: list[Judged]) -> list[Judged]:
    """Return the rows, with one for a kernel that got faster and less accurate at once."""
    faster = next((row for row in rows if row.what == "latency" and row.better and row.verdict.changed), None)
    worse = next((row for row in rows if row.what in ("accuracy", "repeatability") and row.verdict.fails), None)
    if faster is None or worse is None or not (faster.span and worse.span and faster.span.overlaps(worse.span)):
        return rows
    assert faster.change is not None
    first, _, rest = (worse.note or "").partition("; ")
    note = joined(f"{first}, and {change_in_words(faster.change)}", rest)
    both = replace(worse, note=note, effect=replace(faster.effect, before_rms=worse.effect.before_rms))
    return [both if row is worse else row for row in rows if row is not faster]


def _unknown(row: Judged) -> str | None:
    """Return that a change cannot be traced to commits, because one of them is not known; else None."""
    if row.span is None or row.verdict.quiet or all(end.state.has_commit for end in row.span.ends):
        return None
    return "the commit is not known, and cannot be measured again; `tritonbench --commit HASH` names the next one"


def _unchecked(row: Judged) -> str | None:
    """Return the checks missing in a row's A/B, or None."""
    lines = () if row.compared is None else unchecked_lines(row.compared.unchecked)
    return f"A/B {'; '.join(lines)}" if lines else None
