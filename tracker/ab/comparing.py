"""One comparison of a cell on two sides: preparing it, measuring blocks, and the verdict.

A comparison consists of blocks. In each block, both sides are placed at new memory addresses, then their bursts
alternate: head first or base first, and mirrored if each side has two. A coin decides the order for every two blocks,
which have opposite orders. Every few blocks, both sides get new processes. After each block, tracker/ab/sequential.py
decides same, different or continue. The statistical unit is the block, not the burst, because an address changes a
kernel's latency by up to 0.4 % for as long as it stays there.

The GPU rests before a burst; short bursts share one rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from groupbench.tracker.ab.answers import Prepared
from groupbench.tracker.ab.result import (
    AbCell,
    AbResult,
    AbSettings,
    AbVerdict,
    Block,
    SideAccuracy,
    defaults,
    rule_for,
)
from groupbench.tracker.ab.side import AbSide, SideFailure, SideProcess
from groupbench.tracker.facts.environment import software_identity
from groupbench.tracker.facts.metrics import finite_or_none
from groupbench.tracker.facts.physics import floor_ms, too_fast
from groupbench.tracker.facts.record import Environment, Timing
from groupbench.tracker.text.wording import counted, signed_change

if TYPE_CHECKING:
    from groupbench.tracker.ab.sequential import Decision, Rule

T = TypeVar("T")

SCOUTED = 10
"""Calls in the first burst, by which the others are planned."""
SHORT_BURST_S = 0.03
"""Longest burst, in seconds, that shares a rest with the other side's. A kernel below 1 ms runs for a third of it."""
BURST_TO_PLACEMENT = 2.0
"""Ratio of a burst's scatter to a placement's: 1.3 to 2.4 on an H100, except for long kernels, which hardly depend on
their placement."""


@dataclass(frozen=True)
class _Plan:
    """The measuring plan for one comparison's blocks.

    Attributes:
        samples: Calls in a burst.
        bursts: Bursts of each side in a block.
        idle_s: Rest before a burst, in s.
        shares_rest: Whether the bursts of a block share one rest.
    """

    rule: Rule
    samples: int
    bursts: int
    idle_s: float
    shares_rest: bool


