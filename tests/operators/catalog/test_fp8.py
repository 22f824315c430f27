"""The fp8 operators: their inputs, their numbers, and every backend against the reference."""

from __future__ import annotations

import pytest
import torch

from groupbench.operators.catalog import grouped_gemm_fp8 as gg
from groupbench.operators.catalog import quantize_fp8 as qz
from groupbench.operators.catalog.grouped_gemm_fp8 import GROUPED_GEMM_FP8, GROUPED_GEMM_FP8_BLOCKWISE
from groupbench.operators.catalog.quantize_fp8 import QUANTIZE_FP8
from groupbench.operators.catalog.shapes import listed
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import accuracy
from groupbench.operators.operator import Operator, Target
from groupbench.operators.tolerances import TOLERANCES, tolerance_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEMMS = (GROUPED_GEMM_FP8, GROUPED_GEMM_FP8_BLOCKWISE)


# --- grouped_gemm_fp8, both recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", GEMMS, ids=lambda operator: operator.name)
def test_inputs(operator: Operator) -> None:
    x = operator.make_inputs(operator.parse_shape("G=3,M_g=3|0|2,N=130,K=300"), "fp8", DEVICE, 0)
    assert (x.a.dtype, x.b.dtype) == (torch.float8_e4m3fn,) * 2
    assert (x.a.shape, x.b.shape) == ((5, 300), (3, 130, 300))
    assert all(stride % 16 == 0 for stride in (*x.a.stride()[:-1], *x.b.stride()[:-1]))
    blockwise = operator is GROUPED_GEMM_FP8_BLOCKWISE
    assert (x.scale_a.shape, x.scale_b.shape) == (((5, 3), (3, 2, 3)) if blockwise else ((5,), (3, 130)))
    assert x.scale_a.stride() == ((1, 5) if blockwise else (1,))
    assert (x.offs.tolist(), x.rows) == ([3, 3, 5], (3, 0, 2))
    assert x.a.float().abs().amax() == x.b.float().abs().amax() == 448
    assert not torch.equal(x.b[0].float(), x.b[1].float())


def test_inputs_are_drawn_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gg, "QUANTISED_AT_ONCE", 4)
    for operator in GEMMS:
        x = operator.make_inputs(listed((9,), 16, 16), "fp8", DEVICE, 0)
        assert (x.scale_a > 0).all()
        assert (x.a.float().abs().amax(1) == 448).all()


def test_weights_are_always_nk_and_never_shared() -> None:
    for operator in GEMMS:
        assert str(operator.parse_shape("2,8,16,32")) == "G=2,M_g=8,N=16,K=32,W=nk"
        assert str(operator.parse_shape("G=2,M_g=8,N=16,K=32,W=nk")) == "G=2,M_g=8,N=16,K=32,W=nk"
        with pytest.raises(ValueError, match="omit B=shared"):
            operator.parse_shape("G=2,M_g=8,N=16,K=32,B=shared")
        assert all(shape.nk and not shape.shared for suite in operator.suites.values() for shape in suite)


def test_no_backend_is_right_with_the_scales_of_another_row() -> None:
    x = GROUPED_GEMM_FP8.make_inputs(listed((33, 31), 48, 64), "fp8", DEVICE, 0)
    wrong = gg.replace(x, scale_a=x.scale_a.roll(1))
    for name in ("triton_flat", "triton_flat_fast"):
        run = GROUPED_GEMM_FP8.backend(name).prepare(wrong)
        reference = GROUPED_GEMM_FP8.reference(x)
        assert accuracy.check_backend(run, reference, GROUPED_GEMM_FP8, name, "fp8")[1] is not None


def test_where_backends_run() -> None:
    def reasons(operator: Operator, *target: object) -> dict[str, str | None]:
        return {b.name: b.unavailable(Target(target[0], "fp8", capability=target[1])) for b in operator.backends}

    assert {n for n, why in reasons(GROUPED_GEMM_FP8, "cpu", None).items() if why is None} == {
        *("torch_loop", "triton_flat", "triton_flat_fast")
    }
    assert set(reasons(GROUPED_GEMM_FP8, "cuda", (9, 0)).values()) == {None}
    assert set(reasons(GROUPED_GEMM_FP8_BLOCKWISE, "cuda", (9, 0)).values()) == {None}
    ada = reasons(GROUPED_GEMM_FP8, "cuda", (8, 9))
    assert ada["torch_loop"] is None
    assert "8.9" in (ada["triton_flat"] or "")
    blackwell = reasons(GROUPED_GEMM_FP8_BLOCKWISE, "cuda", (10, 0))
    assert "Hopper" in (blackwell["torch_loop"] or "")
    assert "CPU" in (reasons(GROUPED_GEMM_FP8_BLOCKWISE, "cpu", None)["torch_loop"] or "")


def test_torch_says_which_sizes_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = GROUPED_GEMM_FP8.make_inputs(listed((3,), 24, 32), "fp8", "cpu", 0)

    class OnGpu:
        is_cuda = True

    for prepare in (gg.prepare_torch_loop, gg.prepare_torch_scaled_grouped_mm, gg.prepare_torch_loop_blockwise):
        with pytest.raises(Unavailable, match="N=24, K=32"):
            prepare(gg.replace(x, a=OnGpu()))


def test_fast_accumulation_alone_has_a_tolerance_of_its_own() -> None:
    for operator in GEMMS:
        for backend in operator.backends:
            expected = TOLERANCES["bf16_fast_accum" if backend.name.endswith("_fast") else "bf16"]
            assert tolerance_of(operator, backend.name, "fp8") == expected
        assert tolerance_of(operator, "of_another_host", "fp8") == TOLERANCES["bf16"]


# --- quantize_fp8 -----------------------------------------------------------------------------------------------------


def cut_off(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round towards zero: decrease the code wherever rounding increased the magnitude."""
    codes = q.contiguous().view(torch.uint8)
    away = (q.float().abs() * scale[:, None] > x.float().abs()) & (codes & 0x7F > 0)
    return (codes - away.to(torch.uint8)).view(q.dtype), scale


FAULTS = {
    "rounds towards zero": cut_off,
    "scale a hundredth off": lambda q, scale, x: (q, scale * 1.01),
    "one row's scale is its neighbour's": lambda q, scale, x: (q, torch.cat([scale[1:2], scale[1:]])),
    "one value lost": lambda q, scale, x: (
        q.float().index_put((torch.tensor(5),), torch.tensor(0.0)).to(q.dtype),
        scale,
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_quantiser_that_is_wrong_is_found(fault) -> None:
    from groupbench.kernels.grouped_gemm.quantize import quantize_rows_reference

    x = QUANTIZE_FP8.make_inputs(QUANTIZE_FP8.parse_shape("rowwise,M=64,K=256"), "fp32", "cpu", 0)
    out = fault(*quantize_rows_reference(x.x), x.x)
    assert accuracy.check_backend(lambda: out, x.x, QUANTIZE_FP8, "triton", "fp32")[1] is not None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(2, 2), "not the pair"),
        ((torch.zeros(2, 2), torch.zeros(2)), "expected float8_e4m3fn"),
        ((torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.zeros(2).half()), "with float32"),
    ],
    ids=["tensor", "not_quantised", "scale_in_fp16"],
)
def test_an_output_that_is_not_quantised(output, message) -> None:
    with pytest.raises(TypeError, match=message):
        qz.decode(output)
