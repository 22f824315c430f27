"""Cells for the tests of a fleet: they cost nothing, or make the worker itself fail. Workers import this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Machine
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.fleet.slots import Slot
from groupbench.operators.measure.environment import cpu_model
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.record import Accuracy, Commit, Environment, Record, Run

RUN = Run(id="r", started=datetime(2026, 1, 1, tzinfo=UTC), commit=Commit(hash="c" * 40))
FAST = Protocol(bursts=1, samples=1)


def machine(cpu: str = "a CPU", **facts: object) -> Machine:
    return Machine(Environment(device="cpu", cpu=cpu, memory_mib=64_000, **facts), None)  # type: ignore[arg-type]


def card(name: str, uuid: str | None = None) -> Card:
    return Card(name, machine(gpu_uuid=uuid), "code")


def job(number: int = 0, backend: str = "torch_loop", **fields: object) -> Job:
    facts = {"dtype": "fp16", "device": "cpu", "protocol": FAST} | fields
    return Job("grouped_gemm", backend, f"G=1,M_g={number + 1},N=256,K=256", **facts)  # type: ignore[arg-type]


def work(count: int, run: Run = RUN, first: int = 0) -> list[Batch]:
    jobs = [job(n, backend) for n in range(first, first + count) for backend in ("torch_loop", "torch_grouped_mm")]
    return batches.batches(jobs, run, 20.0, batches.code())


def instant(batch: Batch) -> list[Record]:
    """Return records without measuring; their `host` names the process that made them, and its visible devices."""
    where = machine(host=f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    records = [executor.record_of(j, where, batch.run, "unavailable", "costs nothing") for j in batch.jobs]
    return [_ok(record) for record in records]


def _ok(record: Record) -> Record:
    import msgspec

    return msgspec.structs.replace(record, status="ok", message=None, accuracy=Accuracy(rms=1e-4))


def slow(batch: Batch) -> list[Record]:
    time.sleep(0.02)
    return instant(batch)


def takes_turns(batch: Batch) -> list[Record]:
    """Wait, at the first batch, until another process has begun one too."""
    mark = Path(os.environ["FLEET_MARK"]).with_suffix(f".{os.getpid()}")
    mark.touch()
    until = time.monotonic() + 120
    while len(list(mark.parent.glob("mark.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    return instant(batch)


def hangs(batch: Batch) -> list[Record]:
    time.sleep(600)
    return []


def refuses(batch: Batch) -> list[Record]:
    raise GroupbenchError(f"not here: {batch}")


def dies(batch: Batch) -> list[Record]:
    """Die at the third problem, every time."""
    if batch.jobs[0].shape.startswith("G=1,M_g=3,"):
        os.kill(os.getpid(), signal.SIGKILL)
    return instant(batch)


def dies_once(batch: Batch) -> list[Record]:
    """Die at the third problem, once: a file marks that it has died."""
    mark = Path(os.environ["FLEET_MARK"])
    if batch.jobs[0].shape.startswith("G=1,M_g=3,") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return instant(batch)


def look_at_slot(slot: Slot) -> Card:
    """Return the card of a process of this host, without torch."""
    return Card(slot.name, machine(), batches.code())


def look_at_gpu(slot: Slot, locked: bool = False, jobs: Sequence[Job] = ()) -> Card:
    """Return the card of a GPU, named by whether it was locked first, without opening one."""
    uuid = slot.name if locked else f"GPU behind {slot.name}"
    return Card("locked" if locked else "not locked", machine(gpu_uuid=uuid), batches.code())


def look(device: str, dask_worker: object = None) -> Card:
    """Return the card of a Dask worker, without torch."""
    return Card(str(dask_worker.name), machine(cpu_model() or ""), batches.code())  # type: ignore[union-attr, attr-defined]
