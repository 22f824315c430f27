"""One HTML page that needs nothing else: no server, no network, no other file.

What counts comes first, as text; each operator has a page of its own in it, whose plots are drawn when they are looked
at. Scripts are named to the browser by their hashes, so that nothing else in the file can run, whatever a commit's
subject holds.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from groupbench.tracker.environment import IDENTITY_FIELDS
from groupbench.tracker.errors import ReportError
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.query.rows import MEASURED, PointRow, RunRow, SeriesRow
from groupbench.tracker.report import figures
from groupbench.tracker.report.gather import Report, gather
from groupbench.tracker.report.shown import OperatorPage, SeriesHistory, SpeedMap
from groupbench.tracker.report.table import Cell, filter_box, number, percent, table
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import INTERPRETED
from groupbench.tracker.verdicts import GOOD, Verdict, style_sheet, tone_of

MAP_CELLS = 20_000
"""Cells of all heat maps of one table: so many baselines are offered. Each cell is 130 bytes of the file."""

_LONG = 1000
"""Characters of a message that the page shows: a compiler's can fill it."""

_UNFOLDED = 4
"""An operator of more series than this has their histories folded: a hundred of them are 50,000 pixels."""

_INTERPRETED = Cell(INTERPRETED, "number faint")


def build(session: Session, judged: Gate, *, limit: int = 200) -> str:
    """Return the page of a run as the gate judged it, with the history of the `limit` runs up to it.

    Raises ReportError where plotly is not installed.
    """
    plotly = plotly_script()
    return render(gather(session, judged, limit=limit), plotly)


def render(report: Report, plotly: str) -> str:
    """The page of a report; `plotly` is the library's script."""
    judged = report.gate
    slugs = slugs_of(page.name for page in report.pages)
    unmeasured = _unmeasured(judged)
    pages = [
        _section("overview", "Overview", _overview(report, slugs)),
        *(_section(slugs[page.name], page.name, _operator(page, report, slugs[page.name])) for page in report.pages),
        _section("unmeasured", "Not measured", _unmeasured_table(unmeasured)),
        _section("environment", "Environment", _environments(report)),
    ]
    links = [("overview", "Overview", "")]
    links += [(slugs[page.name], page.name, "") for page in report.pages]
    links += [("unmeasured", "Not measured", str(len(unmeasured))), ("environment", "Environment", "")]
    script = "\n" + "\n".join(piece(name) for name in ("tables.js", "draw.js", "page.js")) + "\n"
    plotly = f"\n{plotly}\n"
    return Template(piece("page.html")).substitute(
        title=escape(f"{judged.word} at {judged.run.state}"),
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in (plotly, script)),
        style=style_sheet() + piece("colours.css") + piece("style.css"),
        word=judged.word,
        summary=_commands(_said(judged)[0]),
        about=_about(report),
        counts=_counts(judged),
        nav="".join(
            f'<a href="#{slug}">{escape(text)}{f" <b>{count}</b>" if count else ""}</a>' for slug, text, count in links
        ),
        pages="\n".join(pages),
        runs=embed([[figures.run_text(label), label.commit[:7]] for label in report.labels]),
        data="\n".join(
            f'<script type="application/json" id="data-{slugs[page.name]}">{embed(page_data(page, report))}</script>'
            for page in report.pages
        ),
        plotly=plotly,
        script=script,
    )


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no file, such as a pipe, as it is. Raises ReportError."""
    with whole_file(path, ReportError) as file:
        file.write(text.encode())


def page_data(page: OperatorPage, report: Report) -> dict[str, Any]:
    """What the plots of an operator need: heat maps by baseline, the roofline, three figures for each series."""
    verdicts = report.gate.by_series
    ceilings, shared = page.roofline.ceilings, _shared(page)
    return {
        "maps": [
            {name: figures.speedup_heatmap(one.rows, one.backends, name) for name in baselines(one)}
            for one in page.speeds
        ],
        "roofline": None if ceilings is None else figures.roofline(page.roofline.points, ceilings),
        "series": [_series(history, report, verdicts.get(history.series.pk), shared) for history in page.histories],
    }


def _shared(page: OperatorPage) -> dict[str, str]:
    """What is alike in all series of an operator: told once above their histories."""
    held = {name: {getattr(one.series, name) for one in page.histories} for name in ("hardware", "host", "protocol")}
    return {name: values.pop() for name, values in held.items() if len(values) == 1}


def _series(history: SeriesHistory, report: Report, verdict: str | None, shared: Mapping[str, str]) -> dict[str, Any]:
    series = history.series
    place = [getattr(series, name) for name in ("hardware", "host", "protocol") if name not in shared]
    rest = (series.mode, series.dtype, series.shape, *place)
    told: dict[str, Any] = {
        "id": series.pk,
        "backend": series.backend,
        "rest": " · ".join([*rest, *([f"seed {series.seed}"] if series.seed else [])]),
        "verdict": verdict,
        "tone": tone_of(verdict).name,
    }
    if any(value is not None for value in history.ms):
        told["latency"] = figures.latency_history(history)
    if any(value is not None for value in history.rms):
        told["accuracy"] = figures.accuracy_history(history)
    if history.bursts:
        told["bursts"] = figures.burst_distribution(history.bursts, report.labels)
    if len(told) == 5:
        last = len(history.runs) - 1
        message = history.message.get(last)
        told["none"] = f"{history.status.get(last, 'ok')}{f': {_cut(message)}' if message else ''}"
    return told


def baselines(one: SpeedMap) -> list[str]:
    """Backends that the reader can compare with: all that have a speed, unless the table is very large."""
    timed = [name for name in one.backends if any(name in row.ms for row in one.rows)]
    if len(one.backends) < 2:
        return []
    return timed[: max(1, MAP_CELLS // (len(one.rows) * len(one.backends)))]


def embed(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = msgspec.json.encode(value).decode()
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def piece(name: str) -> str:
    """A file of this package: page.html, colours.css, style.css, tables.js, draw.js, page.js."""
    return resources.files("groupbench.tracker.report").joinpath(name).read_text(encoding="utf-8").rstrip()


def plotly_script() -> str:
    """Plotly's own script, fit to stand within a page. Raises ReportError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError("the report needs plotly: pip install -e '.[report]'") from error
    # Maps would be asked for there, of which we draw none.
    return get_plotlyjs().replace("https://cdn.plot.ly", "").replace("</script", "<\\/script")


