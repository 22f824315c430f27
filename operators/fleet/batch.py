"""Fleet batches: all cells with one operator and shape, how a worker measures them, and the card choice.

A shape's backends take turns on one card, where dtypes and modes follow each other, so comparisons are always on the
same silicon. A history's environment includes the card, so a shape goes back to the previous night's card, unless the
cards' loads drift apart.
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

from groupbench.operators import executor, foreign
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Machine, Progress, Workers
from groupbench.operators.logs import Logs
from groupbench.operators.measure.environment import resolve_device
from groupbench.operators.measure.folders import of_party
from groupbench.operators.measure.texts import one_line
from groupbench.operators.measure.wire import Job, Request
from groupbench.operators.measure.worker import OPENING_S, Judge, Spare, Worker, preload, result_of
from groupbench.operators.registry import plugin_backends
from groupbench.tracker.facts.record import Environment, Record, Run

Problem: TypeAlias = tuple[str, str]
"""Operator and shape, whose cells stay on one card."""


@dataclass(frozen=True)
class Sharing:
    """The tuned numbers of this module, and where each comes from.

    Shapes move when a card's load exceeds `uneven` times the mean, until every load is within `even`. There are two
    bounds because a shape begins a new history when it moves: a nearly even night is not changed.
    """

    uneven: float = 1.05
    even: float = 1.01
    starting_s: float = 10.0  # of starting that a card's first problem includes at most
    waiting_s: float = 20.0  # that processes wait for the next batch, before they free the GPU for other work


SHARING = Sharing()


class OtherCode(GroupbenchError):
    """A worker runs different code than the client, so the records would name the wrong commit."""


@dataclass(frozen=True)
class Batch:
    """Cells with one operator and shape, small enough to send anywhere.

    Attributes:
        code: Digest of the client's code; the worker must have the same.
        hardware: Pattern of the card's model; None matches any card.
        logs: Storage for the output of cells on the worker.
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
    """A GPU in a fleet, or a CPU in place of one.

    Attributes:
        name: The engine's name of its worker; only one worker at a time has it.
        machine: The machine as the worker's process sees it.
    """

    name: str
    machine: Machine
    code: str

    @property
    def hardware(self) -> str:
        return hardware(self.machine.environment)


def hardware(environment: Environment) -> str:
    """Return the GPU's model, or the CPU's if the device is the CPU."""
    return (environment.gpu if environment.device == "cuda" else environment.cpu) or f"unknown {environment.device}"


def matches(environment: Environment, pattern: str | None) -> bool:
    """Return whether the model matches a pattern such as `NVIDIA H100*`, by a shell's rules for file names."""
    return pattern is None or fnmatch.fnmatchcase(hardware(environment), pattern)


def batches(
    jobs: Iterable[Job],
    run: Run,
    timeout_s: float,
    code: str = "",
    hardware: str | None = None,
    logs: Logs | None = None,
) -> list[Batch]:
    """Return the jobs grouped by operator and shape, in the order in which each first appears."""
    groups: dict[Problem, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.operator, job.shape), []).append(job)
    return [Batch(tuple(group), run, timeout_s, code, hardware, logs) for group in groups.values()]


def measure(batch: Batch) -> list[Record]:
    """Measure every job on this process's card and return the records. A failing cell does not affect others.

    Backends keep their processes between batches, as on a single GPU between problems.

    Raises OtherCode, and GroupbenchError if this process has no such card or cannot load a plugin.
    """
    if batch.code != code():
        raise OtherCode("this worker runs different code than the client; restart the workers")
    machine = machine_here(batch.jobs[0].device)
    if not matches(machine.environment, batch.hardware):
        raise GroupbenchError(f"the run needs {batch.hardware}, but this worker has {hardware(machine.environment)}")
    if lacks := plugin_fault(batch.jobs[0].plugins):
        raise GroupbenchError(f"the worker on {platform.node()} cannot measure this: {lacks}")
    progress = Progress(printed=batch.logs.keep) if batch.logs is not None else Progress()
    with _KEPT.of(batch) as workers:
        return list(executor.execute(list(batch.jobs), machine, batch.run, batch.timeout_s, progress, workers=workers))


class _KeptWorkers:
    """One run's backend processes. They end when another run begins, or after `SHARING.waiting_s` without a batch."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._run: tuple[str, float] | None = None
        self._workers: Workers | None = None
        self._judge: Judge | None = None
        self._spares: list[Worker] = []
        self._idle: threading.Timer | None = None

    def start(self, device: str, jobs: Sequence[Job]) -> Machine:
        with self._guard:
            self._judge = Judge(device, OPENING_S)
            self._judge.send(Request("examine", (device,)))
            preload(*executor.imports(list(jobs)))
            self._spares = [Spare(device, OPENING_S, of_party(())) for _ in jobs]
            try:
                return Machine(*result_of(self._judge.receive()))
            except GroupbenchError:
                for started in (self._judge, *self._spares):
                    started.close()
                self._judge, self._spares = None, []
                raise

    @contextmanager
    def of(self, batch: Batch) -> Iterator[Workers]:
        with self._guard:
            if self._idle is not None:
                self._idle.cancel()
            run = (batch.run.id, batch.timeout_s)
            if self._workers is None or self._run != run:
                self._end()
                self._run, self._workers = run, Workers(batch.timeout_s, self._judge, self._spares)
                self._judge, self._spares = None, []
            try:
                yield self._workers
                self._workers.end_spares()
            except BaseException:
                self._end()
                raise
            self._idle = threading.Timer(SHARING.waiting_s, self.end)
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
_MACHINES: dict[str, Machine] = {}
"""The machine of this process by the requested device."""


def start(device: str, jobs: Sequence[Job] = ()) -> Machine:
    """Start the first batch's processes, and return the machine. The GPU must be locked.

    The driver opens GPUs for one process after another. So the judging process also examines the GPU, and the backends'
    processes open it before they get a cell.

    Args:
        jobs: Cells without plugins, for each of which a process is started.

    Raises GroupbenchError.
    """
    machine = _MACHINES[device] = _KEPT.start(device, jobs)
    return machine


def together(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return the cells measured together at first, one per backend; none if they import plugins."""
    first = [job for job in jobs if executor.problem_of(job) == executor.problem_of(jobs[0])]
    return () if any(job.plugins for job in first) else tuple({job.backend: job for job in first}.values())


