"""`groupbench serve`: who may handle alerts, by token or by session, and who may not."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cases import Cli
from starlette.requests import Request
from starlette.testclient import TestClient

from groupbench.tracker.serve import app, security
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import BadRequest
from groupbench.tracker.serve.security import COOKIE, Names

from .conftest import Act, Client


@pytest.mark.both
def test_alerts_are_dealt_with_by_token(
    nights: Any, serve: Client, cli: Cli, bearer: Any, token: str, act: Act
) -> None:
    client = serve(token=token)
    wants_json = {**bearer, "Accept": "application/json"}
    acknowledged = act(client, wants_json, reason="known").json()["incidents"][0]
    assert (acknowledged["state"], acknowledged["last"]) == ("acknowledged", "acknowledged by Ada: known")
    assert client.get("/overview.json").json()["verdict"]["exit_code"] == 0  # judged again after the change
    expected = act(client, wants_json, action="expect", reason="right", until="30d").json()["incidents"][0]
    assert expected["state"] == "expected"
    assert expected["until"]
    by_json = {"incident": [1], "action": "invalid", "who": "Bob", "reason": "a cable"}
    assert (
        client.post("/incidents/change.json", json=by_json, headers=bearer).json()["incidents"][0]["state"] == "invalid"
    )
    events = client.get("/incidents/1.json").json()["incident"]["events"]
    assert [(event["state"], event["who"]) for event in events] == [
        ("new", "groupbench"), ("acknowledged", "Ada"), ("expected", "Ada"), ("invalid", "Bob")]  # fmt: skip
    assert "invalid by Bob: a cable" in cli("incidents", "--all", "--each").stdout


@pytest.mark.both
def test_a_level_is_expected_until_a_stored_commit(
    nights: Any, serve: Client, token: str, act: Act, stored: Any, make: Any
) -> None:
    stored([make(9, backend="other", commit="f" * 40, plan=None)])  # the incident's series lacks it
    client = serve(token=token)
    act(client, action="expect", reason="right", until="fffffff")
    assert client.get("/incidents/1.json").json()["incident"]["until"] == "commit ffffffffff"


WRONG_FORMS: list[tuple[dict[str, str], str]] = [
    ({"incident": ""}, "no incident was chosen"),
    ({"incident": "2"}, "no incident 2"),
    ({"incident": "x"}, "is not a key"),
    ({"action": ""}, "no action"),
    ({"action": "delete"}, "is not one of"),
    ({"who": ""}, "missing `who`"),
    ({"reason": ""}, "acknowledge needs a reason"),
    ({"action": "expect", "reason": ""}, "expect needs a reason"),
    ({"reason": " \u00a0"}, "acknowledge needs a reason"),
    ({"action": "expect", "reason": "r", "until": "main"}, "neither a date nor one known commit"),
    ({"action": "expect", "reason": "r", "until": "HEAD"}, "neither a date nor one known commit"),
    ({"action": "expect", "reason": "r", "until": "2020-01-01"}, "is in the past"),
    ({"until": "30d"}, "goes with expect"),
    ({"reason": "a\0b"}, "control character"),
    ({"reason": "x" * 2000}, "at most 1000 are allowed"),
    ({"other": "1"}, "no parameter 'other'"),
]


def test_a_wrong_form_changes_nothing(nights: Any, serve: Client, token: str, act: Act) -> None:
    client = serve(token=token)
    for fields, says in WRONG_FORMS:
        response = act(client, **fields)
        assert response.status_code in (400, 404), fields
        assert says in response.text.replace("&#39;", "'")
        assert client.get("/incidents/1.json").json()["incident"]["state"] == "new", fields


def test_what_cannot_be_read_as_a_form_is_refused(nights: Any, serve: Client, bearer: Any, token: str) -> None:
    client = serve(token=token)
    for body, kind in (
        (b"incident=1", "text/plain"),
        (b"{", "application/json"),
        (b'{"incident": {"a": 1}}', "application/json"),
        (b"[" * 50_000, "application/json"),
        (b"\xff=%ff", "application/x-www-form-urlencoded"),
        (b"a=" + b"x" * 100_000, "application/x-www-form-urlencoded"),
        (b"&".join([b"a=1"] * 3_000), "application/x-www-form-urlencoded"),
    ):
        response = client.post("/incidents/change", content=body, headers={**bearer, "Content-Type": kind})
        assert response.status_code == 400, body[:20]
    in_address = client.post(f"/incidents/change?incident=1&token={token}", data={"action": "fixed"}, headers=bearer)
    assert in_address.status_code == 400


def log_in(client: TestClient, token: str, **more: Any) -> Any:
    return client.post("/login", data={"token": token, **more})


def test_a_session_writes_by_the_form_of_its_own_page(nights: Any, serve: Client, token: str, act: Act) -> None:
    client = serve(token=token)
    assert 'action="/incidents/change"' not in client.get("/incidents/1").text
    response = log_in(client, token, next="/incidents/1")
    assert (response.status_code, response.headers["location"]) == (303, "/incidents/1")
    cookie = response.headers["set-cookie"]
    assert all(word in cookie for word in (f"{COOKIE}=", "HttpOnly", "SameSite=strict", f"Max-Age={LIMITS.session_s}"))
    assert token not in cookie
    page = client.get("/incidents/1").text
    assert token not in page
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)
    assert csrf is not None
    assert act(client, {}, who="").status_code == 403  # without the form's own word
    assert act(client, {}, who="", csrf="x" * 43).status_code == 403
    assert act(client, {"Origin": "http://evil.example"}, who="", csrf=csrf[1]).status_code == 403
    assert act(client, {"Sec-Fetch-Site": "cross-site"}, who="", csrf=csrf[1]).status_code == 403
    assert client.get("/incidents/1.json").json()["incident"]["state"] == "new"
    done = act(client, {"Origin": "http://localhost:8642"}, who="", csrf=csrf[1], next="/incidents/1")
    assert (done.status_code, done.headers["location"]) == (303, "/incidents/1")
    assert client.get("/incidents/1.json").json()["incident"]["state"] == "acknowledged"
    assert client.post("/logout", data={"csrf": csrf[1]}).status_code == 303
    assert act(client, {}, csrf=csrf[1]).status_code == 401


def test_who_may_write(nights: Any, serve: Client, token: str, act: Act) -> None:
    reader, writer = serve(), serve(token=token)
    assert act(reader, {}).status_code == act(reader).status_code == 403 or act(reader).status_code == 401
    assert log_in(reader, token).status_code == 403
    assert act(writer, {}).status_code == 401
    for header in ("Bearer wrong-token-of-length", f"Basic {token}", "Bearer ", f"Bearer {token}x", "Bearer ü"):
        response = act(writer, {"Authorization": header.encode()})
        assert response.status_code == 401, header
        assert "Bearer" in response.headers["www-authenticate"]
    assert log_in(writer, "wrong").status_code == 401
    assert act(writer, {"Cookie": f"{COOKIE}={token}"}).status_code == 401  # the token is not a session
    assert writer.get("/incidents/1.json").json()["incident"]["state"] == "new"
    assert act(writer).status_code == 303


def test_no_form_leads_elsewhere(nights: Any, serve: Client, token: str, act: Act) -> None:
    client = serve(token=token)
    for back in ("https://evil.example/", "//evil.example", "/\\evil.example", "evil"):
        assert act(client, next=back).headers["location"] == "/incidents", back
        assert log_in(client, token, next=back).headers["location"] == "/incidents", back


def test_the_token_is_asked_for_before_the_body_is_read(nights: Any, serve: Client, token: str) -> None:
    client = serve(token=token)
    response = client.post("/incidents/change", content=b"x" * 100_000, headers={"Content-Type": "text/plain"})
    assert response.status_code == 401


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> Any:
        await asyncio.sleep(600)

    monkeypatch.setattr(app, "FORM_S", 0.01)
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    with ThreadPoolExecutor(1) as elsewhere:  # a browser's test may run a loop in this thread
        form = elsewhere.submit(lambda: asyncio.run(app._form(Request(scope, nothing))))
        with pytest.raises(BadRequest, match="did not arrive"):
            form.result()


def events(client: TestClient) -> list[str]:
    """Return the people who changed the first alert."""
    client.cookies.clear()
    return [event["who"] for event in client.get("/incidents/1.json").json()["incident"]["events"][1:]]


PROXY = "10.0.0.1"


def change_in_session(client: TestClient, token: str, act: Act, headers: dict[str, str], **fields: Any) -> int:
    """Log in, acknowledge the first alert by its form, and return the status of the first response that failed."""
    logged_in = client.post("/login", data={"token": token}, headers=headers)
    if logged_in.status_code != 303:
        return int(logged_in.status_code)
    csrf = re.search(r'name="csrf" value="([^"]+)"', client.get("/incidents/1", headers=headers).text)
    assert csrf is not None
    return int(act(client, headers, **{"who": "", "csrf": csrf[1], **fields}).status_code)


@pytest.mark.parametrize(
    ("address", "headers", "person"),
    [
        (PROXY, {"X-User": "Ada Lovelace"}, "Ada Lovelace"),
        (PROXY, {"X-User": b"G\xc3\xb6del"}, "Gödel"),
        ("::ffff:10.0.0.1", {"X-User": "Ada"}, "Ada"),
        ("10.0.0.2", {"X-User": "Ada"}, "10.0.0.2"),  # not a trusted proxy
        ("127.0.0.1", {"X-User": "Ada"}, "Charles"),
    ],
    ids=["proxy", "utf-8", "mapped", "another machine", "this machine"],
)
def test_the_name_of_a_person_comes_from_the_proxy(
    nights: Any, serve: Client, token: str, act: Act, address: str, headers: Any, person: str
) -> None:
    names = Names("Charles", frozenset({PROXY}), "X-User")
    client = serve(token=token, address=address, names=names)
    assert change_in_session(client, token, act, headers) == 303
    assert events(client) == [person]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 403), ([("X-User", "Ada"), ("X-User", "Bob")], 403), ({"X-User": " "}, 403), ({"X-User": "a\tb"}, 400)],
    ids=["none", "two", "blank", "control"],
)
def test_a_proxy_must_name_one_person(
    nights: Any, serve: Client, token: str, act: Act, headers: Any, status: int
) -> None:
    client = serve(token=token, address=PROXY, names=Names("Charles", frozenset({PROXY}), "X-User"))
    assert change_in_session(client, token, act, headers) == status
    assert client.get("/runs", headers=headers).status_code == 200  # reading needs no name
    assert events(client) == []


def test_nobody_chooses_the_name_that_is_recorded(nights: Any, serve: Client, token: str, act: Act) -> None:
    client = serve(token=token, names=Names("Charles"))
    assert change_in_session(client, token, act, {}, who="Ada") == 400
    assert events(client) == []


def test_a_wrong_token_is_logged_without_it(nights: Any, serve: Client, token: str, act: Act, monkeypatch: Any) -> None:
    logged: list[str] = []
    monkeypatch.setattr(security.logger, "warning", lambda text, *args: logged.append(text % args))
    assert act(serve(token=token, address=PROXY), {"Authorization": "Bearer a-wrong-token"}).status_code == 401
    assert logged == ["wrong token from 10.0.0.1"]
