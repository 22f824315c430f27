"""The judge, called directly instead of in its process."""

from __future__ import annotations

import os
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from groupbench.operators.measure.exchange import Part, Sent
from groupbench.operators.measure.faults import is_oom
from groupbench.operators.measure.judge import At, JudgeHandler, _on, _Problem
from groupbench.operators.measure.wire import Job

PROBLEM = Job("grouped_gemm", "torch_loop", "G=2,M_g=8,N=16,K=16", "fp16", "cpu")


def test_inputs_that_did_not_fit_are_made_for_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = JudgeHandler()
    with monkeypatch.context() as patch:

        def full(self: Any) -> None:
            raise MemoryError

        patch.setattr(_Problem, "_check_inputs", full)
        with pytest.raises(MemoryError):
            judge.load(PROBLEM)
    judge.load(PROBLEM)
    assert judge.problem.reference(At()) is not None


def test_an_output_that_is_announced_larger_than_it_can_be_takes_no_memory(tmp_path: Path) -> None:
    """A file of a terabyte without a block on disk is quickly made."""
    judge, file = JudgeHandler(), tmp_path / "output"
    judge.load(PROBLEM)
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(ValueError, match="returned 549,755,813,888 elements, and the reference has 256"):
        judge.compare(Sent("tensor", (Part("float16", (1 << 39,)),)), str(file), At(), None, None, None, 1.0)


@pytest.mark.parametrize(
    ("sums_ms", "usual_ms", "expected"),
    [([1.0], 1.0, 1.0), ([1.0], 0.5, 2.0), ([1.0, 1.0, 1.0, 5.0], 1.0, 15 / 7), ([1.0] * 99 + [60.0], 1.0, 1.0)],
    ids=["idle", "all slower than before", "every fourth stalled", "a stall in some parts"],
)
def test_the_slowdown_of_a_cpu_is_that_of_known_work(
    sums_ms: list[float], usual_ms: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from groupbench.operators.measure import witness

    clock, coming = [0.0], cycle(sums_ms)

    def add(*terms: Any, out: Any = None) -> None:
        clock[0] += next(coming) / 1e3

    monkeypatch.setattr(witness.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(witness.torch, "add", add)
    assert witness.stretch("cpu", usual_ms) == pytest.approx(expected)


def test_a_stall_before_the_first_sum_leaves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupbench.operators.measure import witness

    clock = count(0.0, 60.0)
    monkeypatch.setattr(witness.time, "perf_counter", lambda: next(clock))
    assert witness.usual_ms() == 60e3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: out of memory\nSearch for it", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: an illegal instruction", False),
    ],
)
def test_cuda_memory_errors_are_oom(text: str, expected: bool) -> None:
    assert is_oom(RuntimeError(text)) is expected


def test_the_judge_runs_on_another_processor_for_a_while() -> None:
    allowed = os.sched_getaffinity(0)
    for processor in (*allowed, None, 1 << 20):
        with _on(processor):
            assert os.sched_getaffinity(0) == ({processor} if processor in allowed else allowed)
        assert os.sched_getaffinity(0) == allowed
