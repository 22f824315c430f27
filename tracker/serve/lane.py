"""A lane for heavy requests: one at a time, so that the others stay fast.

Python runs one thread at a time, and the pages share the processor. A few requests for 500 rows or for many patterns
would therefore make every page wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from groupbench.tracker.errors import StoreError
from groupbench.tracker.serve.parameters import Parameters

WAITING = 3
"""Heavy requests that may wait; a further one is asked to come back."""

WAIT_S = 2.0
"""How long a heavy request may wait before it is asked to come back."""

REST = 2
"""How long the lane rests after a heavy request, as a multiple of the time that it worked."""

REFUSED_S = 1.0
"""How long such a refusal is held back: a client that repeats refused requests without end is work too."""

CROWDED_S = 0.15
"""The same for a comparison that finds the queue full. It is shorter, since a page for a reader comes back so too."""

SWITCH_S = 0.0005
"""How long a thread may hold Python's lock while another waits for it.

A page gives the lock up for each row that it reads, and would wait 5 ms, Python's default, to get it back each time.
"""

_LONGEST_PART, _LONGEST_HISTORY = 50, 500
_MOST_TERMS = 5

ADVICE = "ask for less, or come back later"


class CrowdedError(StoreError):
    """Too many heavy requests wait already."""


def is_heavy(parameters: Parameters) -> bool:
    """Return whether a request asks for much more than the forms and links of the pages do."""
    words = sum(len(text.split()) for text in parameters.raw("q"))
    terms = sum(1 + text.count(",") for name in ("shape", "where") for text in parameters.raw(name))
    return (
        words + terms > _MOST_TERMS
        or any(_number(text) > _LONGEST_PART for text in parameters.raw("per_page"))
        or any(_number(text) > _LONGEST_HISTORY for text in parameters.raw("last"))
    )


def _number(text: str) -> float:
    """Return the number in a text, or 0 if it is not one: the page will refuse it."""
    return float(text) if text.isdecimal() else 0.0


class Lane:
    """Lets light requests pass and heavy ones take turns, with a rest after each."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._waiting = 0

    @asynccontextmanager
    async def enter(self, parameters: Parameters) -> AsyncIterator[None]:
        """Wait until the request may begin. Raises CrowdedError."""
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
