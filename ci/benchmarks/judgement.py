"""Measure the gate's statistics on simulated nights.

Every night is one call of `scan` with the gate's own false-discovery rate, floor and least effect, over all series of
the night. `--scale 0.1` simulates a tenth of the nights. The part `public` needs `--nyrkio`, a folder with the public
histories rocksdb_2023.csv.gz and tigerbeetle_2023.csv.gz (columns timestamp, commit, metric, value and, with several
benchmarks, test). The part `splices` also judges by Apache Otava, if it is on the PYTHONPATH.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.judge.parts import Q
from groupbench.tracker.stats.scan import SeriesFinding, SeriesHistory, scan
from groupbench.tracker.stats.thresholds import FLOOR, least_effect

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]
Rows = Iterator[tuple[object, ...]]

MS = 0.6
"""Latency of the simulated cells, which determines the least effect."""


def ar1(rng: np.random.Generator, m: int, n: int, rho: float) -> Floats:
    e = rng.normal(0, 1, (m, n + 50))
    for i in range(1, n + 50):
        e[:, i] = rho * e[:, i - 1] + np.sqrt(1 - rho**2) * e[:, i]
    return e[:, 50:]


def weekdays(rng: np.random.Generator, m: int, n: int) -> Floats:
    return rng.normal(0, 1, (m, n)) + 3 * ((np.arange(n) + rng.integers(0, 7, (m, 1))) % 7 < 2)


QUIET: dict[str, Noise] = {  # in sigmas of the core
    "Gaussian": lambda rng, m, n: rng.normal(0, 1, (m, n)),
    "log-normal": lambda rng, m, n: 0.6 * np.exp(rng.normal(0, 1, (m, n))),
    "t3": lambda rng, m, n: rng.standard_t(3, (m, n)),
    "5 % outliers of 5-50 sigma": lambda rng, m, n: (
        rng.normal(0, 1, (m, n)) + (rng.random((m, n)) < 0.05) * rng.uniform(5, 50, (m, n))
    ),
    "bimodal": lambda rng, m, n: rng.normal(0, 0.3, (m, n)) + 3 * (rng.random((m, n)) < 0.3),
    "weekdays": weekdays,
    "AR(1) 0.3": lambda rng, m, n: ar1(rng, m, n, 0.3),
    "AR(1) 0.6": lambda rng, m, n: ar1(rng, m, n, 0.6),
}


def judged(y: Floats, ms: float = MS) -> list[SeriesFinding]:
    """Judge one night of log latencies y [m, n], in which each point is another commit."""
    n = y.shape[1]
    unknown, one, commits = np.full(n, np.nan), np.zeros(n, np.int64), np.arange(n)
    least = float(np.log1p(least_effect("gpu", ms)))
    return scan([SeriesHistory(row, unknown, one, commits, FLOOR["gpu"], least) for row in y], q=Q)


NEWS = ("suspect", "changed")


def news(y: Floats, ms: float = MS) -> NDArray[np.bool_]:
    """Return [m] whether each series is a suspect or a change."""
    return np.array([one.verdict in NEWS for one in judged(y, ms)])


def times(full: int, scale: float) -> int:
    return max(1, round(full * scale))


def large(options: argparse.Namespace) -> Rows:
    """Find changes in at most a sixth of a night's series; the others are heavy-tailed."""
    rng, scale = options.rng, options.scale
    yield "others", "earlier results", "night of", "2.0x in 2 %", "1.5x in 2 %", "1.1x in 0.5 %"
    for others in ("t3", "5 % outliers of 5-50 sigma"):
        for earlier in (5, 10, 13, 16, 22):
            for size, nights in ((20, 100), (312, 10), (2000, 4)):
                hits, changed = np.zeros((3, 0)), 3 * min(size // 18, 6)
                for _ in range(times(nights, scale)):
                    y = np.exp(rng.uniform(np.log(0.0005), np.log(0.02), (size, 1))) * QUIET[others](
                        rng, size, earlier + 1
                    )
                    for row in range(changed):
                        factor, sigma = ((2.0, 0.02), (1.5, 0.02), (1.1, 0.005))[row % 3]
                        y[row] = rng.normal(0, sigma, earlier + 1)
                        y[row, -1] += np.log(factor)
                    hits = np.concatenate([hits, news(y)[:changed].reshape(-1, 3).T], axis=1)
                yield others, earlier, size, *(f"{one.mean():.1%} of {len(one)}" for one in hits)


def calm(options: argparse.Namespace) -> Rows:
    rng, scale = options.rng, options.scale
    yield "earlier results", "night of", "+0.9 %", "+1.8 %", "+3.6 %"
    for earlier in (10, 20, 50):
        for size, nights in ((12, 60), (312, 4)):
            shares = []
            for effect in (0.009, 0.018, 0.036):
                hits: list[bool] = []
                for _ in range(times(nights, scale)):
                    y = rng.uniform(0.0004, 0.01, (size, 1)) * rng.normal(0, 1, (size, earlier + 2))
                    y[:6] = rng.normal(0, 0.0004, (6, earlier + 2))
                    y[:6, earlier:] += np.log1p(effect)
                    hits += (news(y[:, :-1]) | news(y))[:6].tolist()
                shares.append(f"{np.mean(hits):.1%} of {len(hits)}")
            yield earlier, size, *shares


def power(options: argparse.Namespace) -> Rows:
    rng, scale = options.rng, options.scale
    yield "night of", "stepped", "after 1", "2", "3", "5", "others flagged after 1"
    for size, stepped, nights in ((20, 1, 400), (300, 3, 60), (2000, 20, 12), (20000, 200, 2)):
        shares, false = [], 0.0
        for after in (1, 2, 3, 5):
            hits, others = 0, 0
            for _ in range(times(nights, scale)):
                y = rng.normal(0, 0.01, (size, 50 + after))
                y[:stepped, 50:] += np.log(1.03)
                flagged = news(y)
                hits, others = hits + int(flagged[:stepped].sum()), others + int(flagged[stepped:].sum())
            shares.append(f"{hits / (stepped * times(nights, scale)):.3f}")
            false = others / ((size - stepped) * times(nights, scale)) if after == 1 else false
        yield size, stepped, *shares, f"{false:.2%}"


def grid(options: argparse.Namespace) -> Rows:
    """Find steps of 6 sigma, but not below the least effect, after one and two nights."""
    rng, scale = options.rng, options.scale
    noises = ("Gaussian", "t3", "AR(1) 0.6", "bimodal", "5 % outliers of 5-50 sigma")
    yield "noise", "shape", *(f"{earlier} results" for earlier in (5, 10, 15, 30, 100))
    size, stepped = 300, 10
    for sigma in (0.0003, 0.001, 0.01, 0.03):
        for shape in noises:
            shares = []
            for earlier in (5, 10, 15, 30, 100):
                after: list[list[bool]] = [[], []]
                for _ in range(times(6, scale)):
                    y = sigma * QUIET[shape](rng, size, earlier + 2)
                    y[:stepped, earlier:] += max(6 * sigma, 0.004)
                    after[0] += news(y[:, :-1])[:stepped].tolist()
                    after[1] += news(y)[:stepped].tolist()
                shares.append(f"{np.mean(after[0]):.2f} {np.mean(after[1]):.2f}")
            yield f"{sigma:.2%}", shape, *shares


def quiet(options: argparse.Namespace) -> Rows:
    rng, scale = options.rng, options.scale
    yield "noise", *(f"suspects of 20,000, n = {n}" for n in (11, 23, 41, 101)), "nights of 20 with any, n = 41"
    m = times(20000, scale)
    for name, noise in QUIET.items():
        counts = []
        for n in (11, 23, 41, 101):
            verdicts = [one.verdict for one in judged(0.01 * noise(rng, m, n))]
            certain, suspects = verdicts.count("changed"), verdicts.count("suspect")
            counts.append(f"{suspects * 20000 / m:.0f}" + (f" + {certain} changed" if certain else ""))
        nights = [bool(news(0.01 * noise(rng, 20, 41)).any()) for _ in range(times(400, scale))]
        yield name, *counts, f"{np.mean(nights):.1%}"


def replay(options: argparse.Namespace) -> Rows:
    """Judge 40 successive quiet nights, and count the series that are ever certain or ever a suspect."""
    rng, scale = options.rng, options.scale
    yield "noise", "ever certain", "ever suspect", "of series"
    m = times(2000, scale)
    for name, noise in QUIET.items():
        y = 0.01 * noise(rng, m, 60)
        certain, suspect = np.zeros(m, dtype=bool), np.zeros(m, dtype=bool)
        for stop in range(21, 61):
            verdicts = np.array([one.verdict for one in judged(y[:, :stop])])
            certain |= verdicts == "changed"
            suspect |= verdicts == "suspect"
        yield name, f"{certain.mean():.2%}", f"{suspect.mean():.2%}", m


def steady(options: argparse.Namespace) -> Rows:
    """Judge nights of 12 series after a lasting step; a suspect must not become ok again. A drift is not ok."""
    rng, scale = options.rng, options.scale
    yield "step", "within two nights", "ok again", "of series"
    for size in (3, 5, 8, 12, 20):
        seen_early, again, total = 0, 0, 0
        for _ in range(times(30, scale)):
            earlier = int(rng.integers(6, 19))
            y = np.exp(rng.uniform(np.log(0.0005), np.log(0.006), (12, 1))) * ar1(rng, 12, 24, 0.3)
            y[0] = 0.0015 * (rng.normal(0, 1, 24) + size * (np.arange(24) >= earlier))
            seen = [judged(y[:, :stop], MS)[0].verdict for stop in range(earlier + 1, 25)]
            seen_early += any(verdict in NEWS for verdict in seen[:2])
            again += any(before in NEWS and now not in (*NEWS, "drift") for before, now in itertools.pairwise(seen))
            total += 1
        yield f"{size} sigma", f"{seen_early / total:.0%}", f"{again / total:.0%}", total


CELLS = (  # ms, lowest and highest scatter between nights in % (H200, a process for each night), steps in %
    (0.6, 0.05, 0.10, (0.9, 1.8, 3.5)),
    (0.4, 0.05, 0.12, (2.5,)),
    (0.097, 0.15, 0.30, (0.8, 1.9, 3.4)),
    (0.018, 0.4, 0.6, (3.5,)),
    (0.013, 0.4, 0.6, (2.5,)),
)


def splices(options: argparse.Namespace) -> Rows:
    """Find a real step in one of 11 cells with the scatter of recorded nights, with each method, within two nights.

    `wander` is the share of the variance that lasts from night to night (AR(1) 0.7). `quiet` is the share of false
    alarms on nights before the step and on the ten cells without a step.
    """
    rng, scale = options.rng, options.scale
    methods = {"gate": _by_gate, "6 MAD": _by_simple_rule} | ({"Otava": _by_otava} if _otava() else {})
    yield (
        "wander",
        "latency ms",
        "step",
        *(f"{name}: found" for name in methods),
        *(f"{name}: quiet" for name in methods),
    )
    for wander in (0.0, 0.5):
        for ms, low, high, steps in CELLS:
            for step in steps:
                hits, false, quiet = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0), 0
                cases = times(100, scale)
                for _ in range(cases):
                    sigma = rng.uniform(low, high, (11, 1)) / 100
                    slow = ar1(rng, 11, 24, 0.7)
                    y = sigma * (np.sqrt(wander) * slow + np.sqrt(1 - wander) * rng.normal(0, 1, (11, 24)))
                    at = int(rng.integers(6, 19))
                    y[0, at:] += np.log1p(step / 100)
                    quiet += 10 * 2 + (at - 4)
                    for name, method in methods.items():
                        seen = [method(y[:, :stop], ms) for stop in range(5, at + 3)]
                        hits[name] += bool(seen[-1][0] or seen[-2][0])
                        false[name] += sum(bool(night[0]) for night in seen[:-2])
                        false[name] += sum(int(night[1:].sum()) for night in seen[-2:])
                yield (
                    wander, ms, f"{step} %", *(f"{100 * hits[name] / cases:.0f} % of {cases}" for name in methods),
                    *(f"{100 * false[name] / quiet:.2f} % of {quiet}" for name in methods),
                )  # fmt: skip


