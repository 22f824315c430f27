"""Compare the quantisation kernels with torch bit by bit, and both with their documented bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.kernels.grouped_gemm import quantize
from groupbench.kernels.grouped_gemm.quantize import dequantize, prepare_quantize

REFERENCES = {
    "rowwise": quantize.quantize_rows_reference,
    "blockwise": quantize.quantize_blocks_reference,
    "weights": quantize.quantize_weight_blocks_reference,
}
KERNELS = ("rowwise", "blockwise")
SIZES = {
    "one_row": (1, 128),
    "one_value": (1, 1),
    "rows_past_a_tile": (33, 128),
    "ragged_k": (5, 300),
    "k_below_a_block": (7, 45),
    "k_of_16_bytes": (3, 16),
    "no_rows": (0, 128),
}
NAN, INF = float("nan"), float("inf")


def run(recipe: str, x: Tensor) -> tuple[Tensor, Tensor]:
    return prepare_quantize(x, recipe == "blockwise")()


def bits(q: Tensor) -> Tensor:
    return q.contiguous().view(torch.uint8)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert actual[0].dtype == torch.float8_e4m3fn
    assert actual[1].dtype == torch.float32
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)
    # NaN has two codes; either is right.
    q, r = (bits(values[0]) & torch.where(values[0].float().isnan(), 0x7F, 0xFF) for values in (actual, expected))
    assert torch.equal(q, r), f"{(q != r).sum()} codes differ"


@pytest.mark.parametrize("recipe", KERNELS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), SIZES.values(), ids=SIZES)
def test_kernels_match_torch(recipe, kind, rows, columns, device, poisoned):
    torch.manual_seed(0)
    x = (torch.randn(rows, columns) * torch.logspace(-3, 3, columns)).to(device, kind)
    with poisoned():
        actual = run(recipe, x)
    assert_same(actual, REFERENCES[recipe](x))
    assert actual[0].shape == (rows, columns)
    assert actual[0].stride(0) % 16 == 0
    assert actual[1].stride(-1) == max(rows, 1) if recipe == "blockwise" else actual[1].shape == (rows,)


@pytest.mark.parametrize("recipe", KERNELS)
def test_rounds_to_nearest_and_ties_to_even(recipe, device):
    """Test all values of e4m3, the midpoints between them, and points close to these, with a scale of 1."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (values[1:] + values[:-1]) / 2
    tries = torch.cat([values, halfway, halfway * (1 + 2**-20), halfway * (1 - 2**-20)])
    tries = torch.cat([tries, -tries])
    x = torch.nn.functional.pad(tries, (0, -len(tries) % 127)).view(-1, 127)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], 1).to(device)
    q, scale = run(recipe, x)
    assert (scale == 1).all()
    assert torch.equal(bits(q), bits(x.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("recipe", REFERENCES)
def test_scales_are_the_largest_value_over_448(recipe, device):
    x = torch.ones(160, 256, device=device)
    x[3, 5], x[150, 130] = -896.0, 44.8
    q, scale = (run if recipe in KERNELS else lambda recipe, x: REFERENCES[recipe](x))(recipe, x)
    one = 1 / 448
    expected = {
        "rowwise": {3: 2.0, 150: 0.1, 4: one},
        "blockwise": {(3, 0): 2.0, (3, 1): one, (150, 0): one, (150, 1): 0.1},
        "weights": {(0, 0): 2.0, (0, 1): one, (1, 0): one, (1, 1): 0.1},
    }[recipe]
    for at, value in expected.items():
        assert scale[at].item() == pytest.approx(value), at
    assert q.float()[3, 5] == -448
    assert q.float()[150, 130] == 448


@pytest.mark.parametrize("recipe", REFERENCES)
def test_a_row_of_zeros_is_zeros(recipe, device):
    x = torch.zeros(40, 200, device=device)
    q, scale = run(recipe, x) if recipe in KERNELS else REFERENCES[recipe](x)
    assert (bits(q) == 0).all()
    assert ((scale > 0) & scale.isfinite()).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of infinity times zero
@pytest.mark.parametrize("recipe", KERNELS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_nan_and_infinity_affect_only_their_row_or_block(recipe, bad, device):
    torch.manual_seed(0)
    x = torch.randn(3, 256, device=device)
    x[1, 7] = bad
    actual = run(recipe, x)
    assert_same(actual, REFERENCES[recipe](x))
    affected = torch.zeros(3, 256, dtype=torch.bool)
    affected[1, : 128 if recipe == "blockwise" else None] = True
    assert torch.equal(dequantize(*actual).isnan().cpu(), affected)


def test_a_row_wider_than_registers_is_read_in_parts(device, monkeypatch, poisoned):
    monkeypatch.setattr(quantize, "WHOLE_ROW", 128)
    torch.manual_seed(0)
    x = torch.randn(6, 300, device=device)
    for row, at in ((1, 0), (2, 150), (3, 299)):  # NaN, and something larger after it
        x[row, at] = NAN
        x[row, min(at + 128, 298)] = 7.0
    with poisoned():
        actual = run("rowwise", x)
    assert_same(actual, quantize.quantize_rows_reference(x))
    assert actual[1].isnan().tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("recipe", KERNELS)
def test_nothing_overflows(recipe, device):
    """The rounding of scale and quotient may exceed 448, which must round back."""
    torch.manual_seed(0)
    x = torch.randn(64, 256, device=device) * torch.logspace(-30, 37, 64, device=device)[:, None]
    q, scale = run(recipe, x)
    assert q.float().isfinite().all()
    assert scale.isfinite().all()
    assert (q.float().abs().amax(1)[x.abs().amax(1) > 1e-12] == 448).all()


@pytest.mark.parametrize("recipe", KERNELS)
def test_reads_rows_of_any_stride(recipe, device):
    torch.manual_seed(0)
    wide = torch.randn(9, 77, device=device)
    assert_same(run(recipe, wide[:, :45]), REFERENCES[recipe](wide[:, :45].contiguous()))


values = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 5e-13, 1.0, 448.0])

tables = st.lists(st.lists(values, min_size=1, max_size=20), min_size=1, max_size=4)


@given(rows=tables, recipe=st.sampled_from(KERNELS))
def test_error_bound(rows, recipe, device):
    """The error is at most 2^-4 of the value or 2^-10 of the scale, and the codes are torch's."""
    width = max(map(len, rows))
    x = torch.tensor([row + [0.0] * (width - len(row)) for row in rows], device=device)
    q, scale = run(recipe, x)
    assert_same((q, scale), REFERENCES[recipe](x))
    back, exact = dequantize(q, scale).double(), x.double()
    per_value = scale.double().reshape(len(rows), -1)[:, :1]
    bound = torch.maximum(exact.abs() * 2**-4, per_value * 2**-10) * (1 + 2**-20)
    assert ((back - exact).abs() <= bound).all()
    assert ((back == 0) | (back.sign() == exact.sign())).all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), "expected"),
        (torch.zeros(4, 8).t(), "rows of stride 1"),
        (torch.zeros(4, 8, dtype=torch.float64), "float64"),
    ],
    ids=["vector", "columns", "fp64"],
)
def test_refuses(x, message, device):
    with pytest.raises(ValueError, match=message):
        prepare_quantize(x.to(device), blockwise=False)
