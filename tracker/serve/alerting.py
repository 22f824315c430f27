"""Alert pages, and forms to acknowledge, accept and close alerts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.judge import alert_moves
from groupbench.tracker.judge import alerts as stored
from groupbench.tracker.serve import queries
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters
from groupbench.tracker.serve.runs import alert_data
from groupbench.tracker.serve.security import Person
from groupbench.tracker.serve.site import Page, Site, paging_of, slice_of
from groupbench.tracker.store.schema import Alert

ACTIONS = ("acknowledge", "expect", "fixed", "invalid")
_SHOWN = ("open", "all", *stored.STATES)


def alerts(site: Site, parameters: Parameters) -> Page:
    """Return the alerts page, sorted by change date, newest first."""
    state, paging = parameters.choice("state", _SHOWN, "open"), paging_of(parameters)
    states = {"open": stored.OPEN, "all": ()}.get(state, (state,))
    with site.database.read() as session:
        where, form = slice_of(site, session, parameters)
        parameters.done()
        number, keys = queries.alert_keys(session, states, where, limit=paging.size, offset=paging.offset)
        alert_rows = {alert.pk: alert for alert in stored.find(session, keys=set(keys))} if keys else {}
        counts = queries.alert_counts(session)
    data = {
        "state": state,
        "counts": {each: counts[each] for each in stored.STATES if counts.get(each)},
        "paging": paging.data(number),
        "alerts": [alert_data(alert_rows[key]) for key in keys if key in alert_rows],
    }
    return Page("alerts.html", data, {"path": "/alerts", "asked": parameters, "states": _SHOWN, **form})


def alert(site: Site, parameters: Parameters, key: int) -> Page:
    """Return one alert's page, with all state changes. Raises NotFound."""
    parameters.done()
    with site.database.read() as session:
        row = _one(session, key)
    return Page("alert.html", {"alert": alert_data(row)}, {"path": f"/alerts/{key}", "asked": parameters})


def _one(session: Any, key: int) -> stored.AlertRow:
    alert_rows = stored.find(session, keys={key})
    if not alert_rows:
        raise NotFound(f"no alert {key}; /alerts?state=all lists them")
    return alert_rows[0]


def change(site: Site, parameters: Parameters, person: Person) -> tuple[list[dict[str, Any]], str]:
    """Change alerts as a request asks, and return (the changed alerts, the path to return to).

    Raises BadRequest or QueryError for invalid parameters, NotFound for an unknown alert, and StoreError if this server
    is read-only or the database fails.
    """
    requested = _requested(parameters, person)
    keys, action = requested.keys, requested.action
    if site.writer is None:
        raise StoreError("this server only reads")
    now = datetime.now(UTC)
    with site.writer.write() as session:
        stored_keys = set(session.scalars(select(Alert.id).where(Alert.id.in_(keys))))
        for key in keys:
            if key not in stored_keys:
                raise NotFound(f"no alert {key}; /alerts?state=all lists them")
        if action == "acknowledge":
            changed = alert_moves.acknowledge(session, keys, requested.who, requested.reason, now)
        elif action == "expect":
            changed = alert_moves.expect(session, keys, requested.until, requested.who, requested.reason, now, _unknown)
        else:
            changed = alert_moves.close(session, keys, action, requested.who, requested.reason, now)
        return [alert_data(each) for each in changed], local(requested.back)


def _unknown(name: str) -> str | None:
    """Look a commit up nowhere: the server does not ask git for names from requests."""
    return None


@dataclass(frozen=True)
class _Requested:
    """A request to change alerts."""

    keys: Sequence[int]
    action: str
    reason: str
    who: str
    until: str | None
    back: str  # path to return to


def _requested(parameters: Parameters, person: Person) -> _Requested:
    """Parse a request's parameters. Raises BadRequest for missing or contradictory parameters."""
    keys, action = parameters.keys("alert"), parameters.choice("action", ACTIONS, "")
    reason, until = parameters.text("reason"), parameters.text("until")
    who = person.who if person.session else parameters.text("who")  # only programs name themselves
    back = parameters.text("next") or "/alerts"
    parameters.text("csrf")
    parameters.done()
    if not keys:
        raise BadRequest("no alert was chosen; alert=KEY names one, and may be repeated")
    if not action:
        raise BadRequest(f"no action; give one of {', '.join(ACTIONS)}")
    if not who:
        raise BadRequest("missing `who`: a name, recorded with the change")
    if reason is None:
        raise BadRequest(f"{action} needs a reason")
    if until is not None and action != "expect":
        raise BadRequest("until goes with expect alone")
    return _Requested(keys, action, reason, who, until, back)


def local(path: str) -> str:
    """Return the path if it is on this server, else the alert list's path."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if plain and path.isprintable() else "/alerts"
