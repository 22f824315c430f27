"""One HTML page that needs nothing else: no server, no network, no other file."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from groupbench.tracker import gate, query
from groupbench.tracker.environment import IDENTITY_FIELDS, environment_differences
from groupbench.tracker.errors import ReportError
from groupbench.tracker.files import whole_file
from groupbench.tracker.report.table import Cell, number, percent, table
from groupbench.tracker.rows import MEASURED, PointRow, RunSummary
from groupbench.tracker.verdicts import Gate, Judged

_TONES = {
    "ok": "good",
    "improved": "good",
    "wrong": "bad",
    "regressed": "bad",
    "new": "faint",
    "insufficient": "faint",
    "unavailable": "faint",
}


def build(session: Session, *, limit: int = 200, min_effect: float | None = None) -> str:
    """The page: the newest run's verdict and results, and the history of the newest `limit` runs.

    Raises ReportError where plotly is not installed, QueryError where the database holds no run.
    """
    plotly = _plotly()
    run = query.find_run(session)
    judged = gate.judge_run(session, run, min_effect=min_effect)
    points = query.points_of_run(session, run)
    shown = query.runs(session, limit)[::-1]
    history = query.points_of_runs(session, [row.run.pk for row in shown])
    return Template(_piece("page.html")).substitute(
        title=escape(f"{judged.word} at {run.state}"),
        style=_piece("style.css"),
        word=judged.word,
        summary=escape(judged.summary),
        facts=_facts(shown[-1]),
        changed=_changed(judged),
        unmeasured=_unmeasured(judged),
        results=_results(judged, points),
        environment=_environment(points),
        span=f"The newest {len(shown)} runs." if len(shown) > 1 else "One run.",
        data=embed(series_data(shown, history)),
        plotly=plotly,
        script=_piece("page.js"),
    )


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no file, such as a pipe, as it is. Raises ReportError."""
    with whole_file(path, ReportError) as file:
        file.write(text.encode())


def series_data(shown: list[RunSummary], history: list[PointRow]) -> dict[str, Any]:
    """What the plots need, compactly: runs in order, and each series by index into them."""
    order = {row.run.pk: index for index, row in enumerate(shown)}
    series: dict[int, dict[str, Any]] = {}
    before: PointRow | None = None
    for point in history:
        if before is None or before.series.pk != point.series.pk:
            before = None
        key = point.series
        entry = series.setdefault(
            key.pk,
            {
                "name": [
                    key.backend,
                    key.operator,
                    key.mode,
                    key.dtype,
                    key.shape,
                    key.hardware,
                    key.host,
                    key.protocol,
                ],
                "interpreted": False,
                **{name: [] for name in ("x", "ms", "low", "high", "rms")},
                "status": {},  # of what is not ok, by position: most are
                "message": {},
                "environments": [],
            },
        )
        position = len(entry["x"])
        entry["x"].append(order[point.run.pk])
        for name, value in (
            ("ms", point.median_ms),
            ("low", point.low_ms),
            ("high", point.high_ms),
            ("rms", point.rms),
        ):
            entry[name].append(None if value is None else float(f"{value:.5g}"))
        entry["interpreted"] = point.timing == "interpreted"
        if point.status != "ok":
            entry["status"][position] = point.status
            entry["message"][position] = (point.message or "")[:300]
        if before is not None and before.environment.identity != point.environment.identity:
            changed = environment_differences(before.environment.facts, point.environment.facts)
            entry["environments"].append([order[point.run.pk], "; ".join(changed)])
        before = point
    runs = [[str(row.run.state), f"{row.run.started:%Y-%m-%d %H:%M}", row.run.subject or ""] for row in shown]
    return {"runs": runs, "series": list(series.values())}


def embed(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return resources.files("groupbench.tracker.report").joinpath(name).read_text(encoding="utf-8").rstrip()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError("the report needs plotly: pip install 'groupbench[report]'") from error
    return get_plotlyjs().replace("</script", "<\\/script")


def _facts(summary: RunSummary) -> str:
    run = summary.run
    facts = {
        "commit": f"{run.state} {run.subject or ''}".strip(),
        "branch": run.branch,
        "run": run.id,
        "began": f"{run.started:%Y-%m-%d %H:%M} UTC",
        "plan": run.plan,
        "trigger": run.trigger,
        "hardware": ", ".join(summary.hardware),
    }
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value
    )


