"""Let requests take turns by client, so that one client's many requests delay another's by few."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Collection

from starlette.requests import Request

_NETWORK_BITS = 64
"""Leading bits of an IPv6 address that name a client: one machine may use all addresses that share them."""

_WITH_PORT = re.compile(r"\[(.*)\](?::\d+)?|([\d.]+):\d+")
"""An address as some proxies forward it, such as 192.0.2.1:80 or [2001:db8::1]:80."""


class FullError(Exception):
    """A client has too many waiting requests."""


class Turns:
    """Let some requests work at once, and the clients of the others take turns.

    at_once  maximum number of working requests
    each     maximum number of working requests of one client
    waiting  maximum number of waiting requests of one client
    """

    def __init__(self, at_once: int, each: int, waiting: int) -> None:
        self._at_once, self._each, self._most_waiting = at_once, each, waiting
        self._working: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client is first

    async def acquire(self, client: str) -> None:
        """Wait for a turn. Raises FullError if too many requests of this client wait already."""
        queue = self._waiting.get(client, ())
        if not queue and self._may_start(client):
            self._working[client] += 1
            return
        if len(queue) >= self._most_waiting:
            raise FullError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._drop(client, turn)
            else:  # the turn came at the same moment
                self.release(client)
            raise

    def release(self, client: str) -> None:
        """End a request, and start the next."""
        self._working[client] -= 1
        if not self._working[client]:
            del self._working[client]
        while (following := next(filter(self._may_start, self._waiting), None)) is not None:
            queue = self._waiting[following]
            turn = queue.popleft()
            self._waiting.move_to_end(following)
            if not queue:
                del self._waiting[following]
            if not turn.done():
                self._working[following] += 1
                turn.set_result(None)

    def _may_start(self, client: str) -> bool:
        return self._working.total() < self._at_once and self._working[client] < self._each

    def _drop(self, client: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[client]


def client_of(request: Request, proxies: Collection[str]) -> str:
    """Return the address of a request's client.

    A connection from one of these proxies has the address that the nearest other machine had, by X-Forwarded-For. A
    client may write anything into that header, but only before the addresses that the proxies add.
    """
    address = "" if request.client is None else request.client.host
    forwarded = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
    while plain_address(address) in proxies and forwarded:
        address = forwarded.pop().strip() or address
    return machine_of(address)


def machine_of(address: str) -> str:
    """Return the part of an IP address that names a machine, or an empty text for another address."""
    plain = plain_address(address)
    return str(ipaddress.ip_network((plain, _NETWORK_BITS), strict=False)) if ":" in plain else plain


def plain_address(text: str) -> str:
    """Return an IP address without a port, and in IPv4 if it is IPv4 within IPv6; an empty text for another text."""
    with_port = _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address(text if with_port is None else with_port[1] or with_port[2])
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
