"""Test the jobs of `groupbench serve`: long work runs in the background, and its results are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.serve.jobs import WAITING, Jobs, Known, Working

Client = Callable[..., TestClient]


def test_a_page_says_what_is_being_worked_out(nights: Any, serve: Client, monkeypatch: Any) -> None:
    from groupbench.tracker.serve import work

    go = threading.Event()
    judge, compare = work.judge, work.compare
    monkeypatch.setattr(work, "judge", lambda *args: (go.wait(30), judge(*args))[1])
    monkeypatch.setattr(work, "compare", lambda *args: (go.wait(30), compare(*args))[1])
    client = serve(patience=0)
    page, compared = client.get("/"), client.get("/compare?a=000&b=latest")
    try:
        for response, word in ((page, "Judging"), (compared, "Comparing")):
            assert response.status_code == 200
            assert word in response.text
            assert 'http-equiv="refresh"' in response.text
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
    overview = client.get("/overview.json").json()
    assert overview["verdict"] == {"state": "failed", "error": "the disk is gone"}
    assert len(overview["runs"]) == 8
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
def test_jobs_are_done_by_a_process_of_their_own(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupbench.tracker.serve import work

    monkeypatch.setattr("groupbench.tracker.serve.jobs.UNWANTED_S", 0.0)  # asking once and waiting is enough
    jobs = Jobs(patience=60)
    try:
        outcome = jobs.ask("v", 1, work.judge, str(nights), "run-007")
        assert isinstance(outcome, Known)
        assert outcome.value.word in ("regression", "incomplete", "ok")  # its statistics are not the test's
        with pytest.raises(QueryError, match="no run"):
            jobs.ask("w", 1, work.judge, str(nights), "none")
    finally:
        jobs.close()