def _by_gate(y: Floats, ms: float) -> NDArray[np.bool_]:
    return news(y, ms)


def _by_simple_rule(y: Floats, ms: float) -> NDArray[np.bool_]:
    """Return [m] whether the last night is 6 median absolute deviations, and 0.5 %, from the earlier median."""
    centre = np.median(y[:, :-1], axis=1, keepdims=True)
    spread = np.median(np.abs(y[:, :-1] - centre), axis=1)
    off = np.abs(y[:, -1] - centre[:, 0])
    return (off > 6 * np.maximum(spread, 0.0004)) & (off > 0.005)


def _by_otava(y: Floats, ms: float) -> NDArray[np.bool_]:
    """Return [m] whether one of the last two nights is a change point (p below 1e-5, at least 0.5 %)."""
    from otava.analysis import compute_change_points  # type: ignore[import-not-found, unused-ignore]

    def newest(values: Sequence[float]) -> bool:
        points, _ = compute_change_points(values, max_pvalue=1e-5, min_magnitude=0.005)
        return any(point.index >= len(values) - 2 for point in points)

    return np.array([newest(list(row)) for row in np.exp(y) * ms])


def _otava() -> bool:
    return importlib.util.find_spec("otava") is not None


def speed(options: argparse.Namespace) -> Rows:
    rng, scale = options.rng, options.scale
    yield "20,000 series of 100 results", "wall s", "process s"
    m = times(20000, scale)
    for name in ("quiet", "every one stepped"):
        y = rng.normal(0, 0.01, (m, 100))
        if name != "quiet":
            y += 0.1 * (np.arange(100) >= rng.integers(20, 95, (m, 1)))
        wall, cpu = time.perf_counter(), time.process_time()
        judged(y)
        yield name, f"{time.perf_counter() - wall:.1f}", f"{time.process_time() - cpu:.1f}"


