"""What is compared, by which rule, and what came of it: the nouns of an A/B. How it is measured is in ab.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from groupbench.tracker.ab.side import AbError, Side, Which
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.metrics import RMS
from groupbench.tracker.text.files import append_whole

if TYPE_CHECKING:
    from groupbench.tracker.stats.sequential import Rule

Verdict = Literal["same", "different", "unknown", "failed"]
AccuracyChange = Literal["same", "less accurate", "more accurate", "wrong", "mended", "both wrong"]

RECORDS_SCHEMA = 1
REFRESH_BLOCKS = 4
"""Blocks that two processes serve before new ones take their place: different rests on three pairs at least. Several
that live side by side would cost less to renew, but with three a side placing anew takes 0.35 s on an H100."""
PROCESS_SD = ((0.015, 0.011), (0.06, 0.0035), (0.12, 0.0012), (0.3, 0.0007), (0.6, 0.0006))
"""(ms, relative standard deviation of what a process is off for life), of an H100: see docs/explanation/ab.md."""
TICK_MS = {"gpu": 32e-6, "cpu": 1e-6}
"""Steps of CUDA's event clock on an H100, and of the host's."""


@dataclass(frozen=True)
class AbCell:
    """What is compared. device: auto, cuda, cpu. samples, idle_s, cudagraph are the protocol's; None: what suits it.

    trusted       plugins that base and the judge import, where head's are not to be trusted
    base_backend  that base runs, by whose tolerance head's is judged, where it is not head's
    """

    operator: str
    backend: str
    shape: str
    dtype: str
    mode: str = "fwd"
    seed: int = 0
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    samples: int | None = None
    idle_s: float | None = None
    cudagraph: bool = False
    base_backend: str | None = None
    trusted: tuple[str, ...] | None = None

    @property
    def base(self) -> AbCell:
        """What base computes, where that is not what head does."""
        if self.trusted is None:
            return self
        return replace(self, backend=self.base_backend or self.backend, plugins=self.trusted)

    def __str__(self) -> str:
        mode = "" if self.mode == "fwd" else f" {self.mode}"
        return f"{self.operator}/{self.backend} {self.shape} {self.dtype}{mode}"


@dataclass(frozen=True)
class Block:
    """order: A is base, B is head. Medians of each burst in ms, by side. process: how many fresh ones came before."""

    order: str
    process: int
    base_ms: tuple[float, ...]
    head_ms: tuple[float, ...]

    @property
    def difference(self) -> float:
        """log(head) - log(base)."""
        return statistics.fmean(map(math.log, self.head_ms)) - statistics.fmean(map(math.log, self.base_ms))


@dataclass(frozen=True)
class SideAccuracy:
    """status: ok, or wrong. rms: relative error against the reference, None where it is not finite."""

    status: str
    rms: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Defaults:
    """What a comparison uses where the user does not say. Effects are relative."""

    min_effect: float
    floor: float
    gross: float
    samples: int
    idle_s: float
    tick_ms: float
    process_sd: float


def defaults(timing: str, latency_ms: float) -> Defaults:
    """By how a cell is timed and how long it takes.

    On an H100, blocks of a 13 us kernel scatter ten times as much as those of a 0.4 ms one: to see less than 2 % there
    would take minutes. More samples cost such a kernel nothing beside the rest before them.
    """
    from groupbench.tracker.stats.thresholds import least_effect  # numpy comes with it

    min_effect = least_effect(timing, latency_ms)
    if timing != "gpu":
        return Defaults(min_effect, 0.02, 0.30, 10, 0.0, TICK_MS["cpu"], 0.0)
    return Defaults(
        min_effect, 0.001, 0.05, 30 if latency_ms < 0.05 else 10, 0.3, TICK_MS["gpu"], process_sd(latency_ms)
    )


def process_sd(latency_ms: float) -> float:
    """Of PROCESS_SD, between its points by logarithms and beyond them as the last one."""
    import numpy as np

    ms, sd = np.log(PROCESS_SD).T
    return float(np.exp(np.interp(math.log(latency_ms), ms, sd)))


def rule_for(
    timing: str,
    latency_ms: float,
    alpha: float = 0.001,
    min_effect: float | None = None,  # relative
    renewed: int = REFRESH_BLOCKS,
) -> Rule:
    """When a comparison of such a cell stops."""
    from groupbench.tracker.stats.sequential import Rule

    plan = defaults(timing, latency_ms)
    min_effect = plan.min_effect if min_effect is None else min_effect
    return Rule(
        alpha=alpha,
        floor=min(plan.floor, min_effect / 2),
        min_effect=math.log1p(min_effect),
        gross=max(plan.gross, 2 * min_effect),
        resolution=plan.tick_ms / latency_ms,
        process_sd=plan.process_sd,
        renewed=renewed,
    )


@dataclass(frozen=True)
class AbResult:
    """One comparison.

    verdict     different only where the interval excludes the floor; same where it lies within min_effect; unknown
                where the budget ended first; failed says which side and why in `message`
    effect      log(head / base), low..high its interval: what the verdict rests on
    pairs       blocks
    *_hash      of the compiled kernels, None where there are none
    blocks      what was measured, to be stored and resampled
    head_facts  what head's side found out before anything was timed
    """

    cell: AbCell
    base: Side
    head: Side
    verdict: Verdict
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    base_ms: float | None = None
    head_ms: float | None = None
    pairs: int = 0
    seconds: float = 0.0
    base_accuracy: SideAccuracy | None = None
    head_accuracy: SideAccuracy | None = None
    base_hash: str | None = None
    head_hash: str | None = None
    message: str | None = None
    timing: str | None = None
    min_effect: float | None = None
    base_environment: dict[str, Any] = field(default_factory=dict)
    head_environment: dict[str, Any] = field(default_factory=dict)
    failed_side: Which | None = None
    failed_status: str | None = None  # error, oom, timeout, unavailable, usage
    bursts: tuple[Block, ...] = ()
    head_facts: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def change(self) -> float | None:
        """0.03 is three per cent slower."""
        return None if self.effect is None else math.expm1(self.effect)

    @property
    def head_level_ms(self) -> float | None:
        """The base's median with the effect, so that the numbers of a row agree; head's median where there is none.

        The effect pairs bursts that were measured next to each other, which a drift of the machine does not move.
        Medians of all bursts do not, and may differ by another amount or in the other direction.
        """
        if self.base_ms is None or self.change is None:
            return self.head_ms
        return self.base_ms * (1 + self.change)

    @property
    def direction(self) -> Literal["slower", "faster", "same", "unknown"]:
        if self.verdict == "different" and self.effect is not None:
            return "slower" if self.effect > 0 else "faster"
        return "same" if self.verdict == "same" else "unknown"

    @property
    def accuracy_change(self) -> AccuracyChange:
        return accuracy_change(self.base_accuracy, self.head_accuracy)

    @property
    def conclusion(self) -> str:
        """Latency and accuracy in one phrase."""
        if self.verdict == "failed":
            return f"{self.failed_side} failed" if self.failed_side else "failed"
        parts = {"unknown": "not resolved"}
        speed = parts.get(self.direction, self.direction)
        if self.effect is not None and self.verdict == "different":
            percent = abs(100 * math.expm1(self.effect))
            speed = f"{percent:.0f} % {speed}" if percent >= 10 else f"{percent:.2g} % {speed}"
        told = {"wrong": "head is wrong", "mended": "base was wrong", "both wrong": "both are wrong"}
        accuracy = told.get(self.accuracy_change, self.accuracy_change)
        if self.effect is None and self.timing == "interpreted":
            return "equally accurate" if accuracy == "same" else accuracy
        if accuracy == "same":
            return speed
        opposed = self.direction == "faster" and self.accuracy_change in ("wrong", "less accurate")
        opposed |= self.direction == "slower" and self.accuracy_change in ("mended", "more accurate")
        return f"{speed} {'but' if opposed else 'and'} {accuracy}"

    @property
    def is_worse(self) -> bool:
        """Slower, less accurate or wrong where the base was right."""
        return self.direction == "slower" or self.accuracy_change in ("wrong", "less accurate")


def accuracy_change(base: SideAccuracy | None, head: SideAccuracy | None) -> AccuracyChange:
    """Head's accuracy beside base's. An error 1.5 times as large is a change, as for `gate`."""
    if base is None or head is None:
        return "same"
    if head.status != "ok":
        return "wrong" if base.status == "ok" else "both wrong"
    if base.status != "ok":
        return "mended"
    before, after = base.rms or 0.0, head.rms or 0.0
    if RMS.worse(before, after):
        return "less accurate"
    return "more accurate" if RMS.worse(after, before) else "same"


def exit_code(results: Sequence[AbResult]) -> int:
    """1 where a head is worse, else 3 where something failed, is unknown or nothing was compared, else 0."""
    if any(result.is_worse for result in results):
        return ExitCode.FAILED
    if not results or any(result.verdict in ("unknown", "failed") for result in results):
        return ExitCode.INCOMPLETE
    return ExitCode.OK


class RecordsError(AbError):
    """A comparison that was made and cannot be kept."""

    exit_code = ExitCode.INCOMPLETE


def append_record(path: Path, result: AbResult) -> None:
    """The comparison as one line of JSON: with `as_json`'s fields and every block's bursts. Raises RecordsError."""
    body = {"schema": RECORDS_SCHEMA, **as_json(result)}
    body["bursts"] = msgspec.to_builtins(result.bursts)
    append_whole(path, msgspec.json.encode(body) + b"\n", RecordsError)


def as_json(result: AbResult) -> dict[str, Any]:
    """Everything but the bursts, as plain values."""
    body = msgspec.to_builtins(result, enc_hook=str)
    for name in ("bursts", "head_facts"):
        del body[name]
    for name in ("base_backend", "trusted"):
        if body["cell"][name] is None:
            del body["cell"][name]
    return body | {
        "change": result.change,
        "conclusion": result.conclusion,
        "accuracy_change": result.accuracy_change,
    }
