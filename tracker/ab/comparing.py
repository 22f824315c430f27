"""One comparison of a cell on two sides: preparing it, measuring blocks, and the verdict.

A comparison consists of blocks. In each block, both sides are placed at new memory addresses, then their bursts
alternate in a random order: head first or base first, and mirrored if each side has two, so that neither side is always
later. Every few blocks, both sides get new processes. After each block, tracker/stats/sequential.py decides same,
different or continue. The statistical unit is the block, not the burst, because an address changes a kernel's latency
by up to 0.4 % for as long as it stays there.

The GPU rests before a burst; short bursts share one rest.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from groupbench.tracker.ab.result import AbCell, AbResult, AbVerdict, Block, SideAccuracy, defaults, rule_for
from groupbench.tracker.ab.side import SideFailure, SideProcess
from groupbench.tracker.facts.metrics import finite_or_none
from groupbench.tracker.facts.physics import floor_ms, too_fast
from groupbench.tracker.facts.record import Timing
from groupbench.tracker.text.wording import signed_change

if TYPE_CHECKING:
    from groupbench.tracker.ab.bench import Bench

SHORT_BURST_S = 0.03
"""Longest burst, in seconds, that shares a rest with the other side's. A kernel below 1 ms runs for a third of it."""
BURST_TO_PLACEMENT = 2.0
"""Ratio of a burst's scatter to a placement's: 1.3 to 2.4 on an H100, except for long kernels, which hardly depend on
their placement."""


