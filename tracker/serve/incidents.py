"""Incident pages, and forms to acknowledge, accept and close incidents."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.judge import incident_moves, triage
from groupbench.tracker.judge.incident_rows import OPEN, STATES
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters
from groupbench.tracker.serve.runs import incident_data
from groupbench.tracker.serve.security import Person
from groupbench.tracker.serve.site import Page, Site, paging_of, slice_of
from groupbench.tracker.store.schema import Incident

ACTIONS = {"acknowledge": "acknowledged", "expect": "expected", "fixed": "fixed", "invalid": "invalid"}
"""The state that each action sets."""
_SHOWN = ("open", "all", *STATES)


def incidents(site: Site, parameters: Parameters) -> Page:
    """Return the incidents page, the newest first."""
    state, paging = parameters.choice("state", _SHOWN, "open"), paging_of(parameters)
    states = {"open": OPEN, "all": ()}.get(state, (state,))
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        number, keys = queries.incident_keys(session, states, where, limit=paging.size, offset=paging.offset)
        counts = queries.incident_counts(session)
        views = triage.of(session, site.traffic.resolve(session), asks_git=False, keys=set(keys))
    data = {
        "state": state,
        "counts": {each: counts[each] for each in STATES if counts.get(each)},
        "paging": paging.data(number),
        "incidents": [incident_data(view) for view in views],
    }
    return Page("incidents.html", data, {"path": "/incidents", "asked": parameters, "states": _SHOWN, **form})


def incident(site: Site, parameters: Parameters, key: int) -> Page:
    """Return one incident's page, with its members and all state changes. Raises NotFound."""
    parameters.done()
    with site.database.read() as session:
        views = triage.of(session, site.traffic.resolve(session), asks_git=False, keys={key})
    if not views:
        raise NotFound(f"no incident {key}; /incidents?state=all lists them")
    data = {"incident": incident_data(views[0])}
    return Page("incident.html", data, {"path": f"/incidents/{key}", "asked": parameters})


def change(site: Site, parameters: Parameters, person: Person) -> tuple[list[dict[str, Any]], str]:
    """Change incidents as a request asks, and return (the changed ones, the path to return to).

    Raises BadRequest or QueryError for invalid parameters, NotFound for an unknown incident, and StoreError if this
    server is read-only or the database fails.
    """
    keys, action, reason, who, until, back = _requested(parameters, person)
    if site.writer is None:
        raise StoreError("this server only reads")
    now = datetime.now(UTC)
    with site.writer.write() as session:
        stored_keys = set(session.scalars(select(Incident.id).where(Incident.id.in_(keys))))
        for key in keys:
            if key not in stored_keys:
                raise NotFound(f"no incident {key}; /incidents?state=all lists them")
        changed = incident_moves.change(session, keys, ACTIONS[action], who, reason, now, until=until, lookup=_unknown)
        views = triage.of(session, site.traffic.resolve(session), asks_git=False, keys=changed)
        return [incident_data(view) for view in views], local(back)


def _unknown(name: str) -> str | None:
    """Look a commit up nowhere: the server does not ask git for names from requests."""
    return None


def _requested(parameters: Parameters, person: Person) -> tuple[Sequence[int], str, str, str, str | None, str]:
    """Return a request's incidents, action, reason, person, end and path to return to.

    Raises BadRequest for missing or contradictory parameters.
    """
    keys, action = parameters.keys("incident"), parameters.choice("action", tuple(ACTIONS), "")
    reason, until = parameters.text("reason"), parameters.text("until")
    who = person.who if person.session else parameters.text("who")  # only programs name themselves
    back = parameters.text("next") or "/incidents"
    parameters.text("csrf")
    parameters.done()
    if not keys:
        raise BadRequest("no incident was chosen; incident=KEY names one, and may be repeated")
    if not action:
        raise BadRequest(f"no action; give one of {', '.join(ACTIONS)}")
    if not who:
        raise BadRequest("missing `who`: a name, recorded with the change")
    if reason is None:
        raise BadRequest(f"{action} needs a reason")
    if until is not None and action != "expect":
        raise BadRequest("until goes with expect alone")
    return keys, action, reason, who, until, back


def local(path: str) -> str:
    """Return the path if it is on this server, else the path of the list."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if plain and path.isprintable() else "/incidents"
