"""`groupbench serve`: what each address shows, in HTML and in JSON, and what may be done there."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from groupbench.tracker import query
from groupbench.tracker.errors import QueryError, StoreError
from groupbench.tracker.serve import database, queries
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.jobs import WAITING, Jobs, Known, Working
from groupbench.tracker.serve.security import COOKIE, HEADERS, LOOPBACK, SESSION_S

Cli = Callable[..., Result]
Client = Callable[..., TestClient]

TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
BREAKING = """</script><script>alert(1)</script> "quoted" 'it' & <b>%s</b> {{ 7*7 }}"""
STEP = {"subject": BREAKING, "author": "Ada", "branch": "main"}


@pytest.fixture
def serve(db: Any) -> Iterator[Client]:
    """A client of the dashboard of the test's database; jobs are done in a thread, and waited for."""
    begun: list[tuple[TestClient, ThreadPoolExecutor]] = []

    def serve(db: Any = db, patience: float = 60, **options: Any) -> TestClient:
        worker = ThreadPoolExecutor(1)
        app = create_app(str(db), jobs=Jobs(worker, patience), **options)
        client = TestClient(app, base_url="http://localhost:8642", follow_redirects=False)
        client.__enter__()
        begun.append((client, worker))
        return client

    yield serve
    for client, worker in begun:
        client.__exit__(None, None, None)
        worker.shutdown()


@pytest.fixture
def nights(cli: Cli, stored: Any, make: Any, plain_statistics: None) -> Any:
    """Eight nights of two backends, an accelerator that is not there, canaries, and one regression with its alert."""
    records = []
    for night in range(8):
        facts = {"commit_facts": STEP if night == 6 else {"branch": "main", "subject": f"change {night}"}}
        sizes = {"cell": {"dims": {"G": 4, "M": 4096, "N": 1024, "K": 1024}, "flops": 10**9, "min_bytes": 10**6}}
        ms = 1 + 0.001 * (night % 3 - 1) + (0.05 if night > 5 else 0)
        records += [
            make(night, ms, **facts, **sizes),
            make(night, 2.0, backend="torch", baseline=True, **facts, **sizes),
            make(night, backend="cutlass", status="unavailable", message=f"needs {BREAKING}", **facts),
            make(night, 1.0, operator="canary", backend="matmul", cell={"dims": {"N": 4096}, "flops": 10**12,
                 "min_bytes": 10**8}, **facts),
            make(night, 1.0, operator="canary", backend="copy", cell={"dims": {}, "min_bytes": 10**9}, **facts),
        ]  # fmt: skip
    database = stored(records)
    assert "1 opened" in cli("gate", "--update").stderr
    return database


PAGES = (
    *("/", "/runs", "/runs/run-007", "/series", "/series/1", "/points/1.8", "/operators", "/operators/grouped_gemm"),
    *("/compare", "/compare?a=previous&b=latest", "/alerts", "/alerts?state=all", "/alerts/1", "/login"),
)


def json_of(address: str) -> str:
    path, _, search = address.partition("?")
    return f"{'/overview' if path == '/' else path}.json{'?' + search if search else ''}"


# ---- what is shown


def test_every_page_is_there_in_html_and_in_json(nights: Any, serve: Client) -> None:
    client = serve(token=TOKEN)
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


