"""grouped_gemm_mnk: its text and its layouts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.catalog.grouped_gemm_mnk import (
    GROUPED_GEMM_MNK,
    MnkShape,
    from_tritonbench,
    make_inputs,
    parse_shape,
    random_groups,
)

sizes = st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999))


@given(st.lists(sizes, min_size=1, max_size=9), st.booleans(), st.booleans())
def test_text_goes_both_ways(groups: list[tuple[int, int, int]], km: bool, nk: bool) -> None:
    shape = MnkShape((*groups, groups[-1]), km, nk)
    assert parse_shape(str(shape)) == shape


def test_equal_groups_are_written_once() -> None:
    assert str(GROUPED_GEMM_MNK.suites["tutorial"][1]) == "groups=128x128x128*4"
    assert len(set(random_groups(16, 512, 1))) > 10


def test_layouts() -> None:
    shape = parse_shape("groups=3x5x7|2x0x4,A=km,W=nk")
    x = make_inputs(shape, "fp16", "cpu", 0)
    assert [(a.shape, a.stride(0)) for a in x.a[:1]] == [((3, 5), 1)]
    assert (x.b[0].shape, x.b[0].stride()) == ((5, 7), (1, 5))
    assert shape.dims == {"G": 2, "M": 5, "N": 7, "K": 5}


def test_lists_of_tritonbench_are_taken_as_they_are() -> None:
    group_a, group_b = [torch.ones(3, 5), torch.ones(2, 6)], [torch.ones(5, 7), torch.ones(6, 4)]
    example = from_tritonbench(group_a, group_b)
    assert str(example.shape) == "groups=3x5x7|2x6x4"
    assert example.inputs.a[1] is group_a[1]
