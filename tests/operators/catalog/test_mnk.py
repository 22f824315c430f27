"""grouped_gemm_mnk: its text, its suites, and every backend in every mode on the smoke shapes."""

from __future__ import annotations

import pytest
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
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.accuracy import check_backend
from groupbench.operators.operator import Target

HERE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = Target("cpu", "fp16", interpreted=True)
BACKENDS = [b.name for b in GROUPED_GEMM_MNK.backends if HERE == "cuda" or b.unavailable(INTERPRETED) is None]
CELLS = [
    pytest.param(mode, name, marks=pytest.mark.exhaustive if name == "helion_pointers" and mode != "fwd" else ())
    for mode in GROUPED_GEMM_MNK.modes
    for name in BACKENDS
]


@pytest.mark.parametrize(("mode", "name"), CELLS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_smoke(mode: str, name: str, dtype: str) -> None:
    """The shapes hold a group without rows, one of one row, ragged tails, one group alone, and a K of 0."""
    operator = GROUPED_GEMM_MNK.in_mode(mode)
    measured = 0
    for shape in operator.suites["smoke"]:
        x = operator.make_inputs(shape, dtype, HERE, 0)
        try:
            run = operator.backend(name).prepare(x)
        except Unavailable:  # torch_bmm needs equal groups, cuda_cluster 16 bits
            continue
        accuracy, problem = check_backend(run, operator.reference(x), operator, name, dtype)
        assert problem is None, f"{shape}: {problem}"
        assert accuracy.repeatable
        measured += 1
    assert measured or (name, dtype) == ("cuda_cluster", "fp32") or name == "torch_foreach"


sizes = st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999))


@given(st.lists(sizes, min_size=1, max_size=9), st.booleans(), st.booleans())
def test_text_goes_both_ways(groups: list[tuple[int, int, int]], km: bool, nk: bool) -> None:
    shape = MnkShape((*groups, groups[-1]), km, nk)
    assert parse_shape(str(shape)) == shape


def test_every_suites_text_is_read_back() -> None:
    for suite in GROUPED_GEMM_MNK.suites.values():
        assert [parse_shape(str(shape)) for shape in suite] == list(suite)
    assert str(GROUPED_GEMM_MNK.suites["tutorial"][1]) == "groups=128x128x128*4"
    assert len(set(random_groups(16, 512, 1))) > 10


@pytest.mark.parametrize(
    "text",
    ["", "groups=", "1x2", "groups=1x2", "groups=1x2x3*0", "groups=1x2x3,W=kn", "groups=1x2x3,W=nk,W=nk", "G=1",
     "groups=1x2x-3", "groups=1x2x3|", "groups=9999999999x1x1", "groups=1x1x1*9999999",
     "groups=2147483647x2147483647x2147483647"],
)  # fmt: skip
def test_text_that_is_not_a_shape(text: str) -> None:
    with pytest.raises(ValueError, match="groups=M0xK0xN0"):
        parse_shape(text)


def test_layouts_and_counts() -> None:
    shape = parse_shape("groups=3x5x7|2x0x4,A=km,W=nk")
    x = make_inputs(shape, "fp16", "cpu", 0)
    assert [(a.shape, a.stride(0)) for a in x.a[:1]] == [((3, 5), 1)]
    assert (x.b[0].shape, x.b[0].stride()) == ((5, 7), (1, 5))
    assert shape.dims == {"G": 2, "M": 5, "N": 7, "K": 5}
    assert GROUPED_GEMM_MNK.flops(shape) == 2 * 3 * 5 * 7
    assert GROUPED_GEMM_MNK.min_bytes(shape, "fp16") == 2 * (15 + 35 + 21 + 8)


def test_lists_of_tritonbench_are_taken_as_they_are() -> None:
    group_a, group_b = [torch.ones(3, 5), torch.ones(2, 6)], [torch.ones(5, 7), torch.ones(6, 4)]
    example = from_tritonbench(group_a, group_b)
    assert str(example.shape) == "groups=3x5x7|2x6x4"
    assert example.inputs.a[1] is group_a[1]
