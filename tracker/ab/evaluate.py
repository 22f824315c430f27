"""Check whether a candidate is correct, honest and faster, with an A/B of two backends at one commit.

Base is a trusted backend, head the candidate's. Each has separate processes. Only the candidate's processes import the
file: neither the judging process does, nor the one whose clock bounds the times.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from groupbench.tracker.ab.answers import ListedCell, Offer
from groupbench.tracker.ab.bench import AnswerError, Bench
from groupbench.tracker.ab.result import AbCell, AbResult, AbSettings, RanOut
from groupbench.tracker.ab.side import AbError, AbSide
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.record import NOT_CHECKED, Accuracy
from groupbench.tracker.text.unchecked import Unchecked

EvaluationVerdict = Literal["faster", "slower", "same", "unknown", "right", "wrong", "suspicious", "failed"]

_TITLES = {"base": "against", "head": "candidate"}
MIN_EFFECT = 0.01
EVALUATION_S = 15.0


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one candidate backend on one problem, or of a file without a backend because it does not load.

    Attributes:
        verdict: A correct candidate: faster, slower, same, unknown, or right if a CPU interpreted it without timing;
            otherwise wrong, failed, or suspicious: it deceives the measurement, or a bug looks like it.
        first_wrong: Coordinates of the first wrong element.
        against_problem: Why the result of `against` is wrong, or why it failed.
        speedup: Time of `against` over the candidate's, with the interval low..high.
        kernels: Static facts of compiled Triton kernels: registers, spills, shared memory, config.
        seconds: Wall time, of which before_measuring_s prepared the processes.
        ran_out: The limit that ended the evaluation, if any: budget, which counts measuring alone, blocks or timeout.
        unchecked: Impossible checks of `candidate` and `against`, with reasons.
        to_try: Commands to see more.
    """

    operator: str | None
    backend: str | None
    against: str | None
    shape: str | None
    dtype: str | None
    mode: str
    device: str
    verdict: EvaluationVerdict
    right: bool | None
    honest: bool | None
    problem: str | None = None
    first_wrong: tuple[int, ...] | None = None
    rms: float | None = None
    against_rms: float | None = None
    against_problem: str | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    candidate_ms: float | None = None
    against_ms: float | None = None
    prepare_ms: float | None = None
    blocks: int = 0
    seconds: float = 0.0
    before_measuring_s: float | None = None
    ran_out: RanOut | None = None
    note: str | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    unchecked: Unchecked = field(default_factory=dict)
    to_try: list[str] = field(default_factory=list)


class Evaluator(AbstractContextManager["Evaluator"]):
    """Evaluates candidates in long-lived processes. A context manager.

    Args:
        plugins: Trusted plugins of operators other than groupbench's own.
        folders: Folders in which Python finds the modules of plugins and candidates.
    """

    def __init__(
        self,
        plugins: Sequence[str] = (),
        *,
        folders: Sequence[str] = (),
        device: str = "auto",
        budget_s: float = EVALUATION_S,
        min_effect: float = MIN_EFFECT,
        timeout_s: float = 120.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.plugins, self.device, self.timeout_s = tuple(plugins), device, timeout_s
        self._bench = Bench(
            AbSide(_TITLES["base"], pythonpath=tuple(folders)),
            AbSide(_TITLES["head"], pythonpath=tuple(folders)),
            AbSettings(budget_s=budget_s, min_effect=min_effect, timeout_s=timeout_s, times_right_alone=True),
            progress=progress,
        )

    def __exit__(self, *_: object) -> None:
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
    ) -> Iterator[Evaluation]:
        """Yield an evaluation for every selected backend in the candidate on every selected problem.

        Without `shapes` and `suites`, the problem is the first of the operator's default suite.

        An unloadable candidate has one evaluation, `failed`, without a backend. Raises AbError if the candidate
        has no such backend, or cannot be compared with anything.
        """
        candidate = _plugin(candidate)
        try:
            offered = self._bench.ask_head(
                list[Offer], "offers", self.device, candidate=candidate, plugins=list(self.plugins)
            )
        except AnswerError as error:
            problem = self._why_not_loaded(candidate, error)
            first = (*dtypes, None)[0], mode, self._bench.device or "cpu"
            yield Evaluation(operator, None, against, (*shapes, None)[0], *first, "failed", None, None, problem)
            return
        for offer in _chosen(candidate, offered, operator, backends):
            # If the candidate defines the operator, its reference has to be trusted.
            trusted = (*self.plugins, candidate) if offer.own else self.plugins
            problems = self._bench.ask_base(
                list[ListedCell],
                "cells",
                self.device,
                operator=offer.operator,
                backends=[against or offer.baseline],
                shapes=list(shapes),
                suites=list(suites),
                dtypes=list(dtypes),
                mode=mode,
                plugins=list(trusted),
            )
            selected = problems if shapes or suites else problems[:1]
            for each in selected:
                yield self._one(candidate, offer, each, trusted)

    def _why_not_loaded(self, candidate: str, error: AnswerError) -> str:
        """Return why a candidate does not load. Raises AnswerError for a call's error."""
        named = f"plugin {candidate!r}"
        if error.status == "usage" and not error.message.startswith(named):
            raise error
        if error.status == "timeout":
            return f"{named} does not load: no answer within {self.timeout_s:g} s"
        return error.message if named in error.message else f"{named} does not load: {error.message}"

    def _one(self, candidate: str, offer: Offer, problem: ListedCell, trusted: tuple[str, ...]) -> Evaluation:
        cell = AbCell(
            operator=offer.operator,
            backend=offer.backend,
            shape=problem.shape,
            dtype=problem.dtype,
            mode=problem.mode,
            device=self.device,
            plugins=(*self.plugins, candidate),
            base_backend=problem.backend,
            trusted=trusted,
        )
        before = _content(candidate)
        result = self._bench.compare(cell)
        self._bench.forget()  # the next candidate is often another version of the same file
        device = self._bench.device or "cpu"
        if _content(candidate) != before:  # each process imports the file, so the results are of several versions
            cell_facts = cell.operator, cell.backend, cell.base_backend, cell.shape, cell.dtype, cell.mode, device
            return Evaluation(*cell_facts, "failed", None, None, "the file changed during its evaluation; repeat it")
        return of(result, device, candidate, defines_operator=offer.own)


