"""Test every backend on every case by the same call, (a, b, offs) -> [M, N]."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import contiguous, flat, helion_jagged, helion_persistent, helion_worklist, pointer
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference

Prepare = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]


def prepare_pointer(a: Tensor, b: Tensor, offs: Tensor) -> Callable[[], Tensor]:
    starts = [0, *offs.tolist()]
    run = pointer.prepare_pointer_packed([a[start:end] for start, end in pairwise(starts)], list(b))
    # The pointer kernel takes groups only; its caller adds the rows past them.
    return lambda: torch.nn.functional.pad(run(), (0, 0, 0, a.size(0) - starts[-1]))


BACKENDS: dict[str, Prepare] = {
    "triton_pointer": prepare_pointer,
    "triton_flat": flat.prepare_flat,
    "triton_contiguous": lambda a, b, offs: contiguous.prepare_contiguous(a, b.transpose(1, 2), offs),
    "helion_jagged": helion_jagged.prepare_helion_jagged,
    "helion_persistent": helion_persistent.prepare_helion_persistent,
    "helion_worklist": helion_worklist.prepare_helion_worklist,
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def prepare(request) -> Prepare:
    return request.param


@pytest.mark.pairwise
def test_matches_the_reference(prepare, case, dtype, make_inputs, poisoned, check, no_tuning):
    a, b, offs = make_inputs(case, dtype)
    run = prepare(a, b, offs)
    with poisoned():
        out = run()
    expected = grouped_gemm_reference(a, b, offs)
    check(out, expected, dtype)


def test_a_second_call_repeats_the_first_in_a_new_tensor(prepare, make_case, make_inputs):
    run = prepare(*make_inputs(make_case("two", (21, 40)), torch.float16))
    first, second = run(), run()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("name", ["triton_flat", "helion_jagged", "helion_persistent", "helion_worklist"])
def test_reads_its_offsets_on_every_call(name, make_case, make_inputs, poisoned, check):
    """A serving engine keeps one buffer and writes each step's routing into it."""
    a, b, offs = make_inputs(make_case("four", (0, 40, 1, 20)), torch.float16)
    run = BACKENDS[name](a, b, offs)
    for sizes in ((61, 0, 0, 0), (3, 0, 33, 2), (0, 0, 0, 0), (15, 15, 15, 16)):
        offs.copy_(torch.tensor(sizes).cumsum(0))
        with poisoned():
            out = run()
        check(out, grouped_gemm_reference(a, b, offs), torch.float16)


def test_refuses_offsets_with_gaps(prepare, make_case, make_inputs):
    """A kernel would read the neighbours of a table's column as offsets."""
    a, b, offs = make_inputs(make_case("three", (5, 15, 20)), torch.float16)
    with pytest.raises(ValueError, match=r"offs\.contiguous"):
        BACKENDS["triton_flat"](a, b, torch.stack([offs, offs], 1)[:, 0])
    if prepare is not prepare_pointer:
        with pytest.raises(ValueError, match=r"offs\.contiguous"):
            prepare(a, b, torch.stack([offs, offs], 1)[:, 0])


def test_reads_its_inputs_on_every_call(prepare, make_case, make_inputs):
    a, b, offs = make_inputs(make_case("two", (21, 40)), torch.float16)
    run = prepare(a, b, offs)
    before = run()
    a.mul_(2)
    assert torch.equal(run(), before * 2)


def test_one_nan_stays_in_its_row(prepare, make_case, make_inputs):
    a, b, offs = make_inputs(make_case("three", (21, 5, 40), n=53, k=45), torch.float16)
    a[23, 7] = float("nan")
    bad = prepare(a, b, offs)().isnan()
    assert bad[23].all()
    assert bad.sum() == b.size(2)


HELION = {"cuda": lambda kernel: kernel.CHOICES.large, "cuda_fp32": lambda kernel: kernel.CHOICES.fp32}


@pytest.mark.parametrize(
    ("name", "config_of"),
    [
        *((name, config_of) for name in ("pointer", "contiguous") for config_of in ("cuda", "cuda_fp32")),
        ("jagged", "cuda_fp32"),
        ("persistent", "cuda_fp32"),
        # In fp16, tests of Helion's kernels try other tiles.
        *(pytest.param(name, "cuda", marks=pytest.mark.exhaustive) for name in ("jagged", "persistent")),
    ],
)
def test_configs_of_the_gpu_are_right_too(name, config_of, make_case, make_inputs, poisoned, check):
    """The interpreter's own tiles are small; these lead to masks of other shapes."""
    dtype = torch.float32 if config_of == "cuda_fp32" else torch.float16
    a, b, offs = make_inputs(make_case("ragged", (129, 0, 30), n=140, k=72), dtype)
    groups = list(a.split([129, 0, 30]))
    run = {
        "pointer": lambda: pointer.prepare_pointer_packed(groups, list(b), pointer.CONFIGS[config_of]),
        "contiguous": lambda: contiguous.prepare_contiguous(a, b.transpose(1, 2), offs, contiguous.CONFIGS[config_of]),
        "jagged": lambda: helion_jagged.prepare_helion_jagged(a, b, offs, HELION[config_of](helion_jagged)),
        "persistent": lambda: helion_persistent.prepare_helion_persistent(
            a, b, offs, HELION[config_of](helion_persistent)
        ),
    }[name]()
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, offs: (a.double(), b.double(), offs), "not one of"),
        (lambda a, b, offs: (a, b.float(), offs), "one dtype and one device"),
    ],
    ids=["fp64", "mixed_dtypes"],
)
def test_refuses_operands_it_cannot_multiply(prepare, change, message, make_case, make_inputs):
    with pytest.raises(ValueError, match=message):
        prepare(*change(*make_inputs(make_case("two", (21, 40)), torch.float16)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes bf16 correctly")
def test_refuses_bf16_in_the_interpreter(prepare, make_case, make_inputs):
    with pytest.raises(ValueError, match="use fp16"):
        prepare(*make_inputs(make_case("two", (21, 40)), torch.bfloat16))
