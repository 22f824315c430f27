"""Every operator of the catalog: its suites' texts, inputs, counts, and each backend against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.accuracy import check_backend
from groupbench.operators.measure.given import Given, named_tensors
from groupbench.operators.operator import Operator, Target
from groupbench.operators.registry import get_operator, operator_names
from groupbench.operators.tolerances import TOLERANCES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
MODES = [(name, mode) for name in operator_names() for mode in get_operator(name).modes]


@pytest.mark.parametrize("name", operator_names())
def test_the_text_of_every_shape_of_a_suite_is_read_back(name: str) -> None:
    operator = get_operator(name)
    for mode in operator.modes:
        for suite in operator.in_mode(mode).suites.values():
            assert [operator.parse_shape(f" {shape} ") for shape in suite] == list(suite)
            assert [str(operator.parse_shape(str(shape))) for shape in suite] == list(map(str, suite))


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_backends_have_names_and_sources_and_dtypes_a_tolerance(name: str, mode: str) -> None:
    operator = get_operator(name).in_mode(mode)
    names = [backend.name for backend in operator.backends]
    assert operator.baseline in names and len(set(names)) == len(names)
    assert all(backend.source for backend in operator.backends)
    assert {operator.output_dtype(dtype) for dtype in operator.dtypes} <= {*TOLERANCES, *operator.tolerances}


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_seed_gives_the_same_inputs_and_another_one_others(name: str, mode: str) -> None:
    operator = get_operator(name).in_mode(mode)
    dtype, shape = operator.dtypes[-1], operator.suites["smoke"][1]
    one, same, other = (
        [tensor.float() for _, tensor in named_tensors(operator.make_inputs(shape, dtype, DEVICE, seed))]
        for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, one, same)) and not all(map(torch.equal, one, other))


BIAS_ADD = "grouped_gemm_bias_add_permute"
FUSED = 2 * ((6 + 10) * 7 + 10 + 60)  # of M = 6, N = 10, K = 7 in two bytes: operands, bias, output
FP8 = 3 * 300 + 2 * 130 * 300 + 2 * 3 * 130  # the expert without rows is not read
PACKED = 2 * 128 * (128 + 2 * 3 + 2)  # of two experts: codes, scales and zero points of two groups, bias
W4 = "G=3,M_g=0|5|17,N=128,K=256,fmt=int4(128,zp),bias=true"
LAYER, WEIGHTS, TOKENS = "T=10,k=2,G=4,H=32,F=16,routing=balanced", 4 * 3 * 32 * 16, 10 * 32

# An expert without rows is not read, but its gradient is written; shared weights are read once; layout does not matter.
COUNTED = [  # operator, mode, shape, operations, dtype, least bytes
    ("grouped_gemm", "fwd", "G=1,M_g=2,N=3,K=4", 48, "fp16", 2 * (8 + 12 + 6)),
    ("grouped_gemm", "fwd", "G=3,M_g=1|0|1,N=3,K=4", 48, "fp32", 4 * (8 + 24 + 6)),
    ("grouped_gemm", "fwd", "G=2,M_g=1,N=3,K=4,B=shared", 48, "bf16", 2 * (8 + 12 + 6)),
    ("grouped_gemm", "fwd", "G=3,M_g=1|0|1,N=3,K=4,W=nk", 48, "fp16", 2 * (8 + 24 + 6)),
    ("grouped_gemm", "fwd", "G=2,M_g=0,N=3,K=4", 0, "fp16", 0),
    ("grouped_gemm", "bwd", "G=1,M_g=2,N=3,K=4", 96, "fp32", 4 * (8 + 6 + 12 + 8 + 12)),
    ("grouped_gemm", "bwd", "G=3,M_g=1|0|1,N=3,K=4", 96, "fp16", 2 * (8 + 6 + 24 + 8 + 36)),
    ("grouped_gemm", "bwd", "G=2,M_g=1,N=3,K=4,B=shared", 96, "fp16", 2 * (8 + 6 + 12 + 8 + 24)),
    ("grouped_gemm", "bwd", "G=2,M_g=0,N=3,K=4", 0, "fp16", 2 * 24),
    ("grouped_gemm_dgrad", "fwd", "G=1,M_g=2,N=3,K=4", 48, "fp32", 4 * (6 + 12 + 8)),
    ("grouped_gemm_dgrad", "fwd", "G=3,M_g=1|0|1,N=3,K=4", 48, "fp16", 2 * (6 + 24 + 8)),
    ("grouped_gemm_dgrad", "fwd", "G=2,M_g=1,N=3,K=4,B=shared", 48, "fp16", 2 * (6 + 12 + 8)),
    ("grouped_gemm_dgrad", "fwd", "G=2,M_g=0,N=3,K=4", 0, "fp16", 0),
    ("grouped_gemm_wgrad", "fwd", "G=1,M_g=2,N=3,K=4", 48, "fp32", 4 * (8 + 6 + 12)),
    ("grouped_gemm_wgrad", "fwd", "G=3,M_g=1|0|1,N=3,K=4", 48, "fp16", 2 * (8 + 6 + 36)),
    ("grouped_gemm_wgrad", "fwd", "G=2,M_g=1,N=3,K=4,B=shared", 48, "fp16", 2 * (8 + 6 + 24)),
    ("grouped_gemm_wgrad", "fwd", "G=2,M_g=0,N=3,K=4", 0, "fp16", 2 * 24),
    ("grouped_gemm_fp8", "fwd", "G=3,M_g=1|0|2,N=130,K=300", 2 * 3 * 130 * 300, "fp8", FP8 + 4 * (3 + 2 * 130)),
    ("grouped_gemm_fp8_blockwise", "fwd", "G=3,M_g=1|0|2,N=130,K=300", 234_000, "fp8", FP8 + 4 * (9 + 2 * 2 * 3)),
    ("grouped_gemm_w4a16", "fwd", W4, 2 * 22 * 128 * 256, "bf16", PACKED + 22 * (256 + 128) * 2),
    ("grouped_gemm_w4a8", "fwd", W4, 2 * 22 * 128 * 256, "fp8", PACKED + 22 * (256 + 4 + 128 * 2)),
    ("grouped_gemm_mnk", "fwd", "groups=3x5x7|2x0x4,A=km,W=nk", 2 * 3 * 5 * 7, "fp16", 2 * (15 + 35 + 21 + 8)),
    (BIAS_ADD, "fwd", "G=1,groups=1x2x3:2x5:7", 60 * (14 + 2), "fp16", FUSED + 2 * 60),
    (BIAS_ADD, "fwd", "G=1,groups=1x2x3:2x5:7,E=none", 60 * (14 + 1), "fp32", 2 * FUSED),
    (BIAS_ADD, "fwd", "G=2,groups=1x2x3:2x5:7|0x2x3:2x5:7,E=add", 60 * (14 + 2), "fp16", FUSED + 2 * 60),
    (BIAS_ADD, "fwd", "G=1,groups=0x2x3:2x5:7", 0, "fp16", 0),
    ("quantize_fp8", "fwd", "blockwise,M=33,K=300", 0, "bf16", 33 * 300 * 3 + 4 * 33 * 3),
    ("quantize_fp8", "fwd", "rowwise,M=33,K=300", 0, "fp32", 33 * 300 * 5 + 4 * 33),
    ("split_k_matmul", "fwd", "M=3,N=5,K=7", 2 * 3 * 5 * 7, "bf16", 2 * (3 * 7 + 7 * 5 + 3 * 5)),
    ("causal_attention", "fwd", "S=3|2,H=4,KV=2,D=8", 4 * 4 * 8 * (6 + 3), "fp16", 2 * 8 * 5 * (2 * 4 + 2 * 2)),
    ("row_softmax", "bwd", "M=3,N=5", 0, "fp32", 3 * 60),
    ("vector_add", "fwd", "M=3,N=5", 15, "fp32", 3 * 60),
    ("moe_layer", "fwd", LAYER, 6 * 20 * 32 * 16, "bf16", 2 * (2 * TOKENS + WEIGHTS + 20) + 8 * 20),
    ("moe_layer", "bwd", LAYER, 12 * 20 * 32 * 16, "fp32", 4 * (3 * TOKENS + 2 * WEIGHTS + 40) + 8 * 20),
    ("moe_layer", "fwd_bwd", LAYER, 18 * 20 * 32 * 16, "fp32", 4 * (4 * TOKENS + 2 * WEIGHTS + 40) + 8 * 20),
    # 100 of 400 choices are of the experts that are here.
    ("moe_layer", "fwd", "T=100,k=4,G=2,H=32,F=16,E=8,routing=balanced", 6 * 100 * 32 * 16, "fp16", None),
    ("moe_permute", "fwd", "T=10,k=2,G=4,H=32,routing=balanced", 0, "bf16", 2 * (10 + 20) * 32 + 20 * 12 + 16),
    ("moe_unpermute", "fwd", "T=10,k=2,G=4,H=32,routing=balanced", 2 * 20 * 32, "bf16", 2 * (10 + 20) * 32 + 20 * 6),
    # Of the only expert that has rows: codes and scales of two matrices.
    ("moe_layer_w4a16", "fwd", "T=3,k=1,G=2,H=64,F=32,routing=loads(1|0)", 6 * 3 * 64 * 32, "bf16",
     64 * (32 + 2) + 64 * (16 + 1) + 2 * (2 * 3 * 64 + 2 * 32 + 64 + 3) + 8 * 3),
    ("canary", "fwd", "copy,N=4", 0, "fp16", 64),
    ("canary", "fwd", "matmul,N=8", 1024, "fp16", 384),
    ("canary", "fwd", "matmul,M=4,N=8,K=2,W=nk", 128, "fp16", 2 * (8 + 16 + 32)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "text", "flops", "dtype", "least"), COUNTED)
def test_operations_and_least_bytes(name: str, mode: str, text: str, flops: int, dtype: str, least: int | None) -> None:
    operator = get_operator(name).in_mode(mode)
    shape = operator.parse_shape(text)
    assert operator.flops(shape) == flops
    assert least is None or operator.min_bytes(shape, dtype) == least


# --- backends ---------------------------------------------------------------------------------------------------------

# The places of the suite's shapes that are enough for kernels that other tests run, or that take seconds.
FEW: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("grouped_gemm_dgrad", "grouped_gemm fp32", "grouped_gemm_wgrad fp32"), (1,)),
    "moe_layer": (3, 4),
    "moe_layer fp8": (7,),
    "moe_layer_w4a16": (1, 3, 4),
}
# Helion generates a kernel for each kind of size, and for each dtype.
OF_HELION = {"moe_permute": (4,), "moe_unpermute": (4,)}
TAKE_SOME_SHAPES = ("torch_bmm", "torch_foreach", "torch_int4")
CELLS = [
    pytest.param(
        operator,
        backend.name,
        dtype,
        marks=pytest.mark.exhaustive if rare else (),
        id=f"{name}-{mode}-{backend.name}-{dtype}",
    )
    for name, mode in MODES
    for operator in [get_operator(name).in_mode(mode)]
    for backend in operator.backends
    for dtype in operator.dtypes
    if dtype != "bf16" or name in ("quantize_fp8", "quantize_w4", BIAS_ADD)  # a few small numbers round worse in bf16
    if backend.unavailable(Target(DEVICE, dtype, DEVICE == "cpu", CAPABILITY)) is None
    if backend.name != "triton_recompute" or (mode != "fwd" and dtype != "fp8")  # it has no forward pass, and no fp8
    for rare in [
        backend.kind == "helion"
        and (dtype != "fp16" or name == "grouped_gemm_dgrad" or (name, mode) == ("grouped_gemm_mnk", "bwd"))
    ]
]


@pytest.mark.parametrize(("operator", "name", "dtype"), CELLS)
def test_a_backend_is_right_on_the_smoke_shapes(
    operator: Operator, name: str, dtype: str, pytestconfig: pytest.Config
) -> None:
    """They hold a group without rows, one of one row, ragged tails, and one group alone."""
    backend, shapes, measured = operator.backend(name), operator.suites["smoke"], 0
    if backend.kind != "torch" and not pytestconfig.getoption("exhaustive"):
        few = FEW.get(f"{operator.name} {dtype}", FEW.get(operator.name, range(len(shapes))))
        few = OF_HELION.get(operator.name, (1,)) if backend.kind == "helion" else few
        shapes = [shapes[place] for place in few]
    for shape in shapes:
        x: Any = operator.make_inputs(shape, dtype, DEVICE, 0)
        try:
            run = backend.prepare(x)
        except Unavailable:
            assert DEVICE == "cuda" or name in TAKE_SOME_SHAPES or dtype == "fp8", shape
            continue
        accuracy, problem = check_backend(run, operator.reference(x), operator, name, dtype, given=Given(x))
        assert problem is None, f"{shape}: {problem}"
        assert accuracy.unwritten == 0
        assert accuracy.repeatable or (DEVICE == "cuda" and (backend.kind == "torch" or name == "triton_atomic"))
        measured += 1
    assert measured or DEVICE == "cuda" or name == "torch_foreach"
