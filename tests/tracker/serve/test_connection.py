"""Connections of clients that stall, that send what no browser sends, or that have very many of them."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn

from groupbench.tracker.serve import connection
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.jobs import Jobs
from groupbench.tracker.serve.security import LOOPBACK
from groupbench.tracker.serve.site import Site

pytestmark = pytest.mark.sqlite

Place = tuple[str, int]
Connect = Callable[..., socket.socket]

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def place(nights: Any) -> Iterator[Place]:
    """Return the address of a server that runs in a thread."""
    worker = ThreadPoolExecutor(1)
    app = create_app(str(nights), token="a-token-of-some-length", hosts=frozenset(LOOPBACK), jobs=Jobs(worker))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=connection.Connection, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(30)
    worker.shutdown()
    listener.close()


@pytest.fixture
def connect(place: Place) -> Iterator[Connect]:
    """Return a function that connects to the server."""
    opened: list[socket.socket] = []

    def connect(source: str = "127.0.0.1") -> socket.socket:
        opened.append(socket.create_connection(place, 30, source_address=(source, 0)))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def all_of(one: socket.socket) -> bytes:
    """Return what arrives until the server closes the connection."""
    received = b""
    try:
        while part := one.recv(100_000):
            received += part
    except ConnectionResetError:
        pass  # by unread data
    return received


def ask(one: socket.socket) -> None:
    """Send a request on a connection that stays open, and check its response."""
    one.sendall(HEAD + b"\r\n")
    received = b""
    while not received.endswith(b"}"):
        received += one.recv(10_000) or b"closed}"
    assert received.startswith(b"HTTP/1.1 200 ")


def test_who_connects_and_asks_nothing_is_sent_away(
    place: Place, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    idle = [connect() for _ in range(4)]
    idle[0].sendall(HEAD)  # and never the rest
    assert [all_of(each) for each in idle] == [b""] * 4
    kept = connect()  # who has asked may ask again
    for _ in range(2):
        ask(kept)
        time.sleep(0.7)
    kept.sendall(HEAD)  # but must then ask to the end
    assert all_of(kept) == b""
    with urllib.request.urlopen(f"http://127.0.0.1:{place[1]}/healthz", timeout=30) as response:
        assert response.status == 200


def test_who_has_the_most_connections_loses_one(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST", 4)
    reader = connect("127.0.0.2")
    ask(reader)
    form = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    greedy = [connect() for _ in range(3)]
    for each in greedy[:2]:
        each.sendall(form)  # and never the body
    ask(greedy[2])
    other = connect("127.0.0.3")
    ask(other)
    assert all_of(greedy[2]) == b""  # the one without a request
    for each in (reader, other):
        ask(each)


@pytest.mark.parametrize("parts", [1, 2], ids=["at once", "later"])
def test_requests_before_the_response_end_the_connection(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    facets, receive = Site.facets, connection.Connection.data_received
    begun, received = threading.Event(), threading.Event()
    sizes: list[int] = []

    def slowly(*args: Any) -> Any:
        begun.set()
        assert received.wait(60)
        return facets(*args)

    def note(self: connection.Connection, data: bytes) -> None:
        receive(self, data)
        sizes.append(len(data))
        if sum(sizes) == 2 * len(request):
            received.set()

    monkeypatch.setattr(Site, "facets", slowly)
    monkeypatch.setattr(connection.Connection, "data_received", note)
    one, request = connect(), HEAD + b"\r\n"
    one.sendall(request * (2 // parts))
    if parts == 2:
        assert begun.wait(60)
        one.sendall(request)
    assert all_of(one).count(b"HTTP/1.1 200 ") == 1


def test_bodies_in_chunks_are_refused(connect: Connect) -> None:
    one = connect()
    one.sendall(b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    assert all_of(one).startswith(b"HTTP/1.1 400 ")


def test_who_does_not_read_is_sent_away(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.2)
    one = connect()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    one.sendall(b"GET /static/plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
    one.recv(100)
    time.sleep(1)
    assert len(all_of(one)) < 4_000_000
