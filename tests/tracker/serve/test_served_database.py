"""The database of `groupbench serve`, its errors, and the work in the background."""

from __future__ import annotations

import html
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cases import Cli, refused
from sqlalchemy import delete, func, select, text
from starlette.testclient import TestClient

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.serve import database, queries, runs, site, verdict
from groupbench.tracker.serve.answers import MOST_WAITING, Answers, Known, Working
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.database import SlowError
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import Commit, Point, Run

from .conftest import Act, Client


def test_the_database_is_opened_to_read(nights: Any) -> None:
    opened = database.open_to_read(str(nights))
    with opened.read() as session, pytest.raises(Exception, match=r"readonly|read-only"):
        session.execute(text("DELETE FROM incident_event"))
    opened.close()


@pytest.mark.both
def test_a_statement_uses_one_core_of_postgresql(nights: Any) -> None:
    opened = database.open_to_read(str(nights))
    with opened.read() as session:
        if session.get_bind().dialect.name == "postgresql":
            settings = [session.scalar(text(f"SHOW {name}")) for name in ("max_parallel_workers_per_gather", "jit")]
            assert settings == ["0", "off"]
    opened.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.mark.both
def test_a_statement_is_interrupted_at_the_end_of_its_time(nights: Any) -> None:
    opened = database.open_to_read(str(nights))
    with pytest.raises(database.SlowError, match=r"longer than 0\.2 s"), opened.read(0.2) as session:
        session.execute(text(ENDLESS))
    with opened.read() as session:  # the limit was that of the session, not of its connection
        assert session.scalar(select(func.count(Run.id))) == 8
    opened.close()


def test_no_statement_starts_after_the_end_of_the_time(nights: Any) -> None:
    opened = database.open_to_read(str(nights))
    with pytest.raises(database.SlowError), opened.read(0) as session:
        session.scalar(select(Run.id))
    opened.close()


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/incidents", "groupbench incidents"),
        ("/runs", "groupbench list runs"),
        ("/series/1", "groupbench history"),
    ],
)
def test_a_slow_request_names_the_command_that_does_it(
    nights: Any, serve: Client, monkeypatch: pytest.MonkeyPatch, path: str, command: str
) -> None:
    client = serve()
    monkeypatch.setattr(database, "LIMITS", replace(database.LIMITS, request_s=0.2))
    for name in ("incident_counts", "find_runs", "one_series"):
        monkeypatch.setattr(queries, name, lambda session, *_, **__: session.execute(text(ENDLESS)))
    response = client.get(f"{path}.json")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    expected = f"the database takes longer than 0.2 s for this: ask for less, or run `{command}`"
    assert response.json()["error"] == expected
    assert expected in html.unescape(client.get(path).text)


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
    with pytest.raises(StoreError, match=r"is at revision 0001.*`groupbench list runs` migrates it"):
        create_app(str(old))
    assert old.read_bytes() == before
    assert "no such database" in refused(cli, "serve", db=tmp_path / "none.db")


@pytest.mark.sqlite
def test_a_file_whose_name_is_not_text(nights: Any, serve: Client, tmp_path: Path) -> None:
    """UTF-8 cannot encode the name, as Python holds it."""
    named = tmp_path / "\udcff.db"
    shutil.copy(nights, named)
    client = serve(named)
    assert "�.db" in client.get("/runs").text
    with sqlite3.connect(named) as connection:
        connection.execute("DROP TABLE incident_event")
    response = client.get("/incidents.json?state=all")
    assert (response.status_code, "�.db" in response.json()["error"]) == (503, True)


@pytest.mark.sqlite
def test_a_damaged_name_that_a_page_looks_up_is_damage(nights: Any, serve: Client) -> None:
    client = serve()
    with sqlite3.connect(nights) as connection:
        assert connection.execute("UPDATE incident SET state = 'agknowledged'").rowcount
    response = client.get("/incidents?state=all", headers={"Accept": "text/html"})
    assert (response.status_code, "damage" in response.text) == (503, True)


