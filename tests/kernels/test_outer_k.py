"""The plain tiled product, of any size, strides and dtype."""

from __future__ import annotations

import pytest
import torch
from grouped import matrix

from groupbench.kernels import outer_k
from groupbench.kernels.outer_k import OuterKConfig, matmul_reference, prepare_outer_k

SIZES = {
    "one_element": (1, 1, 1),
    "one_row": (1, 70, 130),
    "one_column": (70, 1, 130),
    "one_tile": (64, 64, 64),
    "one_past_a_tile": (65, 129, 65),
    "primes": (67, 131, 101),
    "no_rows": (0, 5, 7),
    "no_columns": (5, 0, 7),
    "no_k": (5, 7, 0),
}
LAYOUTS = (("rows", "rows"), ("rows", "columns"), ("columns", "strided"), ("strided", "rows"))  # of a and b


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_matches_the_reference(sizes, layouts, dtype, check_run):
    torch.manual_seed(0)
    M, N, K = sizes
    a, b = matrix(M, K, layouts[0], dtype), matrix(K, N, layouts[1], dtype)
    run = prepare_outer_k(a, b)
    out = check_run(run, matmul_reference(a, b), dtype)
    assert torch.equal(out, run())


@pytest.mark.parametrize("config", outer_k.CONFIGS.values(), ids=outer_k.CONFIGS)
def test_configs_of_the_gpu_are_right_too(config, device, check_run):
    a, b = torch.randn(130, 70).to(device), torch.randn(70, 140).to(device)
    check_run(prepare_outer_k(a, b, config), matmul_reference(a, b), torch.float32)


def test_a_nan_stays_in_its_row(device):
    a, b = torch.randn(70, 130).half().to(device), torch.randn(130, 20).half().to(device)
    a[66, 129] = float("nan")
    bad = prepare_outer_k(a, b)().isnan()
    assert bad[66].all()
    assert bad.sum() == 20


def test_refuses_tiles_that_cannot_be_multiplied(device):
    a = torch.randn(4, 4).to(device)
    with pytest.raises(ValueError, match="block_n=24"):
        prepare_outer_k(a, a, OuterKConfig(16, 24, 16, num_warps=4, num_stages=1))
    with pytest.raises(ValueError, match="expected a"):
        prepare_outer_k(a, a[:3])