def test_the_overview_says_what_the_gate_says(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve()
    told = client.get("/overview.json").json()
    line = cli("gate").stdout.split("\n")[0]
    assert told["verdict"]["summary"] == line
    assert told["verdict"]["word"] == "regression"
    assert told["run"]["run"] == "run-007"
    (row,) = [row for row in told["verdict"]["rows"] if row["verdict"] == "regressed"]
    assert (row["backend"], row["head"][:3], row["author"]) == ("triton", "006", "Ada")
    assert row["change"] == pytest.approx(0.05, abs=0.003)
    assert told["alerts"]["counts"] == {"new": 1}
    assert told["runs"][0]["counts"] == {"ok": 4, "unavailable": 1}
    html = client.get("/").text
    assert all(text in html for text in (line, "regressed", "+5.0%", "Not measured", "/alerts/1"))
    assert "needs &lt;/script&gt;" in html


def test_a_new_run_is_judged_anew(nights: Any, serve: Client, stored: Any, make: Any) -> None:
    client = serve()
    assert client.get("/overview.json").json()["verdict"]["run"] == "run-007"
    stored([make(8, ms=1.0)])
    assert client.get("/overview.json").json()["verdict"]["run"] == "run-008"


def test_an_empty_database_says_so(opened: Any, serve: Client) -> None:
    client = serve()
    assert "holds no run yet" in client.get("/").text
    assert client.get("/series.json").json()["series"] == []
    for page in ("/runs", "/series", "/operators", "/alerts", "/compare"):
        assert client.get(page).status_code == 200
    assert client.get("/compare?a=latest&b=previous").status_code == 400
    assert client.get("/series/1").status_code == 404


def test_a_series_is_found_by_words_names_shapes_and_sizes(stored: Any, make: Any, serve: Client) -> None:
    stored([make(backend=backend, shape=shape, dtype=dtype, cell={"dims": {"M": m}})
            for backend in ("triton", "Torch_100%") for dtype in ("bf16", "fp16")
            for shape, m in (("G=4,M=64", 64), ("G=4,M=4096", 4096))])  # fmt: skip
    client = serve()

    def found(search: str) -> set[tuple[str, str, str]]:
        answer = client.get(f"/series.json?{search}").json()
        assert answer["paging"]["total"] == len(answer["series"])
        return {(row["backend"], row["dtype"], row["shape"]) for row in answer["series"]}

    assert len(found("")) == 8
    assert {row[1] for row in found("q=TRITON+bf16")} == {"bf16"}
    assert found("q=100%25+fp16+M=64") == {("Torch_100%", "fp16", "G=4,M=64")}
    assert found("q=_1") == found("backend=Torch_100%25")  # wildcards of LIKE are letters
    assert {row[2] for row in found("shape=*M=4*")} == {"G=4,M=4096"}
    assert {row[2] for row in found("where=M>=100")} == {"G=4,M=4096"}
    assert {row[2] for row in found("where=M!=1..100")} == {"G=4,M=4096"}
    assert found("where=Z>1") == found(f"where=M>{10**25}") == set()
    assert len(found("dtype=bf16&dtype=fp16&backend=triton")) == 4


def test_long_lists_come_in_parts(stored: Any, make: Any, serve: Client) -> None:
    stored([make(shape=f"G=4,N={n}") for n in range(7)])
    client = serve()
    parts = [client.get(f"/series.json?per_page=3&page={page}").json() for page in (1, 2, 3)]
    assert [len(part["series"]) for part in parts] == [3, 3, 1]
    assert parts[0]["paging"] == {"page": 1, "per_page": 3, "pages": 3, "total": 7}
    assert len({row["series"] for part in parts for row in part["series"]}) == 7
    assert 'href="/series?per_page=3&amp;page=3"' in client.get("/series?per_page=3&page=2").text
    beyond = client.get("/series.json?per_page=3&page=5000")
    assert (beyond.status_code, beyond.json()["error"]) == (404, "no page 5000 of this list; the last is 3")
    assert client.get("/series?q=nothing+like+it").status_code == 200  # an empty list has one page


def test_new_series_are_found_at_once(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0)])
    client = serve()
    assert client.get("/series.json").json()["paging"]["total"] == 1
    assert client.get("/series?backend=b").status_code == 400
    assert client.get("/operators/grouped_gemm.json").json()["paging"]["total"] == 1
    stored([make(1, backend="b", shape="other")])
    assert client.get("/series.json").json()["paging"]["total"] == 2
    assert client.get("/series.json?backend=b").json()["paging"]["total"] == 1
    assert client.get("/operators/grouped_gemm.json").json()["paging"]["total"] == 2


def test_a_series_shows_its_history_with_what_happened(stored: Any, make: Any, serve: Client) -> None:
    """A step, a change of driver and a failure; by the statistics of the tracker."""
    nights = [make(n, 1.0 if n < 12 else 1.2, environment={"driver": "580.2"} if n < 4 else {}) for n in range(24)]
    stored([*nights, make(24, status="error", message="no")])
    told = serve().get("/series/1.json").json()
    assert [(mark["kind"], mark["commit"][:3]) for mark in told["marks"]] == [("environment", "004"), ("change", "00c")]
    assert "driver 580.2 → 570.1" in told["marks"][0]["text"]
    assert [round(level["ms"], 1) for level in told["levels"]] == [1.0, 1.0, 1.2]
    assert told["paging"]["total"] == told["shown"] == 25
    newest, second = told["points"][:2]
    assert (newest["status"], newest["message"], second["status"]) == ("error", "no", "ok")
    assert told["points"][12]["change"] == pytest.approx(0.2, abs=0.01)


def test_what_the_gate_says_of_the_newest_change_is_marked(nights: Any, serve: Client) -> None:
    client = serve()
    client.get("/")
    told = client.get("/series/1.json").json()
    assert told["verdict"]["verdict"] == "regressed"
    marks = {mark["kind"]: mark for mark in told["marks"]}
    assert (marks["verdict"]["run"], marks["verdict"]["text"][:10]) == ("run-006", "regressed ")
    assert marks["alert"]["run"] == "run-006"


def test_only_the_newest_points_are_drawn_where_there_are_many(stored: Any, make: Any, serve: Client) -> None:
    stored([make(n) for n in range(5)])
    client = serve()
    told = client.get("/series/1.json?last=2").json()
    assert (told["shown"], told["series"]["points"]) == (2, 5)
    assert [point["run"] for point in told["points"]] == ["run-004", "run-003"]
    assert "The newest 2 of 5 points" in client.get("/series/1?last=2").text


