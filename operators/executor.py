"""Run jobs and yield records, with one process per backend and a problem's backends side by side.

A problem's backends are alive together so their bursts can alternate. Each round visits all backends and starts one
later than the previous round; the GPU idles before every burst. A backend keeps the process for the next problem, which
saves the imports. After a failed cell it gets a new process, so a failure affects no other cell. A cell unable to run
also yields a record, with a status and the reason.

The backend process's results are checked. A process without any backend compares a timed call's output in every burst,
on inputs drawn by this process after the backend is prepared. This process's clock bounds the times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

from groupbench.operators.errors import WorkerLost
from groupbench.operators.foreign import facts_of, learn
from groupbench.operators.measure import environment, folders, further, machine_code, servers
from groupbench.operators.measure.cold import first_results
from groupbench.operators.measure.costs import COLD, ENERGY
from groupbench.operators.measure.live import Live, ask_judge, cool, drawn, fingerprint_of, new_secret, settle, warm_up
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.measure.wire import Burst, Failure, Job, Prepared, Request
from groupbench.operators.measure.worker import OPENING_S, Judge, Worker, call, living, preload, result_of
from groupbench.operators.operator import Target
from groupbench.operators.registry import CATALOG, catalog_operator, get_operator
from groupbench.tracker.facts.record import SCHEMA, Cell, Environment, Latency, Record, Run, Status
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools import lease

# Memory of a process beyond the problem itself: CUDA context, libraries, the buffer that flushes the L2.
PROCESS_MIB = 1500
MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Machine:
    """Device facts known to the parent process without opening the device."""

    environment: Environment
    capability: tuple[int, int] | None


@dataclass
class Progress:
    """Callbacks for a run's progress; by default they do nothing.

    Attributes:
        printed: Gets each record with the output of its process, including tracebacks.
        finished: Gets each record after it is written.
        missed: Gets the text about something that was asked for and that a record lacks.
    """

    describe: Callable[[str], None] = lambda text: None
    advance: Callable[[float], None] = lambda cells: None
    printed: Callable[[Record, str], None] = lambda record, text: None
    finished: Callable[[Record], None] = lambda record: None
    missed: Callable[[str], None] = lambda text: None


class Workers:
    """The worker processes: one per backend, started when first needed, and one judge."""

    def __init__(self, timeout_s: float, judge: Judge | None = None, spares: Iterable[Worker] = ()) -> None:
        """Take the judging process, and processes for cells without plugins, if they have been started."""
        self.timeout_s = timeout_s
        self.idle_w: float | None = None  # power of the GPU at rest, once the judge has measured it
        self.reasons: dict[tuple[Any, ...], str | None] = {}  # answers of plugins to whether a backend can run
        self._alive: dict[tuple[str, ...], Worker] = {}
        self._judge = judge
        self._spares = list(spares)
        for started in (*self._spares, *([judge] if judge is not None else ())):
            started.timeout_s = timeout_s

    def judge(self, device: str) -> Judge:
        """Return the process for checking results, restarted if it has died."""
        self._judge = living(self._judge, device, self.timeout_s)
        return self._judge

    def get(self, job: Job) -> Worker:
        key = (job.operator, job.backend, job.device)
        if key not in self._alive:
            spare = self._spares.pop(0) if self._spares and not job.plugins else None
            party = folders.of_party(facts_of(job).plugins)
            self._alive[key] = spare or Worker(job.device, self.timeout_s, party)
        return self._alive[key]

    def retire(self, worker: Worker) -> None:
        """End a failed process. The backend's next cell gets a new one."""
        self._alive = {key: alive for key, alive in self._alive.items() if alive is not worker}
        worker.kill()
        worker.close()

    def end_spares(self) -> None:
        """End the processes no cell has needed."""
        while self._spares:
            self._spares.pop().close()

    def close(self, at_once: bool) -> None:
        self.end_spares()
        for worker in self._alive.values():
            if at_once:
                worker.kill()
            worker.close()
        self._alive.clear()
        if self._judge is not None:
            self._judge.kill()
            self._judge.close()
            self._judge = None


def imports(jobs: list[Job]) -> tuple[str, ...]:
    """Return the large modules to import for these jobs."""
    learn(jobs)
    return tuple(dict.fromkeys(module for job in jobs for module in facts_of(job).imports))


def probe(device: str) -> Machine:
    """Return the machine for "cuda" or "cpu". Raises GroupbenchError."""
    servers.begin()
    judge = Judge(device, OPENING_S)
    try:
        return examined(judge, device)
    finally:
        judge.close()


def examined(judge: Judge, device: str) -> Machine:
    """Return the machine as the judging process sees it. Raises GroupbenchError."""
    return Machine(*result_of(judge.ask(Request("examine", (device,)))))


