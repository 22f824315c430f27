"""Series pages: the search, one series with history, and one point with samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.identity import PROBLEM, SHOWN
from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import members, triage
from groupbench.tracker.query.history import changes
from groupbench.tracker.query.points import find_point
from groupbench.tracker.query.rows import HistoryRow, RunRow, SeriesRow
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.report.figures import burst_plot, history_plots
from groupbench.tracker.report.histories import histories, places, read_context, verdict_marks
from groupbench.tracker.report.shown import ResultBursts, RunLabel, ShownHistory, label_of
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.answers import Known
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import NotFound, Parameters
from groupbench.tracker.serve.runs import environment_data, member_data, newest_run, result_data
from groupbench.tracker.serve.site import Page, Site, paging_of, series_facts, slice_of
from groupbench.tracker.store.schema import Series
from groupbench.tracker.text import repro

SHOWN_POINTS = 500
"""Default number of points that a history shows."""

CHARTED = 7
"""Maximum number of other backends in a chart: with the series itself, as many as there are colours."""


def search(site: Site, parameters: Parameters) -> Page:
    """Return the search page: the series matching words, names and sizes, each with the newest result."""
    paging = paging_of(parameters)
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        keys = site.series_keys(session, where)
        rows = series_rows(session, paging.part(keys))
        shown = [rows[key] for key in paging.part(keys)]
        data = {"paging": paging.data(len(keys)), "series": newest_data(site, session, shown)}
    return Page("search.html", data, {"path": "/series", "asked": parameters, **form})


def newest_data(site: Site, session: Session, listed: Sequence[SeriesRow]) -> list[dict[str, Any]]:
    """Return each series with the newest result, comparable earlier latencies, and point count."""
    keys = [row.pk for row in listed]
    recent = queries.recent_results(session, keys, site.every_line(session).newest(queries.RECENT_RUNS))
    newest = [of_series[-1] for of_series in recent.values()]
    results = queries.results_by_key(session, [result.pk for result in newest])
    numbers = queries.counts_of_series(session, keys)
    runs = site.run_rows(session, {result.run for result in newest})
    rows = []
    for row in listed:
        of_series = recent.get(row.pk, [])
        entry: dict[str, Any] = {**series_facts(row), "points": numbers.get(row.pk, 0), "newest": None, "recent_ms": []}
        if of_series:
            last = of_series[-1]
            run = runs[last.run]
            entry["newest"] = {"run": run.id, "started": run.started, "commit": run.commit_text,
                               **result_data(results[last.pk], row)}  # fmt: skip
            # Latencies in another environment or of another timing are not comparable.
            like = (last.environment, last.timing)
            entry["recent_ms"] = [r.median_ms for r in of_series if r.timed and (r.environment, r.timing) == like]
        rows.append(entry)
    return rows


def series(site: Site, parameters: Parameters, key: int) -> Page:
    """Return one series' page: history with changes and incidents, and points. Raises NotFound."""
    last, paging = parameters.number("last", SHOWN_POINTS, 1, LIMITS.points), paging_of(parameters)
    parameters.done()
    with site.database.read() as session:
        row = queries.one_series(session, key)
        points = queries.newest_points(session, row, last, site.run_rows)
        own = members.find(session, series={key})
        incidents = triage.of(session, asks_git=False, keys={member.incident.pk for member in own})
        line = site.line_through(session, points[-1].run) if points else None
        on_line = [] if line is None else line.along(points)
        listed = site.every_line(session).along(points)
        runs = [point.run for point in on_line]
        context = read_context(session, on_line, runs, alerts=own)
        own_histories = histories(on_line, places(runs), context)
        number = queries.counts_of_series(session, [key]).get(key, 0)
        verdict = _verdict(site, session, key)
        others = _other_backends(session, row)
        siblings = newest_data(site, session, others)
    labels = [label_of(run) for run in runs]
    history = _with_verdict(own_histories[0], verdict, labels) if own_histories else None
    rows = changes(listed)[::-1]
    page = paging.part(rows)
    data = {
        "series": {**series_facts(row), "dims": row.dims, "flops": row.flops, "min_bytes": row.min_bytes,
                   "points": number},
        "verdict": verdict,
        "shown": len(points),
        "marks": [{"kind": m.kind, "run": labels[m.at].run, "commit": labels[m.at].commit, "text": m.text}
                  for m in (history.marks if history else ())],
        "levels": [{"first": labels[level.first].run, "last": labels[level.last].run, "ms": level.ms}
                   for level in (history.levels if history else ())],
        "alerts": [member_data(each) for one in incidents for each in one.members if each.series.pk == key],
        "other_backends": siblings,
        "paging": paging.data(len(rows)),
        "points": [point_data(each) for each in page],
    }  # fmt: skip
    draw = dict if history is None else partial(_figures, site, history, others[:CHARTED], runs, labels)
    return Page("series.html", data, {"path": f"/series/{key}", "asked": parameters}, figures=draw)


