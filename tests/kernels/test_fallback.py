"""Break the preferred variants of a kernel: the next one gives the right result and is named, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources

from groupbench.kernels import variants
from groupbench.kernels.grouped_gemm import choose
from groupbench.kernels.moe import gate_up, permute
from groupbench.kernels.variants import Choice, Variant, choices
from groupbench.operators.measure import accuracy
from groupbench.operators.measure.selection import select_shapes
from groupbench.operators.registry import get_backend, get_operator
from groupbench.operators.tolerances import TOLERANCES

DTYPE = "fp16"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPUS = (("grouped_gemm_bias_add_permute", "triton_fused"),)  # the interpreter has a single variant of it
BACKENDS = (
    ("grouped_gemm", "triton_pointer"),
    ("grouped_gemm", "triton_flat"),
    ("grouped_gemm", "triton_contiguous"),
    ("grouped_gemm_wgrad", "triton_flat"),
    ("split_k_matmul", "triton_fixup"),
    ("matmul_outer_k", "triton_outer_k"),
    ("moe_layer", "triton"),
    *(ON_GPUS if DEVICE == "cuda" else ()),
)

FAILURES: dict[str, tuple[str, Callable[[], Exception]]] = {  # (stage, exception)
    "import": ("prepare", lambda: ImportError("cannot import name 'tma'")),
    "removed_name": ("prepare", lambda: AttributeError("module 'triton' has no attribute 'make_tensor_descriptor'")),
    "compiler": ("call", lambda: CompileTimeAssertionFailure("", mock.Mock(lineno=1, col_offset=0), "no such layout")),
    "shared_memory": ("call", lambda: OutOfResources(250_000, 232_448, "shared memory")),
    "launch": ("call", lambda: RuntimeError("Triton Error [CUDA]: invalid argument")),
}
CASES = dict.fromkeys([*zip(BACKENDS, cycle(FAILURES)), *((BACKENDS[1], failure) for failure in FAILURES)])


@contextmanager
def broken(which: Callable[[int, int], bool], stage: str, error: Callable[[], Exception]) -> Iterator[list[int]]:
    """Break the usable variants of each kernel for which `which(number, count)` holds; yield their counts."""
    counts: list[int] = []
    original = variants._FirstThatRuns.__init__

    def fail(*args: Any) -> Any:
        raise error()

    def init(self: Any, kernel: str, listed: Sequence[Variant[Any]]) -> None:
        usable = [variant for variant in listed if variant.unsuitable is None]
        counts.append(len(usable))
        bad = {variant.name for number, variant in enumerate(usable) if which(number, len(usable))}
        prepare = fail if stage == "prepare" else lambda: fail
        original(self, kernel, [Variant(v.name, prepare) if v.name in bad else v for v in listed])

    with mock.patch.object(variants._FirstThatRuns, "__init__", init):
        yield counts


def measured(operator_name: str, backend_name: str) -> tuple[list[Choice], str | None]:
    """Return the choices of a backend's first call, and the fault of its output, if any."""
    operator = get_operator(operator_name)
    shape = select_shapes(operator, (), (), "cpu")[1]
    inputs = operator.make_inputs(shape, DTYPE, DEVICE, 0)
    with choices() as chosen:
        out = get_backend(operator, backend_name).prepare(inputs)()
    _, problem = accuracy.judge(out, operator.reference(inputs), operator, DTYPE, TOLERANCES[DTYPE])
    return chosen, problem


@pytest.fixture(autouse=True)
def falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variants.SETTING, raising=False)
    monkeypatch.setattr(variants, "_failed", {})
    choose.forget()
    for kept in (gate_up._bound, permute._permutes):
        kept.clear()


@pytest.mark.filterwarnings("ignore:.*does not run:RuntimeWarning")
@pytest.mark.parametrize(("names", "failure"), CASES)
def test_the_last_variant_is_right_if_all_others_fail(names: tuple[str, str], failure: str) -> None:
    stage, error = FAILURES[failure]
    with broken(lambda number, count: number < count - 1, stage, error) as counts:
        chosen, problem = measured(*names)
    assert problem is None
    assert max(counts) > 1, "there is a preferred variant to break"
    reason = variants.describe(error())
    passed_over = [why for choice in chosen for _, why in choice.passed_over]
    assert passed_over.count(reason) >= max(counts) - 1
    assert all(choice.variant not in dict(choice.passed_over) for choice in chosen)