class RunningComparison:
    """One cell, from preparation to verdict."""

    def __init__(
        self,
        base: AbSide,
        head: AbSide,
        cell: AbCell,
        settings: AbSettings,
        seed: int,
        progress: Callable[[str], None],
        within_s: float = math.inf,
    ) -> None:
        self.cell, self.settings, self.progress = cell, settings, progress
        self.started = time.monotonic()
        self.until = self.started + within_s
        self.coin = random.Random(seed)
        self.result = AbResult(cell, base, head, "unknown", seed=seed)
        self.blocks: list[Block] = []
        self.sides: tuple[SideProcess, ...] = ()

    def run(self, sides: tuple[SideProcess, SideProcess]) -> AbResult:
        """Measure the cell on both sides. Raises SideFailure."""
        self.sides = sides
        self.progress(f"{self.cell}: preparing")
        base, head = self._prepare()
        self.result = replace(
            self.result,
            timing="interpreted" if "interpreted" in (base.timing, head.timing) else base.timing,
            base_accuracy=_accuracy(base),
            base_hash=base.kernel_hash,
            head_hash=head.kernel_hash,
            base_environment=sides[0].facts.environment,
            head_environment=sides[1].facts.environment,
            base_dynamic=base.dynamic,
            head_dynamic=head.dynamic,
        )
        ended = self._untimed(base, head) or self._measure()
        answers = zip(("base", "head"), self._ask_both(list[str], "unchecked"), strict=True)
        with contextlib.suppress(SideFailure):
            self._ask_both(object, "unload")
        return replace(ended, unchecked={side: reasons for side, reasons in answers if reasons})

    def failed(self, failure: SideFailure) -> AbResult:
        """Return the result after a side's failure, and unload the cell on the other side."""
        for process in self.sides:
            if failure.who != "both" and process.who != failure.who:
                with contextlib.suppress(SideFailure):
                    process.ask(object, "unload", self.settings.timeout_s)
        message = f"{failure.who} ({failure.title}): {failure.reason}"
        self.result = replace(self.result, bursts=tuple(self.blocks), blocks=len(self.blocks))
        return self._ended("failed", message=message, failed_side=failure.who, failed_status=failure.status)

    def _prepare(self) -> list[Prepared]:
        """Prepare the cell on both sides at the same time, since nothing is timed yet."""
        limit_s = self.settings.timeout_s
        for process, cell in zip(self.sides, (self.cell.base, self.cell), strict=True):
            process.send("prepare", limit_s, cell=msgspec.to_builtins(cell), timeout_s=limit_s)
        answers = [_receive(process, Prepared) for process in self.sides]
        if isinstance(head := answers[1], Prepared):  # known even if base fails
            self.result = replace(self.result, head_accuracy=_accuracy(head), head_facts=head)
        return _of_both(answers)

    def _untimed(self, base: Prepared, head: Prepared) -> AbResult | None:
        """Return the result if the answers to `prepare` decide it, else None."""
        if self.settings.times_right_alone and head.problem is not None:
            return self._ended("different", message="not timed: the result is wrong")
        if self.result.timing == "interpreted":
            equal = self.result.accuracy_change == "same"
            verdict: AbVerdict = "same" if equal else "different"
            return self._ended(verdict, message="speed was not measured: interpreted kernels have no latency")
        if not self.settings.times_same_code and self._runs_the_same(base, head):
            assert head.loaded is not None
            files = counted(len(head.loaded.files), "file")
            return self._ended("same", message=f"not timed: both sides ran the same {files}, with the same packages")
        if self.settings.only_changed and base.has_same_code(head):
            return self._ended("same", message="not timed: the compiled kernels and their configs are equal")
        return None

    def _runs_the_same(self, base: Prepared, head: Prepared) -> bool:
        """Return whether both sides are known to run the same files of the repository with the same packages."""
        if self.cell.base != self.cell or base.loaded is None or head.loaded is None or not head.loaded.files:
            return False
        software = [software_identity(_environment(process)) for process in self.sides]
        return base.loaded == head.loaded and base.loaded.code is not None and software[0] == software[1]

    def _measure(self) -> AbResult:
        """Measure blocks until they decide, or the time or number of blocks is spent."""
        from groupbench.tracker.ab import sequential

        if not self.settings.budget_s or time.monotonic() >= self.until:
            return self._ended("unknown", message="not timed: the budget is spent", ran_out="budget")
        plan = self._plan()
        decision = sequential.decide([], plan.rule)
        began = time.monotonic()
        self.until = min(self.until, began + self.settings.budget_s)
        self.result = replace(self.result, before_measuring_s=round(began - self.started, 3))
        while (
            decision.verdict == "continue"
            and len(self.blocks) < sequential.MAX_BLOCKS
            and time.monotonic() < self.until
        ):
            self._block(plan)
            decision = sequential.decide([block.difference for block in self.blocks], plan.rule)
            change = signed_change(math.expm1(decision.effect), 2)
            self.progress(f"{self.cell}: block {len(self.blocks)}, {change}")
        base_ms = _median([ms for block in self.blocks for ms in block.base_ms])
        head_ms = _median([ms for block in self.blocks for ms in block.head_ms])
        self.result = replace(
            self.result, bursts=tuple(self.blocks), blocks=len(self.blocks), base_ms=base_ms, head_ms=head_ms
        )
        if base_ms is not None and head_ms is not None:
            self._refuse_implausible((base_ms, head_ms))
        return self._decided(decision, plan.rule, self.until - began)

    def _decided(self, decision: Decision, rule: Rule, limit_s: float) -> AbResult:
        from groupbench.tracker.ab import sequential

        if decision.verdict != "continue":
            return self._ended(decision.verdict, effect=decision.effect, low=decision.low, high=decision.high)
        effect, low, high = sequential.estimate([block.difference for block in self.blocks], 0.95, rule.resolution)
        out_of_blocks = len(self.blocks) == sequential.MAX_BLOCKS
        limit = f"{sequential.MAX_BLOCKS} blocks" if out_of_blocks else f"{limit_s:.3g} s of measuring"
        limit += busy() if self.result.timing == "cpu" else ""
        interval = "; the interval is a 95 % interval" if math.isfinite(low) and math.isfinite(high) else ""
        return self._ended(
            "unknown",
            f"not resolved within {limit}{interval}",
            effect=effect,
            low=finite_or_none(low),
            high=finite_or_none(high),
            ran_out="blocks" if out_of_blocks else "budget",
        )

    def _refuse_implausible(self, levels_ms: tuple[float, float]) -> None:
        """Check whether a side is faster than the device allows. Raises SideFailure."""
        timing: Timing = "gpu" if self.result.timing == "gpu" else "cpu"
        for process, amounts, ms in zip(self.sides, self._ask_both(tuple[int, int], "amounts"), levels_ms, strict=True):
            facts = process.facts.environment
            least_ms = floor_ms(*amounts, self.cell.dtype, timing, facts.get("gpu"), facts.get("cpu_count"))
            reason = too_fast(ms, least_ms)
            if reason is not None:
                raise SideFailure(process.who, process.side.title, "wrong", reason)

    def _plan(self) -> _Plan:
        """Measure a first burst of each side, and plan the blocks by the latency."""
        from groupbench.tracker.ab import sequential

        scouted = self.cell.samples or SCOUTED
        self._adopt(scouted, self.sides)
        started = time.monotonic()
        self._ask_both(object, "reload", seed=self.coin.getrandbits(32), samples=scouted)
        reload_s = time.monotonic() - started
        medians, seconds = [], []
        for process in self.sides:
            started = time.monotonic()
            medians.append(self._burst(process))
            seconds.append(time.monotonic() - started)
        timing, latency_ms = self.result.timing or "cpu", min(medians)
        usual = defaults(timing, latency_ms)
        min_effect = self.settings.min_effect
        min_effect = usual.min_effect if min_effect is None else min_effect
        self.result = replace(self.result, min_effect=min_effect)
        rule = rule_for(timing, latency_ms, self.settings.alpha, min_effect)
        shortest_s = 2 * sequential.first_look(rule.alpha) * latency_ms / 1e3  # with one call a burst
        samples = self.cell.samples or max(1, min(usual.samples, int(self.settings.budget_s / shortest_s)))
        idle_s = usual.idle_s if self.cell.idle_s is None else self.cell.idle_s
        burst_s = max(seconds) * samples / scouted
        shares_rest = timing == "gpu" and burst_s <= SHORT_BURST_S
        return _Plan(rule, samples, bursts_a_side(reload_s, burst_s, idle_s, shares_rest), idle_s, shares_rest)

    def _adopt(self, samples: int, sides: Sequence[SideProcess], fresh: bool = False) -> None:
        """Load the cell in the timed process of each side in this order, or in a new one if `fresh`."""
        for process in sides:
            seed = self.coin.getrandbits(32)
            process.send("adopt", self.settings.timeout_s, seed=seed, samples=samples, fresh=fresh)
        self._receive_both(object)

    def _block(self, plan: _Plan) -> None:
        """Measure a block: give both sides new addresses, or new processes if due, then run their bursts.

        The sides do all of this in one order. A coin decides it, and the next block has the other one. So being first,
        which makes a burst faster on a busy machine, favours neither side.
        """
        age, turn = divmod(len(self.blocks), plan.rule.renewed)
        earlier = self.blocks[-1].order if len(self.blocks) % 2 else ""
        order = block_order(plan.bursts, earlier.startswith("A") if earlier else self.coin.random() < 0.5)
        sides = [self.sides["AB".index(name)] for name in order[:2]]
        if age and not turn:
            self._adopt(plan.samples, sides, fresh=True)
        for process in sides:
            process.send("reload", self.settings.timeout_s, seed=self.coin.getrandbits(32), samples=plan.samples)
        self._receive_both(object)
        taken: dict[str, list[float]] = {"A": [], "B": []}
        for number, name in enumerate(order):
            if plan.idle_s and (number == 0 or not plan.shares_rest):
                time.sleep(plan.idle_s)
            taken[name].append(self._burst(self.sides["AB".index(name)]))
        self.blocks.append(Block(order, age, tuple(taken["A"]), tuple(taken["B"])))

    def _burst(self, process: SideProcess) -> float:
        """Return a burst's median in ms."""
        return statistics.median(process.ask(list[float], "burst", self.settings.timeout_s))

    def _ask_both(self, kind: type[T], verb: str, **arguments: Any) -> list[T]:
        for process in self.sides:
            process.send(verb, self.settings.timeout_s, **arguments)
        return self._receive_both(kind)

    def _receive_both(self, kind: type[T]) -> list[T]:
        return _of_both([_receive(process, kind) for process in self.sides])

    def _ended(self, verdict: AbVerdict, message: str | None = None, **facts: Any) -> AbResult:
        seconds = round(time.monotonic() - self.started, 3)
        return replace(self.result, verdict=verdict, message=message, seconds=seconds, **facts)


