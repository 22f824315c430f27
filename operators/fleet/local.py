"""All GPUs of one host: a queue and a process for each, which sees no other.

The process has CUDA_VISIBLE_DEVICES set and its share of the processors before it imports torch. Each GPU is locked
for the run, as a night locks its own, so that two runs never measure on one card.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from groupbench.operators import alone
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Batch, Before, Card, Problem
from groupbench.operators.fleet.drive import NotReached, WorkerDied
from groupbench.operators.measure import worker
from groupbench.operators.measure.warden import end_with_parent
from groupbench.operators.sizes import counted
from groupbench.tracker.device_lock import HELD, lock_file
from groupbench.tracker.record import Record

START_S = 300
"""Importing torch and opening the GPU; the first time on a machine may take minutes."""


@dataclass(frozen=True)
class Slot:
    """Where one queue's process runs.

    variables   of its environment, set before it imports anything
    processors  that it may use; none given are all
    """

    name: str
    device: str
    variables: Mapping[str, str]
    processors: tuple[int, ...] = ()


def slots(asked: str, device: str) -> list[Slot]:
    """What `--gpus` names: `all`, or numbers by comma, as CUDA counts the visible ones. Raises UsageError.

    On a CPU each number is a process more beside the others, which spoils the times and tries everything else.
    """
    if device == "cpu":
        if asked == "all":
            raise UsageError("--gpus all: there is no GPU here; --gpus 0,1 tries two processes side by side")
        numbers = _numbers(asked)
        return _share([Slot(f"cpu {number}", "cpu", {}) for number in numbers])
    visible = visible_gpus()
    if not visible:
        said = "there is no GPU here, or CUDA_VISIBLE_DEVICES lets none through"
        raise UsageError(f"--gpus {asked}: {said}; --device cpu measures without one")
    numbers = list(range(len(visible))) if asked == "all" else _numbers(asked)
    for number in numbers:
        if number >= len(visible):
            here = counted(len(visible), "GPU")
            raise UsageError(f"--gpus {asked}: there is no GPU {number}, but {here} here, numbered from 0")
    return _share([Slot(visible[n], "cuda", {"CUDA_VISIBLE_DEVICES": visible[n]}) for n in numbers])


def visible_gpus() -> list[str]:
    """A name for each GPU that CUDA_VISIBLE_DEVICES lets through, such as it takes itself. Opens none of them.

    Raises UsageError if they cannot be counted.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return [name.strip() for name in said.split(",") if name.strip()]
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot count this machine's GPUs ({said}); set CUDA_VISIBLE_DEVICES") from error
    return [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]


def _numbers(asked: str) -> list[int]:
    texts = [text.strip() for text in asked.split(",")]
    if not all(text.isascii() and text.isdecimal() for text in texts):
        raise UsageError(f"--gpus {asked!r} is neither all nor numbers by comma")
    numbers = list(map(int, texts))
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise UsageError(f"--gpus {asked} names {twice} twice: one queue measures on a GPU, so give each once")
    return numbers


def _share(found: list[Slot]) -> list[Slot]:
    """Each with its part of the processors: what one compiles does not take the time of what another launches."""
    processors = sorted(os.sched_getaffinity(0))
    each = len(processors) // max(len(found), 1)
    if len(found) < 2 or not each:
        return found
    return [
        Slot(slot.name, slot.device, slot.variables, tuple(processors[i * each : (i + 1) * each]))
        for i, slot in enumerate(found)
    ]


