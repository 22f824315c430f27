"""Test the decisions of comparisons on simulated sides, and real comparisons on the CPU, end to end."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from repositories import git

from groupbench.tracker import device_lock
from groupbench.tracker.ab import bench as ab
from groupbench.tracker.ab import comparing
from groupbench.tracker.ab.bench import AbCell, AbError, AbResult, AbSide, Bench, Block, SideAccuracy
from groupbench.tracker.ab.comparing import block_order
from groupbench.tracker.ab.result import footnotes
from groupbench.tracker.ab.side import CONTRACT, SideFailure, is_groupbench, make_layout
from groupbench.tracker.cli import main
from groupbench.tracker.cli.ab import _show, announced, as_row, left_out
from groupbench.tracker.record import Environment, Record
from groupbench.tracker.stats import sequential
from groupbench.tracker.text import repro

pytestmark = pytest.mark.usefixtures("warm_imports")

CELL = AbCell("op", "backend", "N=1", "fp16", device="cuda", idle_s=0.0)
BASE, HEAD = AbSide("old"), AbSide("new")
KERNEL = {"name": "k", "hash": "h", "config": {"BLOCK": 64}}


class Played:
    """A simulated side with answers from the test: `ms` of a burst, or an error to raise."""

    plays: ClassVar[dict[str, dict[str, Any]]] = {}
    requests: ClassVar[list[tuple[str, str]]] = []
    gpu_uuid: ClassVar[str | None] = None

    def __init__(self, who: str, side: AbSide, device: str) -> None:
        self.who, self.side, self.device = who, side, device
        self.alive = True
        self.facts: dict[str, Any] = {"device": "cuda", "environment": {"torch": "2", "gpu_uuid": self.gpu_uuid}}
        self._verb = ""

    def send(self, verb: str, wait_s: float = 0.0, **arguments: Any) -> None:
        self._verb = verb

    def hello(self) -> None:
        self.receive()

    def receive(self) -> Any:
        play = self.plays[self.who]
        self.requests.append((self.who, self._verb))
        if self._verb in play.get("fails", ()):
            raise SideFailure(self.who, self.side.title, play.get("status", "error"), "no luck")  # type: ignore[arg-type]
        if self._verb == "prepare":
            facts = {"timing": "gpu", "accuracy": {"rms": 1e-4}, "problem": None, "kernels": [KERNEL]}
            return facts | play.get("prepared", {})
        if self._verb == "unchecked":
            return play.get("unchecked", [])
        return play["ms"]() if self._verb == "burst" else None

    def ask(self, verb: str, wait_s: float = 0.0, **arguments: Any) -> Any:
        self.send(verb)
        return self.receive()

    def leave(self) -> None:
        pass

    def close(self) -> None:
        self.alive = False


def noisy(level: float, sd: float, seed: int) -> Callable[[], list[float]]:
    draw = random.Random(seed)
    return lambda: [level * math.exp(draw.gauss(0, sd))] * 3


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbResult]:
    def run(base: dict[str, Any], head: dict[str, Any], cell: AbCell = CELL, **options: Any) -> AbResult:
        monkeypatch.setattr(ab, "SideProcess", Played)
        level = {"ms": noisy(0.1, 0.002, 1)}
        monkeypatch.setattr(Played, "plays", {"base": level | base, "head": {"ms": noisy(0.1, 0.002, 2)} | head})
        monkeypatch.setattr(Played, "requests", [])
        with Bench(BASE, HEAD, **options) as bench:
            return bench.compare(cell)

    return run


def test_like_sides_are_the_same(compare: Callable[..., AbResult]) -> None:
    result = compare({}, {})
    assert (result.verdict, result.conclusion, result.is_worse) == ("same", "same", False)
    assert result.low is not None and result.high is not None and result.low <= 0.005 and result.high >= -0.005
    assert result.blocks == len(result.bursts) >= sequential.FIRST_SAME
    assert (result.base_hash, result.head_hash) == ("h", "h")


@pytest.mark.parametrize(("factor", "word"), [(1.02, "slower"), (1 / 1.02, "faster"), (3.0, "slower")])
def test_unlike_sides_are_different(compare: Callable[..., AbResult], factor: float, word: str) -> None:
    result = compare({}, {"ms": noisy(0.1 * factor, 0.002, 2)})
    assert result.verdict == "different" and result.direction == word
    assert result.effect == pytest.approx(math.log(factor), abs=0.005)
    assert result.blocks == (sequential.GROSS_BLOCKS if factor == 3 else 12)
    assert result.is_worse == (word == "slower")
    printed = json.loads(msgspec.json.encode(ab.as_json(result)))
    numbers = ("effect", "low", "high", "change", "change_low", "change_high")
    assert all(isinstance(printed[name], float) for name in numbers)


BUSY, STILL = "times, because other work kept the CPU busy", "stale results, because its inputs do not change"


def test_what_a_side_could_not_check_is_in_the_result(compare: Callable[..., AbResult], tmp_path: Path) -> None:
    assert compare({}, {}).unchecked == {}
    result = compare({"unchecked": [BUSY, STILL]}, {"unchecked": [BUSY]}, records=tmp_path / "ab.jsonl")
    assert (result.verdict, ab.exit_code([result])) == ("same", 0)
    kept = json.loads((tmp_path / "ab.jsonl").read_text())
    assert kept["unchecked"] == ab.as_json(result)["unchecked"] == {"base": [BUSY, STILL], "head": [BUSY]}
    assert Played.requests.index(("head", "unchecked")) < Played.requests.index(("head", "unload"))


def test_what_could_not_be_checked_is_asked_where_nothing_is_timed(compare: Callable[..., AbResult]) -> None:
    assert compare({"unchecked": [STILL]}, {}, only_changed=True).unchecked == {"base": [STILL]}


@pytest.mark.parametrize(
    ("base", "head", "fixed"),
    [(True, False, "head"), (False, True, "base"), (False, False, None), (True, True, None), (None, False, None)],
)
def test_a_routing_that_only_one_side_has_built_in_is_named(
    compare: Callable[..., AbResult], base: bool | None, head: bool, fixed: str | None
) -> None:
    result = compare({"prepared": {"dynamic": base}}, {"prepared": {"dynamic": head}})
    assert (result.base_dynamic, result.head_dynamic) == (base, head)
    note = as_row(result)["message"]
    assert note is None if fixed is None else note.startswith(f"{fixed} has a built-in routing, so it may do less work")


def of_backend(name: str, **unchecked: list[str]) -> AbResult:
    return AbResult(replace(CELL, backend=name), BASE, HEAD, "same", unchecked=unchecked)


@pytest.mark.parametrize(
    ("results", "lines"),
    [
        ([of_backend("a")], []),
        ([of_backend("a", base=[BUSY], head=[BUSY])], [f"not checked in base and head: {BUSY}"]),
        (
            [of_backend("a", base=[STILL], head=[BUSY])],
            [f"not checked in base: {STILL}", f"not checked in head: {BUSY}"],
        ),
        ([of_backend("a", head=[BUSY]), of_backend("b", head=[BUSY])], [f"not checked in head: {BUSY}"]),
        ([of_backend("a"), of_backend("b", head=[BUSY])], [f"not checked in head: {BUSY} (op/b N=1 fp16)"]),
        (
            [of_backend("a", head=[BUSY]), of_backend("b"), of_backend("c", head=[BUSY])],
            [f"not checked in head: {BUSY} (2 of 3 cells: op/a, op/c)"],
        ),
    ],
    ids=["all checked", "both sides", "two reasons", "all cells", "one cell", "several cells"],
)
def test_the_lines_below_the_table_name_sides_and_cells(results: list[AbResult], lines: list[str]) -> None:
    assert footnotes(results) == lines


@pytest.mark.parametrize("form", [None, "md", "csv", "json"])
def test_what_could_not_be_checked_is_below_the_table(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _show([of_backend("a_b", head=[BUSY]), of_backend("c")], form)
    out, err = capsys.readouterr()
    line = f"not checked in head: {BUSY} (op/a_b N=1 fp16)\n"
    if form == "json":
        assert [row["unchecked"] for row in json.loads(out)] == [{"head": [BUSY]}, {}]
    elif form == "csv":  # whose lines are rows
        assert (len(out.splitlines()), err) == (3, line)
    elif form == "md":
        assert out.endswith("|\n\n" + line.replace("_", r"\_"))
    else:
        assert out.endswith("\n" + line)


def test_a_gpu_that_another_command_uses_is_named(
    compare: Callable[..., AbResult], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_lock, "_is_locked", lambda path: "GPU-9" in path.name)
    compare({}, {})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(Played, "gpu_uuid", "GPU-9")
    compare({}, {})
    assert capsys.readouterr().err.startswith("groupbench: GPU-9 is also in use by another process: ")


def test_a_clock_without_noise(compare: Callable[..., AbResult]) -> None:
    assert compare({"ms": lambda: [0.1]}, {"ms": lambda: [0.1]}).verdict == "same"
    result = compare({"ms": lambda: [0.1]}, {"ms": lambda: [0.101]})
    assert result.verdict == "different"
    assert result.high is not None and result.low is not None and result.high > result.low


def test_noise_without_end_is_unknown(compare: Callable[..., AbResult]) -> None:
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=0.05)
    assert result.verdict == "unknown" and "not resolved within 0.05 s of measuring" in (result.message or "")
    assert result.ran_out == "budget"
    assert ab.exit_code([result]) == 3


@pytest.mark.parametrize(
    ("blocks", "interval"), [(3, ""), (20, "; the interval is a 95 % interval")], ids=["too few", "enough"]
)
def test_a_comparison_that_runs_out_of_blocks_does_not_blame_the_budget(
    compare: Callable[..., AbResult], monkeypatch: pytest.MonkeyPatch, blocks: int, interval: str
) -> None:
    """The message names an interval only if that many blocks have one."""
    monkeypatch.setattr("groupbench.tracker.stats.sequential.MAX_BLOCKS", blocks)
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=600)
    assert (result.verdict, result.blocks, result.ran_out) == ("unknown", blocks, "blocks")
    assert result.message == f"not resolved within {blocks} blocks{interval}"
    assert (result.low is not None and result.high is not None) == bool(interval)


def test_the_budget_counts_measuring_alone(compare: Callable[..., AbResult], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    play = Played.receive

    def receive(self: Played) -> Any:
        now[0] += 30 if self._verb in ("prepare", "adopt") else 0.1
        return play(self)

    monkeypatch.setattr(Played, "receive", receive)
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=2)
    assert result.before_measuring_s == pytest.approx(120, abs=2) and 120 < result.seconds < 125
    assert result.blocks >= 2 and (result.message or "").startswith("not resolved within 2 s of measuring")
    untimed = compare({}, {}, budget_s=0)
    assert (untimed.verdict, untimed.blocks, untimed.message) == ("unknown", 0, "not timed: the budget is 0 s")


@pytest.mark.parametrize("verb", ["prepare", "reload", "burst", "hello"])
@pytest.mark.parametrize("who", ["base", "head", "both"])
def test_a_side_that_fails_is_named(compare: Callable[..., AbResult], who: str, verb: str) -> None:
    broken = {"fails": [verb], "status": "timeout"}
    if who == "both" and verb == "burst":
        pytest.skip("bursts are taken one after the other: the first to fail ends it")
    result = compare(broken if who != "head" else {}, broken if who != "base" else {})
    expected = "base" if (who, verb) == ("both", "hello") else who
    assert (result.verdict, result.failed_side, result.failed_status) == ("failed", expected, "timeout")
    assert result.message == {"base": "base (old): no luck", "head": "head (new): no luck"}.get(
        expected, "both (old, new): no luck"
    )
    assert ab.exit_code([result]) == 3


def test_both_sides_are_placed_anew_before_each_block_and_restarted_now_and_then(
    compare: Callable[..., AbResult],
) -> None:
    result = compare({}, {"ms": noisy(0.102, 0.002, 2)}, refresh_blocks=5)
    for who in ("base", "head"):
        verbs = [verb for name, verb in Played.requests if name == who]
        assert verbs.count("reload") == result.blocks + 1
        assert verbs.count("adopt") == 1 + (result.blocks - 1) // 5
        assert verbs[-1] == "unload"
    assert [block.process for block in result.bursts] == [n // 5 for n in range(result.blocks)]


def test_processes_that_are_off_are_no_difference() -> None:
    """Head's are all 0.5 % off, which is as likely as not with three of them at 0.055 ms."""
    rule, longer = ab.rule_for("gpu", 0.055), ab.rule_for("gpu", 0.6)
    d = np.random.default_rng(0).normal(0.005, 0.002, 24)
    assert not any(sequential.decide(d[:n], rule).verdict == "different" for n in range(25))
    assert any(sequential.decide(d[:n], longer).verdict == "different" for n in range(25))


