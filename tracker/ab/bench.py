"""Measure two sides alternately on one device until it is clear whether they differ.

A bench has a long-lived process for each side and serves any number of cells; comparing.py measures one of them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from groupbench.tracker.ab.comparing import RunningComparison
from groupbench.tracker.ab.result import (
    REFRESH_BLOCKS,
    AbCell,
    AbResult,
    Block,
    RecordsError,
    SideAccuracy,
    append_record,
    as_json,
    exit_code,
    rule_for,
)
from groupbench.tracker.ab.side import AbError, AbSide, SideError, SideFailure, SideProcess
from groupbench.tracker.tools.device_lock import warn_if_shared

__all__ = [
    "AbCell",
    "AbError",
    "AbResult",
    "AbSide",
    "Bench",
    "Block",
    "RecordsError",
    "SideAccuracy",
    "as_json",
    "exit_code",
    "rule_for",
]


class Closing(ABC):
    """A context manager whose end is `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release the processes and folders that this object uses."""


class AnswerError(AbError):
    """A side that runs failed to answer a request: `status` is usage, timeout or error."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class Bench(Closing):
    """Compares two sides, with one long-lived process for each. A context manager.

    budget_s      time for measuring one comparison, without its preparation; 0 measures nothing
    min_effect    relative change below which the sides are the same; None: by device and latency, see `defaults`
    alpha         false-positive rate per comparison
    timeout_s     time within which a side must answer
    seed          seed, together with the number of the comparison, of the order and the placements
    only_changed  skip timing if the compiled kernels are equal
    times_right_alone  skip timing if head's result is wrong
    rest          rest before each burst, once per block, or (auto) depending on the length of a burst
    records       file to which each comparison is appended, with its bursts
    results       the comparisons so far
    """

    def __init__(
        self,
        base: AbSide,
        head: AbSide,
        *,
        budget_s: float = 60.0,
        min_effect: float | None = None,
        alpha: float = 0.001,
        timeout_s: float = 300.0,
        seed: int = 0,
        only_changed: bool = False,
        times_right_alone: bool = False,
        refresh_blocks: int = REFRESH_BLOCKS,
        rest: Literal["auto", "burst", "block"] = "auto",
        records: Path | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.base, self.head = base, head
        self.budget_s, self.min_effect, self.alpha, self.timeout_s = budget_s, min_effect, alpha, timeout_s
        self.seed, self.only_changed, self.refresh_blocks, self.rest = seed, only_changed, refresh_blocks, rest
        self.records, self.progress = records, progress
        self.times_right_alone = times_right_alone
        self.results: list[AbResult] = []
        self._sides: tuple[SideProcess, SideProcess] | None = None

    def close(self) -> None:
        """End both sides. The next comparison starts new ones."""
        sides, self._sides = self._sides, None
        for process in sides or ():
            process.leave()
        for process in sides or ():
            process.close()

    @property
    def device(self) -> str | None:
        """The device of the sides, cuda or cpu; None before they are started."""
        return None if self._sides is None else str(self._sides[0].facts["device"])

    def start(self, device: str = "auto") -> str:
        """Start both sides and return their device. Raises AbError."""
        self.sides(device, SideError)
        return str(self.device)

    def cells(self, device: str = "auto", **selection: Any) -> tuple[list[AbCell], list[str]]:
        """Return (cells that both sides have and can run, a note for each other cell).

        selection  operator, and optionally backends, shapes, suites, dtypes, mode and plugins, as for side.py's `cells`

        Raises AbError if both sides lack a named item, SideError if one side lacks it or does not start.
        """
        base, head = self._reasons(device, selection)
        cells, notes = [], []
        for key in {**head, **base}:
            if key not in base or key not in head:
                missing = self.base if key not in base else self.head
                notes.append(f"{key[0]}/{key[1]} {key[2]} {key[3]}: not in {missing.title}")
            elif base[key] and head[key]:
                notes.append(f"{key[0]}/{key[1]} {key[2]} {key[3]}: unavailable: {base[key]}")
            else:
                plugins = tuple(selection.get("plugins") or ())
                operator, backend, shape, dtype, mode = key
                cells.append(AbCell(operator, backend, shape, dtype, mode=mode, device=device, plugins=plugins))
        return cells, notes

    def _reasons(self, device: str, selection: dict[str, Any]) -> list[dict[tuple[str, ...], str | None]]:
        """Return for each side its cells, by the key in `cells`, with the reason why one is unavailable."""
        reasons: list[dict[tuple[str, ...], str | None]] = []
        failures: list[SideFailure] = []
        for process in self.sides(device, SideError):
            try:
                listed = process.ask("cells", self.timeout_s, **selection)
            except SideFailure as failure:
                failures.append(failure)
                continue
            keys = ("operator", "backend", "shape", "dtype", "mode")
            reasons.append({tuple(cell[key] for key in keys): cell["unavailable"] for cell in listed})
        if failures:
            kind = AbError if len(failures) == 2 else SideError
            raise kind(f"{failures[0].title}: {failures[0].reason}")
        return reasons

    def ask_base(self, verb: str, device: str, **arguments: Any) -> Any:
        """Send base a request and return its answer. Raises AbError if it fails."""
        return self._ask(0, verb, device, arguments)

    def ask_head(self, verb: str, device: str, **arguments: Any) -> Any:
        """Send head a request and return its answer. Raises AnswerError if head fails, AbError if it does not start."""
        return self._ask(1, verb, device, arguments)

    def _ask(self, number: int, verb: str, device: str, arguments: dict[str, Any]) -> Any:
        try:
            return self.sides(device, AbError)[number].ask(verb, self.timeout_s, **arguments)
        except SideFailure as failure:
            raise AnswerError(failure.reason, failure.status) from None

    def forget(self) -> None:
        """End the cells' processes but not the sides, because the imported files may have changed."""
        for process in self._sides or ():
            process.send("end", self.timeout_s)
        for process in self._sides or ():
            with contextlib.suppress(SideFailure):
                process.receive()

    def compare(self, cell: AbCell) -> AbResult:
        """Compare the sides on a cell. If a side fails, the result's verdict is `failed`.

        Raises AbError if no comparison is possible (no such device, sides on different devices), RecordsError if it
        cannot be recorded.
        """
        seed = self.seed + len(self.results)
        comparison = RunningComparison(self, cell, seed)
        try:
            result = comparison.run()
        except SideFailure as failure:
            result = comparison.failed(failure)
        except BaseException:
            self.close()
            raise
        self.results.append(result)
        if self.records is not None:
            append_record(self.records, result)
        return result

    def sides(self, device: str, problem: type[AbError] | None = None) -> tuple[SideProcess, SideProcess]:
        """Return the running sides on a device, after starting them if necessary."""
        alive = self._sides is not None and all(process.alive for process in self._sides)
        if self._sides is not None and (not alive or device not in (self._sides[0].device, self.device)):
            self.close()
        if self._sides is None:
            base = SideProcess("base", self.base, device)
            try:
                sides = (base, SideProcess("head", self.head, device))
            except BaseException:
                base.close()
                raise
            self._sides = sides
            for process in sides:
                process.send("hello", self.timeout_s, device=device)
            try:
                for process in sides:
                    process.hello()
            except SideFailure as failure:
                self.close()
                if problem is not None:
                    raise problem(f"{failure.title}: {failure.message}") from None
                raise
            devices = [process.facts["device"] for process in sides]
            if devices[0] != devices[1]:
                self.close()
                raise AbError(f"base would run on {devices[0]} and head on {devices[1]}; choose one with --device")
        warn_if_shared("groupbench", str(self.device), self._sides[0].facts["environment"].get("gpu_uuid"))
        return self._sides
