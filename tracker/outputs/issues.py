"""Keep one issue for each incident at GitHub or GitLab: open, update, assign, close and reopen it.

An issue is found by its stored address, or by a mark in its text if the token's account wrote it. So an answer that
was lost, or a database that could not be written, leads to no second issue. A person's decision to close or reopen an
issue counts until the incident changes its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from groupbench.tracker.judge.incident_rows import ACTIVE, IncidentRow
from groupbench.tracker.outputs import comment, http
from groupbench.tracker.outputs.escape import code, words
from groupbench.tracker.outputs.post import Forge, Text
from groupbench.tracker.text.wording import counted, signed_change

_MEMBERS = 50  # rows of its table

Store = Callable[[int, str | None, str | None], None]
"""Stores the address and the state of an incident's issue; None if the state is not known."""


@dataclass(frozen=True)
class Posted:
    """An action on an incident's issue."""

    incident: int
    done: str  # opened, updated, closed, reopened, unchanged
    url: str | None

    @property
    def text(self) -> str:
        return f"{self.done}: issue of incident {self.incident} {self.url or ''}".rstrip()


@dataclass(frozen=True)
class Planned:
    """An issue for `post` to open, update or close."""

    incident: int
    state: str  # open or closed
    owner: str | None
    title: str
    body: str

    @property
    def text(self) -> str:
        owner = f", owner {self.owner}" if self.owner else ""
        return f"issue of incident {self.incident}, {self.state}{owner}: {self.title}\n\n{self.body}"


def post(forge: Forge, incidents: Sequence[IncidentRow], store: Store) -> list[Posted]:
    """Bring incidents' issues up to date. Raises OutputError at the first failure; a repeated call continues.

    Args:
        incidents: Every incident.
        store: Called after each change at the forge.
    """
    due = [one for one in incidents if one.state in ACTIVE or one.posted != "closed"]
    if not due:
        return []
    me = forge.account()
    issues = _by_mark(forge, due, me)
    return [posted for one in due if (posted := _one(forge, one, issues, me, store)) is not None]


def planned(incidents: Sequence[IncidentRow]) -> list[Planned]:
    """Return the issues for `post` to open, update or close."""
    return [
        Planned(one.pk, _wanted(one), one.owner, one.title, _text(one))
        for one in incidents
        if "open" in (_wanted(one), one.posted)
    ]


def _wanted(one: IncidentRow) -> str:
    return "open" if one.state in ACTIVE else "closed"


def _one(
    forge: Forge, one: IncidentRow, issues: Mapping[str | None, Text], me: str | None, store: Store
) -> Posted | None:
    wanted, text = _wanted(one), _text(one)
    issue = issues.get(_mark(one)) or _linked(forge, one)
    if issue is None and wanted == "closed":
        return None  # it was over before it had an issue
    fields = {"title": one.title, forge.body_key: text}
    if issue is None:
        issue = forge.create(forge.issues, fields, lambda: _by_mark(forge, [one], me).get(_mark(one)))
        _assign(forge, issue, one)
        store(one.pk, issue.url, "open")
        return Posted(one.pk, "opened", issue.url)
    moved = wanted != one.posted and issue.state != wanted
    changed = (issue.title, issue.body.strip()) != (one.title, text.strip())
    if moved:  # if the answer or the next store is lost, the state is unknown, not a person's decision
        store(one.pk, issue.url, None)
    if changed or moved:
        forge.edit_issue(issue.key, fields, forge.moves[wanted] if moved else {})
    if moved or (one.link, one.posted) != (issue.url, wanted):
        store(one.pk, issue.url, wanted)
    done = {"open": "reopened", "closed": "closed"}[wanted] if moved else "updated" if changed else "unchanged"
    return Posted(one.pk, done, issue.url)


def _assign(forge: Forge, issue: Text, one: IncidentRow) -> None:
    """Assign an issue to the owner, if the forge knows such an account."""
    owner = one.owner or ""
    try:
        login = owner[1:] if owner.startswith("@") else owner and forge.login_of(owner, one.span.commit)
        if login and "/" not in login:
            forge.edit_issue(issue.key, forge.assignee(login))
    except http.HttpRefused:
        pass  # no such account, or it may not be assigned: the text names the owner


def _by_mark(forge: Forge, incidents: Iterable[IncidentRow], me: str | None) -> dict[str | None, Text]:
    """Return the token's own issues by mark, the oldest each."""
    since = min(one.opened for one in incidents) - timedelta(days=1)
    newest_first = sorted(forge.issues_since(since, me), key=lambda issue: -issue.key)
    return {comment.mark_of(issue.body): issue for issue in newest_first}


def _linked(forge: Forge, one: IncidentRow) -> Text | None:
    """Return the issue at the stored address, unless it is gone. The list lacks it if the clocks differ."""
    key = (one.link or "").rpartition("/")[2]
    try:
        issue = forge.read(forge.ask("GET", f"{forge.issues}/{key}").body) if key.isdecimal() else None
    except http.HttpRefused:
        return None
    return issue if issue is not None and comment.mark_of(issue.body) == _mark(one) else None


def _mark(one: IncidentRow) -> str:
    return comment.mark("incident", one.identity)


def _text(one: IncidentRow) -> str:
    """Return an issue's text."""
    state, facts, step = (words(line.strip()) for line in replace(one, link=None).lines)  # it need not link itself
    lines = [_mark(one), f"**{state}**", "", facts, "", step, ""]
    lines += ["| series | metric | change | A/B |", "| --- | --- | ---: | --- |"]
    for each in one.members[:_MEMBERS]:
        lines.append(f"| {code(str(each.series))} | {each.metric} | {signed_change(each.change)} | {each.ab or ''} |")
    if len(one.members) > _MEMBERS:
        lines += ["", f"and {counted(len(one.members) - _MEMBERS, 'more member')}"]
    if one.lead.repro:
        lines += ["", f"Reproduce: {code(one.lead.repro)}"]
    return comment.fitted("\n".join(lines) + "\n")
