"""A cell's breaks between bursts. The processes must be idle then, because other backends are measured."""

from __future__ import annotations

import os

from groupbench.operators.measure import witness
from groupbench.operators.measure.worker import Worker

BUSY_BREAKS = 4
"""A cell disturbs others if its processes were busy in so many more breaks than they were idle in. A single busy break
proves nothing: a virtual machine that is stopped for a while charges the time to the process that it was running."""


class Rest:
    """Find out whether a cell's processes are idle in the breaks.

    worker  the cell's process
    device  cpu or cuda
    """

    def __init__(self, worker: Worker, device: str) -> None:
        self._worker, self._device = worker, device
        self._begun: tuple[float, float] | None = None  # by `clocks`, at the end of the last burst
        self._balance = 0  # breaks in which its processes were busy, less those in which they were idle

    def clocks(self) -> tuple[float, float]:
        """Return the time, and the processor time used by the cell's processes so far, in s."""
        return witness.now(), self._worker.processor_s()

    def begin(self) -> None:
        """Begin a break: a burst is over."""
        self._begun = self.clocks()

    def disturb(self) -> None:
        """Let the cell's processes work in this break, because they are asked for something."""
        self._begun = None

    def forget(self) -> None:
        """Begin to count again."""
        self._balance, self._begun = 0, None

    def end(self) -> str | None:
        """Count the ending break. Return why the cell disturbs other measurements, or None."""
        if self._begun is None:
            return None
        fault = self.busy_since(self._begun)
        self._balance = max(0, self._balance + (1 if fault else -1))
        return fault if self._balance >= BUSY_BREAKS else None

    @property
    def undecided(self) -> bool:
        """Return whether the last breaks were busy, but too few."""
        return 0 < self._balance < BUSY_BREAKS

    def busy_since(self, before: tuple[float, float]) -> str | None:
        """Return why the cell's processes disturb others, if they have been busy since `clocks` returned `before`."""
        (now_s, spent_s), (since_s, spent_before_s) = self.clocks(), before
        one_thread = self._device == "cuda" or os.environ.get("OMP_NUM_THREADS") == "1"
        threads = 1 if one_thread else len(os.sched_getaffinity(0))
        return witness.restless(now_s - since_s, spent_s - spent_before_s, threads)
