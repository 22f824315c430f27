"""Compile the kernels in CUDA C++ for Hopper (sm_90a) without one: no spills, and no products in turns."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import LONG, LONGEST, NARROW, NO_NVRTC, SHORT

from groupbench.kernels import cuda_source
from groupbench.kernels.attention import softmax_cluster
from groupbench.kernels.device import KNOWN
from groupbench.kernels.four_bit import formats, hopper, layout
from groupbench.kernels.four_bit.hopper_config import HopperConfig
from groupbench.kernels.grouped_gemm import (
    cluster,
    cluster_fp8_wgrad,
    cluster_tiles,
    mnk_cluster,
    quantize_cuda,
)
from groupbench.kernels.grouped_gemm.quantize import E4M3

pytestmark = NO_NVRTC
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Source = tuple[str, dict[str, Any]]  # and its constants


def of_cluster(config: cluster_tiles.ClusterConfig, of: torch.dtype, nk: bool, shared: bool, wide: bool) -> Source:
    offsets = torch.int64 if wide else torch.int32
    source = cluster_tiles.source("cluster.cu", config.columns)
    return source, cluster.named_constants(config, of, nk, shared, offsets)


def of_wgrad(config: cluster_tiles.ClusterConfig, of: torch.dtype) -> Source:
    source = cluster_tiles.source("cluster_wgrad.cu", config.columns)
    return source, cluster_tiles.constants(config, of, False, False, torch.int32)


def of_fp8_wgrad(of: torch.dtype) -> Source:
    config = cluster_fp8_wgrad.DEFAULT
    assert cluster_fp8_wgrad.illegal(config, KNOWN["sm_90"]) is None
    source = cluster_tiles.source("cluster_fp8_wgrad.cu", config.columns)
    return source, cluster_fp8_wgrad.named_constants(config, of, torch.int32)


def of_mnk(config: cluster_tiles.ClusterConfig, *layout: bool) -> Source:
    assert cluster_tiles.illegal(config, BF16, KNOWN["sm_90"]) is None
    source = cluster_tiles.source("cluster_mnk.cu", config.columns)
    return source, mnk_cluster.named_constants(config, BF16, *layout)


def of_four_bit(config: HopperConfig, of_fp8: bool, text: str) -> Source:
    weights = formats.quantize_reference(torch.randn(1, 64, 512), formats.parse_format(text))
    blocks = layout.lay_out(weights, of_fp8)
    return hopper.source(config.rows), hopper.constants(config, blocks, int(of_fp8), True, torch.int32)


def of_quantize(of: torch.dtype) -> Source:
    source = Path(quantize_cuda.__file__).with_name("quantize.cu").read_text()
    return source, {"IS_BF16": int(of == BF16)}


def of_softmax(of: torch.dtype, operands: int) -> Source:
    return softmax_cluster.source(), dict(softmax_cluster.constants(of, 2, softmax_cluster.PARTS[operands]))


TILES = {"long": LONG, "longest": LONGEST, "short": SHORT, "narrow": NARROW}
CASES = {
    **{
        f"cluster_{name}_{'nk' if nk else 'kn'}_{of}": (of_cluster, config, of, nk, not nk, nk)
        for name, config in TILES.items()
        for of in cluster_tiles.DTYPES
        for nk in (False, True)
    },
    **{f"cluster_{name}_fp8": (of_cluster, config, E4M3, True, False, False) for name, config in TILES.items()},
    **{
        f"wgrad_{name}_{of}": (of_wgrad, config, of)
        for name, config in (TILES | {"mixed": replace(NARROW, from_end=1)}).items()
        for of in (BF16, FP16)
    },
    **{f"fp8_wgrad_{of}": (of_fp8_wgrad, of) for of in (BF16, FP16, FP32)},
    **{
        f"mnk_{name}_{layout}": (of_mnk, config, layout == "nk", layout != "nk")
        for name, config in (("square", mnk_cluster.SQUARE), ("small", mnk_cluster.SMALL), ("short", SHORT))
        for layout in ("nk", "kn")
    },
    "four_bit_decode": (of_four_bit, HopperConfig(32, depth=4, stages=3, per_sm=2), False, "mxfp4"),
    "four_bit_zero_point": (of_four_bit, HopperConfig(256), False, "int4(32,zp)"),
    "four_bit_integers_fp8": (of_four_bit, HopperConfig(128), True, "int4(128)"),
    "four_bit_fp8": (of_four_bit, HopperConfig(256), True, "mxfp4"),
    **{f"quantize_{of}": (of_quantize, of) for of in quantize_cuda.DTYPES},
    **{f"softmax_{of}_{count}": (of_softmax, of, count) for of in (BF16, FP32) for count in softmax_cluster.PARTS},
}
# Each of these compiles for two seconds. Others differ in the shared operand and in whether warps take turns.
FURTHER = {name for name in CASES if name.startswith(("cluster", "wgrad"))} - {
    *(
        "cluster_long_nk_torch.float16",
        "cluster_short_kn_torch.bfloat16",
        "cluster_long_fp8",
        "wgrad_long_torch.bfloat16",
    )
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in FURTHER else ()) for name in CASES]
)
def test_compiles_without_spills(name: str) -> None:
    make, *arguments = CASES[name]
    code, log = cuda_source.compile_with_log(*make(*arguments), "sm_90a")
    assert code.startswith(b"\x7fELF")
    assert "wgmma" not in log and "serialized" not in log  # ptxas warns if it serialises them
    if name.startswith(("cluster", "wgrad", "mnk", "softmax")):
        assert " 0 bytes stack frame, 0 bytes spill stores" in log
    if name.startswith("cluster"):
        assert f"{cluster_tiles.STATIC_BYTES} bytes smem" in log
    if name.startswith("quantize"):
        # A few addresses. Spilled values would pass through L2, since shared memory leaves little of L1.
        assert max(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= 64, log
        assert "Hopper" in str(quantize_cuda.unsuitable(torch.zeros(1, 128, dtype=arguments[0])))


def test_source_that_does_not_compile_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"kernel.cu\(2\): error"):
        cuda_source.compile_cuda("void f() { missing(ONE); }", {"ONE": 1}, "sm_90a")
