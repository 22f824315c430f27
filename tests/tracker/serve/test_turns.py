"""Clients take turns, and each is known by its address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from starlette.requests import Request

from groupbench.tracker.serve.turns import FullError, Turns, client_of

T = TypeVar("T")


def run(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of a scenario, in a thread of its own: the browser's tests leave an event loop in this one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(scenario())).result()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def ask(turns: Turns, order: list[str], names: str) -> list[asyncio.Task[None]]:
    """Ask for a turn with each name; its first letter is the client's."""

    async def one(name: str) -> None:
        await turns.acquire(name[0])
        order.append(name)

    return [asyncio.create_task(one(name)) for name in names.split()]


def test_clients_take_turns_whatever_the_number_of_their_requests() -> None:
    async def scenario() -> list[str]:
        turns, order = Turns(1, 1, 10), list[str]()
        ask(turns, order, "a1 a2 a3 a4 b1 b2 c1")
        await settle()
        while len(order) < 7:
            turns.release(order[-1][0])
            await settle()
        return order

    assert run(scenario) == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_one_client_leaves_room_for_others() -> None:
    async def scenario() -> list[list[str]]:
        turns, order, seen = Turns(3, 2, 10), list[str](), []
        ask(turns, order, "a1 a2 a3 b1 b2")
        await settle()
        seen.append(list(order))
        turns.release("b")
        await settle()
        seen.append(list(order))
        turns.release("a")
        await settle()
        seen.append(list(order))
        return seen

    first, then, last = run(scenario)
    assert first == ["a1", "a2", "b1"]
    assert then == [*first, "b2"]
    assert last == [*then, "a3"]


def test_too_many_waiting_requests_of_one_client_are_refused() -> None:
    async def scenario() -> list[str]:
        turns, order = Turns(1, 1, 2), list[str]()
        ask(turns, order, "a1 a2 a3")
        await settle()
        with pytest.raises(FullError):
            await turns.acquire("a")
        ask(turns, order, "b1")
        for _ in range(4):
            await settle()
            turns.release(order[-1][0])
        return order

    assert run(scenario) == ["a1", "a2", "b1", "a3"]


@pytest.mark.parametrize("granted", [False, True], ids=["while it waits", "as its turn comes"])
def test_a_request_that_goes_away_gives_up_its_turn(granted: bool) -> None:
    async def scenario() -> list[str]:
        turns, order = Turns(1, 1, 10), list[str]()
        tasks = ask(turns, order, "a1 b1 c1")
        await settle()
        if granted:
            turns.release("a")
        tasks[1].cancel()
        await settle()
        if not granted:
            turns.release("a")
        await settle()
        turns.release("c")
        assert not turns._working
        assert not turns._waiting
        return order

    assert run(scenario) == ["a1", "c1"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("198.51.100.7", [], "198.51.100.7"),
        ("198.51.100.7", ["203.0.113.9"], "198.51.100.7"),  # not a proxy: the header says nothing
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["192.0.2.1, 203.0.113.9"], "203.0.113.9"),  # what a client wrote itself
        ("10.0.0.1", ["192.0.2.1", "203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["unknown"], ""),
        ("2001:db8:1:2::1", [], "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", [], "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("::ffff:198.51.100.7", [], "198.51.100.7"),
        ("::FFFF:a00:1", ["203.0.113.9"], "203.0.113.9"),  # the first proxy again
        ("10.0.0.1", ["203.0.113.9, ::ffff:a00:2"], "203.0.113.9"),
        ("10.0.0.1", ["0:0:0:0:0:ffff:cb00:7109"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9:50123"], "203.0.113.9"),
        ("10.0.0.1", ["[2001:db8:1:2::1]:50123"], "2001:db8:1:2::/64"),
        ("10.0.0.1", ["fe80::1%eth0"], "fe80::/64"),
        ("10.0.0.1", ["," * 60_000], "10.0.0.1"),
        ("10.0.0.1", ["1" * 60_000], ""),
        ("10.0.0.1", ["[" * 60_000], ""),
    ],
)
def test_the_address_of_a_client(peer: str, forwarded: list[str], client: str) -> None:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    request = Request({"type": "http", "client": (peer, 1), "headers": headers})
    assert client_of(request, frozenset({"10.0.0.1", "10.0.0.2"})) == client
