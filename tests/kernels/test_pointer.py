"""Test the pointer kernel beyond the shared cases: groups of different sizes and layouts."""

from __future__ import annotations

import gc

import pytest
import torch

from groupbench.kernels.grouped_gemm.pointer import PointerConfig, prepare_pointer, prepare_pointer_packed
from groupbench.kernels.grouped_gemm.reference import reference_list

SMALL = PointerConfig(16, 16, 16, group_m=2, num_warps=4, num_stages=1)

SIZES = {
    "tutorial": [(32, 48, 16), (64, 16, 32)],
    "one_group": [(20, 30, 40)],
    "one_row_and_one_column": [(1, 40, 20), (40, 1, 20)],
    "ragged_everywhere": [(17, 33, 45), (3, 5, 7), (31, 16, 1)],
    "empty_m": [(0, 16, 16), (17, 18, 19), (0, 5, 5)],
    "empty_n": [(16, 0, 16), (17, 18, 19)],
    "empty_k": [(16, 17, 0), (17, 18, 19), (16, 16, 0)],
    "all_empty": [(0, 16, 16), (16, 0, 16), (0, 0, 0)],
    "one_owns_everything": [(0, 16, 16), (100, 40, 33), (0, 16, 16)],
}


def stored(rows: int, columns: int, layout: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a random matrix in storage of the given layout, whose gaps are NaN."""
    if layout == "columns":
        return stored(columns, rows, "rows", dtype, device).t()
    if layout == "no_unit":
        whole = torch.full((rows, 2 * columns), float("nan"), dtype=dtype, device=device)
        matrix = whole[:, ::2]
    else:
        whole = torch.full((rows, columns + 3), float("nan"), dtype=dtype, device=device)
        matrix = whole[:, :columns]
    return matrix.copy_(torch.randn(rows, columns))


def check_groups(group_a, group_b, dtype, poisoned, check, config=SMALL):
    run = prepare_pointer(group_a, group_b, config)
    with poisoned():
        outs = run()
    assert len(outs) == len(group_a)
    for out, expected in zip(outs, reference_list(group_a, group_b), strict=True):
        check(out, expected, dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_has_its_own_sizes(sizes, dtype, device, poisoned, check):
    torch.manual_seed(0)
    group_a = [torch.randn(m, k).to(device, dtype) for m, _, k in sizes]
    group_b = [torch.randn(k, n).to(device, dtype) for _, n, k in sizes]
    check_groups(group_a, group_b, dtype, poisoned, check)


@pytest.mark.parametrize("layout_b", ["rows", "columns", "no_unit", "mixed"])
@pytest.mark.parametrize("layout_a", ["rows", "columns", "no_unit", "mixed"])
def test_any_strides(layout_a, layout_b, device, poisoned, check):
    torch.manual_seed(0)
    dtype = torch.float16
    sizes = [(17, 33, 45), (1, 16, 8), (20, 24, 16)]
    mixed = ["rows", "columns", "rows"]
    layouts_a = mixed if layout_a == "mixed" else [layout_a] * 3
    layouts_b = mixed if layout_b == "mixed" else [layout_b] * 3
    group_a = [stored(m, k, layout, dtype, device) for (m, _, k), layout in zip(sizes, layouts_a, strict=True)]
    group_b = [stored(k, n, layout, dtype, device) for (_, n, k), layout in zip(sizes, layouts_b, strict=True)]
    check_groups(group_a, group_b, dtype, poisoned, check)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_aligned_operands(layout, device, poisoned, check):
    """All sizes, strides and addresses are multiples of 16 bytes: the kernel is compiled for that."""
    torch.manual_seed(0)
    group_a = [torch.randn(m, 48, dtype=torch.float16, device=device) for m in (24, 0, 40)]
    group_b = [torch.randn(48, 40, dtype=torch.float16, device=device) for _ in range(3)]
    if layout == "columns":
        group_a, group_b = (
            [a.t().contiguous().t() for a in group_a],
            [b.t().contiguous().t() for b in group_b],
        )
    check_groups(group_a, group_b, torch.float16, poisoned, check)


def test_outputs_share_one_buffer(device):
    group_a = [torch.ones(m, 16, dtype=torch.float16, device=device) for m in (3, 0, 5)]
    group_b = [torch.ones(16, 8, dtype=torch.float16, device=device)] * 3
    outs = prepare_pointer(group_a, group_b, SMALL)()
    assert [tuple(out.shape) for out in outs] == [(3, 8), (0, 8), (5, 8)]
    assert outs[2].untyped_storage().data_ptr() == outs[0].untyped_storage().data_ptr()
    assert prepare_pointer_packed(group_a, group_b, SMALL)().eq(16).all()


def test_keeps_its_operands_alive(device):
    """The table holds addresses only; copies that were made for a layout have no other owner."""
    torch.manual_seed(0)
    group_a = [stored(20, 24, "no_unit", torch.float16, device) for _ in range(3)]
    group_b = [stored(24, 20, "columns", torch.float16, device) for _ in range(3)]
    run = prepare_pointer(group_a, group_b, SMALL)
    expected = run()
    del group_a, group_b
    gc.collect()
    # The allocator would reuse freed memory here.
    rubbish = [torch.full((20, 24), float("nan"), dtype=torch.float16, device=device) for _ in range(64)]
    assert all(torch.equal(out, before) for out, before in zip(run(), expected, strict=True))
    del rubbish


@pytest.mark.parametrize(
    ("shapes_a", "shapes_b", "message"),
    [
        ([], [], "at least one"),
        ([(4, 4)], [(4, 4), (4, 4)], "as many A as B"),
        ([(4, 4)], [(5, 4)], "group 0: cannot multiply"),
        ([(4, 4)], [(4,)], "group 0: cannot multiply"),
        ([(4, 4), (4, 4)], [(4, 4), (4, 5)], "one N for all groups"),
    ],
    ids=["none", "unlike_counts", "unlike_k", "vector", "unlike_n_packed"],
)
def test_refuses(shapes_a, shapes_b, message, device):
    matrices = [[torch.ones(s, dtype=torch.float16, device=device) for s in shapes] for shapes in (shapes_a, shapes_b)]
    with pytest.raises(ValueError, match=message):
        prepare_pointer_packed(*matrices)


def test_refuses_tiles_that_do_not_compile(device):
    operands = [torch.ones(4, 4, dtype=torch.float16, device=device)]
    with pytest.raises(ValueError, match="block_n=24"):
        prepare_pointer(operands, operands, PointerConfig(16, 24, 16, group_m=1, num_warps=4, num_stages=1))
