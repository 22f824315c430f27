"""Heavy requests take turns apart from light ones, and neither wait without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from starlette.testclient import TestClient

from groupbench.tracker.serve import jobs, lane
from groupbench.tracker.serve.lane import CrowdedError, Lane, is_heavy
from groupbench.tracker.serve.parameters import Parameters
from groupbench.tracker.serve.turns import Turns

Client = Callable[..., TestClient]

T = TypeVar("T")

CLIENT = "198.51.100.7"


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Return the result of a scenario, in a thread of its own: the browser's tests leave an event loop in this one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, scenario).result()


@pytest.mark.parametrize(
    ("query", "heavy"),
    [
        ("", False),
        ("per_page=50&page=7", False),
        ("per_page=51", True),
        ("per_page=9&per_page=500", True),
        ("per_page=many", False),  # refused by the page
        ("last=500", False),
        ("last=5000", True),
        ("q=triton+bf16+G=4+N=512+K=1024", False),
        ("q=a+b+c+d+e+f", True),
        ("where=M>=64,N=512&shape=*G=4*", False),
        ("&".join(f"shape=*{n}*" for n in range(6)), True),
        ("where=" + ",".join(f"M>={n}" for n in range(6)), True),
    ],
)
def test_large_requests_are_heavy(query: str, heavy: bool) -> None:
    assert is_heavy(Parameters.of_query(query)) == heavy


def test_heavy_requests_take_turns_and_light_ones_pass() -> None:
    async def scenario() -> list[str]:
        taken, events, release = Lane(), [], asyncio.Event()

        async def heavy(name: str) -> None:
            async with taken.enter(CLIENT, True):
                events.append(f"{name} begins")
                await release.wait()
                events.append(f"{name} ends")

        tasks = [asyncio.create_task(heavy(name)) for name in "ab"]
        while not events:
            await asyncio.sleep(0)
        async with taken.enter(CLIENT, False):
            events.append("light")
        release.set()
        await asyncio.gather(*tasks)
        return events

    assert run(scenario()) == ["a begins", "light", "a ends", "b begins", "b ends"]


def test_a_client_with_many_requests_delays_those_of_another_by_one() -> None:
    async def scenario() -> list[str]:
        taken, events = Lane(), []

        async def heavy(name: str) -> None:
            async with taken.enter(name[0], True):
                await asyncio.sleep(0)
                events.append(name)

        await asyncio.gather(*(heavy(name) for name in ("a1", "a2", "a3", "b1")))
        return events

    assert run(scenario()) == ["a1", "a2", "b1", "a3"]


@pytest.mark.parametrize("heavy", [False, True])
def test_a_queue_that_is_full_refuses_and_recovers(monkeypatch: pytest.MonkeyPatch, heavy: bool) -> None:
    monkeypatch.setattr(lane, "REFUSED_S", 0.0)
    working, waiting = (1, lane.WAITING) if heavy else (lane.EACH, lane.WAITING_LIGHT)

    async def scenario() -> None:
        taken, release = Lane(), asyncio.Event()

        async def ask() -> None:
            async with taken.enter(CLIENT, heavy):
                await release.wait()

        tasks = [asyncio.create_task(ask()) for _ in range(working + waiting)]
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(CrowdedError, match="ask for less"):
            await ask()
        tasks.pop().cancel()  # a client that went away gives up its place
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask()))
        release.set()
        await asyncio.gather(*tasks)
        async with taken.enter(CLIENT, heavy):
            pass

    run(scenario())


@pytest.mark.parametrize(("rest", "refused"), [(0, False), (10**9, True)], ids=["no rest", "a long rest"])
def test_a_heavy_request_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch, rest: int, refused: bool) -> None:
    """For the request before it, and for the lane's rest after that."""
    monkeypatch.setattr(lane, "WAIT_S", 0.02)

    async def scenario() -> list[bool]:
        taken, refusals = Lane(), []

        async def heavy() -> None:
            try:
                async with taken.enter(CLIENT, True):
                    refusals.append(False)
            except CrowdedError:
                refusals.append(True)

        async with taken.enter(CLIENT, True, rest):
            await heavy()
        await asyncio.sleep(0.001)
        await heavy()
        return refusals

    assert run(scenario()) == [True, refused]


def full(at_once: int, each: int, waiting: int) -> Turns:
    """Return turns, of which those for heavy requests have neither a turn nor room to wait."""
    return Turns(0, 0, 0) if at_once == 1 else Turns(at_once, each, waiting)


def test_a_page_of_500_rows_is_refused_while_others_wait(
    serve: Client, nights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "Turns", full)
    monkeypatch.setattr(lane, "REFUSED_S", 0.0)
    client = serve()
    response = client.get("/series.json?per_page=500")
    assert (response.status_code, "ask for less" in response.json()["error"]) == (503, True)
    assert response.headers["Retry-After"] == "5"
    assert client.get("/series.json?per_page=50").status_code == 200


def test_a_refusal_is_held_back(serve: Client, nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "Turns", full)
    monkeypatch.setattr(jobs, "WAITING", 0)
    held: list[float] = []

    async def sleep(seconds: float) -> None:
        held.append(seconds)

    client = serve()
    monkeypatch.setattr(lane.asyncio, "sleep", sleep)
    assert client.get("/series.json?per_page=500").status_code == 503
    assert client.get("/compare.json?a=previous&b=latest").json()["state"] == "crowded"
    assert client.get("/series.json").status_code == 200
    assert held == [lane.REFUSED_S, lane.CROWDED_S]


def test_small_answers_take_turns_too(serve: Client, nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "Turns", lambda *_: Turns(0, 0, 0))
    monkeypatch.setattr(lane, "REFUSED_S", 0.0)
    client = serve()
    for path, status in (("/nothing", 404), ("/login", 503), ("/healthz", 503)):
        response = client.get(path, headers={"Accept": "text/html"})
        assert (response.status_code, response.headers["Content-Type"]) == (status, "text/plain; charset=utf-8"), path
