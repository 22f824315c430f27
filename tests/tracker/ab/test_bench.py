"""Test the decisions of comparisons on simulated sides."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from groupbench.tracker.ab import bench as ab
from groupbench.tracker.ab import comparing, sequential
from groupbench.tracker.ab import result as ab_result
from groupbench.tracker.ab.answers import Greeting
from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.comparing import block_order
from groupbench.tracker.ab.result import AbCell, AbResult, AbSettings, Block, SideAccuracy, footnotes
from groupbench.tracker.ab.side import AbError, AbSide, SideFailure
from groupbench.tracker.cli import main
from groupbench.tracker.cli.ab import _show, announced, as_row, left_out
from groupbench.tracker.facts.loaded import loaded_of
from groupbench.tracker.tools import lease

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
        self.facts = Greeting("cuda", {"device": "cuda", "torch": "2", "gpu_uuid": self.gpu_uuid})
        self._verb = ""

    def send(self, verb: str, wait_s: float = 0.0, **arguments: Any) -> None:
        self._verb = verb

    def hello(self) -> None:
        self.receive(Greeting)

    def receive(self, kind: Any) -> Any:
        play = self.plays[self.who]
        self.requests.append((self.who, self._verb))
        if self._verb in play.get("fails", ()):
            raise SideFailure(self.who, self.side.title, play.get("status", "error"), "no luck")  # type: ignore[arg-type]
        if self._verb == "prepare":
            facts = {"timing": "gpu", "accuracy": {"rms": 1e-4}, "problem": None, "kernels": [KERNEL]}
            return msgspec.convert(facts | play.get("prepared", {}), kind)
        if self._verb in ("unchecked", "cells"):
            return play.get(self._verb, [])
        if self._verb == "amounts":
            return play.get("amounts", (0, 0))
        return play["ms"]() if self._verb == "burst" else None

    def ask(self, kind: Any, verb: str, wait_s: float = 0.0, **arguments: Any) -> Any:
        self.send(verb)
        return self.receive(kind)

    def leave(self) -> None:
        pass

    def close(self) -> None:
        self.alive = False


Compare = Callable[..., AbResult]


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
        records = options.pop("records", None)
        progress = options.pop("progress", lambda text: None)
        seed, within_s = options.pop("seed", 0), options.pop("within_s", math.inf)
        with Bench(BASE, HEAD, AbSettings(**options), seed=seed, records=records, progress=progress) as bench:
            return bench.compare(cell, within_s=within_s)

    return run


def test_like_sides_are_the_same(compare: Compare) -> None:
    result = compare({}, {})
    assert (result.verdict, result.conclusion, result.is_worse) == ("same", "same", False)
    assert result.low is not None and result.high is not None and result.low <= 0.005 and result.high >= -0.005
    assert result.blocks == len(result.bursts) >= sequential.FIRST_SAME
    assert (result.base_hash, result.head_hash) == ("h", "h")


@pytest.mark.parametrize(("factor", "word"), [(1.02, "slower"), (1 / 1.02, "faster"), (3.0, "slower")])
def test_unlike_sides_are_different(compare: Compare, factor: float, word: str) -> None:
    result = compare({}, {"ms": noisy(0.1 * factor, 0.002, 2)})
    assert result.verdict == "different" and result.direction == word
    assert result.effect == pytest.approx(math.log(factor), abs=0.005)
    assert result.blocks == 12
    assert result.is_worse == (word == "slower")
    printed = json.loads(msgspec.json.encode(ab_result.as_json(result)))
    numbers = ("effect", "low", "high", "change", "change_low", "change_high")
    assert all(isinstance(printed[name], float) for name in numbers)


def test_a_latency_that_the_device_does_not_allow_is_refused_after_it_is_measured(compare: Compare) -> None:
    cpu = {"prepared": {"timing": "cpu"}}
    result = compare(cpu, cpu | {"amounts": (10**15, 0)})
    assert (result.verdict, result.failed_side, result.failed_status) == ("failed", "head", "wrong")
    assert "arithmetic at this processor's peak" in str(result.message) and result.blocks > 0


def test_no_amounts_are_counted_for_a_result_that_is_not_timed(compare: Compare) -> None:
    wrong = {"prepared": {"problem": "wrong"}}
    assert compare({}, wrong, times_right_alone=True).blocks == 0
    assert "amounts" not in [verb for _, verb in Played.requests]


def loaded(source: str | None = "1", numpy: str = "2.4.0") -> Any:
    files = None if source is None else {"kernel.py": source, "tuned.json": "2"} if source else {}
    return msgspec.to_builtins(loaded_of(files, {"numpy": numpy}))


LOADED = loaded()


@pytest.mark.parametrize(
    ("base", "head"),
    [
        *((LOADED, other) for other in (loaded("x"), loaded(numpy="2.2.6"), None)),
        *((unknown, unknown) for unknown in (None, loaded(""), loaded(None))),
    ],
)
def test_sides_that_may_differ_are_timed(compare: Compare, base: Any, head: Any) -> None:
    assert compare({"prepared": {"loaded": base}}, {"prepared": {"loaded": head}}).blocks > 0


def test_sides_that_ran_the_same_files_are_not_timed(compare: Compare) -> None:
    same = {"prepared": {"loaded": LOADED}}
    result = compare(same, same)
    assert (result.verdict, result.blocks, ab_result.exit_code([result])) == ("same", 0, 0)
    assert result.message == "not timed: both sides ran the same 2 files, with the same packages"
    assert "burst" not in [verb for _, verb in Played.requests]
    assert compare(same, same, times_same_code=True).blocks > 0, "their noise was asked for"
    assert compare(same, same, replace(CELL, base_backend="other", trusted=())).blocks > 0, "two backends"


BUSY, STILL = "times, because other work kept the CPU busy", "stale results, because its inputs do not change"


def test_what_a_side_could_not_check_is_in_the_result(compare: Compare, tmp_path: Path) -> None:
    assert compare({}, {}).unchecked == {}
    result = compare({"unchecked": [BUSY, STILL]}, {"unchecked": [BUSY]}, records=tmp_path / "ab.jsonl")
    assert (result.verdict, ab_result.exit_code([result])) == ("same", 0)
    kept = json.loads((tmp_path / "ab.jsonl").read_text())
    assert kept["unchecked"] == ab_result.as_json(result)["unchecked"] == {"base": [BUSY, STILL], "head": [BUSY]}
    assert Played.requests.index(("head", "unchecked")) < Played.requests.index(("head", "unload"))


def test_what_could_not_be_checked_is_asked_where_nothing_is_timed(compare: Compare) -> None:
    assert compare({"unchecked": [STILL]}, {}, only_changed=True).unchecked == {"base": [STILL]}


@pytest.mark.parametrize(
    ("base", "head", "fixed"),
    [(True, False, "head"), (False, True, "base"), (False, False, None), (True, True, None), (None, False, None)],
)
def test_a_routing_that_only_one_side_has_built_in_is_named(
    compare: Compare, base: bool | None, head: bool, fixed: str | None
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
        ([of_backend("a", base=[STILL])], [f"not checked in base: {STILL}"]),
        ([of_backend("a", head=[BUSY]), of_backend("b", head=[BUSY])], [f"not checked in head: {BUSY}"]),
        ([of_backend("a"), of_backend("b", head=[BUSY])], [f"not checked in head: {BUSY} (op/b N=1 fp16)"]),
        (
            [of_backend("b"), *(of_backend(name, head=[BUSY]) for name in "ac")],
            [f"not checked in head: {BUSY} (2 of 3 cells: op/a, op/c)"],
        ),
    ],
    ids=["all checked", "both sides", "one side", "all cells", "one cell", "several cells"],
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


def test_a_gpu_that_another_command_uses_is_not_measured_on(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    held = lease.take("GPU-9", ["another"])
    compare({}, {})
    monkeypatch.setattr(Played, "gpu_uuid", "GPU-9")
    monkeypatch.setattr(lease.WAITING, "begun", False)
    with pytest.raises(lease.Busy, match="GPU-9 is in use by pid"):
        compare({}, {})
    os.close(held)
    compare({}, {})


@pytest.mark.parametrize(("fails", "error"), [(("cells",), "no luck"), ((), "GPU-9 is in use by pid")])
def test_names_are_checked_before_the_device_is(
    fails: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = {"fails": fails, "status": "usage", "ms": list}
    monkeypatch.setattr(ab, "SideProcess", Played)
    monkeypatch.setattr(Played, "plays", {"base": side, "head": side})
    monkeypatch.setattr(Played, "gpu_uuid", "GPU-9")
    monkeypatch.setattr(lease.WAITING, "begun", False)
    held = lease.take("GPU-9", ["another"])
    with Bench(BASE, HEAD, AbSettings()) as bench, pytest.raises(AbError if fails else lease.Busy, match=error):
        bench.cells("cuda", operator="grouped_gemm")
    os.close(held)


def test_a_clock_without_noise(compare: Compare) -> None:
    result = compare({"ms": lambda: [0.1]}, {"ms": lambda: [0.101]})
    assert result.verdict == "different" and result.low is not None and result.high is not None
    assert result.high - result.low > 1.9 * ab_result.rule_for("gpu", 0.1).resolution > 0


def test_noise_without_end_is_unknown(compare: Compare) -> None:
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=0.05)
    assert result.verdict == "unknown" and "not resolved within 0.05 s of measuring" in (result.message or "")
    assert result.ran_out == "budget" and ab_result.exit_code([result]) == 3


@pytest.mark.parametrize(
    ("blocks", "interval"), [(3, ""), (20, "; the interval is a 95 % interval")], ids=["too few", "enough"]
)
def test_a_comparison_that_runs_out_of_blocks_does_not_blame_the_budget(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, blocks: int, interval: str
) -> None:
    """The message names an interval only if that many blocks have one."""
    monkeypatch.setattr("groupbench.tracker.ab.sequential.MAX_BLOCKS", blocks)
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=600)
    assert (result.verdict, result.blocks, result.ran_out) == ("unknown", blocks, "blocks")
    assert result.message == f"not resolved within {blocks} blocks{interval}"
    assert (result.low is not None and result.high is not None) == bool(interval)


def test_the_budget_counts_measuring_alone(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    play = Played.receive

    def receive(self: Played, kind: Any) -> Any:
        now[0] += 30 if self._verb in ("prepare", "adopt") else 0.1
        return play(self, kind)

    monkeypatch.setattr(Played, "receive", receive)
    result = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=2)
    assert result.before_measuring_s == pytest.approx(120, abs=2) and 120 < result.seconds < 125
    assert result.blocks >= 2 and (result.message or "").startswith("not resolved within 2 s of measuring")
    within = compare({"ms": noisy(0.1, 0.5, 1)}, {"ms": noisy(0.1, 0.5, 2)}, budget_s=60, within_s=121)
    assert within.seconds < 125 and "not resolved within 0.4 s of" in f"{within.message}", "with the preparation"
    untimed = compare({}, {}, budget_s=0)
    assert (untimed.verdict, untimed.blocks, untimed.message) == ("unknown", 0, "not timed: the budget is spent")


def test_a_busy_machine_is_why_a_comparison_is_undecided(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"prepared": {"timing": "cpu"}, "ms": noisy(0.1, 2.0, 1)}
    for load, says in ((6.0, " on a busy machine (load 6 on 2 processors); the interval"), (1.0, "; the interval")):
        monkeypatch.setattr(comparing.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(comparing.os, "cpu_count", lambda: 2)
        result = compare(facts, facts)
        assert result.verdict == "unknown" and f"{result.message}".startswith(f"not resolved within 160 blocks{says}")


def test_a_burst_of_a_slow_kernel_leaves_time_for_the_first_look(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    send = Played.send

    def noted(self: Played, verb: str, wait_s: float = 0.0, **facts: Any) -> None:
        asked.extend([facts["samples"]] if verb == "reload" else [])
        send(self, verb)

    monkeypatch.setattr(Played, "send", noted)
    compare({"ms": noisy(900, 0.01, 1)}, {"ms": noisy(900, 0.01, 2)})
    assert asked[-1] == 2, "12 blocks of two bursts of two calls take 43 s of 60"


@pytest.mark.parametrize("verb", ["prepare", "reload", "burst", "hello"])
@pytest.mark.parametrize("who", ["base", "head", "both"])
def test_a_side_that_fails_is_named(compare: Compare, who: str, verb: str) -> None:
    broken = {"fails": [verb], "status": "timeout"}
    if who == "both" and verb == "burst":
        pytest.skip("bursts are taken one after the other: the first to fail ends it")
    result = compare(broken if who != "head" else {}, broken if who != "base" else {})
    expected = "base" if (who, verb) == ("both", "hello") else who
    assert (result.verdict, result.failed_side, result.failed_status) == ("failed", expected, "timeout")
    titles = {"base": "old", "head": "new", "both": "old, new"}
    assert result.message == f"{expected} ({titles[expected]}): no luck" and ab_result.exit_code([result]) == 3


@pytest.mark.parametrize(("timing", "renewed"), [("gpu", 4), ("cpu", 1)])
def test_both_sides_are_placed_anew_before_each_block_and_restarted(
    compare: Compare, timing: str, renewed: int
) -> None:
    """On a CPU, other work slows a process down for seconds, and its blocks are not independent."""
    result = compare({"prepared": {"timing": timing}}, {"ms": noisy(0.14, 0.002, 2)})
    for who in ("base", "head"):
        verbs = [verb for name, verb in Played.requests if name == who]
        assert verbs.count("reload") == result.blocks + 1
        assert verbs.count("adopt") == 1 + (result.blocks - 1) // renewed and verbs[-1] == "unload"
    assert [block.process for block in result.bursts] == [n // renewed for n in range(result.blocks)]


def test_processes_that_are_off_are_no_difference() -> None:
    """Head's are all 0.5 % off, which is as likely as not with three of them at 0.055 ms."""
    rule, longer = ab_result.rule_for("gpu", 0.055), ab_result.rule_for("gpu", 0.6)
    d = np.random.default_rng(0).normal(0.005, 0.002, 24)
    assert not any(sequential.decide(d[:n], rule).verdict == "different" for n in range(25))
    assert any(sequential.decide(d[:n], longer).verdict == "different" for n in range(25))


