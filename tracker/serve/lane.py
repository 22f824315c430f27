"""Limit how many requests work at once, so that no client delays the pages of another by much.

Python runs one thread at a time, so a page of 60 ms takes 600 ms while nine others work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.serve.parameters import Parameters
from groupbench.tracker.serve.turns import FullError, Turns

AT_ONCE, EACH = 4, 2
"""Maximum number of light requests that work at once: of all clients, and of one. Others take turns."""

WAITING_LIGHT = 64
"""Maximum number of waiting light requests of one client; further ones are refused."""

WAITING = 3
"""Maximum number of waiting heavy requests of one client; further ones are refused."""

WAIT_S = 2.0
"""Maximum time in seconds that a heavy request waits before it is refused."""

REST = 2
"""Pause after a heavy request that works in a thread, as a multiple of its duration."""

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
    """Too many requests of a client wait already, or a heavy one has waited too long."""


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
    """Let requests take turns by client, heavy ones apart from the others and one at a time."""

    def __init__(self) -> None:
        self._light = Turns(AT_ONCE, EACH, WAITING_LIGHT)
        self._heavy = Turns(1, 1, WAITING)

    @asynccontextmanager
    async def enter(self, client: str, heavy: bool, rest: float = 0) -> AsyncIterator[None]:
        """Wait until the request may start. Raises CrowdedError if the queue is full or the wait is too long.

        rest  pause after the request, as a multiple of its duration
        """
        turns = self._heavy if heavy else self._light
        try:
            async with asyncio.timeout(WAIT_S if heavy else None):
                await turns.acquire(client)
        except FullError as error:
            await asyncio.sleep(REFUSED_S)
            raise CrowdedError(f"too many requests wait already; {ADVICE}") from error
        except TimeoutError as error:
            raise CrowdedError(f"other requests for long lists took more than {WAIT_S:g} s; {ADVICE}") from error
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            loop.call_later(rest * (loop.time() - began), turns.release, client)
