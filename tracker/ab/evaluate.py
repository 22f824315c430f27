"""Is a candidate right, honest and faster? One A/B of two backends of one commit, and what to try to see more.

Base is a backend that is trusted, head the candidate's. Both have processes of their own, and the candidate's file is
imported by its processes alone: neither by the process that judges nor by the one whose clock bounds the times.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.result import AbCell, AbResult
from groupbench.tracker.ab.side import AbError, Side
from groupbench.tracker.exits import ExitCode

Verdict = Literal["faster", "slower", "same", "unknown", "right", "wrong", "suspicious", "failed"]

MIN_EFFECT = 0.01
BUDGET_S = 15.0


@dataclass(frozen=True)
class Evaluation:
    """What is known of one candidate on one problem.

    verdict      faster, slower, same or unknown where it is right; right where a CPU has interpreted it, which is no
                 speed; wrong, suspicious (it deceives the measurement, or a mistake looks like it) or failed otherwise
    first_wrong  coordinates of the first wrong element
    speedup      against's time over the candidate's, low..high its interval
    kernels      static facts of compiled Triton kernels: registers, spills, shared memory, config
    to_try       commands that show more
    """

    operator: str
    backend: str
    against: str
    shape: str
    dtype: str
    mode: str
    device: str
    verdict: Verdict
    right: bool | None
    honest: bool | None
    problem: str | None = None
    first_wrong: tuple[int, ...] | None = None
    rms: float | None = None
    against_rms: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    candidate_ms: float | None = None
    against_ms: float | None = None
    prepare_ms: float | None = None
    blocks: int = 0
    seconds: float = 0.0
    note: str | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    to_try: list[str] = field(default_factory=list)


class Evaluator:
    """Processes that stay for many candidates. A context manager.

    plugins  of operators that are not groupbench's own; they are trusted
    """

    def __init__(
        self,
        plugins: Sequence[str] = (),
        *,
        device: str = "auto",
        budget_s: float = BUDGET_S,
        min_effect: float = MIN_EFFECT,
        timeout_s: float = 120.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.plugins, self.device, self.timeout_s = tuple(plugins), device, timeout_s
        self._bench = Bench(
            Side("against"),
            Side("candidate"),
            budget_s=budget_s,
            min_effect=min_effect,
            timeout_s=timeout_s,
            times_right_alone=True,
            progress=progress,
        )

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._bench.close()

    def evaluate(
        self,
        candidate: str,
        *,
        operator: str | None = None,
        backends: Sequence[str] = (),
        against: str | None = None,
        shapes: Sequence[str] = (),
        suites: Sequence[str] = (),
        dtypes: Sequence[str] = (),
        mode: str = "fwd",
    ) -> list[Evaluation]:
        """Every backend of the candidate on every problem: of the operator's default suite the first, unless named.

        Raises AbError where the candidate does not load or has no such backend, or there is nothing to compare with.
        """
        candidate = _plugin(candidate)
        offered = self._bench.ask_head("offers", self.device, candidate=candidate, plugins=list(self.plugins))
        chosen = [
            o for o in offered if operator in (None, o["operator"]) and (not backends or o["backend"] in backends)
        ]
        if not chosen:
            names = ", ".join(f"{o['operator']}/{o['backend']}" for o in offered) or "none"
            raise AbError(f"{candidate} has no such backend; it has: {names}")
        found = []
        for offer in chosen:
            # An operator of the candidate's own brings its reference, which is believed then.
            trusted = (*self.plugins, candidate) if offer["own"] else self.plugins
            problems = self._bench.ask_base(
                "cells",
                self.device,
                operator=offer["operator"],
                backends=[against or offer["baseline"]],
                shapes=list(shapes),
                suites=list(suites),
                dtypes=list(dtypes),
                mode=mode,
                plugins=list(trusted),
            )
            for problem in problems if shapes or suites else problems[:1]:
                found.append(self._one(candidate, offer, problem, trusted))
        return found

    def _one(
        self, candidate: str, offer: dict[str, Any], problem: dict[str, Any], trusted: tuple[str, ...]
    ) -> Evaluation:
        cell = AbCell(
            operator=offer["operator"],
            backend=offer["backend"],
            shape=problem["shape"],
            dtype=problem["dtype"],
            mode=problem["mode"],
            device=self.device,
            plugins=(*self.plugins, candidate),
            base_backend=problem["backend"],
            trusted=trusted,
        )
        result = self._bench.compare(cell)
        self._bench.forget()  # a candidate is often the next version of the same file
        return of(result, self._bench.device or "cpu", candidate, own=offer["own"])


def of(result: AbResult, device: str, candidate: str, own: bool = False) -> Evaluation:
    """What a comparison says of the candidate, its head."""
    facts, cell = result.head_facts, result.cell
    accuracy = facts.get("accuracy") or {}
    problem, honest = facts.get("problem"), not facts.get("suspicious") if facts else None
    failed = result.verdict == "failed"
    if failed and result.failed_status == "wrong" and result.failed_side == "head":
        problem, honest = result.message, False
    right = None if not facts or (failed and problem is None) else problem is None
    verdict: Verdict
    if problem is not None:
        verdict = "wrong" if honest else "suspicious"
    elif failed:
        verdict, problem = "failed", (result.message or "").removeprefix(f"head ({result.head.title}): ")
    elif result.timing == "interpreted":
        verdict = "right"
    else:
        verdict = decided(result)
    speed = verdict in ("faster", "slower", "same", "unknown") and result.effect is not None
    notes = [result.message] if verdict in ("unknown", "right") else []
    if result.verdict == "unknown" and verdict in ("faster", "slower", "same"):
        notes = ["by the interval of 95 % at the end of the budget; a longer one makes it 99.9 %"]
    notes += ["the candidate's own reference was believed: it defines the operator"] if own else []
    return Evaluation(
        operator=cell.operator,
        backend=cell.backend,
        against=cell.base_backend or cell.backend,
        shape=cell.shape,
        dtype=cell.dtype,
        mode=cell.mode,
        device=device,
        verdict=verdict,
        right=right,
        honest=honest,
        problem=problem,
        first_wrong=tuple(accuracy["first_bad"]) if accuracy.get("first_bad") else None,
        rms=accuracy.get("rms"),
        against_rms=result.base_accuracy.rms if result.base_accuracy else None,
        speedup=_inverse(result.effect) if speed else None,
        low=_inverse(result.high) if speed else None,
        high=_inverse(result.low) if speed else None,
        candidate_ms=result.head_level_ms if speed else None,
        against_ms=result.base_ms if speed else None,
        prepare_ms=facts.get("prepare_ms"),
        blocks=result.pairs,
        seconds=round(result.seconds, 2),
        note="; ".join(filter(None, notes)) or None,
        kernels=facts.get("kernels") or [],
        to_try=to_try(verdict, cell, device, candidate),
    )


def decided(result: AbResult) -> Verdict:
    """The direction; where the budget ended first, what the interval says that is known by then.

    The sequential test of `ab` is to be wrong once in a thousand comparisons, which takes several pairs of processes.
    Someone who tries one candidate after the other would rather have the answer of an interval of 95 %.
    """
    if result.verdict != "unknown" or result.low is None or result.high is None:
        return result.direction
    least = math.log1p(result.min_effect or MIN_EFFECT)
    if result.low > least:
        return "slower"
    if result.high < -least:
        return "faster"
    return "same" if -least <= result.low <= result.high <= least else "unknown"


def to_try(verdict: Verdict, cell: AbCell, device: str, candidate: str) -> list[str]:
    """Commands that show more of what the verdict rests on."""
    plugins = " ".join(f"--plugin {shlex.quote(plugin)}" for plugin in cell.plugins)
    problem = f"--op {cell.operator} --shapes {shlex.quote(cell.shape)} --precision {cell.dtype} --device {device}"
    problem += "" if cell.mode == "fwd" else f" --mode {cell.mode}"
    only = f"--only {shlex.quote(cell.backend)}"
    measure = f"tritonbench --host builtin {plugins} {problem}"
    if verdict in ("wrong", "failed", "suspicious"):
        found = [f"{measure} {only} -s"]
        return [*found, f"{measure} {only} --seed 1"] if verdict == "wrong" else found
    evaluate = f"groupbench evaluate {shlex.quote(candidate)} --against {shlex.quote(cell.base_backend or '')}"
    evaluate += "".join(f" --plugin {shlex.quote(plugin)}" for plugin in cell.plugins if plugin != candidate)
    found = [f"{evaluate} --shape {shlex.quote(cell.shape)} --budget 2m"] if verdict in ("unknown", "same") else []
    if device == "cuda":
        found.append(f"{measure} {only} --metrics latency,gbps,tflops,prepare_ms,enqueue_ms")
    found.append(f"{evaluate} --suite smoke")
    return found


def exit_code(found: Sequence[Evaluation]) -> int:
    """1 where a candidate is wrong, suspicious or slower, else 3 where one failed or is unknown, else 0."""
    verdicts = {one.verdict for one in found}
    if verdicts & {"wrong", "suspicious", "slower"}:
        return ExitCode.FAILED
    return ExitCode.INCOMPLETE if verdicts & {"failed", "unknown"} else ExitCode.OK


def _inverse(effect: float | None) -> float | None:
    """Of log(head / base), the speed-up; None where an end of an interval is not known."""
    return None if effect is None or not math.isfinite(effect) else math.exp(-effect)


def _plugin(candidate: str) -> str:
    """A file by its whole path: the processes may be in other folders."""
    file, _, attribute = candidate.partition(".py:") if ".py:" in candidate else (candidate, "", "")
    path = Path(f"{file}.py" if attribute else file)
    if not path.name.endswith((".py", ".json")):
        return candidate
    if not path.is_file():
        raise AbError(f"there is no file {path}")
    return str(path.resolve()) + (f":{attribute}" if attribute else "")
