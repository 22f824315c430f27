"""Run pages: the overview with the newest verdict, the list, and one run."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import declared
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.metrics import GBPS, TFLOPS, rate
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.judge import triage
from groupbench.tracker.judge.incident_rows import OPEN, STATES, IncidentRow, MemberRow
from groupbench.tracker.query import resolve
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.answers import Failed, Known, Working
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters
from groupbench.tracker.serve.site import Page, Paging, Site, paging_of, series_facts, slice_of
from groupbench.tracker.serve.verdict import RunVerdict
from groupbench.tracker.text.wording import no_such


def overview(site: Site, parameters: Parameters) -> Page:
    """Return the overview: the newest run's verdict and changes, the open incidents, and the newest runs."""
    paging = paging_of(parameters)
    parameters.done()
    with site.database.read() as session:
        run = newest_run(site, session)
        if run is None:
            return Page(
                "overview.html", {"run": None, "verdict": None, "runs": [], "incidents": {"counts": {}, "open": []}}
            )
        verdict, again = verdict_data(site.verdict(session, run), paging)
        counts = queries.incident_counts(session)
        calls = site.traffic.resolve(session)
        incidents = triage.of(session, calls, asks_git=False, states=OPEN)
        _, newest = queries.find_runs(session, [], limit=LIMITS.runs, offset=0)
        data = {
            "run": run_data(site, session, run),
            "verdict": verdict,
            "incidents": {
                "counts": {state: counts[state] for state in STATES if counts.get(state)},
                "open": [incident_data(one) for one in incidents[: triage.MOST]],
                "notes": triage.notes(session, calls),
            },
            "runs": [run_data(site, session, row) for row in newest],
        }
    return Page("overview.html", data, {"path": "/", "asked": parameters}, again=again)


def runs(site: Site, parameters: Parameters) -> Page:
    """Return the run list, newest first."""
    paging = paging_of(parameters)
    branches, commit, plan = parameters.texts("branch"), parameters.text("commit"), parameters.text("plan")
    since, until = parameters.date("since"), parameters.date("until", end=True)
    parameters.done()
    with site.database.read() as session:
        conditions = queries.run_conditions(
            session, branches=branches, commit=commit, plan=plan, since=since, until=until
        )
        number, rows = queries.find_runs(session, conditions, limit=paging.size, offset=paging.offset)
        data = {"paging": paging.data(number), "runs": [run_data(site, session, row) for row in rows]}
    return Page("runs.html", data, {"path": "/runs", "asked": parameters})


def run(site: Site, parameters: Parameters, identifier: str) -> Page:
    """Return one run's page: the results, and the verdict if requested or for the newest run.

    Raises NotFound for an unknown run.
    """
    paging = paging_of(parameters)
    statuses, judge = parameters.texts("status"), parameters.flag("verdict")
    for status in statuses:
        if status not in STATUSES:
            raise BadRequest(no_such("no status", status[:40], STATUSES))
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        row = find_run(session, identifier)
        verdict, again = None, None
        verdicts: dict[int, str] = {}
        newest = newest_run(site, session)
        if judge or (newest is not None and newest.pk == row.pk):
            progress = site.verdict(session, row)
            verdict, again = verdict_data(progress, Paging(1, paging.size))
            verdicts = progress.value.by_series if isinstance(progress, Known) else {}
        number, results = queries.results_of_run(session, row, where, statuses, limit=paging.size, offset=paging.offset)
        counts = site.counts(session, row)
        data = {
            "run": run_data(site, session, row),
            "environments": [environment_data(each) for each in counts.environments],
            "verdict": verdict,
            "paging": paging.data(number),
            "results": [
                {
                    **series_facts(series),
                    "point": f"{series.pk}.{row.pk}",
                    "verdict": verdicts.get(series.pk),
                    **result_data(result, series),
                }
                for series, result in results
            ],
        }
    shown = {"path": f"/runs/{row.id}", "asked": parameters, "statuses": statuses, **form}
    return Page("run.html", data, shown, again=again)


def find_run(session: Session, identifier: str) -> RunRow:
    """Return the run whose id starts with `identifier`. Raises NotFound."""
    try:
        return resolve.find_run(session, identifier)
    except QueryError as error:
        raise NotFound(error.message) from error


def newest_run(site: Site, session: Session) -> RunRow | None:
    """Return the newest run, or None for a database without runs."""
    return resolve.latest_run(session, site.line_through, site.run_rows)


def run_data(site: Site, session: Session, row: RunRow) -> dict[str, Any]:
    counts = site.counts(session, row)
    statuses = {status: counts.statuses[status] for status in STATUSES if status in counts.statuses}
    return {**row.flat(), "hardware": list(counts.hardware), "counts": statuses}


def environment_data(row: Any) -> dict[str, Any]:
    facts = {name: value for name, value in declared(row.facts).items() if value is not None}
    return {"environment": row.identity, **facts}


def result_data(result: queries.Result, series: SeriesRow) -> dict[str, Any]:
    """Return a result as a list row."""
    ms = result.median_ms if result.timed else None
    series = series.with_amounts(result.amounts)
    rates = {"tflops": rate(series.flops, ms, TFLOPS), "gbps": rate(series.min_bytes, ms, GBPS)}
    facts = {name: getattr(result, name) for name in ("status", "timing", "error", "rms", "baseline", "message")}
    return {**facts, "latency_ms": result.median_ms, **rates}


def member_data(member: MemberRow) -> dict[str, Any]:
    """Return a member as in `groupbench incidents --each --format json`, with the series key."""
    return {
        **member.flat(),
        "series": member.series.pk,
        "run": member.run.id,
        "label": member.span.label,
        "remark": member.span.remark,
        "head_commit": member.run.commit_text,
        "base_commit": None if member.span.base is None else member.span.base.commit_text,
    }


def incident_data(one: IncidentRow) -> dict[str, Any]:
    """Return an incident as in `groupbench incidents --format json`, with whole members and an event list."""
    events = [{"at": e.at, "who": e.who, "state": e.state, "reason": e.reason} for e in one.events]
    shown = {"lines": [line.strip() for line in one.lines], "opened": one.opened}
    return {**one.flat(), **shown, "members": [member_data(each) for each in one.members], "events": events}


def verdict_data(progress: Known | Working | Failed, paging: Paging) -> tuple[dict[str, Any], int | None]:
    """Return (the verdict as pages show it, seconds after which the page should ask again, or None)."""
    if isinstance(progress, Working):
        return {
            "state": "crowded" if progress.crowded else "judging",
            "seconds": round(progress.seconds, 1),
        }, LIMITS.again_s
    if isinstance(progress, Failed):
        return {"state": "failed", "error": progress.message}, None
    of_run: RunVerdict = progress.value
    rows = paging.part(of_run.rows)
    verdict = {
        "state": "stale" if progress.stale else "known",
        **of_run.facts,
        "paging": paging.data(len(of_run.rows)),
        "rows": list(rows),
        "unmeasured": {"total": len(of_run.unmeasured), "rows": list(of_run.unmeasured[: paging.size])},
    }
    return verdict, LIMITS.again_s if progress.stale else None
