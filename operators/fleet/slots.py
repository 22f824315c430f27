"""The GPUs of this host, and a process that sees only one of them. Local fleets and Dask workers use this code.

CUDA_VISIBLE_DEVICES and the process's share of the CPUs are set before it imports torch. Each GPU is locked while a
fleet or a worker uses it, like the GPU of a nightly run, so that two runs never measure on one card.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupbench.operators import alone
from groupbench.operators.errors import UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Card
from groupbench.operators.measure.wire import Job
from groupbench.tracker.text.wording import counted

UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A GPU's UUID as NVML and CUDA_VISIBLE_DEVICES write it."""


@dataclass(frozen=True)
class Slot:
    """The device and environment of one queue's process.

    Attributes:
        variables: Environment variables, set before the process imports anything.
        processors: CPUs that the process may use; an empty tuple means all.
    """

    name: str
    device: str
    variables: Mapping[str, str]
    processors: tuple[int, ...] = ()

    @property
    def uuid(self) -> str | None:
        """Return the GPU's whole UUID if it is the name. CUDA also accepts a part of it, or a number."""
        return self.name if self.device == "cuda" and UUID.fullmatch(self.name) else None


def choose(gpus: str, device: str) -> list[Slot]:
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


def prepare_process(slot: Slot) -> None:
    """Give this process the slot's processors, and keep the GPU's driver open. It must not have imported torch."""
    os.environ.update(slot.variables)
    if slot.processors:
        os.sched_setaffinity(0, slot.processors)
    if slot.device == "cuda":
        threading.Thread(target=keep_open, daemon=True).start()


def keep_open() -> None:
    """Initialise the driver in this process, without a context on the GPU, while others import torch.

    As long as a process has it, the GPU opens for another in a quarter of the time.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def examine(slot: Slot, locked: bool = False, jobs: Sequence[Job] = ()) -> Card:
    """Return the card of this process. If it is locked, the processes of the first jobs are started too."""
    machine = batches.start(slot.device, jobs) if locked else batches.machine_here(slot.device)
    return Card(machine.environment.gpu_uuid or slot.name, machine, batches.code())


def lock(uuid: str | None) -> None:
    """Lock the GPU for this process, unless the nightly run that it is part of holds it. Raises Busy."""
    if uuid is not None:
        alone.take(uuid, ["tritonbench", "--gpus"])