def plugin_fault(plugins: Sequence[str]) -> str | None:
    """Return why a plugin does not load in this process, or None.

    A worker imports modules from the folder in which it was started.
    """
    try:
        foreign.ask(check_plugins, plugins, plugins=plugins)
    except GroupbenchError as error:
        return one_line(str(error))
    return None


def check_plugins(plugins: Sequence[str]) -> None:
    """Raise UsageError if a plugin does not load. Imports them in this process."""
    plugin_backends(plugins)


def machine_here(device: str) -> Machine:
    """Return this process's machine, examined only once. Raises GroupbenchError."""
    if device not in _MACHINES:
        _MACHINES[device] = executor.probe(resolve_device(device))
    return _MACHINES[device]


@cache
def code() -> str:
    """Return the measuring code's digest (kernels, operators, the record) at the first call."""
    digest = hashlib.sha256()
    for package in ("groupbench.kernels", "groupbench.operators"):
        spec = importlib.util.find_spec(package)
        files: dict[Path, Path] = {}
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in Path(folder).rglob("*"):
                if path.suffix in (".py", ".json"):
                    files.setdefault(path.relative_to(folder), path)  # the first folder has the file that is imported
        for name, path in sorted(files.items()):
            digest.update(f"{package}/{name}\0".encode())
            digest.update(path.read_bytes())
    record = importlib.util.find_spec("groupbench.tracker.facts.record")
    if record and record.origin:
        digest.update(Path(record.origin).read_bytes())
    return digest.hexdigest()[:32]


# --- which card -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """A problem's last card and duration."""

    gpu_uuid: str | None
    seconds: float


def before(records: Iterable[Record]) -> dict[Problem, Before]:
    """Return each problem's card and duration in an earlier run.

    Backends with one dtype and mode are timed together, so their duration counts once. A card's first problem includes
    starting the processes and opening the GPU, which is not counted: it is taken to be as long as the longest other
    problem, unless starting cannot explain the difference.
    """
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
    first = {card: problem for problem, card in reversed(cards.items())}  # on each card
    others = [taken for problem, taken in seconds.items() if problem not in first.values()]
    for problem in first.values():
        taken = seconds[problem]
        seconds[problem] = max(taken - SHARING.starting_s, min(taken, max(others, default=taken)))
    return {problem: Before(cards[problem], taken) for problem, taken in seconds.items()}


def assign(work: Sequence[Batch], cards: Sequence[Card], history: Mapping[Problem, Before] | None = None) -> list[int]:
    """Return each batch's card index.

    A batch goes to the card that measured the problem before. The others go to the card with the least load, the
    longest first. If a load exceeds `uneven` times the mean, batches move until every load is within `even`.
    """
    history = history or {}
    costs = _expected_seconds(work, history)
    uuids = {card.machine.environment.gpu_uuid: number for number, card in enumerate(cards)}
    uuids.pop(None, None)
    loads = [0.0] * len(cards)
    chosen: dict[int, int] = {}
    for number, batch in enumerate(work):
        home = uuids.get(history[batch.problem].gpu_uuid) if batch.problem in history else None
        if home is not None:
            chosen[number] = home
            loads[home] += costs[number]
    for number in sorted((n for n in range(len(work)) if n not in chosen), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        chosen[number] = least
        loads[least] += costs[number]
    _even_out(costs, chosen, loads)
    return [chosen[number] for number in range(len(work))]


def _expected_seconds(work: Sequence[Batch], history: Mapping[Problem, Before]) -> list[float]:
    """Return each batch's time: the problem's earlier time, or the known problems' mean time per cell."""
    cells = sum(len(batch.jobs) for batch in work if batch.problem in history)
    taken = sum(history[batch.problem].seconds for batch in work if batch.problem in history)
    each = taken / cells if cells and taken else 1.0
    return [history[b.problem].seconds if b.problem in history else each * len(b.jobs) for b in work]


def _even_out(costs: list[float], chosen: dict[int, int], loads: list[float]) -> None:
    """Move batches from the card with the most load to the one with the least. Exchange two if none is short enough."""
    mean = sum(loads) / len(loads)
    if max(loads) <= SHARING.uneven * mean:
        return
    while max(loads) > SHARING.even * mean:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap, minimum = loads[most] - loads[least], 1e-3 * mean
        crowded = [n for n, card in chosen.items() if card == most]
        steps = _closer([(costs[n], (n,)) for n in crowded], minimum, gap) or _closer(
            [(costs[n] - costs[m], (n, m)) for n in crowded for m, card in chosen.items() if card == least],
            minimum,
            gap,
        )
        if not steps:
            return
        moved, numbers = min(steps, key=lambda step: (abs(step[0] - gap / 2), step[1]))
        for number in numbers:
            chosen[number] = least if chosen[number] == most else most
        loads[most] -= moved
        loads[least] += moved


def _closer(
    steps: list[tuple[float, tuple[int, ...]]], minimum: float, gap: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the steps whose load, the first value, brings two cards closer together by at least the minimum."""
    return [step for step in steps if minimum < step[0] < gap - minimum]