def _figures(
    site: Site, history: ShownHistory, others: Sequence[SeriesRow], runs: Sequence[RunRow], labels: Sequence[RunLabel]
) -> dict[str, Any]:
    """Return a series page's figures by name. One figure also shows the problem's other backends."""
    with site.database.read() as session:
        other_histories = _latency_histories(session, others, runs, history)
    drawn: dict[str, Any] = {}
    if any(value is not None for value in history.ms):
        drawn["latency"] = history_plots.latency_history(history, labels)
    if other_histories and not history.interpreted:
        drawn["backends"] = history_plots.backend_latencies([history, *other_histories], labels)
    if any(value is not None for value in history.rms):
        drawn["accuracy"] = history_plots.accuracy_history(history, labels)
    for name in history.further:
        drawn[f"metric {name}"] = history_plots.metric_history(history, METRICS[name], labels)
    if history.bursts:
        drawn["bursts"] = burst_plot.burst_distribution(history.bursts, labels)
    return drawn


def _latency_histories(
    session: Session, rows: Sequence[SeriesRow], runs: Sequence[RunRow], own: ShownHistory
) -> list[ShownHistory]:
    """Return series' latencies in these runs. Series without any are omitted.

    Args:
        own: History over the same runs, whose toolchains are theirs.
    """
    latencies = queries.latencies(session, [row.pk for row in rows], [run.pk for run in runs])
    shown = []
    for row in rows:
        of_row = latencies[row.pk]
        at = tuple(place for place, run in enumerate(runs) if run.pk in of_row)
        if at:
            ms = tuple(of_row[runs[place].pk] for place in at)
            unknown = (None,) * len(at)
            shown.append(ShownHistory(
                row, at, ms, low=unknown, high=unknown, rms=unknown,
                toolchains=own.toolchains,
                lines=tuple(own.lines[place] for place in at) if own.toolchains else (),
                measured_with=tuple(own.measured_with[place] for place in at) if own.toolchains else (),
            ))  # fmt: skip
    return shown


def _with_verdict(history: ShownHistory, verdict: dict[str, Any] | None, labels: Sequence[RunLabel]) -> ShownHistory:
    """Return the history with a mark at each change listed by the gate, unless it has one there."""
    at = {label.run: place for place, label in enumerate(labels)}
    marks = verdict_marks(
        [
            (row["verdict"], row["change"], at.get(row["head_run"]))
            for row in (verdict["rows"] if verdict else ())
            if row["metric"] == "latency" and Verdict(row["verdict"]).changed
        ],
        history.marks,
    )
    return replace(history, marks=tuple(sorted((*history.marks, *marks), key=lambda mark: mark.at)))


def point_data(row: HistoryRow) -> dict[str, Any]:
    """Return a point for the series' table, without series facts."""
    return {name: value for name, value in row.flat().items() if name not in (*SHOWN, "speedup")}


def point(site: Site, parameters: Parameters, identifier: str) -> Page:
    """Return one point's page with the whole record, including samples. Raises NotFound."""
    parameters.done()
    with site.database.read() as session:
        try:
            detail = find_point(session, identifier)
        except QueryError as error:
            raise NotFound(error.message) from error
    row = detail.point
    bursts = ResultBursts(0, detail.bursts_ms)
    data = {
        "point": row.id,
        "series": {**series_facts(row.series), "dims": row.series.dims},
        "run": {**row.run.flat(), "command": detail.command, "author": detail.author, "committed": detail.committed,
                "parents": list(detail.parents)},
        "result": {name: value for name, value in row.flat().items()
                   if name not in (*series_facts(row.series), *row.run.flat(), "id", "dirty", "environment")},
        "repro": repro.measure(row.series, None if row.run.dirty else row.run.commit, row.environment.facts),
        "first_bad": detail.first_bad,
        "bursts_ms": detail.bursts_ms,
        "telemetry": [_whole(row) for row in detail.telemetry],
        "kernels": [_whole(row) for row in detail.kernels],
        "environment": environment_data(row.environment),
    }  # fmt: skip

    def draw() -> dict[str, Any]:
        return {"bursts": burst_plot.burst_distribution([bursts], [label_of(row.run)])} if detail.bursts_ms else {}

    return Page("point.html", data, {"path": f"/points/{row.id}", "asked": parameters}, figures=draw)


def _whole(row: msgspec.Struct) -> dict[str, Any]:
    """Return all struct fields, including defaults omitted by JSON."""
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _verdict(site: Site, session: Session, key: int) -> dict[str, Any] | None:
    """Return the newest run's verdict on a series, or None if it is not known yet."""
    newest = newest_run(site, session)
    if newest is None:
        return None
    progress = site.verdict(session, newest, patience=0)
    if not isinstance(progress, Known) or key not in progress.value.by_series:
        return None
    rows = [row for row in progress.value.rows if row["series"] == key]
    return {"run": newest.id, "verdict": progress.value.by_series[key], "stale": progress.stale, "rows": rows}


def _other_backends(session: Session, row: SeriesRow) -> list[SeriesRow]:
    same = [getattr(Series, name) == getattr(row, name) for name in PROBLEM]
    keys = list(session.scalars(select(Series.id).where(*same, Series.id != row.pk).order_by(Series.backend).limit(50)))
    rows = series_rows(session, keys)
    return [rows[key] for key in keys]
