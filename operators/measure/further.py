"""Find the facts of a record beyond latency and accuracy: costs, kernels, profiles, and properties of the callable.

Each function takes a cell after the bursts. None makes the cell fail: latency and accuracy are known by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from groupbench.operators.measure import machine_code, profiler
from groupbench.operators.measure.costs import COLD
from groupbench.operators.measure.judge import At, OutputJudgement
from groupbench.operators.measure.live import Live, ask_judge, compare, drawn, median_ms, new_secret
from groupbench.operators.measure.wire import Failure, Request
from groupbench.tracker.facts.metrics import NCU
from groupbench.tracker.facts.record import Kernel

ROUTINGS = 2
"""Routings that are tried: an extreme one, with one owner of most rows and groups of 0 to 7, and one that differs from
the shape's in a row or two. `reroute` of an operator makes one or the other by its seed."""

_ANALYSES = ThreadPoolExecutor(4, thread_name_prefix="machine code")


def find_costs(cell: Live, idle_w: float | None = None) -> bool:
    """Measure a call's costs besides latency. Returns False if the process is unusable afterwards.

    Args:
        idle_w: Power of the GPU at rest, which no backend's process reports, since the records of rivals have it too.
    """
    wanted = tuple(name for name in cell.job.costs if name not in (COLD, NCU))
    if not wanted or not cell.sound or not cell.bursts:
        return True
    reply = cell.worker.ask(Request("costs", (wanted, median_ms(cell.bursts))))
    if not isinstance(reply, Failure):
        cell.metrics |= reply.metrics
        if idle_w is not None and "energy_j" in cell.metrics:
            cell.metrics["idle_w"] = idle_w
        cell.launched = reply.launched
    return not isinstance(reply, Failure)


def begin_analysis(cells: Iterable[Live]) -> None:
    """Analyse the cells' machine code in the background, half a second per kernel."""
    for cell in cells:
        if cell.analysis is None and cell.prepared is not None and cell.prepared.code:
            cell.analysis = _ANALYSES.submit(machine_code.described, cell.prepared.kernels, cell.prepared.code)


def describe_kernels(cell: Live) -> tuple[Kernel, ...]:
    """Return the kernels with the facts about their machine code."""
    begin_analysis([cell])
    if cell.analysis is not None:
        return cell.analysis.result()
    return cell.prepared.kernels if cell.prepared is not None else ()


def find_profile(cell: Live) -> str | None:
    """Profile a call if ncu is among the costs. Returns why it could not."""
    if NCU in cell.job.costs and cell.sound:
        try:
            cell.metrics |= profiler.profile(cell.job, cell.worker.timeout_s)
        except profiler.ProfileError as error:
            return f"{NCU}: {error}"
    return None


def find_properties(cell: Live) -> bool:
    """Find the properties that a caller may rely on. Returns False if the process is unusable afterwards.

    `dynamic_routing`: it follows other routings in the same buffers. `special_values`: it is right on NaN, infinity,
    zeros and other magnitudes. The requests come last, since a callable that is not made for them may crash. A crash
    counts as a no.
    """
    if not cell.sound:
        return True
    for style in range(ROUTINGS):
        seed = ROUTINGS * drawn(28) + style
        if ask_judge(cell, "can_reroute", seed) is True:
            secret = new_secret()
            holds = _holds(cell, Request("reroute", (seed, secret)), At(secret, 0, seed))
            cell.properties["dynamic_routing"] = holds is True and cell.properties.get("dynamic_routing", True)
            if holds is None:
                return False
    if ask_judge(cell, "can_be_special") is True:
        seed = drawn(31)
        holds = _holds(cell, Request("special", (seed,)), At(special=seed))
        cell.properties["special_values"] = holds is True
        return holds is not None
    return True


def _holds(cell: Live, request: Request, at: At) -> bool | None:
    """Return whether the result of a request is right for inputs in a state, None without a result."""
    shown = cell.worker.ask(request)
    if isinstance(shown, Failure):
        return None
    judged = compare(cell, shown, at)
    return isinstance(judged, OutputJudgement) and judged.problem is None