def busy() -> str:
    """Return a remark if more programs want to run than this machine has processors."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return f" on a busy machine (load {load:.0f} on {counted(cpus, 'processor')})" if load > cpus else ""


def bursts_a_side(reload_s: float, burst_s: float, idle_s: float, shares_rest: bool) -> int:
    """Return each side's burst count in a block: two if all share a rest, else by the reloading cost."""
    from groupbench.tracker.ab.sequential import bursts_per_block

    return 2 if shares_rest else bursts_per_block(1.0, BURST_TO_PLACEMENT, reload_s, burst_s + idle_s)


def block_order(bursts: int, head_first: bool) -> str:
    """Return the burst order in a block: AB, ABBA, ABBAAB, ... or the same with B first."""
    pair = "BA" if head_first else "AB"
    return "".join(pair if number % 2 == 0 else pair[::-1] for number in range(bursts))


def _receive(process: SideProcess, kind: type[T]) -> T | SideFailure:
    try:
        return process.receive(kind)
    except SideFailure as failure:
        return failure


def _of_both(replies: Sequence[T | SideFailure]) -> list[T]:
    """Return both answers. Raises SideFailure; if both sides failed, with base's message."""
    failures = [reply for reply in replies if isinstance(reply, SideFailure)]
    if len(failures) == 2:
        first, second = failures
        titles = first.title if first.title == second.title else f"{first.title}, {second.title}"
        raise SideFailure("both", titles, first.status, first.message)
    if failures:
        raise failures[0]
    return [reply for reply in replies if not isinstance(reply, SideFailure)]


def _environment(process: SideProcess) -> Environment:
    return msgspec.convert(process.facts.environment, Environment, strict=False)


def _accuracy(side: Prepared) -> SideAccuracy:
    rms = None if side.accuracy is None else side.accuracy.rms
    return SideAccuracy("ok" if side.problem is None else "wrong", rms, side.problem)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
