"""Use all GPUs of one host, with a queue and a process for each GPU. The process sees only its own GPU.

CUDA_VISIBLE_DEVICES and the process's share of the CPUs are set before it imports torch. Each GPU is locked during the
run, like the GPU of a nightly run, so that two runs never measure on one card.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
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
from groupbench.operators.measure.cell import Job
from groupbench.operators.measure.warden import end_with_parent
from groupbench.tracker.facts.record import Record
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools.device_lock import HELD, lock_file

UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A GPU's UUID as NVML and CUDA_VISIBLE_DEVICES write it."""


@dataclass(frozen=True)
class Slot:
    """The device and environment of one queue's process.

    variables   environment variables, set before the process imports anything
    processors  CPUs that the process may use; an empty tuple means all
    """

    name: str
    device: str
    variables: Mapping[str, str]
    processors: tuple[int, ...] = ()

    @property
    def uuid(self) -> str | None:
        """Return the GPU's whole UUID if it is the name. CUDA also accepts a part of it, or a number."""
        return self.name if self.device == "cuda" and UUID.fullmatch(self.name) else None


def slots(gpus: str, device: str) -> list[Slot]:
    """Return the slots of `--gpus`: `all`, or numbers of visible GPUs joined by commas. Raises UsageError.

    On a CPU each number is another process. They disturb each other's times, so this is only a trial of the rest.
    """
    if device == "cpu":
        if gpus == "all":
            raise UsageError("--gpus all: no GPU is visible; --gpus 0,1 runs two processes in parallel")
        numbers = numbered(gpus)
        return _share([Slot(f"cpu {number}", "cpu", {}) for number in numbers])
    visible = visible_gpus()
    if not visible:
        reason = "no GPU is visible (CUDA_VISIBLE_DEVICES can hide them)"
        raise UsageError(f"--gpus {gpus}: {reason}; use --device cpu to measure without one")
    numbers = list(range(len(visible))) if gpus == "all" else numbered(gpus)
    for number in numbers:
        if number >= len(visible):
            here = counted(len(visible), "GPU")
            raise UsageError(f"--gpus {gpus}: GPU {number} does not exist: {here} here, numbered from 0")
    return _share([Slot(visible[n], "cuda", {"CUDA_VISIBLE_DEVICES": visible[n]}) for n in numbers])


def visible_gpus() -> list[str]:
    """Return the names of the visible GPUs, as CUDA_VISIBLE_DEVICES accepts them, without opening the GPUs.

    Raises UsageError if the GPUs cannot be counted.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot count this machine's GPUs ({reason}); set CUDA_VISIBLE_DEVICES") from error
    return [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]


def numbered(gpus: str) -> list[int]:
    """Return the numbers of `--gpus`, which need not exist. Raises UsageError."""
    texts = [text.strip() for text in gpus.split(",")]
    if not all(text.isascii() and text.isdecimal() for text in texts):
        raise UsageError(f"--gpus {gpus!r} is neither all nor numbers joined by commas")
    numbers = list(map(int, texts))
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise UsageError(f"--gpus {gpus} names {twice} twice: each GPU has one queue, so name it once")
    return numbers


def _share(chosen: list[Slot]) -> list[Slot]:
    """Return the slots, each with a share of the CPUs, so that compiling in one does not slow launches in another."""
    processors = sorted(os.sched_getaffinity(0))
    each = len(processors) // max(len(chosen), 1)
    if len(chosen) < 2 or not each:
        return chosen
    return [
        Slot(slot.name, slot.device, slot.variables, tuple(processors[i * each : (i + 1) * each]))
        for i, slot in enumerate(chosen)
    ]


class LocalFleet:
    """A process for each slot. If a process dies, its batch is measured once more, on another."""

    def __init__(
        self,
        chosen: Sequence[Slot],
        *,
        named: bool = True,  # the user named the GPUs, so all must work
        history: Mapping[Problem, Before] | None = None,
        planned: Sequence[Job] = (),  # processes of the first ones start before they are submitted
        budget_s: float = math.inf,
        measure: Callable[[Batch], list[Record]] = batches.measure,
        look: Callable[[Slot], Card] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open and lock the cards.

        Raises UsageError, alone.Busy if another run has a card, and GroupbenchError if a card does not open.
        """
        self.history, self._measure = history or {}, measure
        self._until = time.monotonic() + budget_s
        self._closed = False
        self._processes: list[_Process] = []
        self._queues: list[ThreadPoolExecutor] = []
        self.cards: list[Card] = []
        started = [_Process(slot) for slot in chosen]
        opening = [_opening(process, look, planned) for process in started]
        try:
            for process, card in zip(started, opening, strict=True):
                try:
                    opened = card.result(batches.OPENING_S)
                    if opened.machine.environment.gpu_uuid != process.slot.uuid:
                        _lock(opened.machine.environment.gpu_uuid)
                except Exception as error:
                    reason = error if isinstance(error, GroupbenchError) else f"{type(error).__name__}: {error}"
                    if named:
                        raise (
                            error
                            if isinstance(error, GroupbenchError)
                            else GroupbenchError(f"GPU {process.slot.name}: {reason}")
                        ) from error
                    say(f"skipped GPU {process.slot.name}: {reason}")
                    _kill([process])
                    continue
                self.cards.append(opened)
                self._processes.append(process)
            if not self.cards:
                raise GroupbenchError("no GPU is left to measure on")
        except BaseException:
            _kill(started)
            raise
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix=card.name) for card in self.cards]

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        places = batches.assign(work, self.cards, self.history)
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
            _kill(self._processes)
        for queue in self._queues:
            queue.shutdown(wait=True, cancel_futures=at_once)
        _kill(self._processes)


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


