"""Test the background work of `groupbench serve`: pages do not wait for it, and its results are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.serve import comparing, verdict
from groupbench.tracker.serve.answers import WAITING, Answers, Known, Working
from groupbench.tracker.serve.database import SlowError

Client = Callable[..., TestClient]


def test_a_page_says_what_is_being_worked_out(nights: Any, serve: Client, monkeypatch: Any) -> None:
    go = threading.Event()
    judge, compare = verdict.judge, comparing.side_by_side
    monkeypatch.setattr(verdict, "judge", lambda *args: (go.wait(30), judge(*args))[1])
    monkeypatch.setattr(comparing, "side_by_side", lambda *args: (go.wait(30), compare(*args))[1])
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
    assert answers.ask(("compare", "b"), 2, work(1)) == Known(1)  # verdicts do not delay comparisons
    for other in range(WAITING + 2):
        last = answers.ask(("verdict", other), 2, work(1), patience=0)
    assert isinstance(last, Working)
    assert last.crowded
    go.set()
    assert answers.ask(question, 2, work(2)) == Known(2)
    for _ in range(2):  # an error is not kept
        with pytest.raises(QueryError, match="no such thing"):
            answers.ask(("verdict", "c"), 2, work(3))
    assert calls.count(3) == 2