def test_an_operator_compares_backends_below_the_roof(nights: Any, serve: Client) -> None:
    client = serve()
    told = client.get("/operators/grouped_gemm.json").json()
    (speeds,) = told["speeds"]
    (row,) = speeds["rows"]
    assert speeds["baseline"] == "torch"
    assert row["speedup"]["triton"] == pytest.approx(2 / 1.05, rel=0.01)
    assert row["why"]["cutlass"].startswith("unavailable: needs")
    assert told["roofline"]["ceilings"]["tflops"] == pytest.approx(1000, rel=0.01)
    assert {point["backend"] for point in told["roofline"]["points"]} == {"triton", "torch"}
    over = client.get("/operators/grouped_gemm.json?baseline=triton").json()["speeds"][0]["rows"][0]["speedup"]
    assert over["torch"] == pytest.approx(1.05 / 2, rel=0.01)
    html = client.get("/operators/grouped_gemm?baseline=triton").text
    drawn = json.loads(re.findall(r'id="figures">(.*?)</script>', html)[0])
    assert drawn["speeds-0"]["layout"]["xaxis"]["ticktext"] == ["triton", "torch", "cutlass"]
    older = client.get("/operators/grouped_gemm.json?run=run-003").json()
    assert older["run"]["run"] == "run-003"
    assert client.get("/operators/grouped_gemm?baseline=x").status_code == 400


def test_a_series_of_runs_long_ago_is_shown_all_the_same(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0, ms=3.0, backend="old"), *(make(n) for n in range(1, queries.RECENT_RUNS + 2))])
    row = serve().get("/series.json?backend=old").json()["series"][0]
    assert (row["newest"]["run"], row["points"]) == ("run-000", 1)
    assert row["newest"]["latency_ms"] == pytest.approx(3.0, rel=0.01)


def test_comparisons_are_those_of_the_command(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve()
    told = client.get("/compare.json?a=000&b=latest").json()
    asked = json.loads(cli("compare", "000", "latest", "--json").stdout)
    assert (told["counts"], told["geometric_mean"]) == (asked["counts"], pytest.approx(asked["geometric_mean"]))
    key = lambda row: (row["operator"], row["backend"])  # noqa: E731
    mine = [{name: value for name, value in row.items() if name != "series"} for row in told["rows"]]
    assert sorted(mine, key=key) == sorted(asked["series"], key=key)
    for word in ("run:run-007", "2026-01-08", "@2026-01-08", "main"):
        answer = client.get("/compare.json", params={"a": "000", "b": word}).json()
        assert answer["counts"] == told["counts"], word
    only = client.get("/compare.json?a=000&b=latest&backend=triton&verdict=regressed").json()
    assert [row["backend"] for row in only["rows"]] == ["triton"]


def test_unlike_environments_are_compared_where_that_is_asked_for(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0), make(1, environment={"driver": "580.2"})])
    client = serve()
    told = client.get("/compare.json?a=previous&b=latest").json()
    assert (told["counts"], told["differences"]) == ({"incomparable": 1}, ["driver 570.1 → 580.2"])
    forced = client.get("/compare.json?a=previous&b=latest&force=1").json()
    assert (forced["counts"], forced["rows"][0]["note"]) == ({"ok": 1}, "forced: driver 570.1 → 580.2")


def test_runs_are_found_by_branch_commit_and_date(nights: Any, serve: Client) -> None:
    client = serve()

    def found(search: str) -> list[str]:
        return [run["run"] for run in client.get(f"/runs.json?{search}").json()["runs"]]

    assert found("branch=main") == [f"run-{n:03d}" for n in range(7, -1, -1)]
    assert found("commit=003") == ["run-003"]
    assert found("since=2026-01-07&until=2026-01-07") == ["run-006"]
    assert found("branch=other") == []
    told = client.get("/runs/run-007.json?status=unavailable").json()
    assert [row["backend"] for row in told["results"]] == ["cutlass"]
    assert client.get("/runs/run-003.json").json()["verdict"] is None
    assert client.get("/runs/run-003.json?verdict=1").json()["verdict"]["run"] == "run-003"


# ---- alerts


def act(client: TestClient, headers: Any = BEARER, **fields: Any) -> Any:
    data = {"alert": "1", "action": "acknowledge", "who": "Ada", **fields}
    return client.post("/alerts/change", data=data, headers=headers)