def test_the_coin_decides_who_is_first(compare: Callable[..., AbResult]) -> None:
    orders = {block.order for seed in range(4) for block in compare({}, {}, seed=seed).bursts}
    assert orders == {"ABBA", "BAAB"}
    assert [b.order for b in compare({}, {}, seed=3).bursts] == [b.order for b in compare({}, {}, seed=3).bursts]


@pytest.mark.parametrize(
    ("cells", "device", "budget", "says"),
    [
        (1, "cpu", 60, "1 cell on cpu, about 15 s, at most 60 s of measuring"),
        (1, "cpu", 10, "1 cell on cpu, at most 10 s of measuring"),
        (2, "cuda", 10, "2 cells on cuda, at most 20 s of measuring"),
        (40, "cuda", 60, "40 cells on cuda, about 7 min, at most 40 min of measuring"),
    ],
)
def test_the_time_announced_is_within_the_budget(cells: int, device: str, budget: float, says: str) -> None:
    assert announced(cells, device, budget) == says


@pytest.mark.parametrize("bursts", range(1, 9))
def test_orders_are_fair(bursts: int) -> None:
    one, other = block_order(bursts, False), block_order(bursts, True)
    assert one.count("A") == one.count("B") == bursts
    assert other == one.translate(str.maketrans("AB", "BA"))


