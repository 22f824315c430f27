"""Measure the gate's statistics on simulated nights: error rates, power, speed.

A series is *asked* if its result is worth an A/B, *undecided*, *unconfirmed*, *suspect* or *certain* as by the table of
rules.
`--scale 0.1` simulates a tenth of the series. The part `public` needs `--nyrkio`, a folder with the public histories
rocksdb_2023.csv.gz and tigerbeetle_2023.csv.gz (columns timestamp, commit, metric, value and, with several benchmarks,
test).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.latency import of_history
from groupbench.tracker.judge.rules import decide
from groupbench.tracker.stats.screen import Returns, Stacked, ask_of, came_back, screen, worth
from groupbench.tracker.stats.thresholds import FLOOR, GROSS, least_effect, prior_scatter
from groupbench.tracker.stats.walk import NIGHTS, OUT, Walked, walk

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]
Rows = Iterator[tuple[object, ...]]


def ar1(rng: np.random.Generator, m: int, n: int, rho: float) -> Floats:
    e = rng.normal(0, 1, (m, n + 50))
    for i in range(1, n + 50):
        e[:, i] = rho * e[:, i - 1] + np.sqrt(1 - rho**2) * e[:, i]
    return e[:, 50:]


NOISES: dict[str, Noise] = {  # in standard deviations
    "Gaussian": lambda rng, m, n: rng.normal(0, 1, (m, n)),
    "exponential": lambda rng, m, n: rng.exponential(1, (m, n)) - 1,
    "log-normal": lambda rng, m, n: (np.exp(rng.normal(0, 0.8, (m, n))) - 1.38) / 1.6,
    "AR(1) 0.6": lambda rng, m, n: ar1(rng, m, n, 0.6),
    "5 % outliers": lambda rng, m, n: (
        rng.normal(0, 1, (m, n)) + (rng.random((m, n)) < 0.05) * rng.uniform(5, 50, (m, n))
    ),
}


def limits(timing: str, ms: float = 0.6) -> tuple[float, float, float]:
    """Return the smallest distance that counts, the prior and the floor of a latency."""
    return math.log1p(least_effect(timing, ms)), prior_scatter(timing, ms), FLOOR[timing]


def judged(y: Floats, timing: str, ms: float = 0.6) -> Walked:
    least, prior, floor = limits(timing, ms)
    return walk(y.tolist(), least, prior, floor=floor)


def is_certain(walked: Walked, n: int) -> bool:
    """Return whether tonight is the night on which a slowdown became certain."""
    return len(walked.stack) > 1 and walked.stack[-1].start == n - NIGHTS


def times(full: int, scale: float) -> int:
    return max(1, round(full * scale))


def cpu(options: argparse.Namespace) -> Rows:
    """Ask for an A/B of a slowdown on a CPU, in nights of 10 latencies."""
    yield "noise", "sd", "slowdown", *(f"{n} results: night 1, 2" for n in (1, 2, 5, 8, 30, 100))
    rng, scale, least = options.rng, options.scale, limits("cpu")[0]
    for name in ("Gaussian", "exponential", "log-normal"):
        for sd, factor in ((0.05, 1.5), (0.1, 1.5), (0.1, 2.0), (0.2, 1.5), (0.2, 2.0)):
            shares = []
            for n in (1, 2, 5, 8, 30, 100):
                y = sd * NOISES[name](rng, times(150, scale), n + 2)
                y[:, n:] += math.log(factor)
                first = [worth(judged(row[: n + 1], "cpu"), ask_of(10), least) is not None for row in y]
                second = [worth(judged(row, "cpu"), ask_of(10), least) is not None for row in y]
                shares.append(f"{np.mean(first):.1%} {np.mean(np.array(first) | np.array(second)):.1%}")
            yield name, f"{sd:.0%}", f"x{factor}", *shares


CELLS = (  # ms, lowest and highest scatter between nights in % (H200, a process for each night), steps in %
    (0.6, 0.05, 0.10, (0.9, 1.8, 3.5)),
    (0.4, 0.05, 0.12, (2.5,)),
    (0.097, 0.15, 0.30, (0.8, 1.9, 3.4)),
    (0.018, 0.4, 0.6, (3.5,)),
    (0.013, 0.4, 0.6, (2.5,)),
)


def gpu(options: argparse.Namespace) -> Rows:
    """Ask for an A/B of a step in a night of 11 cells, with and without a result of x1.3 earlier."""
    yield "ms", "step", "outlier", "night 1", "within two", "of series"
    rng, scale = options.rng, options.scale
    for ms, low, high, steps in CELLS:
        for step in steps:
            for outlier in (False, True):
                hits = []
                for _ in range(times(200, scale)):
                    n = int(rng.integers(1 + 3 * outlier, 31))
                    y = rng.uniform(low, high) / 100 * ar1(rng, 1, n + 2, 0.3)[0]
                    y[int(rng.integers(0, n))] += math.log(1.3) * outlier
                    y[n:] += math.log1p(step / 100)
                    least = limits("gpu", ms)[0]
                    hits.append([worth(judged(y[: n + k], "gpu", ms), ask_of(11), least) is not None for k in (1, 2)])
                found = np.array(hits)
                yield (
                    ms,
                    f"{step} %",
                    outlier,
                    f"{found[:, 0].mean():.1%}",
                    f"{found.any(axis=1).mean():.1%}",
                    len(found),
                )


def quiet(options: argparse.Namespace) -> Rows:
    """Judge every third night of quiet series by history alone."""
    yield "timing", "noise", "sd", *COUNTED
    rng, scale = options.rng, options.scale
    for timing, sds in (("gpu", (0.001, 0.002, 0.005)), ("cpu", (0.05, 0.1, 0.2))):
        for name, noise in NOISES.items():
            for sd in sds:
                yield (timing, name, f"{sd:.1%}", *_by_history(sd * noise(rng, times(150, scale), 60), timing))


def verdict_of(y: Floats, walked: Walked, timing: str, back: Returns) -> Verdict:
    """Return the verdict on the newest result of y, [n], by history alone."""
    facts: dict[str, Any] = of_history(walked, timing) | {"reach": walked.top and walked.top.reach(OUT)}
    facts["came_back"] = back.share(y[-1] - y[:-1].min())
    return decide(Evidence(had=True, n=len(y) - 1, decidable=True, **facts)).verdict


def returns_of(y: Floats, timing: str) -> Returns:
    """Return a database's results, [s, n], that were outside all before and came back."""
    stack = Stacked(y, *(np.full(len(y), each) for each in limits(timing)))
    return came_back([(stack, math.log1p(GROSS[timing]))])


