"""Close connections of clients that stall, send floods, or have the most of all connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from groupbench.tracker.serve.turns import machine_of

PATIENCE_S = 10.0
"""Maximum time in seconds for the head of a request to arrive. Uvicorn itself has no such limit."""

STALLED_S = 60.0
"""Maximum time in seconds that a client may leave a response unread. The rest of it waits in memory."""

MOST = 400
"""Maximum number of open connections. Below 1024, a common limit of open files per process."""

LARGEST_HEAD = 64 * 1024
"""Maximum size of the head of a request in bytes."""

BACKLOG = 128
"""Maximum number of connections that wait to be accepted, and that are accepted before others are closed."""


class _Parser(h11.Connection):
    """A parser that refuses bodies in chunks. To read chunks of one byte would stop every page for seconds."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a body in chunks")
        return event


class Connection(H11Protocol):
    """A connection that is closed if its client stalls, or if its client has more of them than any other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, LARGEST_HEAD)
        self._patience: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self.machine = ""

    @property
    def busy(self) -> bool:
        """Return whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.machine = machine_of("" if self.client is None else self.client[0])
        self._patience = self.loop.call_later(PATIENCE_S, self._close)
        if len(self.connections) > MOST:
            self._make_room()

    def _make_room(self) -> None:
        """Close a connection of the client that has the most, if possible one without a request."""
        there = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        (machine, _), *_ = Counter(each.machine for each in there).most_common(1)
        min((each for each in there if each.machine == machine), key=lambda each: each.busy).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._holds_whole_request():
            self._take_no_more()
            return
        super().data_received(data)
        if self.busy:
            self._end_patience()
            if self._holds_whole_request() and self.conn.trailing_data[0]:
                self._take_no_more()
        elif self._patience is None:  # the head of another request, or the rest of a refused body
            self._patience = self.loop.call_later(PATIENCE_S, self._close)

    def _holds_whole_request(self) -> bool:
        return self.busy and self.conn.their_state is not h11.SEND_BODY

    def _take_no_more(self) -> None:
        """Close after the response, since a client that sends requests before it would fill the memory."""
        self.cycle.keep_alive = False
        self.flow.pause_reading()

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close(self) -> None:
        if not self.busy and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        self._end_stall()
        super().connection_lost(exc)
