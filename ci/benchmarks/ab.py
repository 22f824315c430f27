"""Measure how often `groupbench ab` is wrong, and how long it takes.

There are two kinds of comparisons. *A/A* compares two copies of this checkout. *Planted* compares a Triton matrix
product with the same one over 0.5 to 2 % more columns of K, which are zeros: more work for the same result. Both are
measured like `ab`, with new processes every `--fresh` comparisons. The parts `simulated`, `slowdowns` and `busy`
simulate the sequential test. `measured` and `resampled` are of the comparisons in tests/data/h100_ab.jsonl.gz. With
`--out DIR`, `measured` first compares on this machine for `--minutes`, and both are of DIR/ab.jsonl, to which each
result is appended; repeat the command to continue. Needs neither git nor a network. `--device cpu` is a trial without a
GPU, with larger effects.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.result import AbCell, AbSettings, rule_for
from groupbench.tracker.ab.sequential import MAX_BLOCKS
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.facts.grouping import grouped

from . import ab_noise

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/data/h100_ab.jsonl.gz"
Rows = Iterator[tuple[object, ...]]
LIKE = "like"
"""Title of the A/A comparisons in ab.jsonl."""

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

LIKE_TOTAL = 200
PLANTED_EACH = 30
RESAMPLED = 10_000
ENOUGH_BLOCKS = 30
"""Fewer blocks are not resampled, because their common error would look like a difference."""
RUNS = 20_000
VERDICTS = ("different", "same", "unknown", "failed")

PLUGIN = '''"""A matrix product over EXTRA more columns of K than the problem has: more work for the same result."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from groupbench.operators.operator import Backend

EXTRA = {extra}
FLAT = {flat}
PAD = {pad}  # columns that both sides have in memory, since a different stride would be a second difference
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 32

if triton is not None:

    @triton.jit
    def product(a, b, c, N, K, STRIDE, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        a_at = a + rows[:, None] * STRIDE + inner[None, :]
        b_at = b + inner[:, None] * N + columns[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in range(0, K, BLOCK_K):
            total = tl.dot(tl.load(a_at), tl.load(b_at), total)
            a_at += BLOCK_K
            b_at += BLOCK_K * N
        tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))


