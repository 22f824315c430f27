"""The operators with four-bit weights: their shapes, inputs, bytes, and every backend against the reference."""

from __future__ import annotations

import pytest
import torch

from groupbench.operators.catalog import w4_shapes
from groupbench.operators.catalog.grouped_gemm_w4 import GROUPED_GEMM_W4A8, GROUPED_GEMM_W4A16
from groupbench.operators.catalog.moe_layer_w4 import MOE_LAYER_W4A16
from groupbench.operators.catalog.quantize_w4 import QUANTIZE_W4
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import accuracy
from groupbench.operators.operator import Operator, Target
from groupbench.tracker.tools.traces import TraceStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
DTYPES = {GROUPED_GEMM_W4A16.name: "bf16" if DEVICE == "cuda" else "fp16", GROUPED_GEMM_W4A8.name: "fp8"}
GEMMS = (GROUPED_GEMM_W4A16, GROUPED_GEMM_W4A8)


def problem(operator: Operator, backend: str, x: object, dtype: str) -> str | None:
    run = operator.backend(backend).prepare(x)
    measured, wrong = accuracy.check_backend(run, operator.reference(x), operator, backend, dtype)
    assert measured.repeatable
    return wrong


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


@pytest.mark.parametrize("text", ["G=2,M_g=3,N=64,K=96,fmt=int4", "G=2,M_g=3,N=64,K=96,B=shared", "nothing", "1,2,3"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shape"):
        GROUPED_GEMM_W4A16.parse_shape(text)


def test_suites_have_the_models_that_are_served_with_four_bits() -> None:
    decode, prefill = w4_shapes.SUITES["decode"], w4_shapes.SUITES["prefill"]
    assert {name.partition("_decode")[0] for name in decode} == {name.partition("_prefill")[0] for name in prefill}
    assert str(decode["kimi_k2_decode64_dn"]).endswith("fmt=int4(32)")
    assert decode["gptoss120b_decode1_gu"].bias
    assert decode["kimi_k3_decode8_gu"].G == 56
    assert GROUPED_GEMM_W4A16.parse_shape("dsv4_pro_prefill_dn") == prefill["dsv4_pro_prefill_dn"]
    assert [shape.M for shape in w4_shapes.SUITES["sweep_batch"].values()] == [4 * 2**i for i in range(15)]


def test_packed_bytes_are_counted() -> None:
    shape = GROUPED_GEMM_W4A16.parse_shape("G=3,M_g=0|5|17,N=128,K=256,fmt=int4(128,zp),bias=true")
    packed = 2 * 128 * (128 + 2 * 3 + 2)  # of two experts: codes, scales and zero points of two groups, bias
    assert GROUPED_GEMM_W4A16.min_bytes(shape, "bf16") == packed + 22 * (256 + 128) * 2
    assert GROUPED_GEMM_W4A8.min_bytes(shape, "fp8") == packed + 22 * (256 + 4 + 128 * 2)
    assert GROUPED_GEMM_W4A16.flops(shape) == 2 * 22 * 128 * 256


def test_a_trace_replaces_the_rows() -> None:
    shape = w4_shapes.SUITES["smoke"]["int4_tail"]
    routed = w4_shapes.on_trace(shape, TraceStep(0, 0, (3, 1)))
    assert (routed.rows, routed.fmt, routed.bias) == ((3, 1), "int4(128)", True)


@pytest.mark.parametrize("operator", GEMMS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("shape", w4_shapes.SUITES["smoke"].values(), ids=str)
def test_every_backend_is_right(operator: Operator, shape: w4_shapes.W4Shape) -> None:
    dtype = DTYPES[operator.name]
    x = operator.make_inputs(shape, dtype, DEVICE, 0)
    for backend in operator.backends:
        if backend.unavailable(Target(DEVICE, dtype, DEVICE == "cpu", CAPABILITY)) is None:
            try:
                assert problem(operator, backend.name, x, dtype) is None, backend.name
            except Unavailable:
                assert backend.name in ("torch_int4", "cuda")


def test_other_weights_of_the_same_shape_are_wrong() -> None:
    operator, dtype = GROUPED_GEMM_W4A16, DTYPES[GROUPED_GEMM_W4A16.name]
    x, other = (operator.make_inputs(w4_shapes.SUITES["smoke"]["int4_zero"], dtype, DEVICE, seed) for seed in (0, 1))
    run = operator.backend("torch_loop").prepare(other)
    assert accuracy.check_backend(run, operator.reference(x), operator, "torch_loop", dtype)[1] is not None


@pytest.mark.parametrize("shape", QUANTIZE_W4.suites["smoke"], ids=str)
def test_packing_is_right(shape: object) -> None:
    x = QUANTIZE_W4.make_inputs(shape, "fp32", DEVICE, 0)
    for backend in ("torch", "triton"):
        assert problem(QUANTIZE_W4, backend, x, "fp32") is None
    assert str(QUANTIZE_W4.parse_shape(str(shape))) == str(shape)
    with pytest.raises(TypeError, match="not \\(codes, scales\\)"):
        QUANTIZE_W4.decode(x.x)


def test_packing_takes_whole_groups() -> None:
    with pytest.raises(ValueError, match="not a multiple of the group"):
        QUANTIZE_W4.parse_shape("fmt=int4(128),N=3,K=64")


@pytest.mark.parametrize("shape", MOE_LAYER_W4A16.suites["smoke"], ids=str)
def test_the_layer_is_right(shape: object) -> None:
    dtype = DTYPES[GROUPED_GEMM_W4A16.name]
    x = MOE_LAYER_W4A16.make_inputs(shape, dtype, DEVICE, 0)
    for backend in MOE_LAYER_W4A16.backends:
        assert problem(MOE_LAYER_W4A16, backend.name, x, dtype) is None, backend.name


def test_the_layers_bytes_are_packed() -> None:
    shape = MOE_LAYER_W4A16.parse_shape("T=3,k=1,G=2,H=64,F=32,routing=loads(1|0)")
    packed = 64 * (32 + 2) + 64 * (16 + 1)  # of the only expert that has rows: codes and scales of two matrices
    assert MOE_LAYER_W4A16.min_bytes(shape, "bf16") == packed + 2 * (2 * 3 * 64 + 2 * 32 + 64 + 3) + 8 * 3
    with pytest.raises(ValueError, match="must be even"):
        MOE_LAYER_W4A16.parse_shape("T=3,k=1,G=2,H=33,F=32")
