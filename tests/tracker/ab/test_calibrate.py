"""The summary of A/A comparisons by `groupbench calibrate`."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from groupbench.tracker.ab import calibrate
from groupbench.tracker.ab.bench import AbCell, AbResult, AbSide, Bench, Block
from groupbench.tracker.cli import main
from groupbench.tracker.stats.sequential import Rule

pytestmark = pytest.mark.usefixtures("warm_imports")

SIDE = AbSide("this")


def result(
    level_ms: float, sd: float, seed: int, verdict: str = "same", blocks: int = 40, off: float = 0.0
) -> AbResult:
    draw = random.Random(seed)

    def bursts(process: int = 0) -> tuple[float, ...]:
        return tuple(level_ms * math.exp(draw.gauss(process * off, sd)) for _ in range(2))

    taken = tuple(Block("ABBA", n % 3, bursts(n % 3), bursts()) for n in range(blocks))
    return AbResult(
        AbCell("op", "b", "N=1", "bf16"),
        SIDE,
        SIDE,
        verdict,  # type: ignore[arg-type]
        base_ms=level_ms,
        head_ms=level_ms,
        blocks=blocks,
        seconds=0.5 * blocks,
        timing="gpu",
        bursts=taken,
    )


def test_a_report_for_each_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "RUNS", 30)
    results = [result(0.012, 0.01, 1), result(0.1, 0.003, 2), result(0.1, 0.003, 3, "different"), result(1.5, 0.002, 4)]
    reports = calibrate.summarise(results, budget_s=60, alpha=0.001)
    assert [report.upto_ms for report in reports] == [0.03, 0.2, None]
    assert [report.comparisons for report in reports] == [1, 2, 1]
    assert [report.different for report in reports] == [0, 1, 0]
    tenth = reports[1]
    assert tenth.burst_sd == pytest.approx(0.003, rel=0.3) and tenth.block_s == pytest.approx(0.5)
    assert tenth.block_sd == pytest.approx(0.003, rel=0.3)  # two sides, two bursts each
    changes = [report.smallest_change for report in reports]
    assert changes[0] is not None and changes[1] is not None and changes[2] is not None
    assert changes[0] > 2 * changes[1] and 0.001 < changes[2] < 0.006  # about min_effect: less is called the same


def test_what_processes_are_off_is_told_from_what_blocks_are() -> None:
    alike = [result(0.1, 0.003, seed) for seed in range(40)]
    assert (calibrate.process_sd(alike) or 0) < 0.0004
    off = [result(0.1, 0.003, seed, off=0.005) for seed in range(20)]  # base's three 0, 0.5 and 1 %, head's none
    assert calibrate.process_sd(off) == pytest.approx(0.005 / math.sqrt(2), rel=0.1)
    assert calibrate.process_sd([result(0.1, 0.003, 1, blocks=3)]) is None


def test_cells_that_failed_are_counted_not_hidden() -> None:
    failed = AbResult(AbCell("op", "b", "N=1", "bf16"), SIDE, SIDE, "failed", message="why")
    (report,) = calibrate.summarise([failed], budget_s=60, alpha=0.001)
    assert (report.comparisons, report.failed, report.blocks, report.smallest_change) == (1, 1, 0, None)


def test_the_smallest_change_is_seen_and_half_of_it_is_not() -> None:
    d = np.random.default_rng(0).normal(0, 0.004, 200)
    rule = Rule()
    change = calibrate.smallest_change(d, rule, 60)
    assert change is not None and 0.002 < change < 0.01
    assert calibrate.smallest_change(d, rule, 11) is not None  # five gross blocks are enough
    assert calibrate.smallest_change(np.random.default_rng(0).normal(0, 2.0, 200), rule, 12) is None


def test_each_cell_is_compared_at_least_once() -> None:
    class Counting:
        def __init__(self) -> None:
            self.compared: list[AbCell] = []

        def compare(self, cell: AbCell) -> AbResult:
            self.compared.append(cell)
            return result(0.1, 0.01, 1)

    bench = Counting()
    todo = calibrate.cells("cpu")
    assert len(list(calibrate.measure(bench, todo, 0))) == len(todo)  # type: ignore[arg-type]
    assert bench.compared == todo
    ticks = iter(range(100))
    assert len(list(calibrate.measure(bench, todo, 6 / 60, clock=lambda: float(next(ticks))))) > len(todo)  # type: ignore[arg-type]


def test_the_command_says_what_could_not_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "times, because other work kept the CPU busy"
    made = [result(0.1, 0.003, 1), replace(result(0.1, 0.003, 2), unchecked={"base": [busy], "head": [busy]})]
    monkeypatch.setattr(Bench, "start", lambda bench, device: "cpu")
    monkeypatch.setattr(calibrate, "measure", lambda *_: iter(made))
    line = f"not checked in base and head: {busy} (op/b N=1 bf16)"
    assert CliRunner().invoke(main, ["calibrate", "--budget", "5"]).stdout.endswith(f"\n{line}\n")
    assert json.loads(CliRunner().invoke(main, ["calibrate", "--budget", "5", "--format=json"]).stdout)["notes"] == [
        line
    ]


def test_no_time_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "start", lambda *_: pytest.fail("it measures"))
    result = CliRunner().invoke(main, ["calibrate", "--minutes", "0"])
    assert (result.exit_code, "0 is out of range: above 0 s" in result.output) == (2, True)