def public(options: argparse.Namespace) -> Rows:
    """Judge recorded CI histories in random order, in which no night has a real change."""
    rng = options.rng
    yield "history", "series", "least effect", "ever suspect in 40 nights", "ever certain", "suspect on the last night"
    if options.nyrkio is None:
        return
    for path in sorted(options.nyrkio.glob("*_2023.csv.gz")):
        for least in (0.003, 0.05):
            series = [rng.permutation(log) for log in read(path)]
            ever, certain, last = set(), set(), 0
            for left in range(39, -1, -1):
                cut = [log[: len(log) - left] for log in series]
                findings = scan([_history(log, least) for log in cut], q=Q)
                ever |= {i for i, one in enumerate(findings) if one.verdict == "suspect"}
                certain |= {i for i, one in enumerate(findings) if one.verdict == "changed"}
                last = sum(one.verdict == "suspect" for one in findings)
            yield path.name.split("_")[0], len(series), f"{least:.1%}", len(ever), len(certain), last


def _history(log: Floats, least: float) -> SeriesHistory:
    n = len(log)
    return SeriesHistory(
        log, np.full(n, np.nan), np.zeros(n, np.int64), np.arange(n), FLOOR["gpu"], float(np.log1p(least))
    )  # fmt: skip


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
    "large": large, "calm": calm, "power": power, "grid": grid, "quiet": quiet, "replay": replay, "steady": steady,
    "splices": splices, "speed": speed, "public": public,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nyrkio", type=Path, metavar="FOLDER", help="folder with the public histories")