TOGETHER = 20
"""Number of series in a simulated database."""
COUNTED = *(f"{word} of 1,000" for word in ("undecided", "unconfirmed", "suspect", "certain")), "judgements"


def _by_history(y: Floats, timing: str) -> tuple[object, ...]:
    """Return how many of 1,000 judgements have each verdict or are newly certain, and their number."""
    counts, number = [0, 0, 0, 0], 0
    for start, n in product(range(0, len(y), TOGETHER), range(2, y.shape[1] + 1, 3)):
        results = y[start : start + TOGETHER, :n]
        back = returns_of(results, timing)
        for row in results:
            walked, number = judged(row, timing), number + 1
            verdict = verdict_of(row, walked, timing, back)
            counts[0] += verdict is Verdict.UNDECIDED
            counts[1] += verdict is Verdict.UNCONFIRMED
            counts[2] += verdict is Verdict.SUSPECT and walked.distance > 0
            counts[3] += is_certain(walked, n)
    return *(f"{1000 * count / number:.2f}" for count in counts), number


def _worse(y: Floats, walked: Walked, timing: str, back: Returns) -> Verdict:
    return verdict_of(y, walked, timing, back) if walked.distance > 0 else Verdict.OK


def steps(options: argparse.Namespace) -> Rows:
    """See a step by history alone: share of series that fail on the first three nights, and that are undecided."""
    names = "timing", "noise", "sd", "step", "outlier"
    yield *names, *(f"{n} results: nights 1 to 3, undecided" for n in (2, 5, 10, 30))
    rng, scale = options.rng, options.scale
    cases = (
        ("gpu", "Gaussian", 0.001, 0.009), ("gpu", "Gaussian", 0.001, 0.018), ("gpu", "exponential", 0.002, 0.018),
        ("cpu", "Gaussian", 0.03, 0.25), ("cpu", "exponential", 0.05, 0.3), ("cpu", "exponential", 0.05, 0.5),
        ("cpu", "exponential", 0.1, 1.0), ("cpu", "Gaussian", 0.2, 1.0),
    )  # fmt: skip
    for timing, name, sd, step in cases:
        for outlier in (0.0, 1.3 if timing == "gpu" else 3.0):
            shares = []
            for n in (2, 5, 10, 30):
                y = sd * NOISES[name](rng, times(100, scale), n + 3)
                y[:, n // 2] += math.log(outlier or 1.0)
                y[:, n:] += math.log1p(step)
                walked = [[judged(row[: n + k], timing) for k in (1, 2, 3)] for row in y]
                back = returns_of(y[:TOGETHER, : n + 1], timing)
                verdicts = [
                    [_worse(row[: n + k], one, timing, back) for k, one in enumerate(each, 1) if len(one.stack) == 1]
                    for row, each in zip(y, walked, strict=True)
                ]
                failing = [np.mean([len(each) < k or each[k - 1].exit != 0 for each in verdicts]) for k in (1, 2, 3)]
                undecided = np.mean([each[:1] == [Verdict.UNDECIDED] for each in verdicts])
                shares.append(" ".join(f"{share:.0%}" for share in (*failing, undecided)))
            yield timing, name, sd, f"{step:.1%}", outlier or "", *shares


def drift(options: argparse.Namespace) -> Rows:
    """See a drift: the night and the sum at which history alone is certain."""
    yield "a night", "noise", "certain in", "median night", "median sum"
    rng, scale = options.rng, options.scale
    for rate, sd in ((0.0005, 0.0004), (0.0008, 0.0004), (0.005, 0.002), (0.02, 0.01)):
        nights = []
        for _ in range(times(40, scale)):
            y = np.log1p(rate) * np.arange(60) + rng.normal(0, sd, 60)
            nights.append(next((n for n in range(2, 61) if len(judged(y[:n], "gpu").stack) > 1), None))
        found = [n for n in nights if n is not None]
        middle = float(np.median(found)) if found else math.nan
        yield f"{rate:.2%}", f"{sd:.2%}", f"{len(found)} of {len(nights)}", middle, f"{math.expm1(rate * middle):.1%}"


def speed(options: argparse.Namespace) -> Rows:
    rng = options.rng
    yield "20,000 series of 100 results", "wall s", "process s"
    m, (least, prior, floor) = times(20000, options.scale), limits("gpu")
    for name, sd in (("0.1 % scatter", 0.001), ("1 % scatter", 0.01), ("3 % stepped", 0.001)):
        y = rng.normal(0, sd, (m, 100))
        if "stepped" in name:
            y[: m // 33, 95:] += 0.05
        wall, cpu_s = time.perf_counter(), time.process_time()
        stack = Stacked(y, *(np.full(m, each) for each in (least, max(prior, sd), floor)))
        level = screen([stack], ask_of(m))[0]
        for at in range(m) if level is None else np.flatnonzero(~level.certain).tolist():
            stack.one(at).walked()
        yield name, f"{time.perf_counter() - wall:.1f}", f"{time.process_time() - cpu_s:.1f}"


def public(options: argparse.Namespace) -> Rows:
    """Judge recorded CI histories in random order, in which no night has a real change, by history alone."""
    yield "history", "limits of", "series", *COUNTED
    if options.nyrkio is None:
        return
    for path in sorted(options.nyrkio.glob("*_2023.csv.gz")):
        series = [options.rng.permutation(log) for log in read(path)]
        length = min(map(len, series))
        for timing in ("cpu", "gpu"):
            y = np.stack([one[:length] for one in series])
            yield path.name.split("_")[0], timing, len(series), *_by_history(y, timing)


def read(path: Path) -> Iterator[Floats]:
    """Yield the logarithms of a file's series in order of time, without values that are not positive.

    Series of fewer than 50 values are skipped.
    """
    series: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            series[line.get("test") or "", line["metric"]].append((int(line["timestamp"]), float(line["value"])))
    for _, points in sorted(series.items()):
        values = np.array([value for _, value in sorted(points) if value > 0])
        if len(values) >= 50:
            yield np.log(values)


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "cpu": cpu, "gpu": gpu, "quiet": quiet, "steps": steps, "drift": drift, "speed": speed, "public": public,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nyrkio", type=Path, metavar="FOLDER", help="folder with the public histories")