@pytest.mark.sqlite
def test_a_locked_database_is_reported_without_a_long_wait(
    nights: Any, serve: Client, monkeypatch: Any, bearer: Any, token: str, act: Act
) -> None:
    monkeypatch.setattr(database, "LIMITS", replace(database.LIMITS, busy_ms=50))
    client = serve(token=token)
    other = sqlite3.connect(nights, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        response = act(client, {**bearer, "Accept": "application/json"})
        assert response.status_code == 503
        assert "locked" in response.json()["error"]
        assert client.get("/incidents").status_code == 200  # readers go on
    finally:
        other.rollback()
        other.close()
    assert act(client).status_code == 303


@pytest.mark.sqlite
@pytest.mark.parametrize("page", ["/incidents.json?state=all", "/incidents.json?state=all&per_page=500"])
def test_a_damaged_value_is_named_in_the_response(nights: Any, serve: Client, page: str) -> None:
    client = serve()
    with sqlite3.connect(nights) as connection:
        connection.execute("UPDATE incident_event SET at = '2x26-01-01 00:00:00.000000'")
    response = client.get(page)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert "damaged database" in response.json()["error"]
    assert client.get("/runs").status_code == 200


def test_an_error_without_damage_is_a_bug(nights: Any, serve: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    monkeypatch.setattr(queries, "incident_counts", lambda _: {}["none"])
    with pytest.raises(KeyError):
        client.get("/incidents")
    client = TestClient(client.app, base_url="http://localhost:8642", raise_server_exceptions=False)
    assert client.get("/incidents").status_code == 500


def test_an_error_in_a_template_is_not_blamed_on_the_database(nights: Any, serve: Client, monkeypatch: Any) -> None:
    """Nor is it while the search for damage takes long."""
    searched = Event()
    monkeypatch.setattr(site, "damage_of", lambda _: searched.wait(60) and None)
    monkeypatch.setattr(site, "DAMAGE_S", 0.05)
    monkeypatch.setattr(runs, "overview", lambda *_: site.Page("incident.html", {}))
    client = TestClient(serve().app, base_url="http://localhost:8642", raise_server_exceptions=False)
    try:
        response = client.get("/")
    finally:
        searched.set()
    assert (response.status_code, "internal error" in response.text, "damage" in response.text) == (500, True, False)


def test_a_run_is_counted_again_when_it_changes(nights: Any, serve: Client, stored: Any, make: Any) -> None:
    client = serve()

    def counts() -> list[dict[str, int]]:
        return [run["counts"] for run in client.get("/runs.json").json()["runs"]]

    assert counts() == 8 * [{"ok": 4, "unavailable": 1}]
    stored([make(6, 3.0, backend="late", commit_facts={"branch": "main"})])
    assert [each["ok"] for each in counts()] == [4, 5, 4, 4, 4, 4, 4, 4]
    with open_store(str(nights), create=False) as store, store.write() as session:
        run = session.scalars(select(Run.id).order_by(Run.started.desc()).limit(1)).one()
        session.execute(delete(Point).where(Point.run_id == run, Point.status == "ok"))
    assert counts()[:2] == [{"unavailable": 1}, {"ok": 5, "unavailable": 1}]


def test_the_line_of_commits_is_read_again_when_a_run_or_a_commit_changes(
    nights: Any, serve: Client, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ingest` also completes the facts of a stored commit, without a new row."""
    served = serve().app.state.site  # type: ignore[attr-defined]

    def runs() -> tuple[int, ...]:
        with served.database.read() as session:
            _, (newest,) = queries.find_runs(session, [], limit=1, offset=0)
            every = served.every_line(session).runs
            assert set(served.line_through(session, newest).runs) <= set(every)
            return every

    before = runs()
    stored([make(9, commit_facts={"branch": "main"})])
    after = runs()
    assert after[1:] == before
    with open_store(str(nights), create=False) as store, store.write() as session:
        oldest, newest = (session.scalars(select(Commit).order_by(order)).first() for order in (Commit.id, -Commit.id))
        newest.parents, oldest.parents = [], [newest.hash]
    assert runs() != after
    with open_store(str(nights), create=False) as store, store.write() as session:
        session.execute(delete(Point).where(Point.run_id == after[0]))
        session.execute(delete(Run).where(Run.id == after[0]))
    assert after[0] not in runs()


def test_a_rejected_run_is_marked_and_leaves_the_line(nights: Any, serve: Client, cli: Any) -> None:
    client = serve()
    served = client.app.state.site  # type: ignore[attr-defined]

    def runs() -> int:
        with served.database.read() as session:
            return len(served.every_line(session).runs)

    before = runs()
    run = client.get("/runs.json").json()["runs"][0]["run"]
    cli("db", "reject", run, "--reason", "another job")
    assert runs() == before - 1
    assert client.get("/runs.json").json()["runs"][0]["rejected"] == "another job"
    for page in ("/runs", f"/runs/{run}"):
        assert "another job" in client.get(page).text
    cli("db", "reject", run, "--undo", "--reason", "a mistake")
    assert runs() == before
    assert "another job" not in client.get(f"/runs/{run}").text


def test_a_series_shows_new_facts_of_a_stored_run(nights: Any, serve: Client) -> None:
    client = serve()
    newest = client.get("/series/1.json").json()["points"][0]
    with open_store(str(nights), create=False) as store, store.write() as session:
        session.scalars(select(Commit).where(Commit.hash == newest["commit"])).one().subject = "a better subject"
    assert client.get("/series/1.json").json()["points"][0]["subject"] == "a better subject"


def test_a_history_without_its_older_points_has_no_older_latencies(nights: Any, serve: Client) -> None:
    client = serve()
    with client.app.state.site.database.read() as session:  # type: ignore[attr-defined]
        runs = sorted(session.scalars(select(Run.id)))
        some = [runs[-1], runs[-3]]
        assert set(queries.latencies(session, [1, 2], some)[1]) == set(some)
        assert queries.latencies(session, [1], []) == {1: {}}


def test_a_page_says_what_is_being_worked_out(nights: Any, serve: Client, monkeypatch: Any) -> None:
    go = threading.Event()
    judge = verdict.judge
    monkeypatch.setattr(verdict, "judge", lambda *args: (go.wait(30), judge(*args))[1])
    client = serve(patience=0)
    try:
        page, waiting = client.get("/"), client.get("/overview.json")
        assert page.status_code == 200
        assert "Judging" in page.text
        assert 'http-equiv="refresh"' in page.text
        assert waiting.json()["verdict"]["state"] == "judging"
        assert waiting.headers["retry-after"]
    finally:
        go.set()
    deadline = time.monotonic() + 30
    while "refresh" in client.get("/").text:
        assert time.monotonic() < deadline
    assert client.get("/overview.json").json()["verdict"]["state"] == "known"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StoreError("the disk is gone"), "the disk is gone"),
        (SlowError(60), "the database takes longer than 60 s for this; run `groupbench gate --run run-007`"),
    ],
    ids=["failed", "slow"],
)
def test_a_run_that_cannot_be_judged_is_shown_all_the_same(
    nights: Any, serve: Client, monkeypatch: Any, error: StoreError, text: str
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(verdict, "judge", broken)
    client = serve()
    overview = client.get("/overview.json").json()
    assert overview["verdict"] == {"state": "failed", "error": text}
    assert len(overview["runs"]) == 8
    assert f"could not be judged: {text}" in client.get("/").text
    assert client.get("/runs/run-007").status_code == client.get("/series/1").status_code == 200


def test_answers_are_kept_until_something_is_stored() -> None:
    calls: list[int] = []
    go = threading.Event()

    def work(number: int) -> Callable[[], int]:
        def work() -> int:
            calls.append(number)
            if number == 2:
                go.wait(30)
            if number == 3:
                raise QueryError("no such thing")
            return number

        return work

    answers = Answers(patience=30)
    question = ("verdict", "a")
    assert answers.ask(question, 1, work(1)) == answers.ask(question, 1, work(1)) == Known(1)
    assert calls == [1]
    assert answers.ask(question, 2, work(2), patience=0) == Known(1, stale=True)
    assert isinstance(answers.ask(("verdict", "b"), 2, work(1), patience=0), Working)
    assert answers.ask(("damage", "b"), 2, work(1)) == Known(1)  # verdicts do not delay a search for damage
    for other in range(MOST_WAITING + 2):
        last = answers.ask(("verdict", other), 2, work(1), patience=0)
    assert isinstance(last, Working)
    assert last.crowded
    go.set()
    assert answers.ask(question, 2, work(2)) == Known(2)
    for _ in range(2):  # an error is not kept
        with pytest.raises(QueryError, match="no such thing"):
            answers.ask(("verdict", "c"), 2, work(3))
    assert calls.count(3) == 2