def test_alerts_are_dealt_with_by_token(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve(token=TOKEN)
    wants_json = {**BEARER, "Accept": "application/json"}
    acknowledged = act(client, wants_json, reason="known").json()["alerts"][0]
    assert (acknowledged["state"], acknowledged["last"]) == ("acknowledged", "acknowledged by Ada: known")
    assert client.get("/overview.json").json()["verdict"]["exit_code"] == 0  # judged anew by what was written
    expected = act(client, wants_json, action="expect", reason="right", until="30d").json()["alerts"][0]
    assert expected["state"] == "expected"
    assert expected["until"]
    by_json = {"alert": [1], "action": "invalid", "who": "Bob", "reason": "a cable"}
    assert client.post("/alerts/change.json", json=by_json, headers=BEARER).json()["alerts"][0]["state"] == "invalid"
    events = client.get("/alerts/1.json").json()["alert"]["events"]
    assert [(event["state"], event["who"]) for event in events] == [
        ("new", "groupbench"), ("acknowledged", "Ada"), ("expected", "Ada"), ("invalid", "Bob")]  # fmt: skip
    assert "invalid by Bob: a cable" in cli("alerts", "--all", "--each").stdout


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"alert": ""}, "no alert was chosen"),
        ({"alert": "2"}, "no alert 2"),
        ({"alert": "x"}, "is no key"),
        ({"action": ""}, "no action"),
        ({"action": "delete"}, "is none of"),
        ({"who": ""}, "who says so"),
        ({"action": "expect"}, "needs a reason"),
        ({"action": "expect", "reason": "r", "until": "HEAD"}, "no commit or branch"),
        ({"action": "expect", "reason": "r", "until": "2020-01-01"}, "is over already"),
        ({"until": "30d"}, "goes with expect"),
        ({"reason": "a\0b"}, "control character"),
        ({"reason": "x" * 2000}, "1000 are the most"),
        ({"other": "1"}, "no parameter 'other'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.sqlite
def test_a_wrong_form_changes_nothing(nights: Any, serve: Client, fields: Any, says: str) -> None:
    client = serve(token=TOKEN)
    answer = act(client, **fields)
    assert answer.status_code in (400, 404)
    assert says in answer.text.replace("&#39;", "'")
    assert client.get("/alerts/1.json").json()["alert"]["state"] == "new"


@pytest.mark.sqlite
def test_what_cannot_be_read_as_a_form_is_refused(nights: Any, serve: Client) -> None:
    client = serve(token=TOKEN)
    for body, kind in (
        (b"alert=1", "text/plain"),
        (b"{", "application/json"),
        (b'{"alert": {"a": 1}}', "application/json"),
        (b"[" * 50_000, "application/json"),
        (b"\xff=%ff", "application/x-www-form-urlencoded"),
        (b"a=" + b"x" * 100_000, "application/x-www-form-urlencoded"),
        (b"&".join([b"a=1"] * 3_000), "application/x-www-form-urlencoded"),
    ):
        answer = client.post("/alerts/change", content=body, headers={**BEARER, "Content-Type": kind})
        assert answer.status_code == 400, body[:20]
    in_address = client.post(f"/alerts/change?alert=1&token={TOKEN}", data={"action": "fixed"}, headers=BEARER)
    assert in_address.status_code == 400


def log_in(client: TestClient, token: str = TOKEN, **more: Any) -> Any:
    return client.post("/login", data={"who": "Ada", "token": token, **more})


@pytest.mark.sqlite
def test_a_session_writes_by_the_form_of_its_own_page(nights: Any, serve: Client) -> None:
    client = serve(token=TOKEN)
    assert 'action="/alerts/change"' not in client.get("/alerts/1").text
    answer = log_in(client, next="/alerts/1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/alerts/1")
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in (f"{COOKIE}=", "HttpOnly", "SameSite=strict", f"Max-Age={SESSION_S}"))
    assert TOKEN not in cookie
    page = client.get("/alerts/1").text
    assert TOKEN not in page
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)
    assert csrf is not None
    assert act(client, {}).status_code == 403  # without the form's own word
    assert act(client, {}, csrf="x" * 43).status_code == 403
    assert act(client, {"Origin": "http://evil.example"}, csrf=csrf[1]).status_code == 403
    assert act(client, {"Sec-Fetch-Site": "cross-site"}, csrf=csrf[1]).status_code == 403
    assert client.get("/alerts/1.json").json()["alert"]["state"] == "new"
    done = act(client, {"Origin": "http://localhost:8642"}, csrf=csrf[1], next="/alerts/1")
    assert (done.status_code, done.headers["location"]) == (303, "/alerts/1")
    assert client.get("/alerts/1.json").json()["alert"]["state"] == "acknowledged"
    assert client.post("/logout", data={"csrf": csrf[1]}).status_code == 303
    assert act(client, {}, csrf=csrf[1]).status_code == 401