def _changed(judged: Gate) -> str:
    if not judged.told:
        return ""
    alike, rest = judged.folded
    shared = "".join(f"<p>{escape(line)}</p>" for line in alike)
    if not rest:
        return f"<section><h2>What changed</h2>{shared}</section>"
    rows = [
        [
            Cell(row.verdict, _TONES.get(row.verdict, "warn")),
            row.what,
            row.cause,
            row.series.operator,
            row.series.backend,
            Cell(row.series.shape, "shape"),
            row.series.dtype,
            number(row.before_ms),
            number(row.point.median_ms if row.point else None),
            percent(row.change, signed=True),
            _interval(row),
            row.span.text if row.span else "",
            Cell(row.note, "message"),
        ]
        for row in rest
    ]
    head = "verdict what cause operator backend shape dtype before,ms now,ms change interval commits note"
    return f"<section><h2>What changed</h2>{shared}<div class='scroll'>{table(head, rows)}</div></section>"


def _interval(row: Judged) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{100 * row.low:+.1f} to {100 * row.high:+.1f}%"


def _unmeasured(judged: Gate) -> str:
    rows: list[list[Cell | str | None]] = []
    for row in judged.rows:
        if row.point is not None and row.point.status in MEASURED:
            continue
        status = "absent" if row.point is None else row.point.status
        tone = "faint" if row.verdict == "unavailable" else "warn"
        rows.append(
            [
                Cell(status, tone),
                row.series.operator,
                row.series.backend,
                Cell(row.series.shape, "shape"),
                row.series.dtype,
                Cell(row.note, "message"),
            ]
        )
    if not rows:
        return ""
    head = "status operator backend shape dtype reason"
    return f"<section><h2>Not measured</h2><div class='scroll'>{table(head, rows)}</div></section>"


def _results(judged: Gate, points: list[PointRow]) -> str:
    verdicts = {row.series.pk: row.verdict for row in judged.rows}
    baselines = {
        point.series.problem: point.median_ms for point in points if point.baseline and point.timed and point.median_ms
    }
    rows: list[list[Cell | str | None]] = []
    for point in points:
        series, verdict = point.series, verdicts[point.series.pk]
        over = baselines.get(series.problem)
        speedup = f"{over / point.median_ms:.2f}×" if over and point.timed and point.median_ms else ""
        latency = number(point.median_ms) if point.status in MEASURED else Cell("", "number")
        if point.timing == "interpreted":
            latency = Cell("interpreted", "number faint")
        rows.append(
            [
                series.operator,
                Cell(series.shape, "shape"),
                series.dtype,
                series.mode,
                series.backend + (" (baseline)" if point.baseline else ""),
                Cell(
                    point.status,
                    {"ok": "good", "wrong": "bad", "unavailable": "faint"}.get(point.status, "warn"),
                ),
                Cell(verdict, _TONES.get(verdict, "warn")),
                latency,
                percent(point.half_spread if point.timed else None),
                Cell(speedup, "number"),
                number(point.tflops, 3),
                number(point.rms, 3),
            ]
        )
    head = "operator shape dtype mode backend status verdict latency,ms ± speedup tflops rms"
    return table(head, rows, identifier="results")


def _environment(points: list[PointRow]) -> str:
    environments = {point.environment.pk: point.environment.facts for point in points}
    names = [*IDENTITY_FIELDS[:-1], "host", "os", "cpu_count", "memory_mib", "groupbench"]
    rows: list[list[Cell | str | None]] = []
    for name in names:
        values = [getattr(facts, name) for facts in environments.values()]
        if any(value is not None for value in values):
            rows.append([Cell(name, "faint"), *("" if value is None else str(value) for value in values)])
    for name in sorted({name for facts in environments.values() for name in facts.settings}):
        rows.append([Cell(name, "faint"), *(facts.settings.get(name, "") for facts in environments.values())])
    return table(" ".join(["fact", *(["value"] * len(environments))]), rows)