def test_the_coin_decides_who_is_first(compare: Compare) -> None:
    orders = [[block.order for block in compare({}, {}, seed=seed).bursts] for seed in (0, 1, 2, 3, 3)]
    assert {each for of in orders for each in of} == {"ABBA", "BAAB"} and orders[3] == orders[4]
    assert len({of[0] for of in orders}) == 2


def test_being_first_favours_neither_side(compare: Compare) -> None:
    """One of each two blocks begins with base, the other one with head."""
    for seed in range(4):
        orders = [block.order for block in compare({}, {}, seed=seed).bursts]
        assert len(orders) > 4
        assert all(one != other for one, other in zip(orders[::2], orders[1::2], strict=False))


def test_no_two_benches_share_their_orders() -> None:
    assert Bench(BASE, HEAD).seed != Bench(BASE, HEAD).seed


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
    assert one.count("A") == one.count("B") == bursts and other == one.translate(str.maketrans("AB", "BA"))


def test_equal_kernels_need_no_timing(compare: Compare) -> None:
    result = compare({}, {}, only_changed=True)
    assert (result.verdict, result.blocks) == ("same", 0) and "not timed" in (result.message or "")
    for kernels in ([KERNEL | {"hash": "other"}], [KERNEL | {"config": {"BLOCK": 32}}], [], [KERNEL | {"hash": None}]):
        assert compare({}, {"prepared": {"kernels": kernels}}, only_changed=True).blocks > 0
    for unknown in ({"kernels": []}, {"kernels": [KERNEL | {"hash": None}]}):
        assert compare({"prepared": unknown}, {"prepared": unknown}, only_changed=True).blocks > 0


