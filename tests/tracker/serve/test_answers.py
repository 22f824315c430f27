"""`groupbench serve`: the properties of every response, for any address, name or host."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cases import rarely
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from groupbench.tracker.serve import queries
from groupbench.tracker.serve.answers import Answers
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.security import COOKIE, HEADERS, LOOPBACK

from .conftest import Act, Client

PAGES = (
    *("/", "/runs", "/runs/run-007", "/series", "/series/1", "/points/1.8", "/incidents"),
    *("/incidents?state=all", "/incidents/1", "/login"),
)


def json_of(address: str) -> str:
    path, _, search = address.partition("?")
    return f"{'/overview' if path == '/' else path}.json{'?' + search if search else ''}"


@pytest.mark.both
def test_every_page_is_there_in_html_and_in_json(nights: Any, serve: Client, token: str) -> None:
    client = serve(token=token)
    for page in PAGES:
        html = client.get(page)
        assert (html.status_code, html.headers["content-type"]) == (200, "text/html; charset=utf-8"), page
        assert "<script>alert" not in html.text, page
        assert "{{" not in html.text.replace("{{ 7*7 }}", ""), page
        if page != "/login":
            by_address, by_header = client.get(json_of(page)), client.get(page, headers={"Accept": "application/json"})
            assert by_address.json() == by_header.json(), page
            assert by_header.headers["content-type"] == "application/json"
    assert client.get("/healthz").json() == {"ok": True}


def test_every_answer_carries_the_security_headers(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset(LOOPBACK))
    evil = client.get("/", headers={"Host": "evil.example"})
    answers = [client.get(p) for p in (*PAGES, "/none", "/static/serve.css", "/series?limit=1", "/series.json")]
    for response in (*answers, evil, client.post("/incidents/change"), client.get("/?" + "x" * 10_000)):
        for name, value in HEADERS.items():
            assert response.headers.get(name) == value, (response.request.url, name)
        assert "server" not in response.headers
    assert "unsafe-inline" not in HEADERS["Content-Security-Policy"]
    html = client.get("/series/1").text
    assert not re.search(r"<(script|style)>|\son\w+=|\sstyle=", html)


def test_errors_are_pages_or_json_and_name_their_cause(nights: Any, serve: Client) -> None:
    client = serve()
    html = client.get("/series/99")
    assert (html.status_code, html.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "no series 99" in html.text
    assert client.get("/series/99.json").json() == {"error": "no series 99; /series lists them", "status": 404}
    assert client.get("/nowhere.json").json() == {"error": "no such page", "status": 404}
    assert client.post("/series.json").json()["status"] == 405
    assert "no run &#39;x&#39;" in client.get("/runs/x").text


def test_an_error_of_ours_shows_no_trace(nights: Any, db: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("inner secret")

    app = create_app(str(db), answers=Answers())
    with TestClient(app, raise_server_exceptions=False) as client:
        monkeypatch.setattr(queries, "find_runs", broken)
        for page in ("/runs", "/runs.json"):
            response = client.get(page)
            assert response.status_code == 500
            assert "inner secret" not in response.text
            assert "Traceback" not in response.text


def test_static_files_are_kept_and_packed(nights: Any, serve: Client) -> None:
    client = serve()
    html = client.get("/series/1").text
    addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    names = {address.partition("?")[0].removeprefix("/static/") for address in addresses}
    assert names >= {"colours.css", "serve.css", "serve.js", "draw.js", "tables.js", "plotly.js", "plotly.css"}
    for address in addresses:
        response = client.get(address)
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
        again = client.get(address, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/runs").headers["cache-control"] == "no-store"


def test_a_long_address_is_refused(nights: Any, serve: Client) -> None:
    client = serve()
    for page in (*PAGES, "/static/serve.css", "/none"):
        response = client.get(page.partition("?")[0] + "?q=" + "x" * 60_000)
        assert response.status_code == 400
        assert "8192" in response.json()["error"]
    assert client.get("/series/" + "1" * 60_000).status_code == 400
    assert client.get("/series/" + "1" * 1_000).status_code == 404


WRONG = (
    *("limit=-1", "page=0", "page=-1", "page=1e3", "page=9" + "9" * 30, "page=١", "per_page=100000", "page=1&page=2"),
    *("since=yesterday", "since=2026-13-01", "since=99999999999y", "since=0001-01-01T00:00:00%2B23:00"),
    *("q=a%00b", "q=a%0ab", "operator=none", "backend=%27;drop+table+point", "where=M", "where=M>x", "where=M=5..1"),
    *("status=bad", "state=bad", "last=0", "verdict=yes", "nothing=1", "q=" + "x" * 1001, "a=%ff%00"),
)


@pytest.mark.both
@pytest.mark.parametrize("every", [False, *rarely(True)], ids=["each", "product"])
def test_wrong_parameters_are_named(nights: Any, serve: Client, every: bool) -> None:
    """By default, each wrong parameter is asked of one page, and each page has several."""
    client = serve()
    pages = ("/", "/runs", "/runs/run-007", "/series/1", "/incidents")
    for search, page in itertools.product(WRONG, pages) if every else zip(WRONG, itertools.cycle(pages), strict=False):
        name = search.partition("=")[0]
        response = client.get(f"{page}?{search}")
        assert response.status_code == 400, (page, search)
        body = client.get(f"{page}?{search}", headers={"Accept": "application/json"}).json()
        assert body["status"] == 400
        assert name in body["error"] or name in ("where", "a", "backend", "operator"), (page, body)
        assert "\n" not in body["error"]


@pytest.fixture
def shared(nights: Any, serve: Client) -> TestClient:
    """One client for all examples of a test."""
    return serve()


NAMES = (
    *("q", "page", "per_page", "since", "until", "branch", "commit", "plan", "operator", "backend", "dtype", "shape"),
    *("where", "hardware", "last", "verdict", "status", "state", "next", "v"),
)


VALUES = st.one_of(
    st.text(max_size=40),
    st.integers().map(str),
    st.sampled_from(
        ["latest", "previous", "1", "triton", "M>=4", "M=1..", "..", "*", "?", "[", "%", "_", "\\", "7d", "+"]
    ),
    st.sampled_from(["2026-01-01", "@7d", "run:", "run:run-00", "9999-12-31", "M!=1..5,N>" + "9" * 30, "0", "1" * 18]),
)


ADDRESSES = (*PAGES[:-1], "/runs/run", "/series/99", "/points/1.99999999999999999", "/points/x", "/incidents/0")


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(page=st.sampled_from(ADDRESSES), search=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
@example(page="/series", search=[("where", "M>" + "9" * 30)])
@example(page="/series", search=[("shape", "[a-"), ("q", "%_\\")])
def test_nothing_that_is_asked_breaks_it(shared: TestClient, page: str, search: list[tuple[str, str]]) -> None:
    response = shared.get(
        page.partition("?")[0], params=[(n, v.encode("utf-8", "replace").decode()) for n, v in search]
    )
    assert response.status_code in (200, 400, 404)


@pytest.mark.both
def test_postgresql_bears_what_sqlite_bears(nights: Any, serve: Client) -> None:
    client = serve()
    for search in ("where=M>" + "9" * 30, "q=%25_%5C", "shape=%5Ba-*%3F", "where=M!=5,Zz<1", "q=TRITON"):
        for page in ("/series", "/runs/run-007", "/incidents"):
            assert client.get(f"{page}?{search}").status_code == 200, (page, search)
    for search in ("since=9999-12-30", "until=0001-01-02", "until=9999-12-30T23:00:00-01:00", "commit=00"):
        assert client.get(f"/runs?{search}").status_code in (200, 400), search
    assert client.get("/series.json?q=TRITON").json()["paging"]["total"] == 1


HOSTS = (
    *(("localhost", 200), ("localhost:8642", 200), ("127.0.0.1:1", 200), ("[::1]:8642", 200), ("LOCALHOST", 200)),
    *(("evil.example", 421), ("evil.example:8642", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("[::1", 421)),
    *(("localhost@evil.example", 421), ("10.0.0.1", 421)),
)


def test_on_loopback_only_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset(LOOPBACK))
    for host, status in HOSTS:
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


def test_beyond_loopback_addresses_and_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset((*LOOPBACK, "perf.example")), numbers=True)
    for host, status in (("10.0.0.1:80", 200), ("[fe80::1]", 200), ("perf.example", 200), ("evil.example", 421)):
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


ORIGINS = (
    "http://[",
    "http://a]b",
    "null",
    "http://localhost.evil.example",
    "http://localhost@evil.example",
    "//" * 999,
)


@pytest.mark.parametrize("origin", ORIGINS, ids=lambda origin: origin[:40])
def test_no_origin_but_its_own_may_write(nights: Any, serve: Client, token: str, origin: str) -> None:
    client = serve(token=token)
    assert client.post("/login", data={"token": token}, headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("part", ["\\", "\\1", "\\\\", '\\"'])
def test_no_cookie_stops_the_server(nights: Any, serve: Client, part: str) -> None:
    client = serve()
    began = time.process_time()
    assert client.get("/healthz", headers={"Cookie": f'{COOKIE}="{part * 30_000}"'}).status_code == 200
    assert client.get("/login", headers={"Cookie": f'a=b; {COOKIE}="{part * 30_000}"'}).status_code == 200
    assert time.process_time() - began < 1


TRAVERSALS = (
    *("../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "..\\..\\etc\\passwd"),
    *("/etc/passwd", "serve.css/../../app.py", "app.py", "__init__.py", "serve.css%00.html", "....//etc/passwd"),
)


def test_no_address_becomes_a_path(nights: Any, serve: Client) -> None:
    client = serve()
    folders = ("/static/", "/", "/runs/", "/points/", "/series/")
    for address in (folder + name for folder in folders for name in TRAVERSALS):
        response = client.get(address)
        assert response.status_code in (400, 404), address
        assert "root:" not in response.text
        assert "import" not in response.text


def test_no_word_reads_a_file_or_starts_git(
    nights: Any, serve: Client, tmp_path: Path, monkeypatch: Any, token: str, act: Act
) -> None:
    """The command line accepts files and git's names, but the server must not."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text("secret\n")
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(subprocess, "run", lambda *args, **_: pytest.fail(f"started {args}"))
    client = serve(token=token)
    for word in (str(secret), "secret.jsonl", "HEAD", "HEAD~1", "--help", "v1.0", __file__):
        assert client.get("/runs", params={"commit": word}).status_code == 400
        assert act(client, action="expect", reason="r", until=word).status_code == 400