class RunningComparison:
    """One cell, from its preparation to its verdict."""

    def __init__(self, bench: Bench, cell: AbCell, seed: int) -> None:
        self.bench, self.cell, self.seed = bench, cell, seed
        self.started = time.monotonic()
        self.coin = random.Random(seed)
        self.result = AbResult(cell, bench.base, bench.head, "unknown", seed=seed)
        self.blocks: list[Block] = []
        self.sides: tuple[SideProcess, ...] = ()

    def run(self) -> AbResult:
        bench, cell = self.bench, self.cell
        self.sides = bench.sides(cell.device)
        bench.progress(f"{cell}: preparing")
        prepared = self._prepare()
        base, head = prepared
        self._amounts = {
            process.who: (side.get("flops") or 0, side.get("min_bytes") or 0)
            for process, side in zip(self.sides, prepared, strict=True)
        }
        interpreted = "interpreted" in (base["timing"], head["timing"])
        self._keep(
            timing="interpreted" if interpreted else base["timing"],
            base_accuracy=_accuracy(base),
            head_accuracy=_accuracy(head),
            base_hash=_hash(base["kernels"]),
            head_hash=_hash(head["kernels"]),
            base_environment=self.sides[0].facts["environment"],
            head_environment=self.sides[1].facts["environment"],
            base_dynamic=base.get("dynamic"),
            head_dynamic=head.get("dynamic"),
            head_facts=head,
        )
        ended = self._untimed(base, head) or self._measure()
        answers = zip(("base", "head"), self._ask_both("unchecked"), strict=True)
        self._unload()
        return replace(ended, unchecked={side: reasons for side, reasons in answers if reasons})

    def failed(self, failure: SideFailure) -> AbResult:
        """Return the result of a comparison that a side's failure ended, and unload the cell on the other side."""
        for process in self.sides:
            if failure.who != "both" and process.who != failure.who:
                with contextlib.suppress(SideFailure):
                    process.ask("unload", self.bench.timeout_s)
        message = f"{failure.who} ({failure.title}): {failure.reason}"
        self._keep(bursts=tuple(self.blocks), blocks=len(self.blocks))
        return self._ended("failed", message=message, failed_side=failure.who, failed_status=failure.status)

    def _prepare(self) -> list[dict[str, Any]]:
        """Prepare the cell on both sides at the same time, since nothing is timed yet; return their answers."""
        for process, cell in zip(self.sides, (self.cell.base, self.cell), strict=True):
            process.send(
                "prepare", self.bench.timeout_s, cell=msgspec.to_builtins(cell), timeout_s=self.bench.timeout_s
            )
        return self._receive_both()

    def _untimed(self, base: dict[str, Any], head: dict[str, Any]) -> AbResult | None:
        """Return the result if the answers to `prepare` decide it, else None."""
        if self.bench.times_right_alone and head["problem"] is not None:
            return self._ended("different", message="not timed: the result is wrong")
        if self.result.timing == "interpreted":
            equal = self.result.accuracy_change == "same"
            verdict: AbVerdict = "same" if equal else "different"
            return self._ended(verdict, message="speed was not measured: interpreted kernels have no latency")
        if self.bench.only_changed and _same_code(base["kernels"], head["kernels"]):
            return self._ended("same", message="not timed: the compiled kernels and their configs are equal")
        return None

    def _measure(self) -> AbResult:
        from groupbench.tracker.stats import sequential

        if not self.bench.budget_s:
            return self._ended("unknown", message="not timed: the budget is 0 s", ran_out="budget")
        timing = self.result.timing or "cpu"
        latency_ms, burst_s, reload_s = self._scout()
        plan = defaults(timing, latency_ms)
        min_effect = plan.min_effect if self.bench.min_effect is None else self.bench.min_effect
        rule = rule_for(timing, latency_ms, self.bench.alpha, min_effect, self.bench.refresh_blocks)
        self._keep(min_effect=min_effect)
        samples = self.cell.samples or plan.samples
        idle_s = plan.idle_s if self.cell.idle_s is None else self.cell.idle_s
        burst_s *= samples / self._scouted
        shares_rest = self.bench.rest == "block" or (self.bench.rest == "auto" and burst_s <= SHORT_BURST_S)
        bursts = bursts_a_side(reload_s, burst_s, idle_s, shares_rest)
        decision = sequential.decide([], rule)
        self.measuring = time.monotonic()
        self._keep(before_measuring_s=round(self.measuring - self.started, 3))
        while decision.verdict == "continue" and len(self.blocks) < sequential.MAX_BLOCKS and self._has_time():
            self._block(samples, bursts, idle_s, shares_rest)
            decision = sequential.decide([block.difference for block in self.blocks], rule)
            change = signed_change(math.expm1(decision.effect), 2)
            self.bench.progress(f"{self.cell}: block {len(self.blocks)}, {change}")
        self._keep(bursts=tuple(self.blocks), blocks=len(self.blocks), **_levels(self.blocks))
        self._refuse_implausible()
        if decision.verdict == "continue":
            effect, low, high = sequential.estimate([b.difference for b in self.blocks], 0.95, rule.resolution)
            out_of_blocks = len(self.blocks) == sequential.MAX_BLOCKS
            limit = f"{sequential.MAX_BLOCKS} blocks" if out_of_blocks else f"{self.bench.budget_s:g} s of measuring"
            interval = "; the interval is a 95 % interval" if math.isfinite(low) and math.isfinite(high) else ""
            return self._ended(
                "unknown",
                f"not resolved within {limit}{interval}",
                effect=effect,
                low=finite_or_none(low),
                high=finite_or_none(high),
                ran_out="blocks" if out_of_blocks else "budget",
            )
        return self._ended(decision.verdict, effect=decision.effect, low=decision.low, high=decision.high)

    def _refuse_implausible(self) -> None:
        """Check that no side is faster than its device can be. Raises SideFailure."""
        for process, ms in zip(self.sides, (self.result.base_ms, self.result.head_ms), strict=True):
            amounts, facts = self._amounts[process.who], process.facts["environment"]
            timing: Timing = "gpu" if self.result.timing == "gpu" else "cpu"
            floor = floor_ms(*amounts, self.cell.dtype, timing, facts.get("gpu"), facts.get("cpu_count"))
            reason = None if ms is None else too_fast(ms, floor)
            if reason is not None:
                raise SideFailure(process.who, process.side.title, "wrong", reason)

    def _scout(self) -> tuple[float, float, float]:
        """Measure a first burst; return (latency in ms, seconds of a burst, seconds to place both sides again).

        The blocks are planned by these times.
        """
        self._scouted = self.cell.samples or 10
        self._adopt(self._scouted)
        started = time.monotonic()
        self._ask_both("reload", seed=self.coin.getrandbits(32), samples=self._scouted)
        reload_s = time.monotonic() - started
        medians, seconds = [], []
        for process in self.sides:
            started = time.monotonic()
            medians.append(statistics.median(process.ask("burst", self.bench.timeout_s)))
            seconds.append(time.monotonic() - started)
        return min(medians), max(seconds), reload_s

    def _adopt(self, samples: int, fresh: bool = False) -> None:
        """Load the cell in the timed process of each side, or in a new one if `fresh`."""
        for process in self.sides:
            seed = self.coin.getrandbits(32)
            process.send("adopt", self.bench.timeout_s, seed=seed, samples=samples, fresh=fresh)
        self._receive_both()

    def _block(self, samples: int, bursts: int, idle_s: float, shares_rest: bool) -> None:
        """Measure a block: give both sides new addresses, or new processes if due, then run their bursts."""
        age, turn = divmod(len(self.blocks), self.bench.refresh_blocks)
        if age and not turn:
            self._adopt(samples, fresh=True)
        for process in self.sides:
            process.send("reload", self.bench.timeout_s, seed=self.coin.getrandbits(32), samples=samples)
        self._receive_both()
        order = block_order(bursts, self.coin.random() < 0.5)
        taken: dict[str, list[float]] = {"A": [], "B": []}
        for number, name in enumerate(order):
            if idle_s and (number == 0 or not shares_rest):
                time.sleep(idle_s)
            process = self.sides["AB".index(name)]
            taken[name].append(statistics.median(process.ask("burst", self.bench.timeout_s)))
        self.blocks.append(Block(order, age, tuple(taken["A"]), tuple(taken["B"])))

    def _ask_both(self, verb: str, **arguments: Any) -> list[Any]:
        for process in self.sides:
            process.send(verb, self.bench.timeout_s, **arguments)
        return self._receive_both()

    def _receive_both(self) -> list[Any]:
        """Return both answers. Raises SideFailure; if both sides failed, with base's message."""
        answers: list[Any] = []
        failures: list[SideFailure] = []
        for process in self.sides:
            try:
                answers.append(process.receive())
            except SideFailure as failure:
                failures.append(failure)
        if len(failures) == 2:
            first, second = failures
            titles = first.title if first.title == second.title else f"{first.title}, {second.title}"
            raise SideFailure("both", titles, first.status, first.message)
        if failures:
            raise failures[0]
        return answers

    def _unload(self) -> None:
        for process in self.sides:
            process.send("unload", self.bench.timeout_s)
        with contextlib.suppress(SideFailure):
            self._receive_both()

    def _has_time(self) -> bool:
        return time.monotonic() - self.measuring < self.bench.budget_s

    def _keep(self, **facts: Any) -> None:
        self.result = replace(self.result, **facts)

    def _ended(self, verdict: AbVerdict, message: str | None = None, **facts: Any) -> AbResult:
        seconds = round(time.monotonic() - self.started, 3)
        return replace(self.result, verdict=verdict, message=message, seconds=seconds, **facts)