def _chosen(candidate: str, offered: Sequence[Offer], operator: str | None, backends: Sequence[str]) -> list[Offer]:
    """Return the selected backends. Raises AbError without any."""
    if not offered:
        raise AbError(
            f"{candidate} adds no backend to those of the trusted plugins; write the candidate to a file that is "
            "neither in `plugins` of groupbench.toml nor named by --plugin"
        )
    chosen = [
        each for each in offered if operator in (None, each.operator) and (not backends or each.backend in backends)
    ]
    if not chosen:
        names = ", ".join(f"{each.operator}/{each.backend}" for each in offered)
        raise AbError(f"{candidate} has no such backend; its backends: {names}")
    return chosen


def of(result: AbResult, device: str, candidate: str, defines_operator: bool = False) -> Evaluation:
    """Return the candidate's evaluation; the candidate is a comparison's head."""
    facts, cell = result.head_facts, result.cell
    accuracy = Accuracy() if facts is None or facts.accuracy is None else facts.accuracy
    judged = _judged(result)
    verdict, against = judged.verdict, cell.base_backend or cell.backend
    return Evaluation(
        operator=cell.operator,
        backend=cell.backend,
        against=against,
        shape=cell.shape,
        dtype=cell.dtype,
        mode=cell.mode,
        device=device,
        verdict=verdict,
        right=judged.right,
        honest=judged.honest,
        problem=judged.problem,
        first_wrong=accuracy.first_bad or None,
        rms=accuracy.rms,
        against_rms=result.base_accuracy.rms if result.base_accuracy else None,
        against_problem=_against_problem(result),
        prepare_ms=None if facts is None else facts.prepare_ms,
        blocks=result.blocks,
        seconds=round(result.seconds, 2),
        before_measuring_s=result.before_measuring_s,
        ran_out="timeout" if result.failed_status == "timeout" else result.ran_out,
        note="; ".join(_notes(result, verdict, against, defines_operator)) or None,
        kernels=[] if facts is None else msgspec.to_builtins(facts.kernels),
        unchecked={_TITLES[side]: reasons for side, reasons in result.unchecked.items()},
        to_try=to_try(verdict, cell, device, candidate),
        **_speed(result, verdict),
    )


@dataclass(frozen=True)
class _Judged:
    """The verdict on the candidate, the problem, and whether the result is right and honest, as far as known."""

    verdict: EvaluationVerdict
    problem: str | None
    right: bool | None
    honest: bool | None


def _judged(result: AbResult) -> _Judged:
    facts, failed = result.head_facts, result.verdict == "failed"
    problem, honest = (None, None) if facts is None else (facts.problem, not facts.suspicious)
    if failed and result.failed_status == "wrong" and result.failed_side == "head":
        problem, honest = result.message, False
    by_base = failed and result.failed_side == "base"
    right = None if facts is None or (failed and not by_base and problem is None) else problem is None
    if problem is not None:
        return _Judged("wrong" if honest else "suspicious", problem, right, honest)
    if by_base:
        return _Judged("unknown", None, right, honest)
    if failed and _reason(result).startswith(NOT_CHECKED):
        return _Judged("unknown", _reason(result), right, honest)
    if failed:
        return _Judged("failed", _reason(result), right, honest)
    return _Judged("right" if result.timing == "interpreted" else decided(result), None, right, honest)


def _against_problem(result: AbResult) -> str | None:
    if result.verdict == "failed" and result.failed_side == "base":
        return _reason(result)
    return result.base_accuracy.problem if result.base_accuracy else None


