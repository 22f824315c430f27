"""Connections with requests: one that only stays open is closed, and leaves its place to others."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 10.0
"""From connecting to the end of the first request's head; uvicorn itself waits for it as long as it takes."""

MOST = 500
"""Connections at once; later ones get 503. Below 1024 files, which a process may often open."""


class Connection(H11Protocol):
    """One whose first request must come within `PATIENCE_S`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._patience = self.loop.call_later(PATIENCE_S, self._close)

    def _close(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)
