"""One issue for each incident, however often the network, the server or the database fails."""

from __future__ import annotations

import random
import re
import urllib.error
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.judge.incident_rows import IncidentRow, MemberRow
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.outputs import comment, http, issues
from groupbench.tracker.outputs import post as posting
from groupbench.tracker.query.rows import RunRow, SeriesRow

NIGHTS = 100
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


class FakeForge:
    """The issues of a repository, with a server that fails before or after it carried a request out."""

    def __init__(self, kind: str, seed: int, failures: float) -> None:
        self.kind, self.random, self.failures = kind, random.Random(seed), failures
        self.issues: list[dict[str, Any]] = []
        self.assigned = 0
        self.clock_is_behind = False  # so that the list since a time leaves every issue out

    def once(self, request: http.HttpRequest) -> http.HttpResponse:
        if self.random.random() < self.failures:
            kind = self.random.randrange(5)
            if kind == 0:
                raise urllib.error.URLError(ConnectionRefusedError(111, "refused"))
            if kind == 1:
                return http.HttpResponse(429, {"retry-after": "1"}, {"message": "rate limit"})
            if kind == 2:
                return http.HttpResponse(502, {}, None)
            self._carry_out(request)  # carried out, and the answer is lost, or a proxy's page
            if kind == 3:
                return http.HttpResponse(200, {}, None)
            raise TimeoutError("timed out")
        return self._carry_out(request)

    def _carry_out(self, request: http.HttpRequest) -> http.HttpResponse:
        address = urlsplit(request.url)
        path, query, body = address.path.removeprefix("/api/v4"), parse_qs(address.query), request.body or {}
        if path == "/user":
            return http.HttpResponse(200, {}, {"login": "bot", "username": "bot"})
        if path == "/users":
            return http.HttpResponse(200, {}, [{"id": 7, "username": "ada", "name": "Ada"}])
        if "/commits/" in path:
            return http.HttpResponse(
                200, {}, {"commit": {"author": {"name": "Ada"}, "committer": None}, "author": {"login": "ada"}}
            )
        if path.endswith("/issues") and request.method == "GET":
            first = (int(query["page"][0]) - 1) * int(query["per_page"][0]) + 1000 * self.clock_is_behind
            return http.HttpResponse(200, {}, self.issues[first : first + int(query["per_page"][0])])
        if path.endswith("/issues"):
            self.issues.append({"number": len(self.issues) + 1, "iid": len(self.issues) + 1, "state": "open"})
            item = self.issues[-1] | {"user": {"login": "bot"}, "author": {"username": "bot"}}
            self.issues[-1] = item | {"html_url": f"https://forge/{item['iid']}"}
        number = re.search(r"/issues/(\d+)$", path)
        item = self.issues[int(number[1]) - 1 if number else -1]
        self.assigned += "assignees" in body or "assignee_ids" in body
        item.update({name: body[name] for name in ("title", "body", "description", "state") if name in body})
        if "state_event" in body:
            item["state"] = {"close": "closed", "reopen": "opened"}[body["state_event"]]
        return http.HttpResponse(201, {}, dict(item))


def view(key: int, state: str = "new", **facts: Any) -> IncidentRow:
    incident = IncidentRow(key, f"incident {key}", state, "Ada", FIRST + timedelta(days=key), **facts)
    run = RunRow(1, "r1", "1" * 40, False, None, "Tiles", FIRST, "", None, author="Ada")
    series = SeriesRow(
        1, "grouped_gemm", "triton", "fwd", "bf16", "G=4,N=64,K=64", "imported", "cooled", "H200", 0, {}, None, None
    )
    member = MemberRow(
        1, series, "latency", incident, "code", Span(None, run), None, 1.0, 1.1, 0.1, 0.09, 0.11, FIRST, None, None
    )
    return replace(incident, members=(member,))