def slugs_of(names: Iterable[str]) -> dict[str, str]:
    """Names of operators as parts of an address and of CSS selectors, each its own."""
    slugs: dict[str, str] = {}
    for name in names:
        slug = base = "op-" + re.sub(r"[^A-Za-z0-9_]+", "-", name)[:60]
        number = 2
        while slug in slugs.values():
            slug, number = f"{base}-{number}", number + 1
        slugs[name] = slug
    return slugs


def _section(slug: str, title: str, inner: str) -> str:
    mark = escape(slug)
    unseen = ' class="unseen"' if slug == "overview" else ""
    return (
        f'<section id="{mark}" aria-labelledby="h-{mark}">'
        f'<h2 id="h-{mark}"{unseen} tabindex="-1">{escape(title)}</h2>\n'
        f"{inner}</section>"
    )


def _said(judged: Gate) -> tuple[str, list[str]]:
    """The gate's first line without its verdict, and what it counts."""
    head, _, counted = judged.summary.removeprefix(f"GATE {judged.word}").removeprefix(": ").rpartition(". ")
    return head, counted.split(", ")


def _counts(judged: Gate) -> str:
    told = []
    for text in _said(judged)[1]:
        number, _, word = text.partition(" ")
        told.append(f'<li class="{tone_of(word)}"><b>{escape(number)}</b> {escape(word)}</li>')
    return "".join(told)


# ---- the overview


def _overview(report: Report, slugs: Mapping[str, str]) -> str:
    return "\n".join([
        "<h3>What changed</h3>",
        _changed(report.gate, slugs),
        "<h3>Operators</h3>",
        _operators(report, slugs),
        "<h3>This run</h3>",
        _facts(report),
    ])  # fmt: skip


