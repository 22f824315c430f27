"""The page for two commits side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from groupbench.tracker.compare.comparison import ORDER, compare_sides
from groupbench.tracker.compare.sides import StoredSide, find_stored, stored_side
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.serve.answers import Working
from groupbench.tracker.serve.database import Database, version
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import BadRequest, Parameters
from groupbench.tracker.serve.site import Page, Site, paging_of, slice_of

COMMITS = 60
"""Number of commits that the form offers."""


_DIFFERENCES = 20
"""Maximum number of differences between environments on the page."""


@dataclass(frozen=True)
class SideBySide:
    """A comparison as the page shows it."""

    summary: dict[str, Any]
    rows: Sequence[dict[str, Any]]  # every series, the most severe first
    seconds: float


def side_by_side(database: Database, places: Sequence[StoredSide], force: bool, where: Filter) -> SideBySide:
    """Compare two sides in every series from either. Raises TrackerError."""
    began = time.perf_counter()
    with database.read(LIMITS.background_s) as session:
        a, b = (stored_side(session, place) for place in places)
    whole = compare_sides(a, b, force=force, where=where)
    overall = whole.overall
    summary = whole.facts() | {
        "overall": None if overall is None else asdict(overall),
        "differences": list(whole.differences[:_DIFFERENCES]),
    }
    rows = [{"series": pair.series.pk, **pair.flat()} for pair in whole.pairs]
    return SideBySide(summary, rows, time.perf_counter() - began)


def compare(site: Site, parameters: Parameters) -> Page:
    """Return the page for comparing two commits, branches, runs or dates, as `groupbench compare` does."""
    a, b, force = parameters.text("a"), parameters.text("b"), parameters.flag("force")
    verdict = parameters.choice("verdict", ("", *ORDER), "")
    paging = paging_of(parameters)
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        if where.words:
            raise BadRequest("compare takes names, shapes and sizes; q is for /series")
        form["commits"] = _newest_commits(site, session)
        shown = {
            "path": "/compare",
            "asked": parameters,
            "a": a,
            "b": b,
            "force": force,
            "verdict": verdict,
            "verdicts": ("", *ORDER),
            **form,
        }
        if a is None or b is None:
            return Page("compare.html", {"a": None, "b": None, "state": "asking"}, shown)
        places = (_place(site, session, "a", a), _place(site, session, "b", b))
        names: dict[str, Any] = dict(where.names)
        slice_ = Filter(**names, shape=where.shapes, where=where.sizes)
        now = version(session)
    work = partial(side_by_side, site.database, places, force, slice_)
    try:
        progress = site.answers.ask(("compare", *places, force, slice_), now, work)
    except QueryError as error:
        raise BadRequest(error.message) from error
    data: dict[str, Any] = {"a": places[0].title, "b": places[1].title}
    if isinstance(progress, Working):
        # A program is to come back.
        data |= {"state": "crowded" if progress.crowded else "comparing", "seconds": round(progress.seconds, 1)}
        return Page("compare.html", data, shown, status_in_json=202, again=1)
    comparison: SideBySide = progress.value
    rows = [row for row in comparison.rows if not verdict or row["verdict"] == verdict]
    data |= {
        "state": "stale" if progress.stale else "known",
        **comparison.summary,
        "paging": paging.data(len(rows)),
        "rows": paging.part(rows),
        "seconds": round(comparison.seconds, 2),
    }
    return Page("compare.html", data, shown, again=2 if progress.stale else None)


def _newest_commits(site: Site, session: Session) -> list[tuple[str, str | None]]:
    """Return (hash, subject) for the newest measured commits; a dirty tree's hash ends with +."""
    keys = site.every_line(session).newest(4 * COMMITS)
    rows = site.run_rows(session, keys)
    return list({rows[key].commit_text: rows[key].subject for key in keys}.items())[:COMMITS]


def _place(site: Site, session: Session, name: str, word: str) -> StoredSide:
    """Return the side named by `word`, as for the command `compare`, but no files and no names known only to git.

    Raises BadRequest, with the parameter's name, if the word names nothing in the database.
    """
    try:
        return find_stored(session, word, read_line=site.every_line)
    except QueryError as error:
        raise BadRequest(f"{name}: {error.message}") from error
