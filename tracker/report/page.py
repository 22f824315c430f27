"""Build a report as one HTML file without a server, network or other files.

The verdict and the changes come first, as text. Each operator has a page inside the file, with plots drawn when they
come into view. The content policy lists the scripts by hash, so nothing else in the file can run, whatever a commit's
subject contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import ReportError, ReportPackageError
from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.facts.verdicts import style_sheet, tone_of
from groupbench.tracker.judge.headline import verdict_counts
from groupbench.tracker.judge.verdicts import Gate
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.query.traffic import NO_TRAFFIC, Traffic
from groupbench.tracker.report import selection, views
from groupbench.tracker.report.figures import burst_plot, drawing, history_plots, roofline_plot, speedup_map
from groupbench.tracker.report.gather import Report, gather
from groupbench.tracker.report.shown import OperatorPage, ShownHistory, SpeedMap
from groupbench.tracker.report.templates import environment, piece
from groupbench.tracker.text import repro
from groupbench.tracker.text.files import whole_file

MAP_CELLS = 20_000
"""Maximum number of cells in the heat maps of one table, 130 bytes each. It limits the baselines to choose from."""

_UNFOLDED = 4
"""Histories are folded if an operator has more series than this: unfolded, a hundred take 50,000 pixels."""


def build(session: Session, judged: Gate, *, limit: int = 200, traffic: Traffic = NO_TRAFFIC) -> str:
    """Return the page for a run as the gate judged it.

    Args:
        session: A session of the database.
        judged: The gate's verdict on the run.
        limit: Number of newest runs to plot.
        traffic: Calls in a model's step.

    Raises:
        ReportPackageError: plotly is not installed.
    """
    plotly = plotly_script()
    return render(gather(session, judged, limit=limit, traffic=traffic), plotly)


def render(report: Report, plotly: str) -> str:
    """Return a report's page; `plotly` is the library's script."""
    judged = report.gate
    slugs = slugs_of(page.name for page in report.pages)
    script = "\n" + "\n".join(piece(name) for name in ("tables.js", "draw.js", "index.js", "page.js")) + "\n"
    plotly = f"\n{plotly}\n"
    addresses = views.Addresses(slugs, report.coverage)
    unmeasured = judged.unmeasured
    folded, rows = judged.folded
    env = environment()
    env.filters["value"] = str
    return env.get_template("page.html").render(
        report=report,
        judged=judged,
        run=judged.run,
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in (plotly, script)),
        style=style_sheet() + piece("colours.css") + piece("style.css"),
        summary=views.summary(judged),
        counts=verdict_counts(judged.rows),
        folded=folded,
        incidents=report.incidents,
        changed=views.changed(rows, addresses) if rows else None,
        operators=views.operators(report, slugs),
        facts=views.facts(report),
        pages=[_page(page, report, slugs[page.name]) for page in report.pages],
        unmeasured=views.unmeasured_table(unmeasured),
        unmeasured_count=len(unmeasured),
        coverage=report.coverage,
        index=None if report.coverage.complete else selection.index(judged, report.coverage),
        environments=views.environments(report),
        environment_changes=views.changes_table(report),
        runs=[[drawing.run_text(label), drawing.tick_text(label)] for label in report.labels],
        plotly=plotly,
        script=script,
    )


def _page(page: OperatorPage, report: Report, slug: str) -> dict[str, Any]:
    """Return the template's values for an operator."""
    maps = [
        {
            "place": place,
            "title": one.title,
            "baselines": baselines(one),
            "older": sum(row.older for row in one.rows),
            "problems": len(one.rows),
        }
        for place, one in enumerate(page.speeds)
    ]
    return {
        "slug": slug,
        "name": page.name,
        "maps": [one for one in maps if one["baselines"]],
        "roofline": page.roofline,
        "results": views.results(page, report, slug),
        "shared": " · ".join(_shared(page).values()),
        "folded": len(page.histories) > _UNFOLDED,
        "data": page_data(page, report),
    }


