"""Test the contiguous kernel beyond the shared cases: blocks, the tutorial's interface."""

from __future__ import annotations

import pytest
import torch
from grouped import Case, products

from groupbench.kernels.grouped_gemm import contiguous
from groupbench.kernels.grouped_gemm.contiguous import (
    ContiguousConfig,
    grouped_gemm_contiguous,
    launch_contiguous,
    prepare_contiguous,
)
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference

SMALL = ContiguousConfig(16, 16, 16, super_group_m=3, num_warps=4, num_stages=1, group_size_m=32)


@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("blocks", "k"),
    [((0,), 32), ((1, 0, 2, 1), 32), ((2, 2, 2), 45), ((), 32)],
    ids=["one_block", "any_order", "repeated", "no_rows"],
)
def test_an_expert_index_for_every_row(blocks, k, indices, dtype, device, poisoned, check):
    torch.manual_seed(0)
    a = torch.randn(32 * len(blocks), k).to(device, dtype)
    w = torch.randn(3, 40, k).to(device, dtype)
    experts = torch.tensor(blocks, dtype=indices, device=device).repeat_interleave(32)
    with poisoned():
        out = grouped_gemm_contiguous(a, w, experts, SMALL)
    # One group per block, with the matrix of its expert.
    by_block = w[torch.tensor(blocks, dtype=torch.int64, device=device)].transpose(1, 2)
    check(out, grouped_gemm_reference(a, by_block, torch.arange(1, len(blocks) + 1) * 32), dtype)


@pytest.mark.parametrize(
    ("sizes", "mapped"),
    [((32, 64, 32), False), ((32, 0, 64), False), ((33, 31), True), ((1,), True), ((0, 0), False)],
    ids=["whole_blocks", "whole_and_empty", "ragged", "one_row", "no_rows"],
)
def test_a_map_is_made_only_if_rows_need_one(sizes, mapped, device, monkeypatch):
    seen = []
    monkeypatch.setattr(contiguous, "launch_contiguous", lambda *args: seen.append(args[3]) or launch_contiguous(*args))
    a, b, offs = products(Case(sizes))
    prepare_contiguous(a, b.transpose(1, 2), offs, SMALL)()
    assert (seen[-1] is not None) == mapped


def test_rows_may_be_gathered_from_anywhere(device, poisoned, check):
    """The map is any list of distinct rows: tokens need not be sorted by expert."""
    torch.manual_seed(0)
    a = torch.randn(64, 45, device=device)
    w = torch.randn(2, 20, 45, device=device)
    rows = torch.randperm(64, device=device)
    with poisoned():
        out = launch_contiguous(a, w, torch.tensor([1, 0], device=device), rows.to(torch.int32), SMALL)
    expected = grouped_gemm_reference(a[rows], w.flip(0).transpose(1, 2), torch.tensor([32, 64]))
    check(out[rows], expected, torch.float32)


def test_refuses_a_tile_with_two_experts():
    with pytest.raises(ValueError, match="block_m=64 must divide group_size_m=32"):
        ContiguousConfig(64, 16, 16, super_group_m=1, num_warps=4, num_stages=1, group_size_m=32)


@pytest.mark.parametrize(
    ("rows", "indices", "k", "message"),
    [(40, 40, 16, "whole blocks"), (64, 2, 16, "for each of 64 rows"), (64, 64, 17, "expected a")],
    ids=["part_of_a_block", "too_few_indices", "unlike_k"],
)
def test_refuses(rows, indices, k, message, device):
    a = torch.ones(rows, k, dtype=torch.float16, device=device)
    w = torch.ones(2, 8, 16, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=message):
        grouped_gemm_contiguous(a, w, torch.zeros(indices, dtype=torch.int32, device=device), SMALL)
