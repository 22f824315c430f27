"""Operator pages: the list, and one operator's backends compared by shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.judge.verdicts import CANARY
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.report.figures import roofline_plot, speedup_map
from groupbench.tracker.report.roofline import find_roofline
from groupbench.tracker.report.shown import Roofline, SpeedMap
from groupbench.tracker.report.speed import backends_of, speed_maps
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters
from groupbench.tracker.serve.runs import find_run
from groupbench.tracker.serve.site import Page, Paging, Site, slice_of
from groupbench.tracker.store.schema import Series
from groupbench.tracker.text.wording import no_such

PROBLEMS = 40
"""Number of rows of a heat map."""

COMPARED_RUNS = 10
"""Number of newest runs that are searched for results to compare."""

_Results = dict[int, list[queries.RecentResult]]
"""The results of each series, oldest first, by its key."""


def operators(site: Site, parameters: Parameters) -> Page:
    """Return the page with all operators and their backends."""
    parameters.done()
    with site.database.read() as session:
        statement = select(Series.operator, Series.backend, func.count(), func.count(Series.shape.distinct()))
        by_name: dict[str, dict[str, Any]] = {}
        for name, backend, number, shapes in session.execute(
            statement.group_by(Series.operator, Series.backend).order_by(Series.operator, Series.backend)
        ):
            entry = by_name.setdefault(name, {"operator": name, "series": 0, "shapes": 0, "backends": []})
            entry["series"] += number
            entry["shapes"] = max(entry["shapes"], shapes)
            entry["backends"].append(backend)
    rows = sorted(by_name.values(), key=lambda row: (row["operator"] == CANARY, row["operator"]))
    return Page("operators.html", {"operators": rows}, {"path": "/operators", "asked": parameters})


@dataclass(frozen=True)
class _Question:
    """An operator page's parameters."""

    name: str
    baseline: str | None
    run: str | None
    paging: Paging


@dataclass(frozen=True)
class _Contents:
    """An operator page's points."""

    points: Sequence[PointRow]
    canaries: Sequence[PointRow]
    problems: int  # total number of problems, of which the page shows a part
    line: CommitLine  # of all runs

    @property
    def newest(self) -> RunRow | None:
        return max((point.run for point in self.points), key=self.line.place, default=None)


def operator(site: Site, parameters: Parameters, name: str) -> Page:
    """Return one operator's page: each backend's speed-up over a baseline by shape, and the roofline.

    Raises NotFound for an unknown operator.
    """
    size = parameters.number("per_page", PROBLEMS, 1, 2 * PROBLEMS)
    paging = Paging(parameters.number("page", 1, 1, 10**6), size)
    question = _Question(name, parameters.text("baseline"), parameters.text("run"), paging)
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        contents = _read(site, session, question, where)
    data, draw = _shape(question, contents)
    form["choices"] = {name: values for name, values in form["choices"].items() if name != "operator"}
    shown = {"path": f"/operators/{name}", "asked": parameters, "at": question.run or "",
             "baseline": question.baseline, **form}  # fmt: skip
    return Page("operator.html", data, shown, figures=draw)


def _read(site: Site, session: Session, question: _Question, where: queries.Slice) -> _Contents:
    """Read a page's problems. Raises NotFound or BadRequest."""
    name = question.name
    if name not in site.facets(session)["operator"]:
        raise NotFound(f"no operator {name[:80]!r}; /operators lists them")
    if any(each == "operator" and values for each, values in where.names):
        raise BadRequest("this page is of one operator; operator= is for /series")
    problems = site.problem_keys(session, replace(where, names=(*where.names, ("operator", (name,)))))
    rows = question.paging.part(problems)
    run = find_run(session, question.run) if question.run else None
    results, canaries = _results(site, session, rows, run)
    shown = _telling(rows, results, {point.run.pk for point in canaries})
    points = queries.points(session, shown, site.run_rows)
    return _Contents(points, canaries, len(problems), site.every_line(session))


