"""Test the checks of operands that run before any kernel."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels.grouped_gemm.support import (
    group_ends,
    illegal_tile,
    no_tma,
    past_int32,
    require_device,
    stored_weights,
    unsupported,
)


@pytest.mark.parametrize(
    ("dtype_", "interpreted", "reason"),
    [
        (torch.float16, True, None),
        (torch.float32, True, None),
        (torch.bfloat16, False, None),
        (torch.bfloat16, True, "use fp16"),
        (torch.float64, False, "not one of"),
        (torch.int8, False, "not one of"),
    ],
)
def test_unsupported(dtype_, interpreted, reason):
    why_not = unsupported(dtype_, interpreted)
    assert why_not is None if reason is None else reason in why_not


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch):
    """Triton would launch on the current GPU, with addresses of another one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    require_device(torch.device("cuda", 1))
    with pytest.raises(ValueError, match=r"on cuda:0, .* current device, cuda:1: call within torch.cuda.device\(0\)"):
        require_device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        ((128, 128, 64, 4, torch.float16), None),
        ((16, 16, 16), None),
        ((8, 128, 64), "block_m=8"),
        ((128, 96, 64), "block_n=96"),
        ((128, 128, 0), "block_k=0"),
        ((128, 256, 64, 5, torch.float16), "of 232448"),
        ((128, 128, 64, 4, torch.float32), None),
        ((128, 128, 64, 5, torch.float32), "of 232448"),
    ],
)
def test_illegal_tile(tile, reason):
    why_not = illegal_tile(*tile)
    assert why_not is None if reason is None else reason in why_not


A, B = torch.zeros(6, 4), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("a", "b", "offs", "message"),
    [
        (A, B, [3, 7], "exceeds the 6 rows"),
        (A, B, [4, 3], "must not decrease"),
        (A, B, [-1, 3], "must not decrease"),
        (A, B, [3], "each of 2 groups"),
        (A, B[:0], [], "at least one"),
        (A, B.transpose(1, 2), [3, 6], "expected a"),
        (A, B[0], [3, 6], "expected a"),
        (A, B, [3.0, 6.0], "int32 or int64"),
    ],
    ids=["past_a", "decreasing", "negative", "too_few", "no_groups", "other_k", "no_group_dim", "float"],
)
def test_group_ends_refuses(a, b, offs, message):
    with pytest.raises(ValueError, match=message):
        group_ends(a, b, torch.tensor(offs, dtype=torch.int32 if not offs else None))


@pytest.mark.parametrize(
    ("rows", "stride", "columns", "wide"),
    [(100, 64, 64, False), (2**20, 2**11, 64, True), (2**20, 64, 2**11, True)],
    ids=["small", "large_a", "large_out"],
)
def test_row_indices_are_wide_for_far_elements(rows, stride, columns, wide):
    a, b = torch.empty(rows, stride, device="meta"), torch.empty(2, stride, columns, device="meta")
    assert past_int32(a, b) == wide


@pytest.mark.parametrize(
    ("b", "shape", "nk", "shared"),
    [
        (torch.empty(4, 48, 32), (4, 48, 32), False, False),
        (torch.empty(4, 32, 48).transpose(1, 2), (4, 32, 48), True, False),
        (torch.empty(48, 32).expand(4, -1, -1), (1, 48, 32), False, True),
        (torch.empty(32, 48).t().expand(4, -1, -1), (1, 32, 48), True, True),
        (torch.empty(1, 48, 32), (1, 48, 32), False, False),
    ],
    ids=["rows", "columns", "shared", "shared_by_columns", "one_group"],
)
def test_weights_as_stored(b, shape, nk, shared):
    weights, *flags = stored_weights(b)
    assert flags == [nk, shared]
    assert weights.shape == shape
    assert weights.stride(2) == 1
    assert weights.stride(0) > 0
    assert weights.data_ptr() == b.data_ptr()
    assert no_tma(32, b=weights) is None