class LocalFleet:
    """A process for each slot; a batch whose process dies is measured again on another, once."""

    def __init__(
        self,
        found: Sequence[Slot],
        *,
        named: bool = True,  # by the user: then none of them may be missing
        known: Mapping[Problem, Before] | None = None,
        budget_s: float = math.inf,
        imports: Sequence[str] = (worker.DYNAMO,),
        measure: Callable[[Batch], list[Record]] = batches.measure,
        look: Callable[[Slot], Card] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises UsageError, alone.Busy where another run has a card, GroupbenchError where one does not open."""
        self.known, self._measure = known or {}, measure
        self._until = time.monotonic() + budget_s
        self._closed = False
        self._processes: list[_Process] = []
        self._queues: list[ThreadPoolExecutor] = []
        self.cards: list[Card] = []
        started = [_Process(slot, imports) for slot in found]
        asked = [process.pool.submit(look or _card, process.slot) for process in started]
        try:
            for process, card in zip(started, asked, strict=True):
                try:
                    opened = card.result(START_S)
                    _lock(opened)
                except Exception as error:
                    said = error if isinstance(error, GroupbenchError) else f"{type(error).__name__}: {error}"
                    if named:
                        raise (
                            error
                            if isinstance(error, GroupbenchError)
                            else GroupbenchError(f"GPU {process.slot.name}: {said}")
                        ) from error
                    say(f"left out: GPU {process.slot.name}: {said}")
                    process.kill()
                    continue
                self.cards.append(opened)
                self._processes.append(process)
            if not self.cards:
                raise GroupbenchError("no GPU is left to measure on")
        except BaseException:
            for process in started:
                process.kill()
            raise
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix=card.name) for card in self.cards]

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        places = batches.assign(work, self.cards, self.known)
        return [self._queues[place].submit(self._run, place, b) for place, b in zip(places, work, strict=True)]

    def _run(self, place: int, batch: Batch) -> list[Record]:
        if self._closed or time.monotonic() >= self._until:
            raise NotReached("not begun within the budget")
        other = (place + 1) % len(self._processes)
        for attempt in (place, other):
            with contextlib.suppress(BrokenProcessPool):
                return self._processes[attempt].run(self._measure, batch)
            if self._closed:
                raise NotReached("interrupted before it was measured")
        names = " and then ".join(self.cards[number].name for number in (place, other))
        raise WorkerDied(f"its worker died on {names}")

    def close(self, at_once: bool = False) -> None:
        self._closed = True
        if at_once:
            for process in self._processes:
                process.kill()
        for queue in self._queues:
            queue.shutdown(wait=True, cancel_futures=at_once)
        for process in self._processes:
            process.kill()


class _Process:
    """One slot's process, begun again when it has died."""

    def __init__(self, slot: Slot, imports: Sequence[str] = (worker.DYNAMO,)) -> None:
        self.slot, self._imports = slot, imports
        self._guard = threading.Lock()
        self.pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        # Spawned: forked from here it would have this process's environment and whatever threads hold.
        given = (self.slot, self._imports)
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=given)

    def run(self, measure: Callable[[Batch], list[Record]], batch: Batch) -> list[Record]:
        """Raises BrokenProcessPool if the process dies meanwhile."""
        with self._guard:
            pool = self.pool
        try:
            return pool.submit(measure, batch).result()
        except BrokenProcessPool:
            with self._guard:
                if self.pool is pool:
                    self.pool = self._new()
            raise

    def kill(self) -> None:
        for process in list((self.pool._processes or {}).values()):
            process.kill()
        self.pool.shutdown(wait=True, cancel_futures=True)


def _begin(slot: Slot, imports: Sequence[str]) -> None:
    """In the slot's process, before it imports torch."""
    worker.preload(*imports)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the client's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(slot.variables)
    if slot.processors:
        os.sched_setaffinity(0, slot.processors)
    end_with_parent()


def look(asked: str | None, device: str) -> list[tuple[Slot, Card]]:
    """Slots with their cards, locked, for workers that live longer than a run; None are all GPUs, on a CPU one slot.

    Raises GroupbenchError; UsageError where there is no GPU and the CPU was not asked for.
    """
    from groupbench.operators.measure.environment import resolve_device

    asked_device, device = device, resolve_device(device)
    if device == "cpu" != asked_device:
        raise UsageError("there is no GPU here that torch sees; --device cpu tries workers out without one")
    found = slots(asked or ("0" if device == "cpu" else "all"), device)
    processes = [_Process(slot) for slot in found]
    try:
        cards = [process.pool.submit(_card, process.slot).result(START_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for card in cards:
        _lock(card)
    return list(zip(found, cards, strict=True))


def _card(slot: Slot) -> Card:
    machine = batches.machine_here(slot.device)
    return Card(machine.environment.gpu_uuid or slot.name, machine, batches.code())


def _lock(card: Card) -> None:
    """Hold the GPU for this process, unless the night that this is part of holds it. Raises Busy."""
    uuid = card.machine.environment.gpu_uuid
    if uuid is not None and os.environ.get(HELD) != str(lock_file(uuid)):
        alone.take(uuid, ["tritonbench", "--gpus"])