def write(path: Path, text: str) -> None:
    """Write a file atomically; write to a pipe directly. Raises ReportError."""
    with whole_file(path, ReportError) as file:
        file.write(text.encode())


def page_data(page: OperatorPage, report: Report) -> dict[str, Any]:
    """Return an operator's figures: heat maps by baseline, the roofline, and each series' plots."""
    verdicts = report.gate.by_series
    points = {row.series.pk: row.point for row in report.gate.rows if row.point is not None}
    roofline, shared = page.roofline, _shared(page)
    return {
        "maps": [
            {name: speedup_map.speedup_heatmap(one.rows, one.backends, name) for name in baselines(one)}
            for one in page.speeds
        ],
        "roofline": roofline_plot.roofline(roofline.points, roofline.ceilings)
        if roofline is not None and roofline.ceilings is not None
        else None,
        # Encoded one by one, because the figures of all series as Python objects take ten times as much memory as JSON.
        "series": [
            msgspec.Raw(
                msgspec.json.encode(
                    _series(history, report, verdicts.get(history.series.pk), points.get(history.series.pk), shared)
                )
            )
            for history in page.histories
        ],
    }


def _shared(page: OperatorPage) -> dict[str, str]:
    """Return the facts shared by an operator's series, which are shown once above the histories."""
    held = {name: {getattr(one.series, name) for one in page.histories} for name in ("hardware", "host", "protocol")}
    return {name: values.pop() for name, values in held.items() if len(values) == 1}


def _series(
    history: ShownHistory, report: Report, verdict: str | None, point: PointRow | None, shared: Mapping[str, str]
) -> dict[str, Any]:
    """Return the data for a series' card; `point` is the result in the page's run, if any."""
    series = history.series
    place = [getattr(series, name) for name in ("hardware", "host", "protocol") if name not in shared]
    rest = (series.mode, series.dtype, series.shape, *place)
    card: dict[str, Any] = {
        "id": series.pk,
        "backend": series.backend,
        "rest": " · ".join([*rest, *([f"seed {series.seed}"] if series.seed else [])]),
        "verdict": verdict,
        "tone": tone_of(verdict).name,
    }
    if any(value is not None for value in history.ms):
        card["latency"] = history_plots.latency_history(history)
    if any(value is not None for value in history.rms):
        card["accuracy"] = history_plots.accuracy_history(history)
    if history.further:
        card["further"] = [
            [METRICS[name].title, history_plots.metric_history(history, METRICS[name])] for name in history.further
        ]
    if history.bursts:
        card["bursts"] = burst_plot.burst_distribution(history.bursts, report.labels)
    if len(card) == 5:
        last = len(history.runs) - 1
        message = history.message.get(last)
        card["none"] = f"{history.status.get(last, 'ok')}{f': {views.cut(message)}' if message else ''}"
    if point is not None:
        card["repro"] = repro.measure(series, None if point.run.dirty else point.run.commit, point.environment.facts)
    return card


def baselines(one: SpeedMap) -> list[str]:
    """Return the backends to choose from as a baseline: all with a latency, or the first ones if the table is huge."""
    timed = [name for name in one.backends if any(name in row.ms for row in one.rows)]
    if len(one.backends) < 2:
        return []
    return timed[: max(1, MAP_CELLS // (len(one.rows) * len(one.backends)))]


def plotly_script() -> str:
    """Return plotly's script in a form safe inside a page. Raises ReportPackageError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportPackageError("the report needs plotly: pip install -e '.[report]'") from error
    # Plotly would load maps from there, which the report does not use.
    script: str = get_plotlyjs()
    return script.replace("https://cdn.plot.ly", "").replace("</script", "<\\/script")


def slugs_of(names: Iterable[str]) -> dict[str, str]:
    """Return a unique name for each operator, valid in an address and in a CSS selector."""
    slugs: dict[str, str] = {}
    for name in names:
        slug = base = "op-" + re.sub(r"[^A-Za-z0-9_]+", "-", name)[:60]
        number = 2
        while slug in slugs.values():
            slug, number = f"{base}-{number}", number + 1
        slugs[name] = slug
    return slugs


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