def test_equal_kernels_need_no_timing(compare: Callable[..., AbResult]) -> None:
    result = compare({}, {}, only_changed=True)
    assert (result.verdict, result.blocks) == ("same", 0) and "not timed" in (result.message or "")
    for kernels in ([KERNEL | {"hash": "other"}], [KERNEL | {"config": {"BLOCK": 32}}], [], [KERNEL | {"hash": None}]):
        assert compare({}, {"prepared": {"kernels": kernels}}, only_changed=True).blocks > 0
    for unknown in ({"kernels": []}, {"kernels": [KERNEL | {"hash": None}]}):
        assert compare({"prepared": unknown}, {"prepared": unknown}, only_changed=True).blocks > 0


def test_interpreted_kernels_are_compared_by_accuracy_alone(compare: Callable[..., AbResult]) -> None:
    slow = {"timing": "interpreted"}
    result = compare({"prepared": slow}, {"prepared": slow})
    assert (result.verdict, result.conclusion, result.blocks) == ("same", "equally accurate", 0)
    assert "speed was not measured" in (result.message or "")
    result = compare({"prepared": slow}, {"prepared": slow | {"accuracy": {"rms": 1e-2}}})
    assert (result.verdict, result.conclusion) == ("different", "less accurate")
    assert ab.exit_code([result]) == 1


