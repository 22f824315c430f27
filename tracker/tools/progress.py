"""Report how far a long command is, on stderr, also if stderr is not a terminal."""

from __future__ import annotations

import sys
import threading
import time

INTERVAL_S = 1.5
"""Seconds between two reports, and before the first."""


class Progress:
    """Counts steps and their results, and writes a line every INTERVAL_S seconds. A context manager, which ends it."""

    def __init__(self, total: int, noun: str, interval: float | None = None) -> None:
        self.total, self.noun = total, noun
        self.interval = INTERVAL_S if interval is None else interval
        self.done = self.results = self.known = 0
        self.began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._shown = False  # whether a terminal shows a line that the next one replaces

    def add(self, steps: int = 1, results: int = 0, known: bool = False) -> None:
        """Count further steps, and their results. Known ones took no time, which says nothing about the rest."""
        self.done += steps
        self.results += 0 if known else results
        self.known += steps if known else 0

    def line(self) -> str:
        """Return the state as text: `12 of 1,405 files, 72,000 results, 9,000 results/s, about 14 min left`."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        parts = [f"{self.done:,} of {self.total:,} {self.noun}"]
        if self.results:
            parts.append(f"{self.results:,} results, {self.results / seconds:,.0f} results/s")
        if self.done > self.known:
            left = max(self.total - self.done, 0) * seconds / (self.done - self.known)
            parts.append(f"about {f'{left / 60:.0f} min' if left >= 90 else f'{left:.0f} s'} left")
        return ", ".join(parts)

    def clear(self) -> None:
        """Remove the line from a terminal, before other output."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        if self.total > 1:  # of a single step, there is nothing to report
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.clear()

    def _report(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                if sys.stderr.isatty():
                    self._shown = True
                    sys.stderr.write(f"\r\033[K{self.line()}")
                else:
                    sys.stderr.write(f"{self.line()}\n")
                sys.stderr.flush()
            except (OSError, ValueError):  # closed
                return
