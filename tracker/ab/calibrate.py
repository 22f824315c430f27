"""What this machine can tell apart: the same code on both sides, compared again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from groupbench.tracker.ab.bench import AbCell, AbResult, Bench, rule_for

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from groupbench.tracker.stats.sequential import Rule

POWER = 0.9
RUNS = 400
CLASSES_MS = (0.03, 0.2, 0.8, math.inf)
"""Upper ends of the latency classes."""

CELLS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "cuda": tuple(
        ("grouped_gemm", backend, shape, "bf16")
        for shape in (
            "G=4,M_g=128,N=512,K=512",
            "G=8,M=8192,N=2048,K=1024,routing=balanced",
            "G=8,M=16384,N=4096,K=2048,routing=balanced",
            "G=8,M=32768,N=4096,K=4096,routing=balanced",
        )
        for backend in ("torch_grouped_mm", "triton_flat")
    ),
    "cpu": tuple(
        ("grouped_gemm", "torch_loop", shape, "fp32")
        for shape in ("G=4,M_g=64,N=64,K=64", "G=4,M_g=128,N=256,K=256", "G=4,M_g=256,N=512,K=512")
    ),
}
"""Cells of each device: about 10 us, 0.1 ms, 0.5 ms and 1 ms and more on an H100. (operator, backend, shape, dtype)"""


@dataclass(frozen=True)
class ClassReport:
    """One latency class. Standard deviations and changes are relative.

    different        comparisons of like sides that were called different
    placement_sd     between blocks of one side; burst_sd of one burst, None where blocks hold one a side
    process_sd       of what a process is off for as long as it lives, None where there were too few
    block_sd         of a block's difference, by its median absolute deviation
    smallest_change  seen in nine comparisons of ten within the budget, at the rate of false alarms that alpha says;
                     None where no change up to 50 % is
    """

    upto_ms: float | None
    latency_ms: float
    comparisons: int
    different: int
    unknown: int
    failed: int
    blocks: int
    seconds: float
    block_s: float | None
    placement_sd: float | None
    burst_sd: float | None
    process_sd: float | None
    block_sd: float | None
    smallest_change: float | None


def cells(device: str) -> list[AbCell]:
    return [AbCell(*cell, device=device) for cell in CELLS[device]]


def measure(
    bench: Bench, todo: Sequence[AbCell], minutes: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[AbResult]:
    """Comparisons, the cells in turns, each at least once, until the time is over."""
    end = clock() + 60 * minutes
    for number, cell in enumerate(cycle(todo)):
        if number >= len(todo) and clock() >= end:
            return
        yield bench.compare(cell)


def summarise(results: Sequence[AbResult], budget_s: float, alpha: float) -> list[ClassReport]:
    """A report for each latency class that has results."""
    by_class: dict[float, list[AbResult]] = {}
    for result in results:
        latency = result.base_ms if result.base_ms is not None else math.inf
        by_class.setdefault(next(end for end in CLASSES_MS if latency <= end), []).append(result)
    return [_report(end, by_class[end], budget_s, alpha) for end in CLASSES_MS if end in by_class]


def _report(upto_ms: float, results: list[AbResult], budget_s: float, alpha: float) -> ClassReport:
    import numpy as np

    timed = [result for result in results if len(result.bursts) > 1]
    latency = float(np.median([result.base_ms for result in timed])) if timed else math.nan
    return ClassReport(
        upto_ms=upto_ms if math.isfinite(upto_ms) else None,
        latency_ms=latency,
        comparisons=len(results),
        different=sum(result.verdict == "different" for result in results),
        unknown=sum(result.verdict == "unknown" for result in results),
        failed=sum(result.verdict == "failed" for result in results),
        blocks=sum(len(result.bursts) for result in timed),
        seconds=sum(result.seconds for result in timed),
        **(_scatter(timed, rule_for(timed[0].timing or "cpu", latency, alpha), budget_s) if timed else _NO_SCATTER),
    )


_NO_SCATTER: dict[str, float | None] = dict.fromkeys(
    ("block_s", "placement_sd", "burst_sd", "process_sd", "block_sd", "smallest_change")
)


def _scatter(timed: Sequence[AbResult], rule: Rule, budget_s: float) -> dict[str, float | None]:
    """Return how far results scatter at each level, and the smallest change that is found within a budget."""
    import numpy as np

    from groupbench.tracker.stats import sequential

    blocks = [block for result in timed for block in result.bursts]
    parts = [
        sequential.components([[math.log(ms) for ms in side] for side in sides])
        for result in timed
        for sides in ([b.base_ms for b in result.bursts], [b.head_ms for b in result.bursts])
    ]
    placements, bursts = (np.square([value for value in part if value == value]) for part in zip(*parts, strict=True))
    differences = np.array([block.difference for block in blocks])
    block_s = sum(result.seconds for result in timed) / len(blocks)
    return {
        "block_s": block_s,
        "placement_sd": float(np.sqrt(placements.mean())),
        "burst_sd": float(np.sqrt(bursts.mean())) if len(bursts) else None,
        "process_sd": process_sd(timed),
        "block_sd": 1.4826 * float(np.median(np.abs(differences - np.median(differences)))),
        "smallest_change": smallest_change(differences, rule, max(1, int(budget_s / block_s))),
    }


def process_sd(results: Sequence[AbResult]) -> float | None:
    """Of the latency's logarithm, between processes of one side: an analysis of variance with medians.

    None where no comparison has two processes a side with two blocks each.
    """
    import numpy as np

    excess = []
    for result in results:
        for side in ("base", "head"):
            of: dict[int, list[float]] = {}
            for block in result.bursts:
                level = float(np.mean(np.log(getattr(block, f"{side}_ms"))))
                of.setdefault(block.process, []).append(level)
            groups = [levels for levels in of.values() if len(levels) > 1]
            if len(groups) > 1:
                within = float(np.mean([np.var(levels, ddof=1) / len(levels) for levels in groups]))
                excess.append(float(np.var([np.median(levels) for levels in groups], ddof=1)) - within)
    return math.sqrt(max(0.0, float(np.mean(excess)))) if excess else None


def smallest_change(differences: ArrayLike, rule: Rule, blocks: int, seed: int = 0) -> float | None:
    """The smallest relative change that `POWER` of comparisons with at most `blocks` blocks find.

    differences  of blocks of like sides, drawn from with replacement and with either sign, as the coin gives them
    """
    import numpy as np

    from groupbench.tracker.stats.sequential import MAX_BLOCKS, decide_many

    random = np.random.default_rng(seed)
    size = (RUNS, min(blocks, MAX_BLOCKS))
    drawn = random.choice(np.asarray(differences, dtype=np.float64), size) * random.choice([-1.0, 1.0], size)
    drawn += random.normal(0, 1e-9, size)  # equal blocks are ranked by chance

    def found(change: float) -> bool:
        return float(np.mean(decide_many(drawn + math.log1p(change), rule)[0] == 1)) >= POWER

    low, high = rule.floor, 0.5
    if not found(high):
        return None
    while high - low > 0.02 * high:
        middle = math.sqrt(low * high) if low > 0 else high / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
