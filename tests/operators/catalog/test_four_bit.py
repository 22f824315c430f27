"""The operators with four-bit weights: their shapes, inputs, bytes, and every backend against the reference."""

from __future__ import annotations

import pytest
import torch

from groupbench.operators.catalog import w4_shapes
from groupbench.operators.catalog.grouped_gemm_w4 import GROUPED_GEMM_W4A8, GROUPED_GEMM_W4A16
from groupbench.operators.catalog.quantize_w4 import QUANTIZE_W4
from groupbench.operators.measure import accuracy
from groupbench.tracker.tools.traces import TraceStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {GROUPED_GEMM_W4A16.name: "bf16" if DEVICE == "cuda" else "fp16", GROUPED_GEMM_W4A8.name: "fp8"}
GEMMS = (GROUPED_GEMM_W4A16, GROUPED_GEMM_W4A8)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("G=3,M_g=0|5|17,N=128,K=256,fmt=mxfp4", "G=3,M_g=0|5|17,N=128,K=256,fmt=mxfp4"),
        ("G=3,M_g=0|5|17,N=128,K=256,fmt=int4(128,zp)", "G=3,M_g=0|5|17,N=128,K=256,fmt=int4(128,zp)"),
        ("2,3,64,96", "G=2,M_g=3,N=64,K=96,fmt=mxfp4"),
        ("bias=true,G=2,M=9,N=64,K=96,fmt=int4(32),W=nk", "G=2,M=9,N=64,K=96,routing=balanced,fmt=int4(32),bias=true"),
    ],
)
def test_a_shape_is_its_text(text: str, canonical: str) -> None:
    for operator in GEMMS:
        assert str(operator.parse_shape(text)) == canonical
        assert operator.parse_shape(canonical) == operator.parse_shape(text)


def test_fp8_may_have_a_scale_for_every_128_of_k() -> None:
    text = "G=1,M_g=3,N=64,K=96,fmt=mxfp4,scales=1x128"
    assert str(GROUPED_GEMM_W4A8.parse_shape(text)) == text
    with pytest.raises(ValueError, match="scales=1x128 is not rows"):
        GROUPED_GEMM_W4A16.parse_shape(text)


def test_suites_have_the_models_that_are_served_with_four_bits() -> None:
    decode, prefill = w4_shapes.SUITES["decode"], w4_shapes.SUITES["prefill"]
    assert {name.partition("_decode")[0] for name in decode} == {name.partition("_prefill")[0] for name in prefill}
    assert str(decode["kimi_k2_decode64_dn"]).endswith("fmt=int4(32)")
    assert decode["gptoss120b_decode1_gu"].bias
    assert decode["kimi_k3_decode8_gu"].G == 56
    assert GROUPED_GEMM_W4A16.parse_shape("dsv4_pro_prefill_dn") == prefill["dsv4_pro_prefill_dn"]
    assert [shape.M for shape in w4_shapes.SUITES["sweep_batch"].values()] == [4 * 2**i for i in range(15)]


def test_a_trace_replaces_the_rows() -> None:
    shape = w4_shapes.SUITES["smoke"]["int4_tail"]
    routed = w4_shapes.on_trace(shape, TraceStep(0, 0, (3, 1)))
    assert (routed.rows, routed.fmt, routed.bias) == ((3, 1), "int4(128)", True)


def test_other_weights_of_the_same_shape_are_wrong() -> None:
    operator, dtype = GROUPED_GEMM_W4A16, DTYPES[GROUPED_GEMM_W4A16.name]
    x, other = (operator.make_inputs(w4_shapes.SUITES["smoke"]["int4_zero"], dtype, DEVICE, seed) for seed in (0, 1))
    run = operator.backend("torch_loop").prepare(other)
    assert accuracy.check_backend(run, operator.reference(x), operator, "torch_loop", dtype)[1] is not None


def test_an_output_that_is_not_packed_is_refused() -> None:
    with pytest.raises(TypeError, match="not \\(codes, scales\\)"):
        QUANTIZE_W4.decode(torch.zeros(3, 64))
