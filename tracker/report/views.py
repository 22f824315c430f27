"""The report's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupbench.tracker.facts.environment import IDENTITY_FIELDS
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.record import MEASURED
from groupbench.tracker.facts.verdicts import BESIDES_CODE, FAINT, GOOD, Verdict, tone_of, tone_of_count
from groupbench.tracker.judge.verdicts import Gate, Judged, count, worst
from groupbench.tracker.query.rows import PointRow, RunRow, SeriesRow
from groupbench.tracker.report.cells import Row, Table, TableCell, number, plus_minus
from groupbench.tracker.report.gather import Report
from groupbench.tracker.report.selection import Coverage
from groupbench.tracker.report.shown import OperatorPage, shown_speedup
from groupbench.tracker.text.wording import INTERPRETED, times

LONG = 1000
"""Maximum number of characters of a message, since a compiler's could fill the page."""

ROWS = 1000
"""Maximum number of rows in the tables of changes and of unmeasured series. The index and `serve` have all rows."""

_ITEMS = 200
"""Maximum number of series listed below one line of the table of changes."""

_INTERPRETED = TableCell(INTERPRETED, "number faint")


@dataclass(frozen=True)
class Addresses:
    """Operator and series addresses within the page."""

    slugs: Mapping[str, str]  # by operator
    coverage: Coverage

    def of_series(self, series: SeriesRow) -> str | None:
        """Return a series' address, or None if the page does not show it in full."""
        slug = self.slugs.get(series.operator)
        return None if slug is None or series.pk not in self.coverage else f"#{slug}/s{series.pk}"


def summary(judged: Gate) -> str:
    """Return the gate's first line without the verdict and the counts."""
    return judged.summary.removeprefix(f"GATE {judged.word}").removeprefix(": ").rpartition(". ")[0]


def facts(report: Report) -> dict[str, str | None]:
    """Return the run's facts by name."""
    run = report.gate.run
    return {
        "commit": f"{run.state} {run.subject or ''}".strip(),
        "branch": run.branch,
        "run": run.id,
        "started": f"{run.started:%Y-%m-%d %H:%M} UTC",
        "plan": run.plan,
        "trigger": run.trigger,
        "hardware": ", ".join(report.newest.hardware),
        "history": f"{len(report.runs)} runs since {report.labels[0].started[:10]}" if len(report.runs) > 1 else None,
    }


def changed(rows: Sequence[Judged], addresses: Addresses) -> Table:
    """Return the change table. Series missing for the same reason share a row."""
    titles = ("verdict", "series", "effect", "before", "now", "cause", "commit", "note")
    groups = _together(rows)
    lines = [_change(group, addresses) for group in groups[:ROWS]]
    table = Table("What changed", "changed", titles, lines, left_out=len(groups) - len(lines), cards=True)
    return table.without_empty_columns()


def _together(rows: Sequence[Judged]) -> list[list[Judged]]:
    """Return groups with a shared line: series missing for the same reason, or a single series."""

    def key(row: Judged) -> tuple[object, ...]:
        alone = row.series.pk if row.verdict is not Verdict.MISSING or row.change is not None else None
        return row.verdict, row.what, row.series.operator, row.series.backend, row.note, alone

    return list(grouped(rows, key).values())


def _change(rows: Sequence[Judged], addresses: Addresses) -> Row:
    """Return the row for one series, or for several missing for the same reason."""
    row = rows[0]
    series = row.series
    if len(rows) > 1:
        name = TableCell(
            f"{series.operator} {series.backend}: {len(rows)} series",
            "shape",
            items=(
                *((_problem(each.series), addresses.of_series(each.series)) for each in rows[:_ITEMS]),
                *([(f"… and {len(rows) - _ITEMS} more", None)] if len(rows) > _ITEMS else []),
            ),
        )
    else:
        name = TableCell(
            f"{series.operator} {series.backend}", "shape", href=addresses.of_series(series), more=_problem(series)
        )
    shown = row.shown
    return [
        TableCell(row.verdict, f"tag {row.verdict.tone}", sort=row.verdict.severity, more=row.what),
        name,
        TableCell(shown.change_text, "number", sort=shown.change, more=shown.interval(" to ")),
        TableCell(shown.before_text, "number", sort=shown.before),
        _INTERPRETED if shown.now_text == INTERPRETED else TableCell(shown.now_text, "number", sort=shown.now),
        row.cause,
        _first_commit(row),
        TableCell(cut(row.note), "message", command=row.repro),
    ]


