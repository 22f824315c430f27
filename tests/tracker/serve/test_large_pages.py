"""Large pages come from a process of their own, and are those that a thread makes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupbench.tracker.serve import app, responses
from groupbench.tracker.serve.jobs import Jobs

Client = Callable[..., TestClient]

LARGE = (
    "/series?per_page=500",
    "/series.json?per_page=500&q=triton",
    "/series/1?last=5000",
    "/series/1.json?last=5000",
    "/runs/run-007?per_page=500",
    "/runs/run-006.json?per_page=500&verdict=1",
    "/operators/grouped_gemm.json?per_page=80",
    "/alerts?state=all&per_page=500",
    "/compare.json?a=previous&b=latest&per_page=500",
    "/series?per_page=500&backend=none",
    "/series?per_page=500&page=2",
    "/series?per_page=501",
)


def test_they_are_the_same_as_those_of_a_thread(
    serve: Client, nights: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, processes = serve(token=token), serve(token=token, apart=True)
    form = {"token": token, "who": "Ada"}
    for client in (threads, processes):
        assert client.post("/login", data=form).status_code == 303
    # Both servers have the same session, so that even the words of their forms are equal.
    cookie = threads.cookies["groupbench"]
    sites = [client.app.state.site for client in (threads, processes)]  # type: ignore[attr-defined]
    sites[1].guard._sessions = sites[0].guard._sessions
    made: list[str] = []
    in_thread = app.respond

    def respond(*args: Any) -> Any:
        made.append(args[1].__name__)
        return in_thread(*args)

    expected = [_facts(threads, path, cookie) for path in LARGE]
    monkeypatch.setattr(app, "respond", respond)
    assert [_facts(processes, path, cookie) for path in LARGE] == expected
    assert made == ["compare"]
    assert {status for status, *_ in expected} == {200, 400, 404}


def _facts(client: TestClient, path: str, cookie: str) -> tuple[int, str | None, Any]:
    client.cookies.clear()
    response = client.get(path, headers={"Cookie": f"groupbench={cookie}"})
    body = response.json() if path.partition("?")[0].endswith(".json") else response.text
    if isinstance(body, dict):
        for part in (body, body.get("verdict") or {}):
            part.pop("seconds", None)  # that the job took
    return response.status_code, response.headers.get("Retry-After"), body


def test_what_a_job_raises_is_raised_in_the_page(db: Any, nights: Any) -> None:
    jobs = Jobs(patience=0)
    question = responses._Question("of", 1, os.stat, ("/nowhere",), 60, False)
    jobs_of_page = responses._Results({"of": responses._result(_Failing(), question)})
    with pytest.raises(responses.StoreError, match="no room"):
        jobs_of_page.ask("of", 1, os.stat)
    jobs.close()


@pytest.mark.sqlite
def test_their_process_spares_what_exists_at_its_start_from_collection(nights: Any) -> None:
    pages = responses.PageWorker(str(nights))
    assert pages._process.submit(gc.get_freeze_count, seconds=60).result() > 10_000
    pages.close()


class _Failing(Jobs):
    def ask(self, *args: Any, **options: Any) -> Any:
        raise responses.StoreError("no room")
