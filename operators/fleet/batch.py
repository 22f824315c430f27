"""What a fleet hands out: all cells of one operator and shape, for one card, and what a worker does with them.

Backends of a shape take turns on one card, and so do its dtypes and modes one after the other: what is compared is
measured on the same silicon. A history's environment names the card too, so a shape goes back to the card that it was
measured on the night before, unless the cards' loads drift apart.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.executor import Machine, Progress, Workers
from groupbench.operators.logs import Logs
from groupbench.operators.measure.cell import Job
from groupbench.operators.measure.texts import one_line
from groupbench.operators.registry import plugin_backends
from groupbench.tracker.record import Environment, Record, Run

Problem: TypeAlias = tuple[str, str]
"""Operator and shape: what stays on one card."""

UNEVEN, EVEN = 1.05, 1.01
"""Shapes change cards once one has more than the first of the mean load, and then until none has more than the second.

Two bounds, since a shape that moves begins a new history: a night that is nearly even is left as it is.
"""

IDLE_S = 20.0
"""How long processes wait for the next batch: their GPU may be wanted for something else."""


class OtherCode(GroupbenchError):
    """A worker runs other code than the client: its records would be of another commit than they say."""


@dataclass(frozen=True)
class Batch:
    """Cells of one operator and shape, small enough to send anywhere.

    code      digest of the client's code, which a worker's must equal
    hardware  pattern of the card's model, None where any will do
    logs      where a worker keeps what cells print
    """

    jobs: tuple[Job, ...]
    run: Run
    timeout_s: float
    code: str
    hardware: str | None = None
    logs: Logs | None = None

    @property
    def problem(self) -> Problem:
        return (self.jobs[0].operator, self.jobs[0].shape)

    def __str__(self) -> str:
        return f"{self.jobs[0].operator} {self.jobs[0].shape}"


@dataclass(frozen=True)
class Card:
    """A GPU that a fleet measures on, or a processor in its place.

    name     what the engine knows its worker by: one at a time holds it
    machine  as its own process sees it
    """

    name: str
    machine: Machine
    code: str

    @property
    def hardware(self) -> str:
        return hardware(self.machine.environment)


def hardware(environment: Environment) -> str:
    """The model: the GPU's, or the processor's where the device is the cpu."""
    return (environment.gpu if environment.device == "cuda" else environment.cpu) or f"unknown {environment.device}"


def matches(environment: Environment, pattern: str | None) -> bool:
    """`NVIDIA H100*`, as a shell matches file names."""
    return pattern is None or fnmatch.fnmatchcase(hardware(environment), pattern)


def batches(
    jobs: Iterable[Job],
    run: Run,
    timeout_s: float,
    code: str = "",
    hardware: str | None = None,
    logs: Logs | None = None,
) -> list[Batch]:
    """The jobs by operator and shape, in the order in which each first appears."""
    found: dict[Problem, list[Job]] = {}
    for job in jobs:
        found.setdefault((job.operator, job.shape), []).append(job)
    return [Batch(tuple(group), run, timeout_s, code, hardware, logs) for group in found.values()]


def measure(batch: Batch) -> list[Record]:
    """A record for every job, measured on the card of this process. What a cell does to itself harms no other.

    Backends keep their processes from one batch of a run to the next, as they do from problem to problem on one GPU.

    Raises OtherCode, and GroupbenchError where this process has no such card or lacks a plugin.
    """
    if batch.code != code():
        raise OtherCode("this worker runs other code than the night is of; start the workers again")
    machine = machine_here(batch.jobs[0].device)
    if not matches(machine.environment, batch.hardware):
        raise GroupbenchError(f"asked for {batch.hardware}, but this worker has {hardware(machine.environment)}")
    if lacks := plugin_fault(batch.jobs[0].plugins):
        raise GroupbenchError(f"the worker on {platform.node()} cannot measure this: {lacks}")
    progress = Progress(printed=batch.logs.keep) if batch.logs is not None else Progress()
    with _KEPT.of(batch) as workers:
        return list(executor.execute(list(batch.jobs), machine, batch.run, batch.timeout_s, progress, workers=workers))


class _KeptWorkers:
    """The backends' processes of one run. They end with it: when one of another begins, or after IDLE_S of neither."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._run: tuple[str, float] | None = None
        self._workers: Workers | None = None
        self._idle: threading.Timer | None = None

    @contextmanager
    def of(self, batch: Batch) -> Iterator[Workers]:
        with self._guard:
            if self._idle is not None:
                self._idle.cancel()
            run = (batch.run.id, batch.timeout_s)
            if self._workers is None or self._run != run:
                self._end()
                self._run, self._workers = run, Workers(batch.timeout_s)
            try:
                yield self._workers
            except BaseException:
                self._end()
                raise
            self._idle = threading.Timer(IDLE_S, self.end)
            self._idle.daemon = True
            self._idle.start()

    def end(self) -> None:
        with self._guard:
            self._end()

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.close(at_once=False)
            self._workers = None