def _shape(question: _Question, contents: _Contents) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return a page's data and the function to draw the figures.

    Raises BadRequest for a baseline not on the page.
    """
    newest, baseline = contents.newest, question.baseline
    maps = speed_maps(contents.points, newest, contents.line) if newest else []
    roofline = find_roofline(contents.points, contents.canaries, newest, contents.line) if newest else None
    backends = backends_of(contents.points)
    if baseline is not None and baseline not in backends:
        raise BadRequest(no_such("this page has no backend", baseline[:80], backends))
    over = [baseline if baseline in each.backends else each.backends[0] for each in maps]
    data: dict[str, Any] = {
        "operator": question.name,
        "run": None if newest is None else newest.flat(),
        "backends": list(backends),
        "paging": question.paging.data(contents.problems),
        "speeds": [_map_data(each, base) for each, base in zip(maps, over, strict=True)],
        "roofline": _roofline_data(roofline) if roofline else None,
    }

    def draw() -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        for place, (each, base) in enumerate(zip(maps, over, strict=True)):
            ordered = [base, *(backend for backend in each.backends if backend != base)]
            drawn[f"speeds-{place}"] = speedup_map.speedup_heatmap(each.rows, ordered, base)
        if roofline and roofline.ceilings and roofline.points:
            drawn["roofline"] = roofline_plot.roofline(roofline.points, roofline.ceilings)
        return drawn

    return data, draw


def _map_data(speed_map: SpeedMap, baseline: str) -> dict[str, Any]:
    """Latencies and speed-ups for the problems measured alike."""
    rows = []
    for row in speed_map.rows:
        rows.append({
            "problem": row.problem,
            "run": row.run.run,
            "commit": row.run.commit,
            "older": row.older,
            "ms": dict(row.ms),
            "speedup": {name: value for name in row.ms if (value := row.speedup(name, baseline)) is not None},
            "noisy": [name for name in row.ms if row.noisy(name, baseline)],
            "why": dict(row.why),
        })  # fmt: skip
    return {"title": speed_map.title, "baseline": baseline, "backends": list(speed_map.backends), "rows": rows}


def _results(
    site: Site, session: Session, problems: Sequence[Sequence[int]], until: RunRow | None
) -> tuple[_Results, list[PointRow]]:
    """Return the results for a page to select from, and the canaries for the roofline."""
    keys = [key for members in problems for key in members]
    canaries = list(session.scalars(select(Series.id).where(Series.operator == CANARY)))
    # The newest run nearly always has all that a page needs. The others have ten times as many results.
    line = site.every_line(session)
    results = queries.results_in(session, keys, line.newest(1, until))
    points = _canaries(site, session, canaries, results)
    timed = {key for key, of_series in results.items() if of_series[-1].timed}
    if any(timed.isdisjoint(members) for members in problems) or (canaries and not points):
        results = queries.recent_results(session, keys, line.newest(COMPARED_RUNS, until), until)
        points = _canaries(site, session, canaries, results)
    return results, points


def _canaries(site: Site, session: Session, series: Sequence[int], results: _Results) -> list[PointRow]:
    """Return these canaries' points in the newest run with a timed one and any such result."""
    runs = {result.run for of_series in results.values() for result in of_series}
    if not series or not runs:
        return []
    points = queries.points(session, queries.point_keys(session, series, runs), site.run_rows)
    timed = [point.run for point in points if point.timed]
    newest = max(timed, key=site.every_line(session).place, default=None)
    return [point for point in points if newest is not None and point.run.pk == newest.pk]


def _telling(problems: Sequence[Sequence[int]], results: _Results, held: set[int]) -> list[int]:
    """Keys for the page's points: per problem, those from the newest run with a timed backend, and those from the run
    with canaries.
    """
    keys: list[int] = []
    for members in problems:
        of_problem = [result for pk in members for result in results.get(pk, [])]
        timed = [result for result in of_problem if result.timed]
        shown = {result.run for result in of_problem if result.run in held}
        if timed:
            shown.add(max(timed, key=lambda result: result.place).run)
        keys += [result.pk for result in of_problem if result.run in shown]
    return keys


def _roofline_data(roofline: Roofline) -> dict[str, Any]:
    """Return the points with their coordinates in the plot."""
    ceilings = roofline.ceilings
    points = [
        {
            "backend": point.backend,
            "problem": point.problem,
            "intensity": point.intensity,
            "tflops": point.tflops,
            "gbps": point.gbps,
            "share": None if ceilings is None else point.share(ceilings),
        }
        for point in roofline.points
    ]
    ceiling_facts = None if ceilings is None else {"run": ceilings.run.run, "commit": ceilings.run.commit,
                                          "tflops": ceilings.tflops, "gbps": ceilings.gbps,
                                          "dtype": ceilings.dtype}  # fmt: skip
    return {"ceilings": ceiling_facts, "points": points, "missing": roofline.missing, "note": roofline.note}