def bursts_a_side(reload_s: float, burst_s: float, idle_s: float, shares_rest: bool) -> int:
    """Return the number of bursts of each side in a block: two if all share a rest, else by the cost of reloading."""
    from groupbench.tracker.stats.sequential import bursts_per_block

    return 2 if shares_rest else bursts_per_block(1.0, BURST_TO_PLACEMENT, reload_s, burst_s + idle_s)


def block_order(bursts: int, head_first: bool) -> str:
    """Return the order of the bursts in a block: AB, ABBA, ABBAAB, ... or the same with B first."""
    pair = "BA" if head_first else "AB"
    return "".join(pair if number % 2 == 0 else pair[::-1] for number in range(bursts))


def _accuracy(prepared: dict[str, Any]) -> SideAccuracy:
    problem = prepared["problem"]
    return SideAccuracy("ok" if problem is None else "wrong", prepared["accuracy"].get("rms"), problem)


def _hash(kernels: list[dict[str, Any]]) -> str | None:
    """Return one name for all compiled kernels, or None if there are no kernels or one has no hash."""
    hashes = [kernel.get("hash") for kernel in kernels]
    return "+".join(sorted(map(str, hashes))) if hashes and all(hashes) else None


def _same_code(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> bool:
    """Return whether both sides launch at least one kernel, and the same kernels with the same configs."""

    def identity(kernels: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        return sorted(
            (kernel["name"], str(kernel.get("hash")), repr(sorted(kernel.get("config", {}).items())))
            for kernel in kernels
        )

    return _hash(base) is not None and _hash(head) is not None and identity(base) == identity(head)


def _levels(blocks: Sequence[Block]) -> dict[str, float]:
    """Return each side's median over all bursts, in ms."""
    if not blocks:
        return {}
    return {
        "base_ms": statistics.median(ms for block in blocks for ms in block.base_ms),
        "head_ms": statistics.median(ms for block in blocks for ms in block.head_ms),
    }