_KEPT = _KeptWorkers()


def plugin_fault(plugins: Sequence[str]) -> str | None:
    """Return why a plugin does not load in this process, or None. A worker finds modules where it was started."""
    try:
        plugin_backends(plugins)
    except UsageError as error:
        return one_line(str(error))
    return None


@cache
def machine_here(device: str) -> Machine:
    """The machine of this process, looked at once. Raises GroupbenchError."""
    from groupbench.operators.measure.environment import resolve_device

    return executor.probe(resolve_device(device))


@cache
def code() -> str:
    """Digest of the code that measures, as it was when this process first asked: kernels, operators and the record."""
    found = hashlib.sha256()
    for package in ("groupbench.kernels", "groupbench.operators"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).rglob("*")):
                if path.suffix in (".py", ".json"):
                    found.update(f"{package}/{path.relative_to(folder)}\0".encode())
                    found.update(path.read_bytes())
    record = importlib.util.find_spec("groupbench.tracker.record")
    if record and record.origin:
        found.update(Path(record.origin).read_bytes())
    return found.hexdigest()[:32]


# --- which card -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """Where a problem was measured last, and how long that took."""

    gpu_uuid: str | None
    seconds: float


def before(records: Iterable[Record]) -> dict[Problem, Before]:
    """What an earlier run's records say of each problem. Backends of one dtype and mode took their time together."""
    together: dict[tuple[Problem, object], float] = {}
    cards: dict[Problem, str | None] = {}
    for record in records:
        if record.duration_s is not None:
            cell = record.cell
            problem = (cell.operator, cell.shape)
            key = (problem, (cell.dtype, cell.mode, cell.protocol, cell.seed))
            together[key] = max(together.get(key, 0.0), record.duration_s)
            cards[problem] = record.environment.gpu_uuid
    seconds: dict[Problem, float] = {}
    for (problem, _), longest in together.items():
        seconds[problem] = seconds.get(problem, 0.0) + longest
    return {problem: Before(cards[problem], taken) for problem, taken in seconds.items()}


def assign(work: Sequence[Batch], cards: Sequence[Card], known: Mapping[Problem, Before] | None = None) -> list[int]:
    """For each batch the index of its card.

    A batch goes to the card that has measured its problem before; the others, the longest first, to the card with the
    least to do. Where one has more than UNEVEN of the mean, batches move until none has more than EVEN.
    """
    known = known or {}
    cells = sum(len(batch.jobs) for batch in work if batch.problem in known)
    taken = sum(known[batch.problem].seconds for batch in work if batch.problem in known)
    each = taken / cells if cells and taken else 1.0
    costs = [known[b.problem].seconds if b.problem in known else each * len(b.jobs) for b in work]
    uuids = {card.machine.environment.gpu_uuid: number for number, card in enumerate(cards)}
    uuids.pop(None, None)
    loads = [0.0] * len(cards)
    chosen: dict[int, int] = {}
    for number, batch in enumerate(work):
        home = uuids.get(known[batch.problem].gpu_uuid) if batch.problem in known else None
        if home is not None:
            chosen[number] = home
            loads[home] += costs[number]
    for number in sorted((n for n in range(len(work)) if n not in chosen), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        chosen[number] = least
        loads[least] += costs[number]
    _even_out(costs, chosen, loads)
    return [chosen[number] for number in range(len(work))]


def _even_out(costs: list[float], chosen: dict[int, int], loads: list[float]) -> None:
    mean = sum(loads) / len(loads)
    if max(loads) <= UNEVEN * mean:
        return
    for _ in range(len(costs)):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        able = [n for n, card in chosen.items() if card == most and 0 < costs[n] < gap]
        if loads[most] <= EVEN * mean or not able:
            return
        moved = min(able, key=lambda n: (abs(costs[n] - gap / 2), n))
        chosen[moved] = least
        loads[most] -= costs[moved]
        loads[least] += costs[moved]