def execute(
    jobs: list[Job],
    machine: Machine,
    run: Run,
    timeout_s: float,
    progress: Progress,
    budget_s: float = math.inf,
    workers: Workers | None = None,
) -> Iterator[Record]:
    """Yield every job's record when finished, in job order within each problem.

    Args:
        budget_s: Seconds after which no further problem is started; the jobs of the others yield `skipped` records.
        workers: Processes to use, which stay alive for the caller's next jobs unless this run is interrupted.

    After a KeyboardInterrupt, each unfinished job yields a `skipped` record, and then the interrupt is raised again.
    """
    done: set[Job] = set()
    kept, workers = workers is not None, workers or Workers(timeout_s)
    interrupted = True
    preload(*imports(jobs))
    until = time.monotonic() + budget_s  # after the plugins are imported, which may take all of a short budget
    try:
        for _, problem in groupby(jobs, key=problem_of):
            until += lease.give_way()
            if time.monotonic() >= until:
                why = f"not begun within the budget of {counted(budget_s / 60, 'minute')}"
                for job in problem:
                    done.add(job)
                    progress.advance(1)
                    yield record_of(job, machine, run, "skipped", why)
                continue
            for record, job in _problem_records(list(problem), machine, run, workers, progress):
                done.add(job)
                yield record
        interrupted = False
    except KeyboardInterrupt:
        for job in jobs:
            if job not in done:
                yield record_of(job, machine, run, "skipped", "interrupted before it was measured")
        raise
    finally:
        if interrupted or not kept:
            workers.close(at_once=interrupted)


def first_of(jobs: list[Job], urgent: Callable[[Job], bool]) -> list[Job]:
    """Return the jobs, those problems with an urgent job first. The order is unchanged otherwise."""
    problems = {problem_of(job) for job in jobs if urgent(job)}
    return sorted(jobs, key=lambda job: problem_of(job) not in problems)


def problem_of(job: Job) -> tuple[Any, ...]:
    """Return the facts shared by cells timed together."""
    return (job.operator, job.shape, job.dtype, job.mode, job.seed, job.protocol, job.device)


def _problem_records(
    jobs: list[Job], machine: Machine, run: Run, workers: Workers, progress: Progress
) -> Iterator[tuple[Record, Job]]:
    target = Target(jobs[0].device, jobs[0].dtype, jobs[0].interpreted, machine.capability)
    reasons = {job: _why_unavailable(job, target, workers.reasons) for job in jobs}
    able = [job for job in jobs if reasons[job] is None]
    size = _batch_size(jobs[0], machine.environment)
    measured = chain.from_iterable(
        _batch_records(able[first : first + size], size, machine, run, workers, progress)
        for first in range(0, len(able), size)
    )
    for job, reason in reasons.items():
        if reason is None:
            yield next(measured)
        else:
            progress.advance(1)
            yield record_of(job, machine, run, "unavailable", reason), job
    yield from measured  # yields nothing; lets the generator release its last process


def _why_unavailable(job: Job, target: Target, answers: dict[tuple[Any, ...], str | None]) -> str | None:
    """Return why the backend cannot run, or None. A plugin is asked in another process, once for all shapes."""
    facts = facts_of(job)
    if not facts.plugins and job.operator in CATALOG:
        return why_unavailable(catalog_operator(job.operator).in_mode(job.mode), job.backend, target)
    if not facts.is_asked:
        return None
    question = (job.operator, job.backend, job.plugins, job.mode, target)
    if question not in answers:
        try:
            answers[question] = call(_ask_plugin, job, target)
        except WorkerLost as error:
            answers[question] = f"its `unavailable` ended its process: {error}"
    return answers[question]


def _ask_plugin(job: Job, target: Target) -> str | None:
    return why_unavailable(get_operator(job.operator, job.plugins, job.mode), job.backend, target)


def _batch_records(
    jobs: list[Job], size: int, machine: Machine, run: Run, workers: Workers, progress: Progress
) -> Iterator[tuple[Record, Job]]:
    """Yield the records for jobs whose processes fit into memory together, `size` at once."""
    cells = [Live(job, workers.get(job), partial(workers.judge, job.device), facts_of(job).held_to) for job in jobs]
    workers.judge(jobs[0].device)  # opens the GPU while the others do
    progress.describe(f"{jobs[0].operator} {jobs[0].shape} {jobs[0].dtype}: loading")
    _load(cells)
    bursts = jobs[0].protocol.bursts
    for cell in cells:
        progress.describe(f"{_name(cell.job)}: preparing")
        if cell.failure is None:
            cell.prepare()
        progress.advance(1 / (bursts + 1))
    _find_first_results(cells, workers.timeout_s, size - len(cells), progress)
    settle(cells)
    for number in range(bursts):
        secret, chosen = new_secret(), drawn(31)  # one for all, whose reference then is one
        start = number % len(cells)
        for cell in cells[start:] + cells[:start]:
            progress.describe(f"{_name(cell.job)}: burst {number + 1}")
            if cell.going and (number == 0 or not cell.interpreted):  # an interpreted kernel's time is meaningless
                cool(cell.job)
                cell.burst(secret, chosen)
            for other in cells:
                other.rest.look()
            progress.advance(1 / (bursts + 1))
    warm_up(cells)
    further.begin_analysis(cells)
    secret = new_secret()
    for cell in cells:
        cell.finish(secret)
        cell.repeat(bursts)
        if workers.idle_w is None and ENERGY in cell.job.costs and cell.sound:
            watts = ask_judge(cell, "idle_watts")
            workers.idle_w = watts if isinstance(watts, float) else None
        sound = further.find_costs(cell, workers.idle_w) and further.find_properties(cell)
        if problem := further.find_profile(cell):
            progress.missed(f"{_name(cell.job)} has no profile. {problem}")
        record = _finished(cell, machine, run)
        progress.printed(record, cell.worker.printed)
        yield record, cell.job
        if not sound or cell.failure is not None or isinstance(cell.worker.ask(Request("unload")), Failure):
            workers.retire(cell.worker)