def test_interpreted_kernels_are_compared_by_accuracy_alone(compare: Compare) -> None:
    slow = {"timing": "interpreted"}
    result = compare({"prepared": slow}, {"prepared": slow})
    assert (result.verdict, result.conclusion, result.blocks) == ("same", "equally accurate", 0)
    assert "speed was not measured" in (result.message or "")
    result = compare({"prepared": slow}, {"prepared": slow | {"accuracy": {"rms": 1e-2}}})
    assert (result.verdict, result.conclusion) == ("different", "less accurate")
    assert ab_result.exit_code([result]) == 1


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
    assert (result.accuracy_change, result.is_worse, ab_result.exit_code([result])) == (change, worse, int(worse))
    assert ab_result.exit_code([]) == 3, "nothing was compared"


@pytest.mark.parametrize(
    ("ratio", "head", "conclusion"),
    [
        (0.9, SideAccuracy("ok", 1e-3), "10 % faster but less accurate"),
        *((1.025, None, "2.5 % slower"), (1.5, None, "50 % slower"), (60.8, None, "60.8× slower")),
    ],
)
def test_the_conclusion_has_latency_and_accuracy(ratio: float, head: SideAccuracy | None, conclusion: str) -> None:
    base = SideAccuracy("ok", 1e-4)
    result = AbResult(CELL, BASE, HEAD, "different", math.log(ratio), base_accuracy=base, head_accuracy=head)
    assert (result.conclusion, result.is_worse) == (conclusion, True)