@pytest.mark.sqlite
def test_who_may_write(nights: Any, serve: Client) -> None:
    reader, writer = serve(), serve(token=TOKEN)
    assert act(reader, {}).status_code == act(reader).status_code == 403 or act(reader).status_code == 401
    assert log_in(reader).status_code == 403
    assert act(writer, {}).status_code == 401
    for header in ("Bearer wrong-token-of-length", f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x", "Bearer ü"):
        answer = act(writer, {"Authorization": header.encode()})
        assert answer.status_code == 401, header
        assert "Bearer" in answer.headers["www-authenticate"]
    assert log_in(writer, "wrong").status_code == 401
    assert log_in(writer, who="").status_code == 400
    assert act(writer, {"Cookie": f"{COOKIE}={TOKEN}"}).status_code == 401  # the token is no session
    assert writer.get("/alerts/1.json").json()["alert"]["state"] == "new"
    assert act(writer).status_code == 303


@pytest.mark.sqlite
def test_no_form_leads_elsewhere(nights: Any, serve: Client) -> None:
    client = serve(token=TOKEN)
    for back in ("https://evil.example/", "//evil.example", "/\\evil.example", "evil"):
        assert act(client, next=back).headers["location"] == "/alerts", back
        assert log_in(client, next=back).headers["location"] == "/alerts", back


# ---- what must not happen


@pytest.mark.sqlite
def test_every_answer_carries_the_security_headers(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset(LOOPBACK))
    evil = client.get("/", headers={"Host": "evil.example"})
    answers = [client.get(p) for p in (*PAGES, "/none", "/static/serve.css", "/series?limit=1", "/series.json")]
    for answer in (*answers, evil, client.post("/alerts/change"), client.get("/?" + "x" * 10_000)):
        for name, value in HEADERS.items():
            assert answer.headers.get(name) == value, (answer.request.url, name)
        assert "server" not in answer.headers
    assert "unsafe-inline" not in HEADERS["Content-Security-Policy"]
    html = client.get("/series/1").text
    assert not re.search(r"<(script|style)>|\son\w+=|\sstyle=", html)


HOSTS = (
    *(("localhost", 200), ("localhost:8642", 200), ("127.0.0.1:1", 200), ("[::1]:8642", 200), ("LOCALHOST", 200)),
    *(("evil.example", 421), ("evil.example:8642", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("[::1", 421)),
    *(("localhost@evil.example", 421), ("10.0.0.1", 421)),
)


@pytest.mark.sqlite
def test_on_loopback_only_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset(LOOPBACK))
    for host, status in HOSTS:
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


@pytest.mark.sqlite
def test_beyond_loopback_addresses_and_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset((*LOOPBACK, "perf.example")), numbers=True)
    for host, status in (("10.0.0.1:80", 200), ("[fe80::1]", 200), ("perf.example", 200), ("evil.example", 421)):
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


