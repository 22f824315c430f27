"""Pages of operators: which there are, and one's backends against each other by shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.judge.verdicts import CANARY
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.report import figures
from groupbench.tracker.report.roofline import find_roofline
from groupbench.tracker.report.shown import Roofline, SpeedMap
from groupbench.tracker.report.speed import backends_of, speed_maps
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.asked import Asked, BadRequest, NotFound
from groupbench.tracker.serve.runs import find_run
from groupbench.tracker.serve.site import Page, Paging, Site, run_facts, slice_of
from groupbench.tracker.store.schema import Series

PROBLEMS = 40
"""Rows of a heat map."""

RUNS = 10
"""Of the newest runs, as many are looked through for results that stand beside each other."""


def operators(site: Site, asked: Asked) -> Page:
    """Every operator, with its backends."""
    asked.done()
    with site.database.read() as session:
        statement = select(Series.operator, Series.backend, func.count(), func.count(Series.shape.distinct()))
        found: dict[str, dict[str, Any]] = {}
        for name, backend, number, shapes in session.execute(
            statement.group_by(Series.operator, Series.backend).order_by(Series.operator, Series.backend)
        ):
            told = found.setdefault(name, {"operator": name, "series": 0, "shapes": 0, "backends": []})
            told["series"] += number
            told["shapes"] = max(told["shapes"], shapes)
            told["backends"].append(backend)
    rows = sorted(found.values(), key=lambda row: (row["operator"] == CANARY, row["operator"]))
    return Page("operators.html", {"operators": rows}, {"path": "/operators", "asked": asked})


@dataclass(frozen=True)
class _Question:
    """What a page of one operator is asked for."""

    name: str
    baseline: str | None
    run: str | None
    paging: Paging


@dataclass(frozen=True)
class _Answer:
    """What the database holds of it."""

    points: Sequence[PointRow]
    canaries: Sequence[PointRow]
    problems: int  # how many there are in all

    @property
    def newest(self) -> RunRow | None:
        return max((point.run for point in self.points), key=lambda row: (row.started, row.pk), default=None)


def operator(site: Site, asked: Asked, name: str) -> Page:
    """One operator: the speed-up of each backend over a baseline, by shape, and how near they come to the roof."""
    size = asked.number("per_page", PROBLEMS, 1, 2 * PROBLEMS)
    paging = Paging(asked.number("page", 1, 1, 10**6), size)
    question = _Question(name, asked.text("baseline"), asked.text("run"), paging)
    with site.database.read() as session:
        where, form = slice_of(site, session, asked)
        asked.done()
        answer = _read(site, session, question, where)
    data, drawn = _shape(question, answer)
    form["choices"] = {name: values for name, values in form["choices"].items() if name != "operator"}
    shown = {"path": f"/operators/{name}", "asked": asked, "figures": drawn, "at": question.run or "",
             "baseline": question.baseline, **form}  # fmt: skip
    return Page("operator.html", data, shown)


def _read(site: Site, session: Session, question: _Question, where: queries.Slice) -> _Answer:
    """Read the problems of a page. Raises NotFound or BadRequest."""
    name = question.name
    if name not in site.facets(session)["operator"]:
        raise NotFound(f"no operator {name[:80]!r}; /operators lists them")
    if any(each == "operator" and values for each, values in where.names):
        raise BadRequest("this page is of one operator; operator= is for /series")
    problems = site.problem_keys(session, replace(where, names=(*where.names, ("operator", (name,)))))
    rows = question.paging.part(problems)
    run = find_run(session, question.run) if question.run else None
    results = queries.recent_results(session, [key for own in rows for key in own], runs=RUNS, until=run)
    canaries = _canaries(session, results)
    points = queries.points(session, _telling(rows, results, {point.run.pk for point in canaries}))
    return _Answer(points, canaries, len(problems))


def _shape(question: _Question, answer: _Answer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data and the figures of a page. Raises BadRequest for a baseline that is not on it."""
    newest, baseline = answer.newest, question.baseline
    maps = speed_maps(answer.points, newest) if newest else []
    roofline = find_roofline(answer.points, answer.canaries, newest) if newest else None
    backends = backends_of(answer.points)
    if baseline is not None and baseline not in backends:
        raise BadRequest(f"no backend {baseline[:80]!r} here; known: {', '.join(backends) or 'none'}")
    over = [baseline if baseline in each.backends else each.backends[0] for each in maps]
    data: dict[str, Any] = {
        "operator": question.name,
        "run": None if newest is None else run_facts(newest),
        "backends": list(backends),
        "paging": question.paging.data(answer.problems),
        "speeds": [_map_data(each, base) for each, base in zip(maps, over, strict=True)],
        "roofline": _roofline_data(roofline) if roofline else None,
    }
    drawn: dict[str, Any] = {}
    for place, (each, base) in enumerate(zip(maps, over, strict=True)):
        ordered = [base, *(backend for backend in each.backends if backend != base)]
        drawn[f"speeds-{place}"] = figures.speedup_heatmap(each.rows, ordered, base)
    if roofline and roofline.ceilings and roofline.points:
        drawn["roofline"] = figures.roofline(roofline.points, roofline.ceilings)
    return data, drawn


def _map_data(given: SpeedMap, baseline: str) -> dict[str, Any]:
    """Latencies and speed-ups of the problems that were measured alike."""
    rows = []
    for row in given.rows:
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
    return {"title": given.title, "baseline": baseline, "backends": list(given.backends), "rows": rows}


def _canaries(session: Any, results: dict[int, list[queries.Result]]) -> list[PointRow]:
    """Of the newest run, among those that hold these results, that holds canaries."""
    runs = {result.run for own in results.values() for result in own}
    series = list(session.scalars(select(Series.id).where(Series.operator == CANARY)))
    if not series or not runs:
        return []
    points = queries.points(session, queries.point_keys(session, series, runs))
    timed = [point.run for point in points if point.timed]
    newest = max(timed, key=lambda run: (run.started, run.pk), default=None)
    return [point for point in points if newest is not None and point.run.pk == newest.pk]


def _telling(problems: Sequence[Sequence[int]], results: dict[int, list[queries.Result]], held: set[int]) -> list[int]:
    """Keys of the points that the page is made of: of each problem those of the newest run that timed any backend,
    and those of the run that holds canaries."""
    keys: list[int] = []
    for members in problems:
        own = [result for pk in members for result in results.get(pk, [])]
        timed = [result for result in own if result.timed]
        shown = {result.run for result in own if result.run in held}
        if timed:
            shown.add(max(timed, key=lambda result: (result.started, result.run)).run)
        keys += [result.pk for result in own if result.run in shown]
    return keys


def _roofline_data(roofline: Roofline) -> dict[str, Any]:
    """The points with what the plot makes of them."""
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
    told = None if ceilings is None else {"run": ceilings.run.run, "commit": ceilings.run.commit,
                                          "tflops": ceilings.tflops, "gbps": ceilings.gbps,
                                          "dtype": ceilings.dtype}  # fmt: skip
    return {"ceilings": told, "points": points, "missing": roofline.missing, "note": roofline.note}
