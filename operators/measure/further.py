"""Find the facts of a record beyond latency and accuracy: costs, kernels, profiles, and whether the routing is fixed.

Each function takes a cell after its bursts. None of them makes it fail: its latency and accuracy are known by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from groupbench.operators.measure import machine_code, profiler
from groupbench.operators.measure.costs import COLD, ENERGY, IDLE, Costs
from groupbench.operators.measure.judge import At, OutputJudgement, Possible
from groupbench.operators.measure.live import Live, drawn, median_ms, new_secret
from groupbench.operators.measure.wire import Failure, Request, Shown
from groupbench.tracker.facts.metrics import PROFILERS
from groupbench.tracker.facts.record import Kernel

_ANALYSES = ThreadPoolExecutor(4, thread_name_prefix="machine code")


def find_costs(cell: Live, idle_w: float | None = None) -> bool:
    """Measure the costs of a call besides its latency. Returns False if the process is unusable afterwards.

    idle_w  power of the GPU at rest; None if it is not known, and is measured before the energy
    """
    wanted = tuple(name for name in cell.job.costs if name not in (COLD, *PROFILERS))
    if not wanted or not cell.sound or not cell.bursts:
        return True
    more = (IDLE,) if ENERGY in wanted and idle_w is None else ()
    reply = cell.worker.ask(Request("costs", arguments=((*wanted, *more), median_ms(cell.bursts))))
    if isinstance(reply, Costs):
        cell.metrics |= reply.metrics
        if idle_w is not None and "energy_j" in cell.metrics:
            cell.metrics["idle_w"] = idle_w
        cell.launched = reply.launched
        _lower_enqueue(cell, reply.enqueue_ms)
    return not isinstance(reply, Failure)


def _lower_enqueue(cell: Live, enqueue_ms: float | None) -> None:
    """Take the lower of the times of the host before and after the bursts."""
    assert cell.prepared is not None
    if enqueue_ms is not None and cell.prepared.enqueue_ms is not None and enqueue_ms < cell.prepared.enqueue_ms:
        cell.prepared = msgspec.structs.replace(cell.prepared, enqueue_ms=enqueue_ms)


def begin_analysis(cells: Iterable[Live]) -> None:
    """Analyse the machine code of the cells' kernels in the background, half a second for each."""
    for cell in cells:
        if cell.analysis is None and cell.prepared is not None and cell.prepared.code:
            cell.analysis = _ANALYSES.submit(machine_code.described, cell.prepared.kernels, cell.prepared.code)


def describe_kernels(cell: Live) -> tuple[Kernel, ...]:
    """Return the kernels with the facts about their machine code."""
    begin_analysis([cell])
    if cell.analysis is not None:
        return cell.analysis.result()
    return cell.prepared.kernels if cell.prepared is not None else ()


def wants_first_result(cell: Live) -> bool:
    """Return whether the first result of a new process is to be timed."""
    return COLD in cell.job.costs and cell.sound


def find_profile(cell: Live) -> list[str]:
    """Profile a call by the tools among the costs. Returns why one could not, for each that could not."""
    problems: list[str] = []
    for tool in (name for name in cell.job.costs if name in PROFILERS and cell.sound):
        try:
            cell.metrics |= profiler.profile(cell.job, tool, cell.worker.timeout_s)
        except profiler.ProfileError as error:
            problems.append(f"{tool}: {error}")
    return problems


def find_routing(cell: Live) -> bool:
    """Find whether the callable follows another routing in the same buffers. Returns False if its routing is fixed.

    This is the last request to its process, since a fixed routing that does not fit may crash it. A crash also returns
    False.
    """
    if not cell.sound:
        return True
    seed, secret = drawn(31), new_secret()
    possible = cell.judging.ask(Request("can_reroute", arguments=(seed,)))
    if not isinstance(possible, Possible) or not possible.possible:
        return True
    shown = cell.worker.ask(Request("reroute", arguments=(seed, secret)))
    cell.dynamic = False
    if not isinstance(shown, Shown):
        return False
    judged = cell.judging.compare(shown.sent, At(secret, 0, seed))
    cell.dynamic = isinstance(judged, OutputJudgement) and judged.problem is None
    return True
