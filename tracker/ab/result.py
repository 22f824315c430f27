"""The data classes of an A/B comparison: cell, settings, rule and result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from groupbench.tracker.ab.answers import Prepared
from groupbench.tracker.ab.side import AbError, AbSide, Which
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.metrics import RMS, relative
from groupbench.tracker.text.files import append_whole
from groupbench.tracker.text.unchecked import Unchecked, unchecked_lines
from groupbench.tracker.text.wording import change_in_words, counted, some

if TYPE_CHECKING:
    from groupbench.tracker.ab.sequential import Rule
    from groupbench.tracker.query.rows import SeriesRow

AbVerdict = Literal["same", "different", "unknown", "failed"]
RanOut = Literal["budget", "blocks", "timeout"]
AccuracyChange = Literal["same", "less accurate", "more accurate", "wrong", "fixed", "both wrong"]
LESS_ACCURATE: tuple[AccuracyChange, ...] = ("wrong", "less accurate")
MORE_ACCURATE: tuple[AccuracyChange, ...] = ("fixed", "more accurate")

RECORDS_SCHEMA = 2
REFRESH_BLOCKS = {"gpu": 4, "cpu": 1}
"""Blocks before both sides get new processes. On a CPU, other work slows a process down for seconds: blocks of one
process are alike, and only those of different ones are independent. On a GPU, PROCESS_SD covers their offsets."""
PROCESS_SD = ((0.015, 0.011), (0.06, 0.0035), (0.12, 0.0013), (0.4, 0.0013), (0.6, 0.0006))
"""(latency in ms, relative standard deviation of a process's constant offset), on an H100: docs/explanation/ab.md."""
TICK_MS = {"gpu": 32e-6, "cpu": 1e-6}
"""Resolution of CUDA's event clock on an H100, and of the CPU's clock."""


def timing_of(protocol: str) -> dict[str, Any]:
    """Return the AbCell fields set by a series' protocol name, such as `cooled+idle=0.5s+cudagraph`.

    An A/B takes only the idle time and CUDA graphs from the series' protocol.
    """
    _, *parts = protocol.split("+")
    idle = next((part[len("idle=") : -1] for part in parts if part.startswith("idle=")), None)
    timing = {} if idle is None else {"idle_s": float(idle)}
    return timing | ({"cudagraph": True} if "cudagraph" in parts else {})


CELL = ("operator", "backend", "shape", "dtype", "mode", "seed")
"""The AbCell fields that a series has."""


def cell_of_series(series: SeriesRow) -> dict[str, Any]:
    """Return the AbCell fields set by a series."""
    return {name: getattr(series, name) for name in CELL} | timing_of(series.protocol)


@dataclass(frozen=True)
class AbCell:
    """The cell to compare.

    Attributes:
        device: `auto`, `cuda` or `cpu`.
        samples, idle_s, cudagraph: Settings of the timing protocol; None: by the latency.
        trusted: Plugins for base and the judge, if head's plugins are not trusted.
        base_backend: Backend of base, whose tolerance applies to head too; None: the same backend as head's.
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
        """The cell for base, with another backend and trusted plugins if they differ from head's."""
        if self.trusted is None:
            return self
        return replace(self, backend=self.base_backend or self.backend, plugins=self.trusted)

    def __str__(self) -> str:
        mode = "" if self.mode == "fwd" else f" {self.mode}"
        return f"{self.operator}/{self.backend} {self.shape} {self.dtype}{mode}"


@dataclass(frozen=True)
class Block:
    """One block of bursts.

    Attributes:
        order: A is base, B is head.
        process: Number of times the processes were renewed before.
        base_ms, head_ms: Median of each burst, in ms.
    """

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
    """The accuracy of one side.

    Attributes:
        status: `ok` or `wrong`.
        rms: Relative error against the reference; None if it is not finite.
    """

    status: str
    rms: float | None
    problem: str | None = None


@dataclass(frozen=True)
class AbSettings:
    """Settings of comparisons.

    Attributes:
        budget_s: Time in s for measuring one comparison, without preparation; 0 measures nothing.
        min_effect: Relative change below which the sides are the same; None: by device and latency, see `defaults`.
        alpha: False-positive rate per comparison.
        timeout_s: Time in s within which a side must answer.
        only_changed: Skip timing if the compiled kernels are equal.
        times_right_alone: Skip timing if head's result is wrong.
        times_same_code: Also time cells whose sides ran the same files, to find out how noisy the machine is.
    """

    budget_s: float = 60.0
    min_effect: float | None = None
    alpha: float = 0.001
    timeout_s: float = 300.0
    only_changed: bool = False
    times_right_alone: bool = False
    times_same_code: bool = False


@dataclass(frozen=True)
class Defaults:
    """Default settings of a comparison. Effects are relative."""

    min_effect: float
    floor: float
    samples: int
    idle_s: float
    tick_ms: float
    process_sd: float
    renewed: int


def defaults(timing: str, latency_ms: float) -> Defaults:
    """Return the default settings for a timing and a latency.

    On an H100, a 13 us kernel's blocks scatter ten times as much as a 0.4 ms kernel's, so detecting less than
    2 % would take minutes. For such a kernel, more samples cost little compared to the rest before them.
    """
    from groupbench.tracker.stats.thresholds import POOL_FLOOR, least_effect  # numpy comes with it

    device = "gpu" if timing == "gpu" else "cpu"
    common = least_effect(timing, latency_ms), POOL_FLOOR[device]
    if device == "cpu":
        return Defaults(*common, 10, 0.0, TICK_MS["cpu"], 0.0, REFRESH_BLOCKS["cpu"])
    samples = 30 if latency_ms < 0.05 else 10
    return Defaults(*common, samples, 0.3, TICK_MS["gpu"], process_sd(latency_ms), REFRESH_BLOCKS["gpu"])


def process_sd(latency_ms: float) -> float:
    """Return the standard deviation for a latency: PROCESS_SD, interpolated in logarithms, constant beyond the ends."""
    import numpy as np

    ms, sd = np.log(PROCESS_SD).T
    return float(np.exp(np.interp(math.log(latency_ms), ms, sd)))


def rule_for(
    timing: str,
    latency_ms: float,
    alpha: float = 0.001,
    min_effect: float | None = None,  # relative
) -> Rule:
    """Return the stopping rule for a comparison of a cell with this timing and latency."""
    from groupbench.tracker.ab.sequential import Rule

    plan = defaults(timing, latency_ms)
    min_effect = plan.min_effect if min_effect is None else min_effect
    return Rule(
        alpha=alpha,
        floor=min(plan.floor, min_effect / 2),
        min_effect=math.log1p(min_effect),
        resolution=plan.tick_ms / latency_ms,
        process_sd=plan.process_sd,
        renewed=plan.renewed,
    )


@dataclass(frozen=True)
class AbResult:
    """The result of one comparison.

    Attributes:
        verdict: Different if the interval excludes the floor, same if it is within min_effect, unknown if the budget
            ended first, failed if a side failed; `message` then names the side and the reason.
        effect: log(head / base), with the interval low..high on which the verdict is based.
        blocks: Number of blocks.
        seconds: Wall time, of which before_measuring_s prepared the sides.
        ran_out: The limit, if the comparison ended undecided: budget, which counts measuring alone, blocks or timeout.
        *_hash: Hashes of the compiled kernels; None without kernels.
        *_dynamic: Whether the callable follows another routing; None if untested.
        bursts: The measured blocks, to be stored and resampled.
        unchecked: Impossible checks by side, with reasons.
        head_facts: Facts about head from before timing.
    """

    cell: AbCell
    base: AbSide
    head: AbSide
    verdict: AbVerdict
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    base_ms: float | None = None
    head_ms: float | None = None
    blocks: int = 0
    seconds: float = 0.0
    before_measuring_s: float | None = None  # None if it did not get that far
    ran_out: RanOut | None = None
    base_accuracy: SideAccuracy | None = None
    head_accuracy: SideAccuracy | None = None
    base_hash: str | None = None
    head_hash: str | None = None
    base_dynamic: bool | None = None
    head_dynamic: bool | None = None
    message: str | None = None
    timing: str | None = None
    min_effect: float | None = None
    base_environment: dict[str, Any] = field(default_factory=dict)
    head_environment: dict[str, Any] = field(default_factory=dict)
    failed_side: Which | None = None
    failed_status: str | None = None  # error, oom, timeout, unavailable, usage
    bursts: tuple[Block, ...] = ()
    unchecked: Unchecked = field(default_factory=dict)
    head_facts: Prepared | None = None
    seed: int = 0

    @property
    def change(self) -> float | None:
        """The relative change: 0.03 is 3 % slower."""
        return relative(self.effect)

    @property
    def head_level_ms(self) -> float | None:
        """Base's median times the effect, for consistent numbers in a row; head's median without an effect.

        The effect pairs neighbouring bursts, so a drift of the machine cancels out. In
        medians of all bursts it does not, so they may differ by another amount or even in the other direction.
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
        """The change of latency and accuracy in one phrase."""
        if self.verdict == "failed":
            return f"{self.failed_side} failed" if self.failed_side else "failed"
        speed: str = "not resolved" if self.direction == "unknown" else self.direction
        if self.effect is not None and self.verdict == "different":
            change = math.expm1(self.effect)
            speed = change_in_words(change, (speed, speed), ".0f" if abs(change) >= 0.1 else ".2g", " %")
        phrases = {"wrong": "head is wrong", "fixed": "base was wrong", "both wrong": "both are wrong"}
        accuracy = phrases.get(self.accuracy_change, self.accuracy_change)
        if self.effect is None and self.timing == "interpreted":
            return "equally accurate" if accuracy == "same" else accuracy
        if accuracy == "same":
            return speed
        opposed = self.direction == "faster" and self.accuracy_change in LESS_ACCURATE
        opposed |= self.direction == "slower" and self.accuracy_change in MORE_ACCURATE
        return f"{speed} {'but' if opposed else 'and'} {accuracy}"

    @property
    def note(self) -> str | None:
        """The message and the remark on the routing."""
        return "; ".join(filter(None, [self.message, self.routing()])) or None

    def routing(self, base: str = "base", head: str = "head") -> str | None:
        """Return a remark if one side alone was prepared for one routing, and so may do less work than the other."""
        if self.base_dynamic is None or self.head_dynamic is None or self.base_dynamic == self.head_dynamic:
            return None
        fixed, other = (head, base) if self.base_dynamic else (base, head)
        return f"{fixed} has a built-in routing, so it may do less work than {other}, which reads it in each call"

    @property
    def is_worse(self) -> bool:
        """Return whether head is slower, less accurate, or wrong while base is right."""
        return self.direction == "slower" or self.accuracy_change in LESS_ACCURATE


def accuracy_change(base: SideAccuracy | None, head: SideAccuracy | None) -> AccuracyChange:
    """Return how head's accuracy differs from base's. An error 1.5 times as large is a change, as for `gate`."""
    if base is None or head is None:
        return "same"
    if head.status != "ok":
        return "wrong" if base.status == "ok" else "both wrong"
    if base.status != "ok":
        return "fixed"
    before, after = base.rms or 0.0, head.rms or 0.0
    if RMS.worse(before, after):
        return "less accurate"
    return "more accurate" if RMS.worse(after, before) else "same"


def exit_code(results: Sequence[AbResult]) -> int:
    """Return 1 if any head is worse, else 3 if a cell failed, is unknown or nothing was compared, else 0."""
    if any(result.is_worse for result in results):
        return ExitCode.FAILED
    if not results or any(result.verdict in ("unknown", "failed") for result in results):
        return ExitCode.INCOMPLETE
    return ExitCode.OK


def footnotes(results: Sequence[AbResult]) -> list[str]:
    """Return a line for each impossible check, with the affected cells unless all are."""
    cells: dict[str, list[AbCell]] = {}
    for result in results:
        for line in unchecked_lines(result.unchecked):
            cells.setdefault(line, []).append(result.cell)
    return [f"{line}{_in_cells(each, len(results))}" for line, each in cells.items()]


def _in_cells(cells: Sequence[AbCell], most: int) -> str:
    if len(cells) == most:
        return ""
    if len(cells) == 1:
        return f" ({cells[0]})"
    backends = some([*dict.fromkeys(f"{cell.operator}/{cell.backend}" for cell in cells)])
    return f" ({len(cells)} of {counted(most, 'cell')}: {backends})"


class RecordsError(AbError):
    """A finished comparison cannot be written to the records file."""

    exit_code = ExitCode.INCOMPLETE


def append_record(path: Path, result: AbResult) -> None:
    """Append a comparison as a JSON line: `as_json`'s fields and every block's bursts. Raises RecordsError."""
    body = {"schema": RECORDS_SCHEMA, **as_json(result)}
    body["bursts"] = msgspec.to_builtins(result.bursts)
    append_whole(path, msgspec.json.encode(body) + b"\n", RecordsError)


def as_json(result: AbResult) -> dict[str, Any]:
    """Return a comparison as plain values, without bursts."""
    body: dict[str, Any] = msgspec.to_builtins(result, enc_hook=str)
    for name in ("bursts", "head_facts"):
        del body[name]
    for name in ("base_backend", "trusted"):
        if body["cell"][name] is None:
            del body["cell"][name]
    return body | {
        "change": result.change,
        "change_low": relative(result.low),
        "change_high": relative(result.high),
        "conclusion": result.conclusion,
        "accuracy_change": result.accuracy_change,
    }
