"""Measure a machine's noise floor with A/A comparisons: the same code on both sides, many times."""

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
"""Upper limits of the latency classes, in ms."""

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
"""Cells by device, as (operator, backend, shape, dtype): about 10 us, 0.1 ms, 0.5 ms, and 1 ms or more on an H100."""


@dataclass(frozen=True)
class ClassReport:
    """The scatter of one latency class. Standard deviations (sd) and changes are relative.

    Attributes:
        different: A/A comparisons that were called different: false positives.
        placement_sd: Standard deviation between blocks of one side.
        burst_sd: Standard deviation of one burst; None if blocks have one burst per side.
        process_sd: Standard deviation of a process's constant offset; None with too few processes.
        block_sd: Standard deviation of a block's difference, from its median absolute deviation.
        smallest_change: Smallest change detected in nine of ten comparisons within the budget, at the false-positive
            rate alpha; None if no change up to 50 % is.
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
    bench: Bench, cells: Sequence[AbCell], minutes: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[AbResult]:
    """Compare the cells in turn until the time is over, each at least once; yield the results."""
    end = clock() + 60 * minutes
    for number, cell in enumerate(cycle(cells)):
        if number >= len(cells) and clock() >= end:
            return
        yield bench.compare(cell)


def summarise(results: Sequence[AbResult], budget_s: float, alpha: float) -> list[ClassReport]:
    """Return a report for each latency class that has results."""
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
    """Return the scatter at each level, and the smallest change that is detected within a budget."""
    import numpy as np

    from groupbench.tracker.stats import sequential
    from groupbench.tracker.stats.thresholds import mad

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
        "block_sd": mad(differences, corrected=False),
        "smallest_change": smallest_change(differences, rule, max(1, int(budget_s / block_s))),
    }


def process_sd(results: Sequence[AbResult]) -> float | None:
    """Return the standard deviation of log latency between one side's processes, by analysis of variance with medians.

    Returns None unless a comparison has two processes per side with two blocks each.
    """
    import numpy as np

    excess = []
    for result in results:
        for side in ("base", "head"):
            by_process: dict[int, list[float]] = {}
            for block in result.bursts:
                level = float(np.mean(np.log(getattr(block, f"{side}_ms"))))
                by_process.setdefault(block.process, []).append(level)
            groups = [levels for levels in by_process.values() if len(levels) > 1]
            if len(groups) > 1:
                within = float(np.mean([np.var(levels, ddof=1) / len(levels) for levels in groups]))
                excess.append(float(np.var([np.median(levels) for levels in groups], ddof=1)) - within)
    return math.sqrt(max(0.0, float(np.mean(excess)))) if excess else None


def smallest_change(differences: ArrayLike, rule: Rule, blocks: int, seed: int = 0) -> float | None:
    """Return the smallest relative change detected in a share `POWER` of comparisons with at most `blocks` blocks.

    Args:
        differences: Of the blocks of A/A comparisons, to draw from with replacement and a random sign.
    """
    import numpy as np

    from groupbench.tracker.stats.sequential import MAX_BLOCKS, decide_many

    random = np.random.default_rng(seed)
    size = (RUNS, min(blocks, MAX_BLOCKS))
    drawn = random.choice(np.asarray(differences, dtype=np.float64), size) * random.choice([-1.0, 1.0], size)
    drawn += random.normal(0, 1e-9, size)  # rank equal blocks at random

    def is_detected(change: float) -> bool:
        return float(np.mean(decide_many(drawn + math.log1p(change), rule)[0] == 1)) >= POWER

    low, high = rule.floor, 0.5
    if not is_detected(high):
        return None
    while high - low > 0.02 * high:
        middle = math.sqrt(low * high) if low > 0 else high / 2
        low, high = (low, middle) if is_detected(middle) else (middle, high)
    return high
