"""An Atom feed (RFC 4287) of the state changes of alerts, the newest first.

The alerts of one commit, operator and backend share an entry, so a commit that slows thirty shapes is one entry. An
entry's id depends only on its content, so that a feed reader shows it once, even if the feed is written again or from
another database.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree

from groupbench.tracker.judge.alerts import AlertRow, StateChange
from groupbench.tracker.outputs.escape import shown, xml
from groupbench.tracker.outputs.result import CiLocation, GateResult
from groupbench.tracker.text.wording import printable, signed_change

MOST = 200
"""Most entries in a feed."""

_SERIES = 50
_SPACE = uuid.UUID("5f0e4d4c-3e0b-5a77-9a3c-0d7f8f2f6b11")
_ATOM = "http://www.w3.org/2005/Atom"

Change = tuple[StateChange, list[AlertRow]]


def render(result: GateResult) -> str:
    ElementTree.register_namespace("", _ATOM)
    changes = _changes(result.alerts)
    home = result.place.repository
    feed = _element("feed")
    _text(feed, "id", _id("feed", home or "", result.gate.run.plan or ""))
    _text(feed, "title", f"groupbench alerts{f' of {home}' if home else ''}")
    _text(feed, "updated", _when(max((event.at for event, _ in changes), default=result.gate.run.started)))
    _text(_text(feed, "author"), "name", "groupbench")
    _text(feed, "generator", "groupbench")
    if home:
        feed.append(_element("link", rel="alternate", href=home))
    for event, alerts in changes[:MOST]:
        feed.append(_entry(event, alerts, result.place))
    ElementTree.indent(feed)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(feed, encoding="unicode") + "\n"


def _changes(alerts: Sequence[AlertRow]) -> list[Change]:
    """Return the state changes of alerts, the newest first."""
    groups: dict[tuple[object, ...], Change] = {}
    for alert in alerts:
        for event in alert.events:
            groups.setdefault(_key(event, alert), (event, []))[1].append(alert)
    keys = sorted(groups, key=lambda key: [str(part) for part in key], reverse=True)
    return [groups[key] for key in sorted(keys, key=lambda key: groups[key][0].at, reverse=True)]


def _key(event: StateChange, alert: AlertRow) -> tuple[object, ...]:
    series, run = alert.series, alert.run
    return (_when(event.at), event.state, event.who, alert.metric, run.id, series.operator, series.backend)


def _entry(event: StateChange, alerts: list[AlertRow], place: CiLocation) -> ElementTree.Element:
    first = alerts[0]
    entry = _element("entry")
    _text(entry, "id", _id("entry", *map(str, _key(event, first))))
    what = f"{first.series.operator} {first.series.backend}: {first.metric}"
    ends = sorted(alert.change for alert in alerts if alert.change is not None)
    if first.metric == "latency" and ends:
        what += " " + " to ".join(dict.fromkeys(signed_change(end) for end in (ends[0], ends[-1])))
    number = f" of {len(alerts)} series" if len(alerts) > 1 else ""
    _text(entry, "title", f"{event.state}: {shown(what, 200)}{number}")
    _text(entry, "updated", _when(event.at))
    _text(_text(entry, "author"), "name", shown(event.who, 200) or "unknown")
    span = first.span
    href = place.commit(span.commit)
    if href:
        entry.append(_element("link", rel="alternate", href=href))
    entry.append(_element("category", term=event.state))
    commits = f"commits {span.text}" + (f" {shown(span.subject, 200)}" if span.subject else "")
    commits += f" by {span.author}" if span.author else ""
    lines = [event.text, commits + (f" ({span.remark})" if span.remark else "")]
    for alert in alerts[:_SERIES]:
        change = "" if alert.metric != "latency" else f" {signed_change(alert.change)}"
        lines.append(f"alert {alert.pk}: {shown(str(alert.series), 300)}{change}")
    if len(alerts) > _SERIES:
        lines.append(f"and {len(alerts) - _SERIES} more")
    content = _text(entry, "content", "\n".join(map(printable, lines)))
    content.set("type", "text")
    return entry


def _id(*parts: str) -> str:
    return uuid.uuid5(_SPACE, "\0".join(parts).encode("utf-8", "replace").decode()).urn


def _when(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _element(tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.Element(f"{{{_ATOM}}}{tag}", attributes)


def _text(parent: ElementTree.Element, tag: str, text: str | None = None) -> ElementTree.Element:
    child = ElementTree.SubElement(parent, f"{{{_ATOM}}}{tag}")
    child.text = None if text is None else xml(text)
    return child