TRAVERSALS = (
    *("../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "..\\..\\etc\\passwd"),
    *("/etc/passwd", "serve.css/../../app.py", "app.py", "__init__.py", "serve.css%00.html", "....//etc/passwd"),
)


@pytest.mark.sqlite
def test_no_address_becomes_a_path(nights: Any, serve: Client) -> None:
    client = serve()
    folders = ("/static/", "/", "/runs/", "/operators/", "/points/", "/series/")
    for address in (folder + name for folder in folders for name in TRAVERSALS):
        answer = client.get(address)
        assert answer.status_code in (400, 404), address
        assert "root:" not in answer.text
        assert "import" not in answer.text


@pytest.mark.sqlite
def test_no_word_reads_a_file_or_starts_git(nights: Any, serve: Client, tmp_path: Path, monkeypatch: Any) -> None:
    """What the command takes for files and for git's words is neither here."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text("secret\n")
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(subprocess, "run", lambda *args, **_: pytest.fail(f"started {args}"))
    client = serve(token=TOKEN)
    for word in (str(secret), "secret.jsonl", "HEAD", "HEAD~1", "--help", "v1.0", __file__):
        for params in ({"a": word, "b": "latest"}, {"a": "latest", "b": word}):
            answer = client.get("/compare", params=params)
            assert answer.status_code == 400, word
            assert "no commit or branch" in answer.text
        assert client.get("/runs", params={"commit": word}).status_code == 400
        assert act(client, action="expect", reason="r", until=word).status_code == 400


@pytest.mark.sqlite
def test_a_long_address_is_refused(nights: Any, serve: Client) -> None:
    client = serve()
    for page in (*PAGES, "/static/serve.css", "/none"):
        answer = client.get(page.partition("?")[0] + "?q=" + "x" * 60_000)
        assert answer.status_code == 400
        assert "8192" in answer.json()["error"]
    assert client.get("/series/" + "1" * 60_000).status_code == 400
    assert client.get("/series/" + "1" * 1_000).status_code == 404


WRONG = (
    *("limit=-1", "page=0", "page=-1", "page=1e3", "page=9" + "9" * 30, "page=١", "per_page=100000", "page=1&page=2"),
    *("since=yesterday", "since=2026-13-01", "since=99999999999y", "since=0001-01-01T00:00:00%2B23:00"),
    *("q=a%00b", "q=a%0ab", "operator=none", "backend=%27;drop+table+point", "where=M", "where=M>x", "where=M=5..1"),
    *("status=bad", "state=bad", "last=0", "verdict=yes", "nothing=1", "q=" + "x" * 1001, "a=%ff%00"),
)


def test_wrong_parameters_are_named(nights: Any, serve: Client) -> None:
    client = serve()
    pages = ("/", "/runs", "/runs/run-007", "/series/1", "/operators/grouped_gemm", "/compare", "/alerts")
    for search, page in ((search, page) for search in WRONG for page in pages):
        name = search.partition("=")[0]
        answer = client.get(f"{page}?{search}")
        assert answer.status_code == 400, (page, search)
        told = client.get(f"{page}?{search}", headers={"Accept": "application/json"}).json()
        assert told["status"] == 400
        assert name in told["error"] or name in ("where", "a", "backend", "operator"), (page, told)
        assert "\n" not in told["error"]


NAMES = (
    *("q", "page", "per_page", "since", "until", "branch", "commit", "plan", "operator", "backend", "dtype", "shape"),
    *("where", "hardware", "last", "run", "baseline", "a", "b", "force", "verdict", "status", "state", "next", "v"),
)
VALUES = st.one_of(
    st.text(max_size=40),
    st.integers().map(str),
    st.sampled_from(
        ["latest", "previous", "1", "triton", "M>=4", "M=1..", "..", "*", "?", "[", "%", "_", "\\", "7d", "+"]
    ),
    st.sampled_from(["2026-01-01", "@7d", "run:", "run:run-00", "9999-12-31", "M!=1..5,N>" + "9" * 30, "0", "1" * 18]),
)
ADDRESSES = (
    *PAGES[:-1], "/runs/run", "/series/99", "/points/1.99999999999999999", "/points/x", "/alerts/0", "/operators/none",
)  # fmt: skip


@pytest.mark.sqlite
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(page=st.sampled_from(ADDRESSES), search=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
@example(page="/series", search=[("where", "M>" + "9" * 30)])
@example(page="/series", search=[("shape", "[a-"), ("q", "%_\\")])
def test_nothing_that_is_asked_breaks_it(shared: TestClient, page: str, search: list[tuple[str, str]]) -> None:
    answer = shared.get(page.partition("?")[0], params=[(n, v.encode("utf-8", "replace").decode()) for n, v in search])
    assert answer.status_code in (200, 400, 404)


PARTS = (
    *("/{}", "/series/{}", "/runs/{}", "/operators/{}", "/points/{}", "/static/{}", "/alerts/{}", "/series?{}"),
    *("/login?next={}", "/compare?a={}&b=latest"),
)


@pytest.mark.sqlite
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=60), part=st.sampled_from(PARTS))
def test_no_address_breaks_it(shared: TestClient, raw: str, part: str) -> None:
    from urllib.parse import quote

    answer = shared.get(part.format(quote(raw, safe="/%&=;+.")))
    assert answer.status_code < 500


@pytest.fixture
def shared(nights: Any, serve: Client) -> TestClient:
    """One client for all examples of a test."""
    return serve()


def test_postgresql_bears_what_sqlite_bears(nights: Any, serve: Client) -> None:
    client = serve()
    for search in ("where=M>" + "9" * 30, "q=%25_%5C", "shape=%5Ba-*%3F", "where=M!=5,Zz<1", "q=TRITON"):
        for page in ("/series", "/runs/run-007", "/operators/grouped_gemm", "/alerts"):
            assert client.get(f"{page}?{search}").status_code == 200, (page, search)
    for search in ("since=9999-12-30", "until=0001-01-02", "until=9999-12-30T23:00:00-01:00", "commit=00"):
        assert client.get(f"/runs?{search}").status_code in (200, 400), search
    assert client.get("/series.json?q=TRITON").json()["paging"]["total"] == 1


# ---- errors, files, databases


@pytest.mark.sqlite
def test_errors_are_pages_or_json_and_name_their_cause(nights: Any, serve: Client) -> None:
    client = serve()
    html = client.get("/series/99")
    assert (html.status_code, html.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "no series 99" in html.text
    assert client.get("/series/99.json").json() == {"error": "no series 99; /series lists them", "status": 404}
    assert client.get("/nowhere.json").json() == {"error": "no such page", "status": 404}
    assert client.post("/series.json").json()["status"] == 405
    assert "no run &#39;x&#39;" in client.get("/runs/x").text


@pytest.mark.sqlite
def test_an_error_of_ours_shows_no_trace(nights: Any, db: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("inner secret")

    app = create_app(str(db), jobs=Jobs(ThreadPoolExecutor(1)))
    with TestClient(app, raise_server_exceptions=False) as client:
        monkeypatch.setattr(queries, "find_runs", broken)
        for page in ("/runs", "/runs.json"):
            answer = client.get(page)
            assert answer.status_code == 500
            assert "inner secret" not in answer.text
            assert "Traceback" not in answer.text


@pytest.mark.sqlite
def test_static_files_are_kept_and_packed(nights: Any, serve: Client) -> None:
    client = serve()
    html = client.get("/series/1").text
    addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    assert {address.partition("?")[0] for address in addresses} == {
        f"/static/{name}"
        for name in (
            "colours.css",
            "serve.css",
            "serve.js",
            "draw.js",
            "tables.js",
            "plotly.js",
            "plotly.css",
            "icon.svg",
        )
    }
    for address in addresses:
        answer = client.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        again = client.get(address, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/runs").headers["cache-control"] == "no-store"


def test_the_database_is_opened_to_read(nights: Any) -> None:
    found = database.open_to_read(str(nights))
    with found.read() as session, pytest.raises(Exception, match=r"readonly|read-only"):
        from sqlalchemy import text

        session.execute(text("DELETE FROM alert_event"))
    found.close()


@pytest.mark.sqlite
def test_a_database_that_cannot_be_served_is_named(tmp_path: Path, cli: Cli, nights: Any) -> None:
    with pytest.raises(StoreError, match="no such database"):
        create_app(str(tmp_path / "none.db"))
    (tmp_path / "text.db").write_text("text " * 100)
    with pytest.raises(StoreError, match="is not a SQLite database"):
        create_app(str(tmp_path / "text.db"))
    old = tmp_path / "old.db"
    shutil.copy(nights, old)
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    before = old.read_bytes()
    with pytest.raises(StoreError, match=r"is at revision 0001.*`groupbench runs` migrates it"):
        create_app(str(old))
    assert old.read_bytes() == before
    result = cli("serve", db=tmp_path / "none.db")
    assert (result.exit_code, "no such database" in result.stderr) == (2, True)


@pytest.mark.sqlite
def test_a_locked_database_is_told_and_not_waited_for_long(nights: Any, serve: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(database, "BUSY_MS", 50)
    client = serve(token=TOKEN)
    other = sqlite3.connect(nights, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        answer = act(client, {**BEARER, "Accept": "application/json"})
        assert answer.status_code == 503
        assert "locked" in answer.json()["error"]
        assert client.get("/alerts").status_code == 200  # readers go on
    finally:
        other.rollback()
        other.close()
    assert act(client).status_code == 303


# ---- jobs


def test_a_page_says_what_is_being_worked_out(nights: Any, serve: Client, monkeypatch: Any) -> None:
    from groupbench.tracker.serve import work

    go = threading.Event()
    judge, compare = work.judge, work.compare
    monkeypatch.setattr(work, "judge", lambda *args: (go.wait(30), judge(*args))[1])
    monkeypatch.setattr(work, "compare", lambda *args: (go.wait(30), compare(*args))[1])
    client = serve(patience=0)
    page, compared = client.get("/"), client.get("/compare?a=000&b=latest")
    try:
        for answer, word in ((page, "Judging"), (compared, "Comparing")):
            assert answer.status_code == 200
            assert word in answer.text
            assert 'http-equiv="refresh"' in answer.text
        waiting = client.get("/compare.json?a=000&b=latest")
        assert (waiting.status_code, waiting.json()["state"]) == (202, "comparing")
        assert waiting.headers["retry-after"]
    finally:
        go.set()
    deadline = time.monotonic() + 30
    while "refresh" in client.get("/").text + client.get("/compare?a=000&b=latest").text:
        assert time.monotonic() < deadline
    assert client.get("/overview.json").json()["verdict"]["state"] == "known"


def test_a_run_that_cannot_be_judged_is_shown_all_the_same(nights: Any, serve: Client, monkeypatch: Any) -> None:
    from groupbench.tracker.serve import work

    def broken(*_: Any) -> Any:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(work, "judge", broken)
    client = serve()
    told = client.get("/overview.json").json()
    assert told["verdict"] == {"state": "failed", "error": "the disk is gone"}
    assert len(told["runs"]) == 8
    assert "could not be judged: the disk is gone" in client.get("/").text
    assert client.get("/runs/run-007").status_code == client.get("/series/1").status_code == 200


def test_jobs_keep_what_they_found_until_something_is_stored() -> None:
    calls: list[int] = []
    go = threading.Event()

    def work(number: int) -> int:
        calls.append(number)
        if number == 2:
            go.wait(30)
        if number == 3:
            raise QueryError("no such thing")
        return number

    jobs = Jobs(ThreadPoolExecutor(1), patience=10)
    assert jobs.ask("a", 1, work, 1) == jobs.ask("a", 1, work, 1) == Known(1)
    assert calls == [1]
    assert jobs.ask("a", 2, work, 2, patience=0) == Known(1, stale=True)
    assert isinstance(jobs.ask("b", 2, work, 1, patience=0), Working)
    for other in range(WAITING + 2):
        last = jobs.ask(other, 2, work, 1, patience=0)
    assert isinstance(last, Working)
    assert last.crowded
    go.set()
    assert jobs.ask("a", 2, work, 2) == Known(2)
    for _ in range(2):  # an error is not kept
        with pytest.raises(QueryError, match="no such thing"):
            jobs.ask("c", 2, work, 3)
    assert calls.count(3) == 2


@pytest.mark.sqlite
def test_jobs_are_done_by_a_process_of_their_own(nights: Any) -> None:
    from groupbench.tracker.serve import work

    jobs = Jobs(patience=60)
    try:
        found = jobs.ask("v", 1, work.judge, str(nights), "run-007")
        assert isinstance(found, Known)
        assert found.value.word in ("regression", "incomplete", "ok")  # its statistics are not the test's
        with pytest.raises(QueryError, match="no run"):
            jobs.ask("w", 1, work.judge, str(nights), "none")
    finally:
        jobs.close()


# ---- the command


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("args", "token", "says"),
    [
        (("--write",), None, "--write needs a token"),
        (("--write", "--host", "0.0.0.0"), None, "--write needs a token"),
        (("--write",), "short", "16 are the least"),
        (("--token-file", "FILE"), None, "goes with --write"),
        (("--write", "--token-file", "EMPTY"), None, "EMPTY: its first line is empty"),
        (("--write", "--token-file", "NONE"), None, "'NONE' does not exist"),
        (("--host", "no.such.host.invalid"), None, "cannot listen on"),
        (("--port", "70000"), None, "70000"),
    ],
)
def test_it_does_not_start(
    nights: Any, cli: Cli, tmp_path: Path, monkeypatch: Any, args: Any, token: Any, says: str
) -> None:
    monkeypatch.delenv("GROUPBENCH_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("GROUPBENCH_TOKEN", token)
    (tmp_path / "FILE").write_text(TOKEN)
    (tmp_path / "EMPTY").touch()
    monkeypatch.chdir(tmp_path)
    result = cli("serve", *args)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.sqlite
def test_who_connects_and_asks_nothing_is_sent_away(nights: Any, monkeypatch: Any) -> None:
    import socket
    import urllib.request

    import uvicorn

    from groupbench.tracker.serve import connection

    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    worker = ThreadPoolExecutor(1)
    app = create_app(str(nights), hosts=frozenset(LOOPBACK), jobs=Jobs(worker))
    listener = socket.create_server(("127.0.0.1", 0))
    where = listener.getsockname()
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=connection.Connection, log_level="error", limit_concurrency=3, timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        idle = [socket.create_connection(where, 30) for _ in range(4)]
        idle[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: local")  # and never the rest
        for one in idle:
            assert one.recv(100) == b""
            one.close()
        with socket.create_connection(where, 30) as kept:  # who has asked may ask again
            for _ in range(2):
                kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                told = kept.recv(10_000)
                while not told.endswith(b"}"):
                    told += kept.recv(10_000) or b"closed}"
                assert told.startswith(b"HTTP/1.1 200 ")
                time.sleep(0.7)
        with urllib.request.urlopen(f"http://127.0.0.1:{where[1]}/healthz", timeout=30) as answer:
            assert answer.status == 200
    finally:
        server.should_exit = True
        thread.join(30)
        worker.shutdown()
        listener.close()


@pytest.mark.sqlite
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, (0, 130)), (signal.SIGTERM, (0,))], ids=["int", "term"])
def test_it_runs_by_its_command_and_ends_when_it_is_told_to(
    nights: Any, tmp_path: Path, number: int, codes: tuple[int, ...]
) -> None:
    import socket
    import urllib.request

    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "groupbench.tracker", "--db", str(nights), "serve", "--port", "0", "--write"]
    process = subprocess.Popen([*command, "--token-file", str(token)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address is not None, line
        assert "alerts can be dealt with" in line
        with urllib.request.urlopen(f"{address[0]}/overview.json", timeout=60) as answer:
            assert b'"run-007"' in answer.read()
        with socket.create_connection(("127.0.0.1", int(address[0].rpartition(":")[2])), 30) as raw:
            raw.sendall(b"GET /series?q=" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
        busy = subprocess.run([*command[:-3], "--port", address[0].rpartition(":")[2]], capture_output=True, text=True)
        assert (busy.returncode, "give another" in busy.stderr) == (2, True)
        process.send_signal(number)
        assert process.wait(30) in codes
        rest = process.stderr.read()
        assert "leaked" not in rest
        assert TOKEN not in line + rest
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()


def test_words_mean_what_they_mean_to_the_command(nights: Any) -> None:
    found = database.open_to_read(str(nights))
    with found.read() as session:
        for word in ("latest", "previous", "main", "003", "003" + "c" * 37):
            assert queries.stored_state(session, word) == query.resolve_commit(session, word)
    found.close()


# ---- what is told of it

DOCS = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


@pytest.mark.sqlite
def test_every_page_parameter_and_option_is_told(nights: Any, serve: Client) -> None:
    from groupbench.tracker.cli.serve import serve as command
    from groupbench.tracker.serve.alerting import ACTIONS

    client = serve()
    for route in client.app.routes:  # type: ignore[attr-defined]
        named = re.sub(
            r"\{(\w+)(:path)?\}", lambda found: {"key": "KEY", "name": "NAME"}.get(found[1], "ID"), route.path
        )
        assert f"{named}`" in DOCS or named in ("/overview", "/login", "/logout", "/static/NAME", "/alerts/change"), (
            named
        )
    assert "/alerts/change.json" in DOCS
    for page in ("/runs", "/runs/run-007", "/series", "/series/1", "/operators/grouped_gemm", "/compare", "/alerts"):
        known = client.get(f"{page}.json?nothing=1").json()["error"].partition("known: ")[2].split(", ")
        assert all(f"`{name}`" in DOCS or re.search(rf"`[a-z ]*\b{name}\b[^`]*`", DOCS) for name in known), (
            page,
            known,
        )
    assert all(f"`{action}`" in DOCS for action in ACTIONS)
    for option in command.params:
        assert all(name in DOCS for name in option.opts), option.opts