def _about(report: Report) -> str:
    run = report.gate.run
    told = (f"{run.started:%Y-%m-%d %H:%M} UTC", run.branch, ", ".join(report.newest.hardware))
    commit = f"<b>{escape(str(run.state))}</b> {escape(run.subject or '')}".strip()
    return " · ".join([commit, *(escape(text) for text in told if text)])


def _facts(report: Report) -> str:
    run = report.gate.run
    facts = {
        "commit": f"{run.state} {run.subject or ''}".strip(),
        "branch": run.branch,
        "run": run.id,
        "began": f"{run.started:%Y-%m-%d %H:%M} UTC",
        "plan": run.plan,
        "trigger": run.trigger,
        "hardware": ", ".join(report.newest.hardware),
        "history": f"{len(report.runs)} runs since {report.labels[0].started[:10]}" if len(report.runs) > 1 else None,
    }
    told = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value
    )
    return f"<dl>{told}</dl>"


def _changed(judged: Gate, slugs: Mapping[str, str]) -> str:
    alike, rest = judged.folded
    told = "".join(f"<p>{_commands(line)}</p>" for line in alike)
    if not rest:
        return told or "<p>Nothing that could be told.</p>"
    head = ["verdict", "series", "effect", "before", "now", "cause", "first,commit", "note"]
    lines = [_change(rows, slugs) for rows in _together(rest)]
    used = [i for i in range(len(head)) if any(not _empty(line[i]) for line in lines)]
    return told + table(
        " ".join(head[i] for i in used),
        [[line[i] for i in used] for line in lines],
        name="What changed",
        identifier="changed",
    )


def _together(rows: Sequence[Judged]) -> list[list[Judged]]:
    """Series that are missing for one reason are one line: nothing else is to be said of each."""
    groups: dict[tuple[object, ...], list[Judged]] = {}
    for row in rows:
        alone = row.series.pk if row.verdict != "missing" or row.change is not None else None
        key = (row.verdict, row.what, row.series.operator, row.series.backend, row.note, alone)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _empty(cell: Cell | str | None) -> bool:
    return not (cell.text or cell.more) if isinstance(cell, Cell) else not cell


def _change(rows: Sequence[Judged], slugs: Mapping[str, str]) -> list[Cell | str | None]:
    """The line of one series, or of several that are told together."""
    row = rows[0]
    series, point = row.series, row.point
    if len(rows) > 1:
        name = Cell(
            f"{series.operator} {series.backend}: {len(rows)} series",
            "shape",
            items=tuple((_problem(one.series), _address(one, slugs)) for one in rows),
        )
    else:
        name = Cell(f"{series.operator} {series.backend}", "shape", href=_address(row, slugs), more=_problem(series))
    accuracy = row.what == "accuracy"
    before = row.before_rms if accuracy else row.before_ms
    now = None if point is None else point.rms if accuracy else point.median_ms
    unit = " rms" if accuracy else " ms"
    return [
        Cell(row.verdict, f"tag {row.verdict.tone}", sort=row.verdict.severity, more=row.what),
        name,
        replace(percent(row.change, signed=True), more=_interval(row)),
        _with_unit(before, unit),
        _INTERPRETED if point is not None and point.timing == INTERPRETED and not accuracy else _with_unit(now, unit),
        row.cause,
        _first_commit(row),
        Cell(_cut(row.note), "message"),
    ]


def _problem(series: SeriesRow) -> str:
    return f"{series.shape} · {series.dtype} · {series.mode}"


def _address(row: Judged, slugs: Mapping[str, str]) -> str | None:
    slug = slugs.get(row.series.operator)
    return None if slug is None else f"#{slug}/s{row.series.pk}"


def _with_unit(value: float | None, unit: str) -> Cell:
    plain = number(value, 3)
    return Cell(f"{plain.text}{unit}" if plain.text else "", "number", sort=value)