def _problem(series: SeriesRow) -> str:
    return f"{series.shape} · {series.dtype} · {series.mode}"


def _first_commit(row: Judged) -> TableCell:
    """Return the commit to show for a change, with subject, author, and how it was found."""
    span = row.span
    if span is None:
        return TableCell("")
    subject, author = (None, None) if row.cause in BESIDES_CODE else (span.subject, span.author)
    text = f"{span.label} {subject or ''}".strip()
    base = "" if span.base is None or span.named else f"last before: {span.base.state}"
    more = [f"since {span.date}", author and f"by {author}", span.remark, base]
    return TableCell(text, "message", more=", ".join(filter(None, more)) or None)


def operators(report: Report, slugs: Mapping[str, str]) -> Table:
    """Return the operator table, with series counts by verdict."""
    rows: list[Row] = []
    of_operator = grouped(report.gate.rows, lambda row: row.series.operator)
    full = {page.name: len(page.histories) for page in report.pages}
    complete = report.coverage.complete
    for name in full if complete else sorted({*full, *of_operator}):
        judged = of_operator.get(name, [])
        series = {row.series.pk for row in judged}
        rows.append([
            TableCell(name, "shape", href=f"#{slugs[name]}" if name in slugs else None),
            _count(full[name] if complete else len(series)),
            *([] if complete else [_count(full.get(name, 0))]),
            _count(len({row.series.pk for row in judged if row.point is not None})),
            _verdicts(judged),
        ])  # fmt: skip
    in_full = () if complete else ("in full",)
    titles = ("operator", "series", *in_full, "results in this run", "verdicts")
    return Table("Operators", "operators", titles, rows, cards=True)


def _verdicts(judged: Sequence[Judged]) -> TableCell:
    """Return counts of series by verdict, in the tone for the most severe bad one."""
    counts, rows = count(judged), worst(judged)
    loud = [row.verdict for row in rows if not row.verdict.quiet and row.verdict.tone is not GOOD]
    first = min(loud, key=lambda verdict: verdict.severity, default=None)
    acknowledged = sum(row.acknowledged for row in rows if row.verdict is first)
    tone = FAINT if first is None else tone_of_count(first, counts[first], acknowledged)
    text = ", ".join(f"{number:,} {verdict}" for verdict, number in counts.items())
    return TableCell(text or "not in this run", f"message {tone}")


def _count(value: int) -> TableCell:
    return TableCell(f"{value:,}", "number", sort=value)


def results(page: OperatorPage, report: Report, slug: str) -> Table | None:
    """Return a table with the run's results for the shown series, or None without any."""
    points = [
        point for point in report.points if point.series.operator == page.name and point.series.pk in report.coverage
    ]
    if not points:
        return None
    verdicts = report.gate.by_series
    baselines = {point.series.problem: point for point in report.points if point.baseline and point.timed}
    rows = [_result(point, verdicts[point.series.pk], baselines.get(point.series.problem), slug) for point in points]
    titles = (
        *("shape", "dtype", "mode", "backend", "status", "verdict", "latency ms", "±"),
        *("speedup", "tflops", "gbps", "rms"),
    )
    return Table(f"Results of {page.name}", f"results-{slug}", titles, rows, cards=True).without_empty_columns()


