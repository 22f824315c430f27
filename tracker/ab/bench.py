"""Measure two sides alternately on one device until it is clear whether they differ.

A bench has a long-lived process for each side and serves any number of cells; comparing.py measures one cell. The bench
holds the lease of the device for one cell at a time, so another command may measure between two cells.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from groupbench.tracker.ab.answers import ListedCell
from groupbench.tracker.ab.comparing import RunningComparison
from groupbench.tracker.ab.result import AbCell, AbResult, AbSettings, append_record
from groupbench.tracker.ab.side import AbError, AbSide, SideError, SideFailure, SideProcess
from groupbench.tracker.tools.lease import lease, require_free

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AnswerError(AbError):
    """A side that runs failed to answer a request: `status` is usage, timeout or error."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class Bench(contextlib.AbstractContextManager["Bench"]):
    """Compares two sides, with one long-lived process for each. A context manager.

    Args:
        base: The earlier side.
        head: The later side.
        settings: Settings of each comparison.
        seed: Seed for burst orders and placements, together with the comparison's number. Drawn by default: an order
            that every comparison shares would favour the same side in all of them.
        records: File to which each comparison is appended, with its bursts.
        progress: Called with a line of text before and during a comparison.

    Attributes:
        results: The comparisons so far.
    """

    def __init__(
        self,
        base: AbSide,
        head: AbSide,
        settings: AbSettings = AbSettings(),  # noqa: B008 # frozen
        *,
        seed: int | None = None,
        records: Path | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.base, self.head, self.settings = base, head, settings
        self.seed = secrets.randbits(48) if seed is None else seed
        self.records, self.progress = records, progress
        self.results: list[AbResult] = []
        self._sides: tuple[SideProcess, SideProcess] | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

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
        return None if self._sides is None else self._sides[0].facts.device

    def start(self, device: str = "auto") -> str:
        """Start both sides and return their device. Raises AbError."""
        self.sides(device, SideError)
        return str(self.device)

    def cells(self, device: str = "auto", **selection: Any) -> tuple[list[AbCell], list[str]]:
        """Return the cells that both sides have and can run, and a note for each other cell.

        Args:
            device: auto, cuda or cpu.
            selection: `operator`, and optionally `backends`, `shapes`, `suites`, `dtypes`, `mode` and `plugins`.

        Raises:
            AbError: Both sides lack a named item.
            SideError: One side lacks it or does not start.
            Busy: The names are right, and another command measures on the device.
        """
        base, head = self._listed(device, selection)
        self._require_free()
        cells, notes = [], []
        for key in {**head, **base}:
            operator, backend, shape, dtype, mode = key
            name = f"{operator}/{backend} {shape} {dtype}"
            if key not in base or key not in head:
                missing = self.base if key not in base else self.head
                notes.append(f"{name}: not in {missing.title}")
            elif base[key] and head[key]:
                notes.append(f"{name}: unavailable: {base[key]}")
            else:
                plugins = tuple(selection.get("plugins") or ())
                cells.append(AbCell(operator, backend, shape, dtype, mode=mode, device=device, plugins=plugins))
        return cells, notes

    def _listed(self, device: str, selection: dict[str, Any]) -> list[dict[tuple[str, str, str, str, str], str | None]]:
        """Return each side's cells by key, with the reason why one is unavailable."""
        reasons = []
        failures: list[SideFailure] = []
        for process in self.sides(device, SideError):
            try:
                listed = process.ask(list[ListedCell], "cells", self.settings.timeout_s, **selection)
            except SideFailure as failure:
                failures.append(failure)
                continue
            reasons.append({cell.key: cell.unavailable for cell in listed})
        if failures:
            kind = AbError if len(failures) == 2 else SideError
            raise kind(f"{failures[0].title}: {failures[0].reason}")
        return reasons

    def ask_base(self, kind: type[T], verb: str, device: str, **arguments: Any) -> T:
        """Send base a request and return its answer. Raises AbError if it fails."""
        return self._ask(0, kind, verb, device, arguments)

    def ask_head(self, kind: type[T], verb: str, device: str, **arguments: Any) -> T:
        """Send head a request and return its answer. Raises AnswerError if head fails, AbError if it does not start."""
        return self._ask(1, kind, verb, device, arguments)

    def _ask(self, number: int, kind: type[T], verb: str, device: str, arguments: dict[str, Any]) -> T:
        try:
            return self.sides(device, AbError)[number].ask(kind, verb, self.settings.timeout_s, **arguments)
        except SideFailure as failure:
            raise AnswerError(failure.reason, failure.status) from None

    def forget(self) -> None:
        """End the cells' processes but not the sides, because the imported files may have changed."""
        for process in self._sides or ():
            process.send("end", self.settings.timeout_s)
        for process in self._sides or ():
            with contextlib.suppress(SideFailure):
                process.receive(object)

    def compare(self, cell: AbCell, budget_s: float | None = None, within_s: float = math.inf) -> AbResult:
        """Compare the sides on a cell. If a side fails, the result's verdict is `failed`.

        Args:
            cell: The cell to measure on both sides.
            budget_s: Time in s for measuring this comparison; None: the bench's.
            within_s: Time in s, preparation included.

        Raises:
            AbError: No comparison is possible: no such device, or sides on different devices.
            Busy: Another command measures on the device, for longer than this one may wait.
            RecordsError: The result cannot be recorded.
        """
        settings = self.settings if budget_s is None else replace(self.settings, budget_s=budget_s)
        seed = self.seed + len(self.results)
        comparison = RunningComparison(self.base, self.head, cell, settings, seed, self.progress, within_s)
        logger.info("compare %s: %s with %s, at most %g s", cell, self.head.title, self.base.title, settings.budget_s)
        try:
            sides = self.sides(cell.device)
            with lease(str(self.device), sides[0].facts.gpu_uuid):
                result = comparison.run(sides)
        except SideFailure as failure:
            result = comparison.failed(failure)
        except BaseException:
            self.close()
            raise
        logger.info("%s: %s, %d blocks in %.1f s", cell, result.conclusion, result.blocks, result.seconds)
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
                process.send("hello", self.settings.timeout_s, device=device)
            try:
                for process in sides:
                    process.hello()
            except SideFailure as failure:
                self.close()
                if problem is not None:
                    raise problem(f"{failure.title}: {failure.message}") from None
                raise
            devices = [process.facts.device for process in sides]
            if devices[0] != devices[1]:
                self.close()
                raise AbError(f"base would run on {devices[0]} and head on {devices[1]}; choose one with --device")
        return self._sides

    def _require_free(self) -> None:
        """Raise Busy if another command measures on the device and this one may not wait for it."""
        assert self._sides is not None
        require_free(str(self.device), self._sides[0].facts.gpu_uuid)
