"""Use all GPUs of one host, with a queue and a process for each GPU."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import slots
from groupbench.operators.fleet.batch import Batch, Before, Card, Problem
from groupbench.operators.fleet.drive import Fleet, NotReached, WorkerDied
from groupbench.operators.fleet.slots import Slot
from groupbench.operators.measure.wire import Job
from groupbench.operators.measure.worker import OPENING_S
from groupbench.tracker.facts.record import Record
from groupbench.tracker.tools import logs
from groupbench.tracker.tools.parent import end_with_parent

log = logging.getLogger(__name__)


class LocalFleet(Fleet):
    """A process for each slot. If a process dies, the batch is measured once more, on another."""

    def __init__(
        self,
        chosen: Sequence[Slot],
        *,
        named: bool = True,
        history: Mapping[Problem, Before] | None = None,
        planned: Sequence[Job] = (),
        budget_s: float = math.inf,
        measure: Callable[[Batch], list[Record]] = batches.measure,
        look: Callable[[Slot], Card] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open and lock the cards.

        Args:
            named: Whether the user named the GPUs, so that all must work.
            planned: The run's jobs. Processes of the first ones start before they are submitted.
            say: Prints a line about a GPU that is left out.

        Raises UsageError, alone.Busy if another run has a card, and GroupbenchError if a card does not open.
        """
        super().__init__(history=history, budget_s=budget_s)
        self._measure = measure
        self._processes: dict[str, _Process] = {}
        started = [_Process(slot) for slot in chosen]
        opening = [_opening(process, look, planned) for process in started]
        try:
            for process, card in zip(started, opening, strict=True):
                try:
                    self._add(process, card)
                except Exception as error:
                    refusal = error if isinstance(error, GroupbenchError) else _unopened(process.slot, error)
                    if named:
                        raise refusal from error
                    say(f"skipped GPU {process.slot.name}: {refusal}")
                    _kill([process])
            if not self.cards:
                raise GroupbenchError("no GPU is left to measure on")
        except BaseException:
            _kill(started)
            raise

    def _add(self, process: _Process, opening: Future[Card]) -> None:
        log.info("waiting up to %g s for GPU %s to open", OPENING_S, process.slot.name)
        card = opening.result(OPENING_S)
        if card.machine.environment.gpu_uuid != process.slot.uuid:
            slots.lock(card.machine.environment.gpu_uuid)
        self.cards.append(card)
        self._processes[card.name] = process

    def run_on(self, card: Card, batch: Batch) -> list[Record]:
        names = [one.name for one in self.cards]
        pair = card.name, names[(names.index(card.name) + 1) % len(names)]
        for name in pair:
            if self._closed.is_set():
                raise NotReached("interrupted before it was measured")
            with contextlib.suppress(BrokenProcessPool):
                return self._processes[name].run(self._measure, batch)
            log.info("the process of %s died at %s", name, batch)
        raise WorkerDied(f"its worker died on {' and then '.join(pair)}")

    def close(self, at_once: bool = False) -> None:
        if at_once:
            self._closed.set()
            _kill(list(self._processes.values()))
        for thread in self._threads.values():
            thread.join()
        _kill(list(self._processes.values()))


class _Process:
    """One slot's process, which is restarted when it dies."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._guard = threading.Lock()
        self.pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        # The process is spawned: a fork would inherit this process's environment and the locks of its threads.
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=(self.slot,))

    def run(self, measure: Callable[[Batch], list[Record]], batch: Batch) -> list[Record]:
        """Return the batch's records. Raises BrokenProcessPool if the process dies."""
        with self._guard:
            pool = self.pool
        try:
            return pool.submit(measure, batch).result()
        except BrokenProcessPool:
            with self._guard:
                if self.pool is pool:
                    self.pool = self._new()
            raise


def _begin(slot: Slot) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logs.configure(0)
    slots.prepare_process(slot)
    end_with_parent()


def _kill(processes: Sequence[_Process]) -> None:
    """Kill the processes, and wait for all of them together."""
    for process in processes:
        for started in list((process.pool._processes or {}).values()):
            started.kill()
    for process in processes:
        process.pool.shutdown(wait=True, cancel_futures=True)


def _opening(process: _Process, look: Callable[[Slot], Card] | None, planned: Sequence[Job]) -> Future[Card]:
    """Return the card, once the slot's process has opened it. The GPU is locked first, if the UUID is known."""
    if look is not None:
        return process.pool.submit(look, process.slot)
    try:
        slots.lock(process.slot.uuid)
    except Exception as error:
        refused: Future[Card] = Future()
        refused.set_exception(error)
        return refused
    return process.pool.submit(slots.examine, process.slot, process.slot.uuid is not None, batches.together(planned))


def _unopened(slot: Slot, error: Exception) -> GroupbenchError:
    return GroupbenchError(f"GPU {slot.name}: {type(error).__name__}: {error}")


def look(gpus: str | None, device: str) -> list[tuple[Slot, Card]]:
    """Return slots with their locked cards, for workers that outlive a run. None means all GPUs, or one slot on a CPU.

    Raises GroupbenchError, and UsageError if this needs a GPU and torch sees none.
    """
    from groupbench.operators.measure.environment import resolve_device

    requested, device = device, resolve_device(device)
    if device == "cpu" != requested:
        raise UsageError("torch sees no GPU here; use --device cpu to try the command without one")
    chosen = slots.choose(gpus or ("0" if device == "cpu" else "all"), device)
    processes = [_Process(slot) for slot in chosen]
    try:
        cards = [process.pool.submit(slots.examine, process.slot).result(OPENING_S) for process in processes]
    finally:
        _kill(processes)
    for card in cards:
        slots.lock(card.machine.environment.gpu_uuid)
    return list(zip(chosen, cards, strict=True))