def test_comparisons_are_kept_with_their_bursts(compare: Compare, tmp_path: Path) -> None:
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
def test_what_cannot_be_kept_is_shown_all_the_same(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the command prints the earlier comparisons and ends with one line."""
    compare({}, {})  # the sides are simulated from here on
    monkeypatch.setattr(Bench, "cells", lambda self, device, **selection: ([CELL, CELL], []))
    monkeypatch.setattr(Bench, "device", "cuda", raising=False)
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    monkeypatch.setattr("groupbench.tracker.cli.ab.check_records", lambda path: None)
    result = CliRunner().invoke(main, ["ab", ".", ".", "--operator", "op", "--records", "/dev/full", "--format=csv"])
    assert (result.exit_code, result.stdout.count("\n")) == (3, 2), result.output
    header, row = result.stdout.splitlines()
    assert header.startswith("verdict,conclusion,operator,backend,shape,dtype,base_ms,head_ms,change")
    assert row.startswith("same,")
    *_, stopped, why = result.stderr.splitlines()
    assert stopped == "stopped; 1 of 2 cells compared"
    assert why == "groupbench: /dev/full: cannot be written: No space left on device"


def test_an_interrupt_ends_both_sides(compare: Compare) -> None:
    def interrupted() -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({}, {"ms": interrupted})


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
    assert result.head_level_ms == pytest.approx(shown) and ab_result.as_json(result)["head_ms"] == 0.1314