ACCURACIES = {
    "less": (SideAccuracy("ok", 1e-4), SideAccuracy("ok", 1e-3), "less accurate", True),
    "more": (SideAccuracy("ok", 1e-3), SideAccuracy("ok", 1e-4), "more accurate", False),
    "alike": (SideAccuracy("ok", 1e-3), SideAccuracy("ok", 1.2e-3), "same", False),
    "rounding": (SideAccuracy("ok", 1e-8), SideAccuracy("ok", 1e-7), "same", False),
    "wrong": (SideAccuracy("ok", 1e-3), SideAccuracy("wrong", None), "wrong", True),
    "fixed": (SideAccuracy("wrong", None), SideAccuracy("ok", 1e-3), "fixed", False),
    "both": (SideAccuracy("wrong", 1.0), SideAccuracy("wrong", 1.0), "both wrong", False),
}


@pytest.mark.parametrize("name", ACCURACIES)
def test_accuracy_is_part_of_the_verdict(name: str) -> None:
    base, head, change, worse = ACCURACIES[name]
    result = AbResult(CELL, BASE, HEAD, "same", base_accuracy=base, head_accuracy=head)
    assert (result.accuracy_change, result.is_worse, ab.exit_code([result])) == (change, worse, int(worse))


def test_faster_but_less_accurate_is_one_conclusion() -> None:
    base, head = SideAccuracy("ok", 1e-4), SideAccuracy("ok", 1e-3)
    facts = {"effect": math.log(0.9), "base_accuracy": base, "head_accuracy": head}
    result = AbResult(CELL, BASE, HEAD, "different", **facts)
    assert result.conclusion == "10 % faster but less accurate" and result.is_worse


