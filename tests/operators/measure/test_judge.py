"""The judge, called directly instead of in its process."""

from __future__ import annotations

from typing import Any

import pytest

from groupbench.operators.measure.cell import Done, Job
from groupbench.operators.measure.faults import is_oom
from groupbench.operators.measure.judge import At, _Judge

PROBLEM = Job("grouped_gemm", "torch_loop", "G=2,M_g=8,N=16,K=16", "fp16", "cpu")


def test_inputs_that_did_not_fit_are_made_for_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = _Judge()
    make = _Judge._make

    def full(self: Any) -> None:
        make(self)
        raise MemoryError

    monkeypatch.setattr(_Judge, "_make", full)
    with pytest.raises(MemoryError):
        judge.load(PROBLEM)
    assert judge.job is None and not hasattr(judge, "inputs")
    monkeypatch.setattr(_Judge, "_make", make)
    assert judge.load(PROBLEM) == Done("loaded")
    assert judge._reference(At()) is not None


def test_an_idle_cpu_has_no_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupbench.operators.measure import witness

    clock = iter([0.0, 0.05])
    worked = iter([0.0, 0.05, 0.05])
    monkeypatch.setattr(witness.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(witness.time, "process_time", lambda: next(worked))
    assert witness.stretch("cpu") == pytest.approx(1.0)


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