def _load(cells: list[Live]) -> None:
    """Start the processes and import in all at the same time, before any cell's time limit begins."""
    for verb in ("adopt", "load"):
        ready = [cell for cell in cells if cell.failure is None]
        for cell in ready:
            cell.started = time.monotonic()
            cell.worker.send(Request(verb, (_adopted(cell.job),) if verb == "adopt" else ()))
        for cell in ready:
            cell.take(cell.worker.receive())


def _adopted(job: Job) -> Job:
    """Return a job with only the plugins to import."""
    return replace(job, plugins=facts_of(job).plugins)


def _find_first_results(cells: list[Live], timeout_s: float, room: int, progress: Progress) -> None:
    """Time the first results in new processes for the cells with this cost, before anything is timed."""
    wanting = [cell for cell in cells if COLD in cell.job.costs and cell.sound]
    if wanting:
        progress.describe(f"{_name(wanting[0].job)}: first results of new processes")
    results = first_results([_adopted(cell.job) for cell in wanting], timeout_s, room)
    for cell, metrics in zip(wanting, results, strict=True):
        cell.metrics |= metrics


def _name(job: Job) -> str:
    return f"{job.operator}/{job.backend} {job.shape} {job.dtype}"


def _finished(cell: Live, machine: Machine, run: Run) -> Record:
    prepared = cell.prepared
    extra: dict[str, Any] = {
        "duration_s": round(time.monotonic() - cell.started, 3),
        "loaded": fingerprint_of(cell.worker),
    }
    if prepared is not None:
        kernels = further.describe_kernels(cell)
        metrics = machine_code.metrics_of(kernels) | cell.metrics
        if cell.launched is not None:
            metrics["kernels"] = float(len(cell.launched))
            kernels = machine_code.with_launched(kernels, cell.launched)
        metrics |= {name: float(holds) for name, holds in cell.properties.items()}
        extra |= {"accuracy": cell.accuracy, "kernels": kernels, "metrics": metrics}
        if cell.bursts:
            extra["latency"] = _latency(prepared, cell.bursts)
        machine = replace(machine, environment=environment.with_variables(machine.environment, prepared.variables))
    failure = cell.failure or (Failure("wrong", cell.problem) if cell.problem else None)
    if failure is None:
        return record_of(cell.job, machine, run, "ok", None, **extra)
    return record_of(cell.job, machine, run, failure.status, failure.message, **extra)


def _latency(prepared: Prepared, bursts: list[Burst]) -> Latency:
    telemetry = tuple(burst.telemetry for burst in bursts if burst.telemetry)
    # The lowest of several times of the host, seconds apart: in one process of four the first was up to 3.5 x.
    host_ms = [ms for ms in (prepared.enqueue_ms, *(burst.enqueue_ms for burst in bursts)) if ms is not None]
    return Latency(
        timing=prepared.timing,
        bursts_ms=tuple(burst.samples_ms for burst in bursts),
        telemetry=telemetry if len(telemetry) == len(bursts) else (),
        prepare_ms=prepared.prepare_ms,
        enqueue_ms=min(host_ms, default=None),
    )


def record_of(job: Job, machine: Machine, run: Run, status: Status, message: str | None, **measured: Any) -> Record:
    """Return a cell's record, with further fields as far as it was measured."""
    facts = facts_of(job)
    metrics = measured.pop("metrics", {})
    if facts.flops and metrics.get("energy_j"):
        metrics = {**metrics, "tflops_w": facts.flops / metrics["energy_j"] / 1e12}
    return Record(
        schema=SCHEMA,
        run=run,
        environment=environment.with_packages(machine.environment, facts.packages),
        cell=Cell(
            operator=job.operator,
            backend=job.backend,
            shape=job.shape,
            dtype=job.dtype,
            mode=job.mode,
            protocol=job.protocol.label,
            seed=job.seed,
            dims=facts.dims,
            flops=facts.flops,
            min_bytes=facts.min_bytes or None,
        ),
        status=status,
        message=message,
        baseline=facts.is_baseline,
        metrics=metrics,
        **measured,
    )


def _batch_size(job: Job, environment: Environment) -> int:
    """Return how many processes for this problem fit in memory at once.

    Each keeps the inputs and may pack them again; one at a time also holds the reference and the check's temporaries.
    """
    problem_mib = facts_of(job).min_bytes / 2**20
    have_mib = environment.gpu_memory_mib if job.device == "cuda" else environment.memory_mib
    if not have_mib:
        return 1
    return max(1, int((MEMORY_SHARE * have_mib - 6 * problem_mib) / (2.5 * problem_mib + PROCESS_MIB)))
