"""Special values in the inputs, and the comparison of their results."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.measure import specials
from groupbench.operators.registry import get_operator

OPERATOR = get_operator("grouped_gemm")


def inputs(seed: int = 0, dtype: str = "fp32"):
    return OPERATOR.make_inputs(OPERATOR.parse_shape("G=2,M_g=24|16,N=32,K=32"), dtype, "cpu", seed)


@given(st.integers(0, 2**31))
def test_two_processes_write_the_same_values(seed: int) -> None:
    first, second = inputs(), inputs()
    specials.write(OPERATOR, first, seed)
    specials.write(OPERATOR, second, seed)
    assert torch.equal(first.a.view(torch.int32), second.a.view(torch.int32))
    assert torch.equal(first.b.view(torch.int32), second.b.view(torch.int32))
    assert not torch.equal(first.a, inputs().a)


def test_each_kind_is_written() -> None:
    x = inputs()
    specials.write(OPERATOR, x, 1)
    assert x.a.isnan().sum() == 1
    assert set(x.a[x.a.isinf()].tolist()) == {math.inf, -math.inf}
    assert (x.a == 0).all(-1).sum() == 1
    ordinary = inputs().a
    ratios = (x.a / ordinary).nan_to_num(1.0).abs().median(-1).values
    assert ratios.max() > 100
    assert 0 < ratios[ratios > 0].min() < 0.01


def test_an_operator_may_exclude_nan_and_infinity() -> None:
    x = inputs()
    specials.write(OPERATOR.in_mode("bwd"), x, 1)  # its moves are others
    specials.write(get_operator("vector_add"), x, 1)
    assert OPERATOR.in_mode("bwd").nonfinite is False


def test_a_shared_matrix_is_written_once() -> None:
    x = OPERATOR.make_inputs(OPERATOR.parse_shape("G=3,M=8,N=16,K=16,B=shared"), "fp16", "cpu", 0)
    specials.write(OPERATOR, x, 3)
    assert torch.equal(x.b[0].view(torch.int16), x.b[2].view(torch.int16))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_an_honest_product_is_right_and_a_careless_one_is_not(dtype: str) -> None:
    """A kernel that replaces NaN and infinity, or that clamps, is right on ordinary values."""
    from groupbench.operators.measure.accuracy import judge
    from groupbench.operators.tolerances import TOLERANCES, Tolerance

    table = TOLERANCES[dtype]
    wide = Tolerance(10 * table.rms, 60 * table.rtol, 60 * table.atol)

    def fault(change) -> str | None:
        x = inputs(dtype=dtype)
        specials.write(OPERATOR, x, 5)
        reference = OPERATOR.reference(x)
        x.a.copy_(change(x.a))
        out = OPERATOR.backend("torch_loop").prepare(x)()
        return judge(out, reference, OPERATOR, dtype, wide, 6.0, specials.comparable)[1]

    assert fault(lambda a: a) is None
    assert fault(lambda a: a.nan_to_num(0.0)) is not None
    assert fault(lambda a: a.clamp(-4, 4)) is not None
    assert fault(lambda a: torch.where(a.abs() < 0.05, 0.0, a)) is not None