def _kill(processes: Sequence[_Process]) -> None:
    """Kill the processes, and wait for all of them together."""
    for process in processes:
        for started in list((process.pool._processes or {}).values()):
            started.kill()
    for process in processes:
        process.pool.shutdown(wait=True, cancel_futures=True)


def _begin(slot: Slot) -> None:
    """Prepare the slot's process before it imports torch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(slot.variables)
    if slot.processors:
        os.sched_setaffinity(0, slot.processors)
    end_with_parent()
    if slot.device == "cuda":
        threading.Thread(target=_keep_open, daemon=True).start()


def _keep_open() -> None:
    """Initialise the driver in this process, without a context on the GPU, while others import torch.

    As long as a process has it, the GPU opens for another in a quarter of the time.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def look(gpus: str | None, device: str) -> list[tuple[Slot, Card]]:
    """Return slots with their locked cards, for workers that outlive a run. None means all GPUs, or one slot on a CPU.

    Raises GroupbenchError, and UsageError if this needs a GPU and torch sees none.
    """
    from groupbench.operators.measure.environment import resolve_device

    requested, device = device, resolve_device(device)
    if device == "cpu" != requested:
        raise UsageError("torch sees no GPU here; use --device cpu to try the command without one")
    chosen = slots(gpus or ("0" if device == "cpu" else "all"), device)
    processes = [_Process(slot) for slot in chosen]
    try:
        cards = [process.pool.submit(_card, process.slot).result(batches.OPENING_S) for process in processes]
    finally:
        _kill(processes)
    for card in cards:
        _lock(card.machine.environment.gpu_uuid)
    return list(zip(chosen, cards, strict=True))


def _opening(process: _Process, look: Callable[[Slot], Card] | None, planned: Sequence[Job]) -> Future[Card]:
    """Return the card, once the slot's process has opened it. The GPU is locked first, if its UUID is known."""
    if look is not None:
        return process.pool.submit(look, process.slot)
    try:
        _lock(process.slot.uuid)
    except Exception as error:
        refused: Future[Card] = Future()
        refused.set_exception(error)
        return refused
    return process.pool.submit(_card, process.slot, process.slot.uuid is not None, batches.together(planned))


def _card(slot: Slot, locked: bool = False, jobs: Sequence[Job] = ()) -> Card:
    machine = batches.start(slot.device, jobs) if locked else batches.machine_here(slot.device)
    return Card(machine.environment.gpu_uuid or slot.name, machine, batches.code())


def _lock(uuid: str | None) -> None:
    """Lock the GPU for this process, unless the nightly run that it is part of holds it. Raises Busy."""
    if uuid is not None and os.environ.get(HELD) != str(lock_file(uuid)):
        alone.take(uuid, ["tritonbench", "--gpus"])