def _first_commit(row: Judged) -> Cell:
    """The first that is certainly after the change, who wrote it, and what it says of itself."""
    span = row.span
    if span is None:
        return Cell("")
    head = span.head
    text = f"{head.state} {head.subject or ''}".strip()
    base = "" if span.base is None else f"the last before: {span.base.state}"
    return Cell(text, "message", more=", ".join(filter(None, [span.author, base])) or None)


def _interval(row: Judged) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{100 * row.low:+.1f} to {100 * row.high:+.1f}%"


def _operators(report: Report, slugs: Mapping[str, str]) -> str:
    rows: list[list[Cell | str | None]] = []
    for page in report.pages:
        judged = [row for row in report.gate.rows if row.series.operator == page.name]
        held = len({row.series.pk for row in judged if row.point is not None})
        counts = [(verdict, sum(row.verdict == verdict for row in judged)) for verdict in Verdict]
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
        loud = any(not row.verdict.quiet and row.verdict.tone is not GOOD for row in judged)
        rows.append([
            Cell(page.name, "", href=f"#{slugs[page.name]}"),
            Cell(str(len(page.histories)), "number", sort=len(page.histories)),
            Cell(str(held), "number", sort=held),
            Cell(told or "not in this run", "warn" if loud else "faint"),
        ])  # fmt: skip
    head = "operator series results,in,this,run verdicts"
    return table(head, rows, name="Operators", identifier="operators")


# ---- the page of an operator


def _operator(page: OperatorPage, report: Report, slug: str) -> str:
    folded = len(page.histories) > _UNFOLDED
    alike = " · ".join(_shared(page).values())
    where = f' <span class="where">{escape(alike)}</span>' if alike else ""
    return "\n".join([
        *(_map(one, number) for number, one in enumerate(page.speeds) if baselines(one)),
        "<h3>Roofline</h3>",
        _roofline(page),
        "<h3>Results</h3>",
        _results(page, report, slug),
        f'<h3>History{where}</h3>',
        '<p class="note">Bars reach from the fastest to the slowest burst, the broad line is the level. '
        "<b>◆</b> a change of the level, <b>◇</b> what the gate says of the newest, <b>▲</b> an alert, "
        "<b>□</b> another environment, across which nothing is compared, <b>✕</b> a result that is not ok.</p>",
        filter_box(f"#{slug} article", f"the histories of {page.name}"),
        '<p class="note"><button type="button" class="unfold">Open all that are listed</button></p>' if folded else "",
        f'<div class="series"{" data-folded" if folded else ""}></div>',
    ])  # fmt: skip


def _map(one: SpeedMap, place: int) -> str:
    older = sum(row.older for row in one.rows)
    note = f" * {older} of {len(one.rows)} problems are of an earlier run, the newest that holds them." if older else ""
    options = "".join(f"<option>{escape(name)}</option>" for name in baselines(one))
    label = escape(f"Baseline, {one.title}")
    return (
        f'<h3>Speed-up <span class="where">{escape(one.title)}</span></h3>\n'
        f'<p class="note"><label>over <select data-map="{place}" aria-label="{label}">{options}</select></label> '
        f"<span>▲ blue is faster, ▼ orange slower; each row is of one run and environment.{note}</span></p>\n"
        f'<figure data-figure="map-{place}"></figure>'
    )


def _roofline(page: OperatorPage) -> str:
    if page.roofline.missing is not None:
        return f'<p class="note">{escape(page.roofline.missing)}</p>'
    note = f'<p class="note">{escape(page.roofline.note)}</p>' if page.roofline.note else ""
    return f'{note}<figure data-figure="roofline"></figure>'


def _results(page: OperatorPage, report: Report, slug: str) -> str:
    points = [point for point in report.points if point.series.operator == page.name]
    if not points:
        return '<p class="note">The run holds no result of this operator.</p>'
    verdicts = report.gate.by_series
    over = {
        point.series.problem: point.median_ms for point in points if point.baseline and point.timed and point.median_ms
    }
    rows = [_result(point, verdicts[point.series.pk], over.get(point.series.problem), slug) for point in points]
    head = "shape dtype mode backend status verdict latency,ms ± speedup tflops gbps rms"
    return table(head, rows, name=f"Results of {page.name}", identifier=f"results-{slug}")