def prepare(x):
    M, N = x.a.shape[0], x.b.shape[2]
    a = torch.cat([x.a, x.a.new_zeros(M, PAD)], dim=1)
    b = torch.cat([x.b[0], x.b[0][:PAD]], dim=0)
    K = x.a.shape[1] + EXTRA
    if not a.is_cuda:
        return lambda: a[:, :K] @ b[:K]
    if FLAT:  # its K step is 64
        from groupbench.kernels.grouped_gemm.flat import prepare_flat

        return prepare_flat(a[:, :K], b[None, :K], x.offs)

    def run():
        c = a.new_empty(M, N)
        grid = (M // BLOCK_M, N // BLOCK_N)
        product[grid](a, b, c, N, K, a.shape[1], BLOCK_M, BLOCK_N, BLOCK_K, num_warps=8, num_stages=4)
        return c

    return run


BACKEND = Backend("planted", prepare, "a study of the comparison itself", operator="grouped_gemm")
'''


@dataclass(frozen=True)
class Planted:
    """A planted slowdown.

    For short kernels the added share of K is larger than `percent`, because of fixed costs: half of 10 us.
    """

    percent: float  # approximate slowdown
    latency: str
    shape: str
    extra: int  # added columns of K
    first: bool = False  # one of the five that are measured without --all-planted

    @property
    def title(self) -> str:
        return f"planted {self.percent:g} % at {self.latency}"


PLANTED = {
    "cuda": (
        Planted(0.5, "0.3 ms", "G=1,M_g=4096,N=2048,K=12800", 64, first=True),
        Planted(1.0, "0.15 ms", "G=1,M_g=2048,N=1024,K=12800", 128, first=True),
        Planted(3.0, "10 us", "G=1,M_g=1024,N=1024,K=576", 32, first=True),
        Planted(0.5, "1 ms", "G=1,M_g=8192,N=4096,K=12800", 64, first=True),
        Planted(0.5, "0.15 ms", "G=1,M_g=2048,N=1024,K=12800", 64),
        Planted(1.0, "0.3 ms", "G=1,M_g=4096,N=2048,K=12800", 128),
        Planted(1.0, "1 ms", "G=1,M_g=8192,N=4096,K=12800", 128),
        Planted(2.0, "0.15 ms", "G=1,M_g=2048,N=1024,K=12800", 256, first=True),
        Planted(2.0, "0.3 ms", "G=1,M_g=4096,N=2048,K=12800", 256),
        Planted(2.0, "1 ms", "G=1,M_g=8192,N=4096,K=12800", 256),
    ),
    "cpu": (Planted(100.0, "0.1 ms", "G=1,M_g=128,N=128,K=1024", 1024, first=True),),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="compare on this machine, into this folder")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--like", type=int, default=LIKE_TOTAL, help="number of A/A comparisons")
    parser.add_argument("--planted", type=int, default=PLANTED_EACH, help="comparisons of each planted change")
    parser.add_argument("--all-planted", action="store_true", help="measure all ten planted changes, not only five")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each comparison")
    parser.add_argument("--fresh", type=int, default=10, help="comparisons for each pair of processes")
    parser.add_argument("--idle", type=float, help="idle seconds before each burst")
    parser.add_argument("--samples", type=int, help="runs in each burst")


def compare(options: argparse.Namespace) -> None:
    """Compare until the time is over or all comparisons are done. Kinds with the fewest so far come first."""
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    records = options.out / "ab.jsonl"
    trees = make_trees(options.out / "trees", options.device)
    done = tally(records)
    longest = 0.0
    while time.monotonic() + longest < end:
        task = next_task(options, done)
        if task is None:
            print("all comparisons are done", file=sys.stderr)
            return
        title, cells = task
        small = any(p.title == title and p.extra < 64 for p in PLANTED[options.device])
        base = AbSide("base", trees["base" if title == LIKE else "small planted base" if small else "planted base"])
        head = AbSide(title, trees[title])
        with Bench(
            base,
            head,
            AbSettings(budget_s=options.budget, times_same_code=True),
            seed=1_000_000 * len(done) + sum(done.values()),
            records=records,
        ) as bench:
            for cell in cells[: options.fresh]:
                if time.monotonic() + longest >= end:
                    break
                result = bench.compare(cell)
                done[title] = done.get(title, 0) + 1
                longest = max(longest, result.seconds)
                effect = "" if result.effect is None else f"{100 * result.effect:+.2f} %"
                print(
                    f"{title} {done[title]}: {cell.backend} {cell.shape}: {result.verdict} {effect} "
                    f"{result.blocks} blocks {result.seconds:.1f} s {result.message or ''}",
                    file=sys.stderr,
                )
    print(f"{options.minutes:g} minutes are over; repeat the command to continue: {done}", file=sys.stderr)


def next_task(options: argparse.Namespace, done: dict[str, int]) -> tuple[str, list[AbCell]] | None:
    """Return (title, cells in order) of the least complete kind of comparison, or None if all are complete."""
    facts: dict[str, Any] = {"device": options.device, "idle_s": options.idle, "samples": options.samples}
    shares = {LIKE: done.get(LIKE, 0) / options.like if options.like else 1.0}
    planted = {p.title: p for p in PLANTED[options.device] if p.first or options.all_planted}
    if options.planted:
        shares |= {title: done.get(title, 0) / options.planted for title in planted}
    title = min(shares, key=lambda name: shares[name])
    if shares[title] >= 1:
        return None
    if title == LIKE:
        cells = [AbCell(*cell, **facts) for cell in CELLS[options.device]]
        cells = cells[:6] * 4 + cells[6:]  # cells above 1 ms take longest, so they are measured less often
        first = done.get(LIKE, 0) % len(cells)
        return title, (cells[first:] + cells[:first]) * (1 + options.fresh // len(cells))
    dtype = "bf16" if options.device == "cuda" else "fp32"
    cell = AbCell("grouped_gemm", "planted", planted[title].shape, dtype, plugins=("planted.BACKEND",), **facts)
    return title, [cell] * options.fresh


def make_trees(folder: Path, device: str) -> dict[str, Path]:
    """Make two copies of this checkout, and a folder with the plugin for each planted change."""
    trees = {}
    for name in ("base", LIKE):
        trees[name] = folder / name
        for part in ("kernels", "operators", "tracker"):
            if not (trees[name] / part).exists():
                shutil.copytree(ROOT / part, trees[name] / part, ignore=shutil.ignore_patterns("__pycache__"))
    planted = [(p.title, p.extra, p.extra >= 64) for p in PLANTED[device]]
    for name, extra, flat in [("planted base", 0, True), ("small planted base", 0, False), *planted]:
        trees[name] = folder / "".join(c if c.isalnum() or c == "." else "_" for c in name)
        trees[name].mkdir(parents=True, exist_ok=True)
        pad = max(p.extra for p in PLANTED[device])
        text = PLUGIN.replace("{extra}", str(extra)).replace("{pad}", str(pad)).replace("{flat}", str(flat))
        (trees[name] / "planted.py").write_text(text)
    return trees


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the comparisons of a file, without an incomplete last line."""
    if not path.exists():
        return
    content = path.read_bytes()
    for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            print(f"{path}: skipped a line of invalid JSON", file=sys.stderr)


def tally(path: Path) -> dict[str, int]:
    done: dict[str, int] = {}
    for line in lines(path):
        done[line["head"]["title"]] = done.get(line["head"]["title"], 0) + 1
    return done


def measured(options: argparse.Namespace) -> Rows:
    yield "compared", "comparisons", *VERDICTS, "effect", "blocks", "seconds, median (90 %)"
    if options.out:
        compare(options)
    for title, comparisons in _by_title(options).items():
        yield _row("A/A" if title == LIKE else title, comparisons)
        if title == LIKE:
            for cell, of_cell in _by_cell(comparisons).items():
                yield _row(f"A/A: {cell}", of_cell)


def resampled(options: argparse.Namespace) -> Rows:
    yield "resampled from recorded blocks", "comparisons", "different", "median seconds"
    for title, comparisons in _by_title(options).items():
        for cell, of_cell in _by_cell([line for line in comparisons if line["bursts"]]).items():
            if sum(len(line["bursts"]) for line in of_cell) >= ENOUGH_BLOCKS:
                share, seconds = resample(of_cell, options)
                yield f"{title}: {cell}", RESAMPLED, f"{100 * share:.2f} %", f"{seconds:.1f}"


def _by_title(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    made = lines(options.out / "ab.jsonl" if options.out else RECORDED)
    return dict(sorted(grouped(made, lambda line: str(line["head"]["title"])).items()))


def _by_cell(comparisons: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    of_cell = grouped(comparisons, lambda line: f"{line['cell']['backend']} {line['cell']['shape']}")
    return dict(sorted(of_cell.items()))


def resample(timed: list[dict[str, Any]], options: argparse.Namespace) -> tuple[float, float]:
    """Return (share called different, median seconds) of comparisons that are resampled from recorded blocks.

    Each comparison takes up to 60 s. Whole processes are drawn, because their blocks share an error. In A/A comparisons
    the sides are interchangeable, so each process gets a random sign.
    """
    processes = []
    rule = rule_for(timed[0]["timing"], statistics.median(line["base_ms"] for line in timed))
    for line in timed:
        of_process: dict[int, list[float]] = {}
        for block in line["bursts"]:
            of_process.setdefault(block["process"], []).append(_difference(block))
        processes += [blocks for blocks in of_process.values() if len(blocks) == rule.renewed]
    recorded = np.array(processes)
    block_s = sum(line["seconds"] for line in timed) / sum(len(line["bursts"]) for line in timed)
    blocks = min(MAX_BLOCKS, int(60 / block_s))
    random = options.rng
    drawn = recorded[random.integers(0, len(recorded), (RESAMPLED, -(-blocks // rule.renewed)))]
    if timed[0]["head"]["title"] == LIKE:
        drawn *= random.choice([-1.0, 1.0], (*drawn.shape[:2], 1))
    verdicts, used = ab_noise.decide_many(drawn.reshape(RESAMPLED, -1)[:, :blocks], rule)
    return float(np.mean(np.abs(verdicts) == 1)), float(np.median(used)) * block_s


def _row(title: str, comparisons: list[dict[str, Any]]) -> tuple[object, ...]:
    seconds = [line["seconds"] for line in comparisons]
    differences = [_difference(block) for line in comparisons for block in line["bursts"]]
    return (
        title,
        len(comparisons),
        *(sum(line["verdict"] == verdict for line in comparisons) for verdict in VERDICTS),
        f"{100 * statistics.median(differences):+.2f} %" if differences else "",
        f"{statistics.median(line['pairs'] for line in comparisons):g}",
        f"{statistics.median(seconds):.1f} ({np.quantile(seconds, 0.9):.1f})",
    )


def _difference(block: dict[str, Any]) -> float:
    head, base = (statistics.fmean(map(math.log, block[side])) for side in ("head_ms", "base_ms"))
    return head - base


def simulated(options: argparse.Namespace) -> Rows:
    runs = max(1, round(RUNS * options.scale))
    yield f"A/A, {runs} runs", *ab_noise.LATENCIES
    for name, noise in ab_noise.NOISES.items():
        cells = []
        for latency in ab_noise.LATENCIES:
            verdicts, _, seconds = simulate(noise, latency, 0.0, runs, options)
            false, same = np.mean(np.abs(verdicts) == 1), np.mean(verdicts == 0)
            cells.append(f"{100 * false:.3f} % different, {100 * same:.0f} % same in {seconds:.1f} s")
        yield name, *cells


def slowdowns(options: argparse.Namespace) -> Rows:
    runs = max(1, round(RUNS / 10 * options.scale))
    yield f"slower by, gaussian, {runs} runs", *ab_noise.LATENCIES
    for percent in (0.5, 1.0, 2.0, 3.0):
        cells = []
        for latency in ab_noise.LATENCIES:
            verdicts, blocks, seconds = simulate(ab_noise.gaussian, latency, math.log1p(percent / 100), runs, options)
            cells.append(
                f"{100 * np.mean(verdicts == 1):.1f} % seen, {100 * np.mean(verdicts == 0):.1f} % same, "
                f"{np.median(blocks):.0f} blocks, {seconds:.1f} s"
            )
        yield f"{percent:g} %", *cells


def busy(options: argparse.Namespace) -> Rows:
    runs, rule = max(1, round(RUNS / 10 * options.scale)), rule_for("cpu", 0.5)
    yield f"on a busy CPU, {runs} runs", "blocks at most", "intervals that hold it", "different", "these hold it"
    for percent in (0, 20, -27):
        for blocks in (6, 12, 20, 40):
            effect = math.log1p(percent / 100)
            holds, found = ab_noise.hold(ab_noise.busy(options.rng, runs, blocks) + effect, effect, rule)
            shown = f"{100 * holds[found].mean():.1f} %" if found.any() else ""
            yield f"{percent:+} %", blocks, f"{100 * holds.mean():.1f} %", f"{100 * found.mean():.2f} %", shown


def simulate(noise: Any, latency: str, effect: float, runs: int, options: argparse.Namespace) -> tuple[Any, Any, float]:
    """Return (verdicts, blocks used, median seconds) of 60 s comparisons at one of `ab_noise.LATENCIES`."""
    placement, burst, bursts, block_s = ab_noise.LATENCIES[latency]
    rule = rule_for("gpu", ab_noise.MILLISECONDS[latency])
    blocks = min(MAX_BLOCKS, int(60 / block_s))
    random = options.rng
    drawn = noise(random, runs, blocks, placement, burst / math.sqrt(bursts)) + effect
    drawn += ab_noise.luck(random, runs, blocks, rule.process_sd, rule.renewed)
    verdicts, used = ab_noise.decide_many(drawn, rule)
    return verdicts, used, float(np.median(used)) * block_s


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "simulated": simulated, "slowdowns": slowdowns, "busy": busy, "measured": measured, "resampled": resampled,
}  # fmt: skip
