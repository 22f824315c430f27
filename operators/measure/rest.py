"""A cell's breaks between bursts. The processes must be idle then, because other backends are measured.

The processor time that they have used is looked at, which no other process can change: a busy machine neither hides
work nor makes an idle cell look busy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from groupbench.operators.measure import witness
from groupbench.operators.measure.environment import host_threads
from groupbench.operators.measure.worker import Worker


@dataclass(frozen=True)
class Looks:
    """The tuned numbers of this module.

    A look that finds a cell busy counts as much as some idle ones. One proves nothing: a virtual machine that is
    stopped charges the time to the process that it was running. Three in a row are enough.
    """

    look_s: float = 0.5  # least time between two looks, so that a cell that works for a while is found in several
    least_s: float = 0.03  # time below which a look shows nothing
    busy: int = 4
    accused: int = 12  # the sum of a cell that disturbs others


LOOKS = Looks()

SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user lets idle threads of OpenMP spin, those of all backends."""
INTELS_OPENMP = ("libiomp5", "libomp.")
"""Libraries whose threads spin for 0.2 s after a burst. The first look in a break proves nothing then."""


class Rest:
    """Find out whether a cell's processes are idle in the breaks.

    worker   the cell's process
    device   cpu or cuda
    excused  whether work that preparation has started is still going on, which may end
    """

    _since: tuple[float, float] | None  # by `clocks`, at the last look

    def __init__(self, worker: Worker, device: str) -> None:
        self._worker = worker
        self._threads = 1 if device == "cuda" else host_threads()
        self._spins = any(name in os.environ for name in SPINNING)
        self.forget()

    def clocks(self) -> tuple[float, float]:
        """Return the time, and the processor time used by the cell's processes so far, in s."""
        return witness.now(), self._worker.processor_s()

    def begin(self) -> None:
        """Begin a break: a burst is over."""
        self._since, self._is_first = self.clocks(), True

    def disturb(self) -> None:
        """Let the cell's processes work in this break, because they are asked for something."""
        self._since = None

    def forget(self) -> None:
        """Begin to count again."""
        self._since = None
        self._balance, self._is_first = 0, True
        self._fault: str | None = None  # by the last look
        self.excused = False

    def look(self) -> None:
        """Look at the cell while others are measured."""
        if self._since is not None and witness.now() >= self._since[0] + LOOKS.look_s:
            self.end()

    def end(self) -> str | None:
        """Count the time since the last look. Return why the cell disturbs other measurements, or None."""
        is_due = self._since is not None and witness.now() >= self._since[0] + LOOKS.least_s
        if self._since is not None and is_due and self._balance < LOOKS.accused:
            self._fault = self.busy_since(self._since, self._is_first)
            self._since, self._is_first = self.clocks(), False
            self.excused = self.excused and self._fault is not None
            if not self.excused:
                self._balance = max(0, self._balance + (LOOKS.busy if self._fault else -1))
        return self._fault if self._balance >= LOOKS.accused else None

    @property
    def undecided(self) -> bool:
        """Return whether the last look has found the cell busy, but too few have."""
        return self._fault is not None and self._balance < LOOKS.accused

    def busy_since(self, before: tuple[float, float], is_first: bool) -> str | None:
        """Return why the cell's processes disturb others, if they have been busy since `clocks` returned `before`.

        Args:
            is_first: Whether a burst has ended then, whose threads may wait for another one.
        """
        (now_s, spent_s), (since_s, spent_before_s) = self.clocks(), before
        threads = self._threads if is_first or self._spins else 1
        fault = witness.restless(now_s - since_s, spent_s - spent_before_s, threads, self._spins)
        spun = fault and is_first and threads > 1 and self._worker.has_mapped(INTELS_OPENMP)
        return None if spun else fault