def _reason(result: AbResult) -> str:
    """Return why the comparison failed, without the side's name."""
    for side, facts in (("base", result.base), ("head", result.head)):
        prefix = f"{side} ({facts.title}): "
        if result.message and result.message.startswith(prefix):
            return result.message.removeprefix(prefix)
    return result.message or ""


def _speed(result: AbResult, verdict: EvaluationVerdict) -> dict[str, float | None]:
    """Return the speed-up with an interval, and both latencies; empty without a verdict on the speed."""
    if verdict not in ("faster", "slower", "same", "unknown") or result.effect is None:
        return {}
    return {
        "speedup": _inverse(result.effect),
        "low": _inverse(result.high),
        "high": _inverse(result.low),
        "candidate_ms": result.head_level_ms,
        "against_ms": result.base_ms,
    }


def _notes(result: AbResult, verdict: EvaluationVerdict, against: str, defines_operator: bool) -> Iterator[str]:
    if verdict in ("unknown", "right") and result.verdict != "failed":
        yield from filter(None, [result.message])
    yield from filter(None, [result.routing(against, "the candidate")])
    if result.verdict == "unknown" and verdict in ("faster", "slower", "same"):
        longer = "; a longer --budget gives 99.9 %" if result.ran_out == "budget" else ""
        yield f"based on the 95 % interval at the end of the {result.ran_out}{longer}"
    if defines_operator:
        yield "the candidate defines the operator, so its own reference was trusted"


def decided(result: AbResult) -> EvaluationVerdict:
    """Return the change's direction; if the budget ended first, as far as the 95 % interval decides it.

    `ab`'s sequential test may be wrong once in a thousand comparisons, which takes several pairs of processes.
    To try one candidate after another, the 95 % interval is good enough.
    """
    if result.verdict != "unknown" or result.low is None or result.high is None or result.min_effect is None:
        return result.direction
    least = math.log1p(result.min_effect)
    if result.low > least:
        return "slower"
    if result.high < -least:
        return "faster"
    return "same" if -least <= result.low <= result.high <= least else "unknown"


def to_try(verdict: EvaluationVerdict, cell: AbCell, device: str, candidate: str) -> list[str]:
    """Return commands to see the evidence for a verdict in more detail."""
    plugins = " ".join(f"--plugin {shlex.quote(plugin)}" for plugin in cell.plugins)
    problem = f"--op {cell.operator} --shapes {shlex.quote(cell.shape)} --precision {cell.dtype} --device {device}"
    problem += "" if cell.mode == "fwd" else f" --mode {cell.mode}"
    only = f"--only {shlex.quote(cell.backend)}"
    measure = f"tritonbench --host builtin {plugins} {problem}"
    if verdict in ("wrong", "failed", "suspicious"):
        commands = [f"{measure} {only} -s"]
        return [*commands, f"{measure} {only} --seed 1"] if verdict == "wrong" else commands
    evaluate = f"groupbench evaluate {shlex.quote(candidate)} --against {shlex.quote(cell.base_backend or '')}"
    evaluate += "".join(f" --plugin {shlex.quote(plugin)}" for plugin in cell.plugins if plugin != candidate)
    commands = [f"{evaluate} --shape {shlex.quote(cell.shape)} --budget 2m"] if verdict in ("unknown", "same") else []
    if device == "cuda":
        commands.append(f"{measure} {only} --metrics latency,gbps,tflops,prepare_ms,enqueue_ms")
    commands.append(f"{evaluate} --suite smoke")
    return commands


def exit_code(evaluations: Sequence[Evaluation]) -> int:
    """Return 1 if a candidate is wrong, suspicious or slower, else 5 if one failed, 3 if one is unknown, else 0."""
    verdicts = {evaluation.verdict for evaluation in evaluations}
    if verdicts & {"wrong", "suspicious", "slower"}:
        return ExitCode.FAILED
    if "failed" in verdicts:
        return ExitCode.CANDIDATE
    return ExitCode.INCOMPLETE if "unknown" in verdicts else ExitCode.OK


def _inverse(effect: float | None) -> float | None:
    """Return the speed-up for a log(head / base), or None if it is unknown or infinite."""
    return None if effect is None or not math.isfinite(effect) else math.exp(-effect)


def _plugin(candidate: str) -> str:
    """Return a plugin with an absolute file path, since processes may run in other folders."""
    path, attribute = _file_of(candidate)
    if not path.name.endswith((".py", ".json")):
        return candidate
    if not path.is_file():
        raise AbError(f"no such file: {path}")
    return str(path.resolve()) + (f":{attribute}" if attribute else "")


def _file_of(candidate: str) -> tuple[Path, str]:
    """Split `FILE.py:ATTRIBUTE` into the file and the attribute, which may be missing."""
    file, _, attribute = candidate.partition(".py:") if ".py:" in candidate else (candidate, "", "")
    return Path(f"{file}.py" if attribute else file), attribute


def _content(candidate: str) -> bytes | None:
    """Return a candidate file's content; None for a module, and if the file is gone."""
    try:
        return _file_of(candidate)[0].read_bytes()
    except OSError:
        return None
