"""Close connections that send no request, so that they do not use up the server's connections."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 10.0
"""Maximum time in seconds from connecting to the end of the first request's head. Uvicorn itself has no such limit."""

MOST = 500
"""Maximum number of open connections; further ones get 503. Below 1024, a common limit of open files per process."""


class Connection(H11Protocol):
    """A connection that is closed if its first request does not arrive within `PATIENCE_S`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._patience = self.loop.call_later(PATIENCE_S, self._close)

    def _close(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)
