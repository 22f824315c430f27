"""Test the gradient of the weights beyond the shared cases: layouts, strides, and the schedule by rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from grouped import BACKENDS, Case, Kernel, each, gradients, products

from groupbench.kernels.grouped_gemm import wgrad
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_wgrad_reference

KERNELS = {name: kernel for name, kernel in BACKENDS.items() if "wgrad" in name}


def test_the_reference_matches_autograd():
    a, b, offs = (x.double() if x.is_floating_point() else x for x in products(Case((5, 0, 1))))
    dc = torch.randn(6, b.size(2), dtype=torch.float64, device=a.device)
    b.requires_grad_()
    torch.cat([a[:5] @ b[0], a[5:] @ b[2]]).backward(dc)
    torch.testing.assert_close(grouped_gemm_wgrad_reference(a, dc, offs), b.grad)


@pytest.mark.parametrize("nk", [False, True], ids=["kn", "nk"])
@each(KERNELS)
def test_gradients_have_the_layout_of_the_weights(kernel: Kernel, nk, check_run):
    operands = gradients(Case((33, 0, 1, 40), n=56, k=72))
    out = check_run(kernel.prepare(*operands, nk=nk), grouped_gemm_wgrad_reference(*operands), torch.float16)
    assert out.shape == (4, 72, 56)
    assert out.stride() == ((72 * 56, 1, 72) if nk else (72 * 56, 56, 1))


@pytest.mark.parametrize(
    ("k", "n", "pad_a", "nk", "reason"),
    [
        (64, 48, 8, False, ""),
        (64, 48, 3, False, "x's address or strides"),
        (64, 45, 0, False, "y's address or strides"),
        (33, 48, 0, False, "x's address or strides"),
        (64, 45, 0, True, "x's address or strides"),
    ],
    ids=["aligned", "odd_stride", "odd_n", "odd_k", "odd_n_by_columns"],
)
def test_pointers_take_over_if_tma_cannot_read(k, n, pad_a, nk, reason, check_run):
    a, dc, offs = gradients(Case((21, 0, 40), n, k, pad_a=pad_a, tail=5))
    why_not = wgrad.needs_pointers(*((dc, a) if nk else (a, dc)))
    assert reason in (why_not or "") and bool(why_not) == bool(reason)
    check_run(wgrad.prepare_wgrad(a, dc, offs, nk), grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


@each(KERNELS)
def test_operands_of_any_strides(kernel: Kernel, check_run):
    a, dc, offs = gradients(Case((21, 40)))
    operands = a.t().contiguous().t(), dc[:, ::2], offs
    check_run(kernel.prepare(*operands), grouped_gemm_wgrad_reference(*operands), torch.float16)


SIZES = {
    "one_group": (5,),
    "descending": (9, 7, 7, 0),
    "ascending": (0, 1, 2, 3),
    "all_alike": (4, 4, 4),
    "all_empty": (0, 0),
    "several_programs": tuple((7 * i) % 41 for i in range(3 * wgrad.RANKED_AT_ONCE + 1)),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_groups_are_ranked_by_their_rows(sizes, wide, device):
    G, each = len(sizes), wgrad.RANKED_AT_ONCE
    offs = torch.tensor(sizes).cumsum(0).to(device, wide)
    plan = torch.full((1 + G,), -1, dtype=torch.int32, device=device)
    wgrad._plan_kernel[(-(-G // each),)](offs, plan, G, 77, G_POW2=wgrad.triton.next_power_of_2(G), MINE=each)
    assert plan[0] == 77
    assert plan[1:].tolist() == sorted(range(G), key=lambda g: (-sizes[g], g))


def test_a_dynamic_schedule_refuses_more_groups_than_it_ranks(monkeypatch):
    monkeypatch.setattr(wgrad, "MOST_RANKED", 2)
    dynamic = partial(wgrad.prepare_wgrad, config=wgrad.CONFIGS["cpu_dynamic"])
    with pytest.raises(ValueError, match="ranks at most 2"):
        dynamic(*gradients(Case((1, 2, 3))))
