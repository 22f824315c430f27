"""Time the configs of a problem.

All configs are timed in turns, one burst each after a pause, so a drift of the clocks affects them alike. After every
round, configs that are clearly slower than the fastest one drop out. A config's time is the median over bursts. A
difference below half a percent is noise, and then either config is a good choice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import click

from groupbench.operators.measure.faults import describe
from groupbench.operators.measure.protocol import GpuTimer, Protocol

Config = TypeVar("Config")

PROTOCOL = Protocol(samples=8, warmups=2, idle_s=0.12)
SLOWEST = (1.10, 1.03, 1.015)
"""After each round but the last: the largest time, relative to the fastest, with which a config is timed again."""


def burst_of(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function to pause, time a burst and return the median in ms. Raises errors of the first call."""
    timer = GpuTimer(run, PROTOCOL)

    def burst() -> float:
        time.sleep(PROTOCOL.idle_s)
        return statistics.median(timer.burst())

    return burst


def time_each(
    configs: Iterable[Config], prepare: Callable[[Config], Callable[[], object]]
) -> list[tuple[float, Config]]:
    """Return (ms, config) for each config that runs. Print the configs that fail."""
    candidates = []
    for config in configs:
        try:
            burst = burst_of(prepare(config))
            candidates.append((config, burst, [burst()]))
        except Exception as error:
            click.echo(f"  {config} does not run: {describe(error)}", err=True)
    for slowest in SLOWEST:
        fastest = min((min(times) for _, _, times in candidates), default=0.0)
        for _, burst, times in candidates:
            if min(times) <= slowest * fastest:
                times.append(burst())
    return [(statistics.median(times), config) for config, _, times in candidates]
