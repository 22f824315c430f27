"""Test the flat kernel's half tiles, and its fallback to pointers."""

from __future__ import annotations

import pytest
import torch
from grouped import Case, ends, products

from groupbench.kernels.grouped_gemm import flat
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.support import no_tma

HALVES = {  # rows of the experts; tiles of 32 rows and 32 of 64 columns, 4 programs
    "ends_of_16_and_17_rows": (16, 17, 1, 31, 32, 33, 0, 48, 49),
    "last_wave_of_2_tiles": (32, 32, 32),
    "last_wave_of_4_tiles": (32, 32, 32, 32),
    "last_wave_halves_an_end": (32, 32, 20),
    "less_than_a_wave": (20,),
}


@pytest.mark.parametrize("rows", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("weights", ["rows", "columns"])
def test_halves(rows, weights, check_run):
    """Half tiles are right at an expert's end and in a short last wave, next to another expert's rows."""
    operands = products(Case(rows, 64, 40, weights, tail=3))
    halves = flat.CONFIGS["cpu_halves"]
    for config in (halves, flat.replace(halves, split_store=True)):
        check_run(flat.prepare_flat(*operands, config), grouped_gemm_reference(*operands), torch.float16)


@pytest.mark.parametrize(
    ("n", "k", "pad_a", "reason"),
    [(48, 64, 8, ""), (48, 64, 3, "a's address or strides"), (45, 64, 0, "b's"), (48, 33, 0, "a's")],
    ids=["aligned", "odd_stride", "odd_n", "odd_k"],
)
def test_pointers_take_over_if_tma_cannot_read(n, k, pad_a, reason, check_run):
    a, b, offs = products(Case((21, 0, 40), n, k, pad_a=pad_a, tail=5))
    assert reason in (no_tma(n, a=a, b=b) or "")
    assert bool(no_tma(n, a=a, b=b)) == bool(reason)
    check_run(flat.prepare_flat(a, b, offs), grouped_gemm_reference(a, b, offs), torch.float16)


@pytest.mark.parametrize(
    "views",
    [
        lambda a, b: (a, b),
        lambda a, b: (a.t().contiguous().t(), b),
        lambda a, b: (a.repeat_interleave(2, 1)[:, ::2], b.repeat_interleave(3, 2)[:, :, ::3]),
        lambda a, b: (a, b[0].expand(4, -1, -1)),
    ],
    ids=["odd_sizes", "a_transposed", "strided", "shared"],
)
def test_pointers_read_offsets_on_the_device_too(views, check_run):
    a, b, offs = products(Case((21, 0, 39, 1), n=45, k=33))
    a, b = views(a, b)
    assert no_tma(45, a=a, b=b) is not None
    run = flat.prepare_flat(a, b, offs)
    for sizes in ((61, 0, 0, 0), (0, 0, 0, 0), (0, 33, 20, 2), (21, 0, 39, 1)):
        offs.copy_(ends(*sizes))
        check_run(run, grouped_gemm_reference(a, b, offs), torch.float16)