def forge(kind: str) -> posting.Forge:
    environ = {"GITHUB_TOKEN": "t", "GITLAB_TOKEN": "t"}
    return posting.forge(environ, kind=kind, repository="team/kernels", number=0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeForge:
    kind, seed, failures = request.param
    made = FakeForge(kind, seed, failures)
    monkeypatch.setattr(http, "_once", made.once)
    monkeypatch.setattr(http, "sleep", lambda seconds: None)
    return made


@pytest.mark.parametrize("fake", [(kind, seed, 0.3) for kind in ("github", "gitlab") for seed in (1, 2)], indirect=True)
def test_a_hundred_nights_of_failures(fake: FakeForge) -> None:
    """Incidents open, are fixed, return and are accepted; no issue is doubled, lost or left open."""
    chance = random.Random(fake.kind)
    locked = 0.2
    states: dict[int, str] = {}
    stored: dict[int, tuple[str | None, str | None]] = {}

    def store(key: int, link: str | None, state: str | None) -> None:
        if chance.random() < locked:
            raise OutputError("the database is locked")
        stored[key] = link, state

    def tonight(key: int) -> IncidentRow:
        link, posted = stored.get(key, (None, None))
        return view(key, states[key], link=link, posted=posted)

    for night in range(NIGHTS):
        if chance.random() < 0.5:
            states[night] = "new"
        for key, state in states.items():
            if chance.random() < 0.15:
                states[key] = chance.choice(("confirmed", "fixed", "invalid") if state != "fixed" else ("new",))
        try:
            issues.post(forge(fake.kind), [tonight(key) for key in states], store)
        except OutputError:
            continue
    fake.failures, locked = 0.0, 0.0
    issues.post(forge(fake.kind), [tonight(key) for key in states], store)
    found: dict[str, list[str]] = {}
    for item in fake.issues:
        mark = comment.mark_of(item.get("body") or item.get("description") or "")
        assert mark is not None
        found.setdefault(mark, []).append(item["state"])
    assert all(len(each) == 1 for each in found.values()), "no duplicate"
    for key, state in states.items():
        states_of_issue = found.get(comment.mark("incident", f"incident {key}"), [])
        if state in ("new", "confirmed", "acknowledged"):
            assert [each != "closed" for each in states_of_issue] == [True], "an open incident has an open issue"
        else:
            assert states_of_issue in ([], ["closed"]), "an issue is closed with its incident"


@pytest.mark.parametrize("fake", [("github", 1, 0.0), ("gitlab", 1, 0.0)], indirect=True)
def test_an_issue_is_opened_assigned_updated_closed_and_reopened(fake: FakeForge) -> None:
    stored: dict[str, Any] = {}

    def store(key: int, link: str | None, state: str | None) -> None:
        stored.update(link=link, posted=state)

    def done(state: str, **facts: Any) -> list[str]:
        shown = view(1, state, **stored)
        shown = replace(shown, **facts)
        return [each.done for each in issues.post(forge(fake.kind), [shown], store)]

    assert (done("new"), fake.assigned) == (["opened"], 1)
    assert done("new") == ["unchanged"]
    fake.clock_is_behind = True
    assert (done("new"), len(fake.issues)) == (["unchanged"], 1)
    fake.clock_is_behind = False
    assert done("new", us=3.0) == ["updated"]
    fake.issues[0]["state"] = "closed"
    assert done("new", us=3.0) == ["unchanged"], "a person's decision counts"
    assert fake.issues[0]["state"] == "closed"
    assert done("fixed")[0] in ("closed", "updated")
    assert done("fixed") == []
    assert done("confirmed") == ["reopened"]
    assert (fake.issues[0]["state"] in ("open", "opened"), len(fake.issues)) == (True, 1)


def test_nothing_is_posted_without_a_token() -> None:
    for kind in ("github", "gitlab"):
        with pytest.raises(OutputError, match="_TOKEN"):
            posting.forge({}, kind=kind, repository="team/kernels", number=0)


def test_a_dry_run_prints_the_issues_without_a_token(cli: Any, stored: Any, make: Any, monkeypatch: Any) -> None:
    for name in ("GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http, "_once", lambda request: pytest.fail("it posted"))
    assert cli("post", "--issues", "--dry-run", db=stored([make(0)])).stdout == ""
    stored([make(n, ms=1.0 if n < 6 else 1.5) for n in range(1, 9)])
    cli("gate", "--update")
    text = cli("post", "--issues", "--dry-run").stdout
    assert text.startswith("issue of incident 1, open: latency +50.0% in grouped_gemm triton G=4,N=1024,K=1024\n")
    assert comment.mark_of(text.split("\n\n", 1)[1]) is not None and "| latency | +50.0% |" in text
    cli("incidents", "close", "1", "--as", "invalid", "--reason", "a fan")
    assert cli("post", "--issues", "--dry-run").stdout == "", "it has no issue to close"
