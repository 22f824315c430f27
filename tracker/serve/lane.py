"""Run heavy requests one at a time, so that other requests stay fast.

Python runs one thread at a time, so that a few requests for 500 rows or for many patterns would delay every page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from groupbench.tracker.errors import StoreError
from groupbench.tracker.serve.parameters import Parameters

WAITING = 3
"""Maximum number of waiting heavy requests; further ones are refused."""

WAIT_S = 2.0
"""Maximum time in seconds that a heavy request waits before it is refused."""

REST = 2
"""Pause after a heavy request, as a multiple of its duration."""

REFUSED_S = 1.0
"""Delay in seconds of a refusal, which limits the load by a client that repeats refused requests."""

CROWDED_S = 0.15
"""Delay in seconds of the response for a comparison whose queue is full. Short, since the pages of readers wait too."""

SWITCH_S = 0.0005
"""Time in seconds for which a thread may hold Python's global lock while another waits for it.

A page releases the lock for each row that it reads. With Python's default, it would wait 5 ms each time to get it back.
"""

_LONGEST_PART, _LONGEST_HISTORY = 50, 500
_MOST_TERMS = 5

ADVICE = "ask for less, or come back later"


class CrowdedError(StoreError):
    """The queue of heavy requests is full, or its wait was too long."""


def is_heavy(parameters: Parameters) -> bool:
    """Return whether a request asks for far more than the pages' own forms and links do."""
    words = sum(len(text.split()) for text in parameters.raw("q"))
    terms = sum(1 + text.count(",") for name in ("shape", "where") for text in parameters.raw(name))
    return (
        words + terms > _MOST_TERMS
        or any(_number(text) > _LONGEST_PART for text in parameters.raw("per_page"))
        or any(_number(text) > _LONGEST_HISTORY for text in parameters.raw("last"))
    )


def _number(text: str) -> float:
    """Return the number in a text, or 0 if it is not one. The view will refuse such a text."""
    return float(text) if text.isdecimal() else 0.0


class Lane:
    """Let light requests pass, and heavy ones take turns with a pause after each."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._waiting = 0

    @asynccontextmanager
    async def enter(self, parameters: Parameters) -> AsyncIterator[None]:
        """Wait until the request may start. Raises CrowdedError if the queue is full or the wait is too long."""
        if not is_heavy(parameters):
            yield
            return
        if self._waiting >= WAITING:
            await asyncio.sleep(REFUSED_S)
            raise CrowdedError(f"{WAITING} requests for long lists wait already; {ADVICE}")
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise CrowdedError(f"other requests for long lists took more than {WAIT_S:g} s; {ADVICE}") from error
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            loop.call_later(REST * (loop.time() - began), self._turn.release)