def _result(point: PointRow, verdict: str, baseline: PointRow | None, slug: str) -> Row:
    series = point.series
    latency = number(point.median_ms) if point.status in MEASURED else TableCell("", "number")
    if point.timing == INTERPRETED:
        latency = _INTERPRETED
    return [
        TableCell(series.shape, "shape"),
        TableCell(series.dtype, "short"),
        TableCell(series.mode, "short"),
        TableCell(series.backend + (" (baseline)" if point.baseline else ""), href=f"#{slug}/s{series.pk}"),
        TableCell(point.status, f"short {tone_of(point.status).name}"),
        TableCell(verdict, f"short {tone_of(verdict).name}"),
        latency,
        plus_minus(point.half_spread if point.timed else None),
        _speedup(point, baseline),
        number(point.tflops, 3),
        number(point.gbps, 3),
        number(point.rms, 3),
    ]


def _speedup(point: PointRow, baseline: PointRow | None) -> TableCell:
    speedup, noisy = shown_speedup(point, baseline)
    if speedup is None:
        return TableCell("", "number")
    if noisy:
        return TableCell("noisy", "number faint")
    return TableCell(times(speedup), "number", sort=speedup)


def unmeasured_table(rows: Sequence[Judged]) -> Table:
    """Return the table for unmeasured series, with reasons."""
    lines: list[Row] = [
        [
            TableCell("absent" if row.point is None else row.point.status, row.verdict.tone.name),
            row.series.operator,
            row.series.backend,
            TableCell(row.series.shape, "shape"),
            row.series.dtype,
            row.series.mode,
            TableCell(cut(row.note), "message"),
        ]
        for row in rows[:ROWS]
    ]
    titles = ("status", "operator", "backend", "shape", "dtype", "mode", "reason")
    left_out = max(0, len(rows) - ROWS)
    return Table("Series without a result", "unmeasured-table", titles, lines, left_out=left_out)


def environments(report: Report) -> Table:
    """Return a table with the run's environment facts, one column per environment."""
    facts = {point.environment.pk: point.environment.facts for point in report.points}.values()
    names = [*IDENTITY_FIELDS[:-1], "host", "os", "cpu_count", "memory_mib", "groupbench", "confinement"]
    rows: list[Row] = []
    for name in names:
        values = [getattr(one, name) for one in facts]
        if any(value is not None for value in values):
            rows.append([TableCell(name, "faint"), *("" if value is None else str(value) for value in values)])
    for name in sorted({name for one in facts for name in one.settings}):
        rows.append([TableCell(name, "faint"), *(one.settings.get(name, "") for one in facts)])
    return Table("Environment of the run", "environments", ("fact", *(["value"] * len(facts))), rows)


def changes_table(report: Report) -> Table:
    """Return the table for environment changes in the history, newest first."""
    lines: list[Row] = [
        [f"{run.state}", f"{run.started:%Y-%m-%d %H:%M}", hardware, TableCell(what, "message")]
        for run, hardware, what in environment_changes(report)
    ]
    return Table("Changes of environment", "changes", ("commit", "since", "hardware", "changed"), lines)


def environment_changes(report: Report) -> list[tuple[RunRow, str, str]]:
    """Return (run, hardware, difference from the previous environment) for all shown series, newest first."""
    changes: dict[tuple[int, str, str], tuple[RunRow, str, str]] = {}
    for page in report.pages:
        for history in page.histories:
            for mark in history.marks:
                if mark.kind == "environment":
                    run, hardware = report.runs[mark.at], history.series.hardware
                    changes[mark.at, hardware, mark.text] = (run, hardware, mark.text)
    return [changes[key] for key in sorted(changes, reverse=True)]


def cut(text: str | None) -> str:
    """Return a text, cut to the maximum message length."""
    text = text or ""
    return text if len(text) <= LONG else f"{text[:LONG]}… and {len(text) - LONG} more characters"