def _result(point: PointRow, verdict: str, over: float | None, slug: str) -> list[Cell | str | None]:
    series = point.series
    speedup = over / point.median_ms if over and point.timed and point.median_ms else None
    latency = number(point.median_ms) if point.status in MEASURED else Cell("", "number")
    if point.timing == INTERPRETED:
        latency = _INTERPRETED
    return [
        Cell(series.shape, "shape"),
        series.dtype,
        series.mode,
        Cell(series.backend + (" (baseline)" if point.baseline else ""), href=f"#{slug}/s{series.pk}"),
        Cell(point.status, tone_of(point.status).name),
        Cell(verdict, tone_of(verdict).name),
        latency,
        percent(point.half_spread if point.timed else None),
        Cell("" if speedup is None else figures.times(speedup), "number", sort=speedup),
        number(point.tflops, 3),
        number(point.gbps, 3),
        number(point.rms, 3),
    ]


# ---- what was not measured, and where the rest was


def _unmeasured(judged: Gate) -> list[Judged]:
    return [row for row in judged.rows if row.point is None or row.point.status not in MEASURED]


def _unmeasured_table(found: Sequence[Judged]) -> str:
    if not found:
        return "<p>Everything that the run was to measure has a result.</p>"
    rows: list[list[Cell | str | None]] = [
        [
            Cell("absent" if row.point is None else row.point.status, row.verdict.tone.name),
            row.series.operator,
            row.series.backend,
            Cell(row.series.shape, "shape"),
            row.series.dtype,
            row.series.mode,
            Cell(_cut(row.note), "message"),
        ]
        for row in found
    ]
    head = "status operator backend shape dtype mode reason"
    return table(head, rows, name="What was not measured", identifier="unmeasured-table")


def _environments(report: Report) -> str:
    environments = {point.environment.pk: point.environment.facts for point in report.points}
    names = [*IDENTITY_FIELDS[:-1], "host", "os", "cpu_count", "memory_mib", "groupbench"]
    rows: list[list[Cell | str | None]] = []
    for name in names:
        values = [getattr(facts, name) for facts in environments.values()]
        if any(value is not None for value in values):
            rows.append([Cell(name, "faint"), *("" if value is None else str(value) for value in values)])
    for name in sorted({name for facts in environments.values() for name in facts.settings}):
        rows.append([Cell(name, "faint"), *(facts.settings.get(name, "") for facts in environments.values())])
    head = " ".join(["fact", *(["value"] * len(environments))])
    changed = environment_changes(report)
    told = '<p class="note">One environment in all runs shown.</p>'
    if changed:
        lines: list[list[Cell | str | None]] = [
            [f"{run.state}", f"{run.started:%Y-%m-%d %H:%M}", hardware, Cell(what, "message")]
            for run, hardware, what in changed
        ]
        told = table("commit since hardware changed", lines, name="Changes of environment", identifier="changes")
    return (
        "<h3>Of this run</h3>"
        + table(head, rows, name="Environment of the run", identifier="environments")
        + f"<h3>Changes over the history</h3>{told}"
    )


def environment_changes(report: Report) -> list[tuple[RunRow, str, str]]:
    """(run, hardware, what differs from the environment before) in the order of time, of all series together."""
    found: dict[tuple[int, str, str], tuple[RunRow, str, str]] = {}
    for page in report.pages:
        for history in page.histories:
            for mark in history.marks:
                if mark.kind == "environment":
                    run, hardware = report.runs[mark.at], history.series.hardware
                    found[mark.at, hardware, mark.text] = (run, hardware, mark.text)
    return [found[key] for key in sorted(found, reverse=True)]


def _commands(text: str) -> str:
    """Escaped; what stands between backquotes is something to type."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _cut(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= _LONG else f"{text[:_LONG]}… and {len(text) - _LONG} more characters"


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
