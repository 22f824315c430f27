"""The parent's end of a pipe to a process that runs foreign code, which may write anything into it, or nothing.

A backend can find the pipe among its descriptors. Bytes that are not a reply are noticed at once, since a reply starts
with a token that only the last request named, and neither a half reply nor a full pipe can hold up this process.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

REPLY_BYTES = 64 << 20
"""Maximum size of one reply."""
REPORT_EVERY_S = 10.0
"""Time between two reports that a reply is still awaited."""
NOTICE_S = 30.0
"""Time after which a warning names the cell that is awaited. A choice: few compilations take as long."""
_HEADER = struct.Struct("!i")
"""The length of a message, as `Connection.send_bytes` writes it for messages of less than 2 GiB."""


class BadReply(Exception):
    """The process wrote bytes that are not a reply to the last request."""


class Channel:
    """A duplex pipe that this process uses with time limits. The other end is a `Connection`.

    Args:
        connection: This process's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unread = bytearray()
        self.token = b""
        os.set_blocking(connection.fileno(), False)

    def send(self, message: Any, limit_s: float) -> None:
        """Send an object. Raises TimeoutError if it is not read in time, and OSError if the pipe is closed."""
        body = ForkingPickler.dumps(message)
        left = memoryview(_HEADER.pack(len(body)) + bytes(body))
        until = time.monotonic() + limit_s
        while left:
            try:
                left = left[os.write(self._connection.fileno(), left) :]
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                time.sleep(0.01)

    def receive(self, over: int, limit_s: float, still: Callable[[float], None] = lambda waited_s: None) -> bytes:
        """Return the next reply, without its token.

        Args:
            over: A descriptor that becomes readable when the process has ended.
            limit_s: Longest time to wait for the whole reply.
            still: Called with the time waited so far, every REPORT_EVERY_S.

        Raises:
            TimeoutError: There is no whole reply in time.
            EOFError: The process has ended, or closed its end.
            BadReply: These bytes are not a reply to the last request.
        """
        begun = time.monotonic()
        while (reply := self._whole_reply()) is None:
            waited_s = time.monotonic() - begun
            if waited_s >= limit_s:
                raise TimeoutError
            ready = wait([self._connection, over], min(REPORT_EVERY_S, limit_s - waited_s))
            if self._connection in ready:
                self._read()
            elif ready:
                raise EOFError
            else:
                still(time.monotonic() - begun)
        return reply

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            data = os.read(self._connection.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._unread += data

    def _whole_reply(self) -> bytes | None:
        """Return the reply that has arrived and forget it, or None if a part is missing."""
        start = _HEADER.size + len(self.token)
        if len(self._unread) < start:
            return None
        (size,) = _HEADER.unpack_from(self._unread)
        if not len(self.token) <= size <= REPLY_BYTES or self._unread[_HEADER.size : start] != self.token:
            raise BadReply("something else was written into the pipe of its process")
        end = _HEADER.size + size
        if len(self._unread) < end:
            return None
        reply = bytes(self._unread[start:end])
        del self._unread[:end]
        return reply


def warn_of_wait(log: logging.Logger, cell: str, waited_s: float, limit_s: float) -> None:
    """Report a cell without an answer, with the option that limits the wait."""
    log.warning("%s: no answer for %.0f s; it fails after %g s (--timeout)", cell, waited_s, limit_s)
