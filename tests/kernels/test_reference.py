"""Compare the reference itself with sums computed by hand."""

from __future__ import annotations

import pytest
import torch
from grouped import products

from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference, reference_list


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
)
def test_every_row_is_multiplied_by_its_groups_matrix(narrow, wide, device):
    a = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=narrow, device=device)
    b = torch.tensor(
        [[[1, 0, 1], [0, 1, 1]], [[9, 9, 9], [9, 9, 9]], [[0, 2, 0], [2, 0, 1]]], dtype=narrow, device=device
    )
    offs = torch.tensor([1, 1, 3], dtype=torch.int32, device=device)
    out = grouped_gemm_reference(a, b, offs)
    assert out.dtype == wide
    # Group 0 owns row 0, group 1 is empty, group 2 owns rows 1 and 2; row 3 belongs to no group.
    assert out.tolist() == [[1, 2, 3], [8, 6, 4], [12, 10, 6], [0, 0, 0]]


def test_agrees_with_its_list_form(case):
    a, b, offs = products(case, torch.float32)
    groups = a[: sum(case.sizes)].split(list(case.sizes))
    assert torch.equal(
        grouped_gemm_reference(a, b, offs)[: sum(case.sizes)], torch.cat(reference_list(groups, list(b)))
    )


def test_leaves_the_precision_setting_as_it_was():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        grouped_gemm_reference(torch.ones(2, 2), torch.ones(1, 2, 2), torch.tensor([2]))
        assert matmul.fp32_precision == "tf32"
        with pytest.raises(IndexError):
            grouped_gemm_reference(torch.ones(2, 2), torch.ones(1, 2, 2), torch.tensor([1, 2]))
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