def test_nothing_compared_is_no_success() -> None:
    assert ab.exit_code([]) == 3


def test_comparisons_are_kept_with_their_bursts(compare: Callable[..., AbResult], tmp_path: Path) -> None:
    path = tmp_path / "ab.jsonl"
    results = [compare({}, {}, records=path) for _ in range(2)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    for line, result in zip(lines, results, strict=True):
        assert line["schema"] == 2 and line["verdict"] == result.verdict and line["conclusion"] == result.conclusion
        blocks = msgspec.convert(line["bursts"], tuple[Block, ...])
        assert blocks == result.bursts
        assert sequential.decide([block.difference for block in blocks], sequential.Rule()).verdict == "same"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_cannot_be_kept_is_shown_all_the_same(
    compare: Callable[..., AbResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full, the command prints the earlier comparisons and ends with one line."""
    compare({}, {})  # the sides are simulated from here on
    monkeypatch.setattr(Bench, "cells", lambda self, device, **selection: ([CELL, CELL], []))
    monkeypatch.setattr(Bench, "device", "cuda", raising=False)
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    monkeypatch.setattr("groupbench.tracker.cli.ab._check_records", lambda path: None)
    result = CliRunner().invoke(main, ["ab", ".", ".", "--operator", "op", "--records", "/dev/full", "--csv"])
    assert (result.exit_code, result.stdout.count("\n")) == (3, 2), result.output
    header, row = result.stdout.splitlines()
    assert header.startswith("verdict,conclusion,operator,backend,shape,dtype,base_ms,head_ms,change")
    assert row.startswith("same,")
    *_, stopped, why = result.stderr.splitlines()
    assert stopped == "stopped: 1 of 2 cells compared"
    assert why == "groupbench: /dev/full: cannot be written: No space left on device"


def test_an_interrupt_ends_both_sides(compare: Callable[..., AbResult]) -> None:
    def interrupted() -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({}, {"ms": interrupted})


TEXT = (Path(__file__).parents[3] / "docs" / "guide" / "comparing.md").read_text(encoding="utf-8")
EXAMPLES = [
    line.removeprefix("$ ") for line in TEXT.split("\n") if line.startswith(("$ groupbench ab ", "$ groupbench cal"))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_docs_parse(example: str) -> None:
    _, name, *args = shlex.split(example)
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.make_context(name, args).params
    assert len(EXAMPLES) >= 4


# --- which modules a side runs ----------------------------------------------------------------------------------------

ROOT = Path(ab.__file__).resolve().parents[2]


def tree(folder: Path, says: str) -> Path:
    """A checkout of groupbench in small."""
    for part in ("kernels", "operators/measure", "tracker"):
        (folder / part).mkdir(parents=True)
    (folder / "kernels" / "mark.py").write_text(f"SAYS = {says!r}\n")
    (folder / "operators" / "__init__.py").write_text("")
    (folder / "operators" / "operator.py").write_text(f"SAYS = {says!r}\n")
    (folder / "operators" / "measure" / "__init__.py").write_text("raise RuntimeError('not the tree's clock')\n")
    return folder


def test_kernels_are_the_trees_and_the_clock_is_the_drivers(tmp_path: Path) -> None:
    candidate = tree(tmp_path / "tree", "mine")
    assert is_groupbench(candidate) and not is_groupbench(tmp_path)
    make_layout(candidate, tmp_path / "layout")
    code = """
import importlib.util, groupbench.operators.operator as operator, groupbench.operators.measure as measure
import groupbench.tracker as tracker, groupbench.kernels.mark as mark
print(operator.SAYS, mark.SAYS, measure.__file__, tracker.__file__)
for name in ("groupbench.operators.registry", "groupbench.kernels.grouped_gemm"):
    print(importlib.util.find_spec(name))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "layout")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    paths, *missing = done.stdout.splitlines()
    operators, kernels, measure, tracker = paths.split()
    assert (operators, kernels) == ("mine", "mine"), done.stderr
    assert Path(measure).resolve() == ROOT / "operators" / "measure" / "__init__.py"
    assert Path(tracker).resolve() == ROOT / "tracker" / "__init__.py"
    assert missing == ["None", "None"]  # modules that the tree lacks are not taken from the installed packages


def test_an_older_tree_may_be_measured_by_the_drivers_contract(tmp_path: Path) -> None:
    """The operators are the tree's, but the interface that measuring needs is the driver's."""
    older = tree(tmp_path / "tree", "older")
    (older / "operators" / "thing.py").write_text("")
    make_layout(older, tmp_path / "layout", own_contract=False)
    operators = tmp_path / "layout" / "groupbench" / "operators"
    for name in CONTRACT:
        assert (operators / name).resolve() == ROOT / "operators" / name
    assert (operators / "thing.py").resolve() == older / "operators" / "thing.py"


def test_measuring_imports_little_of_the_tree() -> None:
    """The code that measures is the driver's. A module that older trees lack would end comparisons with them."""
    imported = set()
    for path in (ROOT / "operators" / "measure").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "groupbench.operators":
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("groupbench.operators."):
                imported.add((node.module or "").split(".")[2])
    assert imported <= {name.removesuffix(".py") for name in CONTRACT} | {"measure", "registry", "plugins", "relayout"}


def test_a_tree_that_is_too_old_says_so(tmp_path: Path) -> None:
    old = AbSide("v0", tree(tmp_path / "tree", "old"))
    with Bench(old, old) as bench:
        result = bench.compare(AbCell("grouped_gemm", "torch_loop", "single", "fp32", device="cpu"))
        assert result.verdict == "failed"
        assert "(v0): too old or too broken for this groupbench to measure" in (result.message or "")
        with pytest.raises(AbError, match="too old"):
            bench.cells("cpu", operator="grouped_gemm")


def test_an_interpreter_that_is_not_there() -> None:
    with Bench(BASE, AbSide("new", python="/no/such/python")) as bench, pytest.raises(AbError, match="cannot start"):
        bench.compare(AbCell("grouped_gemm", "torch_loop", "single", "fp32", device="cpu"))


# --- end to end -------------------------------------------------------------------------------------------------------

PLUGIN = """
import time
from groupbench.operators.operator import Backend

WORK, FACTOR, RAISES, HANGS = {facts}


def backend(name, work=8, factor=1.0, raises=False, hangs=False):
    def prepare(x):
        print("this must not reach the answers")
        if raises:
            raise RuntimeError("no such instruction")

        def run():
            for _ in range(work):
                out = x.a @ x.b[0]
            time.sleep(3600 * hangs)
            return out * factor

        return run

    return Backend(name, prepare, "a test", operator="grouped_gemm")


ALL = (
    backend("mine", work=WORK),
    backend("wrong", factor=FACTOR),
    backend("raises", raises=RAISES),
    backend("hangs", hangs=HANGS),
)
"""
COMMITS = {"one": (8, 1.0, False, False), "two": (96, 1.1, True, True)}
SHAPE = "G=1,M_g=32,N=32,K=32"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team's own package, whose second commit makes everything worse."""
    folder = tmp_path_factory.mktemp("repository")

    git(folder, "init", "-q")
    for name, facts in COMMITS.items():
        (folder / "my_plugin.py").write_text(PLUGIN.format(facts=facts))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", name)
        git(folder, "tag", name)
    return folder


@pytest.fixture(scope="module")
def groupbench_ab(repository: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        cells = ("--operator", "grouped_gemm", "--shape", SHAPE, "--dtype", "fp32")
        where = ("--device", "cpu", "--plugin", "my_plugin.ALL")
        command = [sys.executable, "-m", "groupbench.tracker", "ab", *args, *cells, *where]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    yield run
    done = subprocess.run(["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1


def test_a_commit_that_makes_everything_worse(groupbench_ab: Any, tmp_path: Path) -> None:
    backends = [part for name in ("mine", "wrong", "raises") for part in ("--backend", name)]
    options = ("--budget", "30", "--min-effect", "100", "--json", "--records", str(tmp_path / "ab.jsonl"))
    done = groupbench_ab("one", "two", *backends, *options)
    assert done.returncode == 1, done.stderr
    rows = {row["cell"]["backend"]: row for row in json.loads(done.stdout)}
    row = rows["mine"]
    assert row["verdict"] == "different" and row["change"] > 0, row
    assert row["head"]["title"] == "two" and len(row["head"]["commit"]) == 40
    assert row["base_accuracy"]["status"] == row["head_accuracy"]["status"] == "ok"
    assert rows["wrong"]["head_accuracy"]["status"] == "wrong" and "head is wrong" in rows["wrong"]["conclusion"]
    assert (rows["raises"]["verdict"], rows["raises"]["failed_side"]) == ("failed", "head")
    assert "head (two): RuntimeError: no such instruction" in rows["raises"]["message"]
    assert "3 cells on cpu" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "ab.jsonl").read_text().splitlines()]
    assert [len(line["bursts"]) for line in records] == [row["blocks"] for row in json.loads(done.stdout)]


@pytest.mark.exhaustive  # it waits for 20 s, which are enough for the other side on a busy machine
def test_a_commit_that_hangs(groupbench_ab: Any) -> None:
    done = groupbench_ab("one", "two", "--backend", "hangs", "--timeout", "20", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["verdict"], row["failed_side"]) == ("failed", "head")
    assert "head (two): no answer within 20 s" in row["message"]


def test_the_line_that_reproduces_a_change_measures_its_cell(repository: Path, make: Callable[..., Record]) -> None:
    record = make(1, backend="torch_loop", dtype="fp32", shape=SHAPE)
    cell = msgspec.structs.replace(record.cell, host="builtin", protocol="cooled+idle=0.01s", seed=7)
    program, *words = shlex.split(repro.compare(cell, "one", "two", Environment(device="cpu")))
    command = [sys.executable, "-m", "groupbench.tracker", *words, "--budget", "1", "--min-effect", "900", "--json"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    names = ("operator", "backend", "shape", "dtype", "mode", "seed")
    assert (program, [row["cell"][name] for name in names]) == ("groupbench", [getattr(cell, name) for name in names])
    assert (row["cell"]["device"], row["cell"]["idle_s"]) == ("cpu", 0.01)


@pytest.mark.exhaustive
def test_a_commit_against_itself_is_not_different(groupbench_ab: Any) -> None:
    done = groupbench_ab("one", "one", "--backend", "mine", "--budget", "1", "--csv")
    assert done.returncode in (0, 3), done.stderr
    _, row = done.stdout.splitlines()
    assert row.split(",")[0] in ("same", "unknown")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("one", "no-such-commit"), "git knows no commit 'no-such-commit'"),
        (("one", "one", "--records", "/no/such/folder/ab.jsonl"), "cannot write"),
        (("one", "one", "--setup", "echo no compiler; false"), "does not build: --setup ended with 1: no compiler"),
        (("one", "one", "--head-python", "/no/such/python"), "cannot start /no/such/python"),
        (("one", "one", "--backend", "nope"), "grouped_gemm has no backend 'nope'"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(groupbench_ab: Any, args: tuple[str, ...], says: str) -> None:
    done = groupbench_ab(*args)
    assert done.returncode == (3 if "--setup" in args else 2)
    assert says in done.stderr.splitlines()[-1] and not done.stdout


def test_what_is_left_out_for_one_reason_is_one_line() -> None:
    notes = [f"gemm/{name} G={g} bf16: unavailable: needs: a GPU" for g in range(9) for name in ("flat", "worklist")]
    assert left_out([*notes, "gemm/new G=1 bf16: not in the base, main"]) == [
        "left out: 18 cells of gemm/flat, gemm/worklist: unavailable: needs: a GPU",
        "left out: gemm/new G=1 bf16: not in the base, main",
    ]
    assert left_out([]) == []


@pytest.mark.parametrize(
    ("effect", "shown"),
    [(math.log(0.9949), 0.1298 * 0.9949), (math.log(1.0168), 0.1298 * 1.0168), (None, 0.1314)],
    ids=["faster, with a slower median", "slower", "no effect"],
)
def test_the_latencies_of_a_row_agree_with_its_effect(effect: float | None, shown: float) -> None:
    """The effect pairs neighbouring bursts, the medians do not: a row had 0.1298 and 0.1314 ms with -0.51 %."""
    result = AbResult(CELL, BASE, HEAD, "same", effect=effect, base_ms=0.1298, head_ms=0.1314)
    assert result.head_level_ms == pytest.approx(shown)
    assert ab.as_json(result)["head_ms"] == 0.1314
