"""Keep one issue for each incident at GitHub or GitLab: open, update, assign, close and reopen it.

An issue is found by a mark in its text, if the token's account wrote it. So an answer that was lost, or a database
that could not be written, leads to no second issue. A person's decision to close or reopen an issue counts until the
incident changes its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.judge.triage import IncidentView
from groupbench.tracker.outputs import comment, http
from groupbench.tracker.outputs.escape import code, words
from groupbench.tracker.outputs.post import Forge, Issue, is_own, pages
from groupbench.tracker.text.wording import counted, signed_change

_TRIES = 3  # to open one issue
_MEMBERS = 50  # rows of its table
_NEEDED = ("new", "confirmed", "acknowledged")

Store = Callable[[int, str | None, str | None], None]
"""Stores the address and the state of an incident's issue; None if the state is not known."""


@dataclass(frozen=True)
class Posted:
    """An action on an incident's issue."""

    incident: int
    done: str  # opened, updated, closed, reopened, unchanged
    url: str | None


def post(forge: Forge, views: Sequence[IncidentView], store: Store) -> list[Posted]:
    """Bring incidents' issues up to date. Raises OutputError at the first failure; a repeated call continues.

    Args:
        views: Every incident.
        store: Called after each change at the forge.
    """
    due = [view for view in views if view.incident.state in _NEEDED or view.incident.posted != "closed"]
    if not due:
        return []
    me = forge.account()
    issues = _by_mark(forge, due, me)
    return [posted for view in due if (posted := _one(forge, view, issues, me, store)) is not None]


def preview(views: Sequence[IncidentView]) -> Iterator[str]:
    """Yield the title and the text of each issue for `post` to open, update or close."""
    for view in views:
        if view.incident.state in _NEEDED or view.incident.posted == "open":
            state = "open" if view.incident.state in _NEEDED else "closed"
            owner = f", owner {view.owner}" if view.owner else ""
            yield f"issue of incident {view.incident.pk}, {state}{owner}: {view.title}\n\n{_text(view)}"


def _one(forge: Forge, view: IncidentView, issues: dict[str, Issue], me: str | None, store: Store) -> Posted | None:
    incident = view.incident
    wanted = "open" if incident.state in _NEEDED else "closed"
    mark, text = _mark(view), _text(view)
    issue = issues.get(mark)
    if issue is None and wanted == "closed":
        return None  # it was over before it had an issue
    if issue is None:
        issue = _create(forge, view, text, me)
        _assign(forge, issue, view)
        store(incident.pk, issue.url, "open")
        return Posted(incident.pk, "opened", issue.url)
    moved = wanted != incident.posted and issue.state != wanted
    changed = issue.body.strip() != text.strip() or issue.title != view.title
    if moved:  # if the answer or the next store is lost, the state is unknown, not a person's decision
        store(incident.pk, issue.url, None)
    if changed or moved:
        forge.edit_issue(issue.number, view.title, text, wanted if moved else None)
    if moved or (incident.link, incident.posted) != (issue.url, wanted):
        store(incident.pk, issue.url, wanted)
    done = {"open": "reopened", "closed": "closed"}[wanted] if moved else "updated" if changed else "unchanged"
    return Posted(incident.pk, done, issue.url)


def _create(forge: Forge, view: IncidentView, text: str, me: str | None) -> Issue:
    """Open an issue. If the answer is lost, look for it before another attempt."""
    last = ""
    for _ in range(_TRIES):
        try:
            return forge.create_issue(view.title, text)
        except http.HttpUncertain as unsure:
            last = unsure.message
        http.sleep(2.0)
        if issue := _by_mark(forge, [view], me).get(_mark(view)):
            return issue
    raise OutputError(f"{last}; given up after {_TRIES} attempts")


def _assign(forge: Forge, issue: Issue, view: IncidentView) -> None:
    """Assign an issue to the owner, if the forge knows such an account."""
    owner, span = view.owner, view.span
    try:
        login = owner[1:] if owner and owner.startswith("@") else forge.login_of(owner, span.commit) if owner else None
        if login and "/" not in login:
            forge.assign(issue.number, login)
    except http.HttpRefused:
        pass  # no such account, or it may not be assigned: the text names the owner


def _by_mark(forge: Forge, views: Iterable[IncidentView], me: str | None) -> dict[str, Issue]:
    """Return the token's own issues by mark, the oldest each."""
    since = min(view.incident.opened for view in views) - timedelta(days=1)
    issues: dict[str, Issue] = {}
    for item in pages(forge, forge.issues_since(since)):
        issue = forge.read_issue(item)
        mark = comment.mark_of(issue.body)
        if mark is None or "pull_request" in item or not is_own(issue, me):
            continue
        if mark not in issues or issue.number < issues[mark].number:
            issues[mark] = issue
    return issues


def _mark(view: IncidentView) -> str:
    return comment.mark("incident", view.incident.identity)


def _text(view: IncidentView) -> str:
    """Return an issue's text."""
    view = replace(view, incident=replace(view.incident, link=None))  # the issue need not link itself
    state, facts, step = (line.strip() for line in view.lines)
    lines = [_mark(view), f"**{words(state)}**", "", words(facts), "", words(step), ""]
    lines += ["| series | metric | change | A/B |", "| --- | --- | ---: | --- |"]
    for each in view.members[:_MEMBERS]:
        ab = each.compared.verdict if each.compared else ""
        lines.append(f"| {code(str(each.series))} | {each.metric} | {signed_change(each.change)} | {ab} |")
    if len(view.members) > _MEMBERS:
        lines += ["", f"and {counted(len(view.members) - _MEMBERS, 'more member')}"]
    if view.lead.repro:
        lines += ["", f"Reproduce: {code(view.lead.repro)}"]
    return comment.fitted("\n".join(lines) + "\n")
