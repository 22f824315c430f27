"""The marks of the judgement from history, measured: `python ci/benchmarks/judgement_marks.py [--only NAME] [--quick]`.

Makes its noise from a seed, writes the table of docs/judgement.md. `--nyrkio PATH` adds the public histories of nyrkio,
rocksdb_2023.csv.gz and tigerbeetle_2023.csv.gz (columns timestamp, commit, metric, value and, with several benchmarks,
test). `--quick` tries it out with a tenth of the series, which resolves less than the marks ask for.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats.scan import Finding, History, find_all_changes, scan

Floats = NDArray[np.float64]
Row = tuple[str, str, str]  # mark, measured, ok or missed


def ar1(rng: np.random.Generator, m: int, n: int) -> Floats:
    e = rng.normal(0, 0.01, (m, n + 50))
    for i in range(1, n + 50):
        e[:, i] += 0.5 * e[:, i - 1]
    return e[:, 50:]


def garch(rng: np.random.Generator, m: int, n: int) -> Floats:
    e, variance = np.zeros((m, n + 50)), np.full(m, 1e-4)
    for i in range(n + 50):
        e[:, i] = rng.normal(0, 1, m) * np.sqrt(variance)
        variance = 1e-5 + 0.1 * e[:, i] ** 2 + 0.8 * variance
    return e[:, 50:]


def seasonal(rng: np.random.Generator, m: int, n: int) -> Floats:
    turns = np.arange(n) / rng.uniform(7, 60, (m, 1)) + rng.random((m, 1))
    return rng.normal(0, 0.01, (m, n)) + 0.007 * np.sin(2 * np.pi * turns)


Noise = Callable[[np.random.Generator, int, int], Floats]
MARKED: dict[str, Noise] = {
    "Gaussian": lambda rng, m, n: rng.normal(0, 0.01, (m, n)),
    "t3": lambda rng, m, n: 0.01 * rng.standard_t(3, (m, n)),
    "log-normal": lambda rng, m, n: np.log1p(0.01 * np.exp(rng.normal(0, 1, (m, n)))),
    "AR(1) 0.5": ar1,
    "bimodal": lambda rng, m, n: rng.normal(0, 0.003, (m, n)) + 0.03 * (rng.random((m, n)) < 0.3),
}
UNTUNED: dict[str, Noise] = {
    "Laplace": lambda rng, m, n: rng.laplace(0, 0.01, (m, n)),
    "rare second mode (5 %)": lambda rng, m, n: rng.normal(0, 0.003, (m, n)) + 0.03 * (rng.random((m, n)) < 0.05),
    "1 % outliers of 10 sigma": lambda rng, m, n: rng.normal(0, 0.01, (m, n)) + 0.1 * (rng.random((m, n)) < 0.01),
    "GARCH 0.1, 0.8": garch,
    "season of 7-60 nights": seasonal,
    "three ticks": lambda rng, m, n: 0.01 * np.clip(np.round(rng.normal(0, 0.7, (m, n))), -1, 1),
    "constant": lambda rng, m, n: np.zeros((m, n)),
}


def histories(y: Floats) -> list[History]:
    """Each point another commit, one environment."""
    n = y.shape[1]
    return [History(row, np.full(n, np.nan), np.zeros(n, np.int64), np.arange(n)) for row in y]


def count(found: list[Finding], *verdicts: str) -> int:
    return sum(one.verdict in verdicts for one in found)


def row(mark: str, measured: str, good: bool) -> Row:
    return mark, measured, "ok" if good else "missed"


def quiet(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    m = round(4000 * size)
    for kinds, owed in ((MARKED, True), (UNTUNED, False)):
        for name, noise in kinds.items():
            shares = []
            for n in (30, 100, 300):
                made = histories(noise(rng, m, n))
                changes, found = find_all_changes(made), scan(made, alpha=0.01)
                shares.append(np.mean([bool(c) or f.verdict == "changed" for c, f in zip(changes, found, strict=True)]))
            text = " / ".join(f"{share:.2%}" for share in shares) + f" of {m}"
            yield row(
                f"quiet {name}: reported, n = 30 / 100 / 300 {'<= 1 %' if owed else '(not tuned on)'}",
                text,
                max(shares) <= 0.01,
            )


def night(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    for title, kinds in (("five noises", MARKED), ("five noises and seven not tuned on", MARKED | UNTUNED)):
        nights = []
        for _ in range(3):
            made = np.concatenate([noise(rng, round(20000 * size / len(kinds)), 100) for noise in kinds.values()])
            wall, cpu = time.perf_counter(), time.process_time()
            found = scan(histories(made))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            nights.append((count(found, "suspect"), count(found, "changed"), wall, cpu))
        text = "; ".join(f"{s} suspect, {c} changed" for s, c, _, _ in nights)
        yield row(f"quiet night of 20,000 x 100, {title}: suspects <= 20", text, max(s for s, *_ in nights) <= 20)
        seconds = ", ".join(f"{wall:.1f} ({cpu:.1f})" for *_, wall, cpu in nights)
        yield row("its judgement <= 10 s (wall; process CPU)", seconds, max(wall for *_, wall, _ in nights) <= 10)


def step(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    m = round(10000 * size)
    for n in (50, 100, 300):
        false = count(scan(histories(rng.normal(0, 0.01, (m, n))), alpha=0.01), "suspect", "changed") / m
        yield row(f"alone, {n} points, alpha 0.01: false suspects <= 1 %", f"{false:.2%} of {m}", false <= 0.01)
        for after, least in ((1, 0.5), (2, 0.85), (3, 0.97), (5, 0.99)):
            y = rng.normal(0, 0.01, (m, n + after))
            y[:, n:] += np.log(1.03)
            share = count(scan(histories(y), alpha=0.01), "suspect", "changed") / m
            yield row(
                f"3 % in 1 %, {n} points before: found after {after} >= {least}", f"{share:.3f} of {m}", share >= least
            )


def steps(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    shares, wrong, m = [], [], round(20000 * size)
    for _ in range(5):
        y = rng.normal(0, 0.01, (m, 100))
        y[: m // 100, -3:] += np.log(1.03)
        hit = np.array([f.verdict in ("suspect", "changed") for f in scan(histories(y))])
        shares.append(hit[: m // 100].mean())
        wrong.append(hit[m // 100 :].sum() / max(hit.sum(), 1))
    each = ", ".join(f"{share:.3f}" for share in shares)
    yield row(
        "3 % in 1 % of 20,000 series: found after 3 points >= 0.9",
        f"{np.mean(shares):.3f} ({each})",
        np.mean(shares) >= 0.9,
    )
    each = ", ".join(f"{share:.3f}" for share in wrong)
    yield row("share of false findings <= 10 %", f"{np.mean(wrong):.3f} ({each})", np.mean(wrong) <= 0.1)


def last(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    m = round(1000 * size)
    for name in ("Gaussian", "AR(1) 0.5", "Laplace"):
        for n in (30, 100):
            y = (MARKED | UNTUNED)[name](rng, m, n)
            y[:, -1] = np.median(y[:, :-1], axis=1) + 6 * y.std()
            alone = scan(histories(y), alpha=0.01)
            others = histories((MARKED | UNTUNED)[name](rng, m, n))
            among = [scan([one, *others])[0] for one in histories(y[:10])]
            changed = count(alone, "changed") + count(among, "changed")
            share, seen = count(alone, "suspect") / m, count(among, "suspect")
            text = f"alone {share:.1%}; among {m}: {seen} of 10; {changed} changed"
            good = changed == 0 and (name != "Gaussian" or count(alone, "suspect") >= 0.99 * m)
            yield row(f"last point off by 6 sigma, {name}, n = {n}: suspect, never changed", text, good)


def public(rng: np.random.Generator, size: float, given: argparse.Namespace) -> Iterator[Row]:
    if given.nyrkio is None:
        return
    folder = given.nyrkio if given.nyrkio.is_dir() else given.nyrkio.parent
    files = sorted(folder.glob("*_2023.csv.gz")) if given.nyrkio.is_dir() else [given.nyrkio]
    for path in files:
        name, made = path.name.removesuffix(".csv.gz"), list(read(path))
        changes, found = find_all_changes(made), scan(made)
        inside = sum(
            h.state[c.index] == h.state[c.index - 1] for h, each in zip(made, changes, strict=True) for c in each
        )
        inside += sum(
            f.verdict == "changed" and h.state[f.index] == h.state[f.index - 1]
            for h, f in zip(made, found, strict=True)
        )
        near = sum(
            min(np.abs(np.flatnonzero(np.diff(h.state)) + 1 - c.index), default=99) > 0
            for h, each in zip(made, changes, strict=True)
            for c in each
        )
        verdicts = ", ".join(f"{count(found, v)} {v}" for v in ("ok", "suspect", "changed", "drift"))
        text = (
            f"{inside} inside; {sum(map(len, changes))} changes between commits; newest: {verdicts}; {len(made)} series"
        )
        yield row(f"{name}: changes reported inside one commit: none", text, inside == 0 and near == 0)
        shuffled = []
        for h in made:
            order = rng.permutation(len(h.log_ms))
            shuffled.append(
                History(h.log_ms[order], h.error, h.environment, np.arange(len(order)), h.floor, h.min_effect)
            )
        false = sum(bool(each) for each in find_all_changes(shuffled))
        yield row(
            f"{name}, shuffled: series with a change <= 1 %", f"{false} of {len(made)}", false <= 0.01 * len(made)
        )


def read(path: Path) -> Iterator[History]:
    """The positive series of a file, in the order of their time stamps."""
    series: dict[tuple[str, str], list[tuple[int, str, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            key = (line.get("test") or "", line["metric"])
            series[key].append((int(line["timestamp"]), line["commit"], float(line["value"])))
    for _, points in sorted(series.items()):
        points = sorted((p for p in points if p[2] > 0), key=lambda point: point[0])
        if len(points) < 10:
            continue
        commits = list(dict.fromkeys(commit for _, commit, _ in points))
        n = len(points)
        yield History(
            np.log([value for *_, value in points]), np.full(n, np.nan), np.zeros(n, np.int64),
            np.array([commits.index(commit) for _, commit, _ in points]), pool=0,
        )  # fmt: skip


MARKS = {"quiet": quiet, "night": night, "step": step, "steps": steps, "last": last, "public": public}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MARKS), action="append")
    parser.add_argument("--nyrkio", type=Path, help="one such file, or the folder of both")
    parser.add_argument("--seed", type=int, default=31415)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print("| mark | measured | |\n|---|---|---|", flush=True)
    for i, (name, measure) in enumerate(MARKS.items()):
        if not given.only or name in given.only:
            for each in measure(np.random.default_rng([given.seed, i]), 0.1 if given.quick else 1.0, given):
                print("| " + " | ".join(each) + " |", flush=True)


if __name__ == "__main__":
    main()
