"""Compile the kernels of one product and of a sum for Hopper, as test_compile.py compiles the grouped ones.

Each config that the split-K rule gives for a typical shape is compiled: no spills, shared memory as computed, loads as
wide as possible, and marked for the L2 if B is streamed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch

from groupbench.kernels import elementwise, outer_k
from groupbench.kernels.attention import softmax
from groupbench.kernels.device import KNOWN
from groupbench.kernels.split_k import stream, tiled

HOPPER = KNOWN["sm_90"]
SMS = HOPPER.sms
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ProductCase:
    M: int
    N: int
    K: int
    dtype: str = "bf16"
    nk: bool = True
    mode: Any = tiled.FIXUP


SPLIT_K = {
    "seed": ProductCase(16, 16, 4096),
    "seed_fp32": ProductCase(16, 16, 4096, "fp32"),
    "seed_long": ProductCase(16, 16, 131072),
    "square": ProductCase(64, 64, 32768),
    "decode": ProductCase(16, 4096, 4096),
    "decode_kn": ProductCase(16, 4096, 4096, nk=False),
    "decode_32": ProductCase(32, 4096, 14336),
    "decode_64": ProductCase(64, 4096, 14336),
    "decode_64_fp32": ProductCase(64, 4096, 4096, "fp32"),
    "wide": ProductCase(128, 4096, 4096),
    "leave": ProductCase(64, 512, 32768, mode=tiled.LEAVE),
    "atomic": ProductCase(64, 512, 32768, mode=tiled.ATOMIC),
}
# Up to 16 rows and weights as [N, K]: stream.py takes them on Hopper.
STREAM = {
    "stream_seed": ProductCase(16, 16, 4096),
    "stream_router": ProductCase(16, 128, 2880),
    "stream_long": ProductCase(16, 16, 131072),
    "stream_long_64": ProductCase(16, 64, 65536),
    "stream_split": ProductCase(16, 1024, 16384),
    "stream_narrow": ProductCase(16, 2112, 7168),
    "stream_decode": ProductCase(16, 4096, 4096),
    "stream_one_row": ProductCase(1, 4096, 14336),
    "stream_ragged": ProductCase(9, 2111, 7184),
    "stream_fp16": ProductCase(16, 4096, 4096, "fp16"),
}
OUTER_K = {
    "outer_k": ProductCase(4096, 4096, 4096, nk=False),
    "outer_k_nk": ProductCase(4096, 4096, 4096),
    "outer_k_fp32": ProductCase(4096, 4096, 4096, "fp32", nk=False),
}
NAMES = (*SPLIT_K, *STREAM, *OUTER_K, "sum", "add_bf16", "add_fp32", "helion_barrier", "row", "row_backward")
# Other sizes, dtypes and layouts of cases that remain.
SIZES = {
    *("seed_long", "square", "decode_32", "stream_router", "stream_long", "stream_long_64", "stream_narrow"),
    *("stream_decode", "stream_fp16", "stream_split", "seed_fp32", "decode_64", "outer_k_nk", "wide"),
}


def all_of(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive if name in SIZES else ()) for name in names]


def config_of(name: str) -> Any:
    if name in SPLIT_K:
        case = SPLIT_K[name]
        return tiled.choose_config(case.M, case.N, case.K, DTYPES[case.dtype], SMS)
    if name in STREAM:
        case = STREAM[name]
        return stream.choose_stream(case.M, case.N, case.K, SMS)
    return outer_k.default_config(HOPPER, DTYPES[OUTER_K[name].dtype])


def inputs_of(name: str) -> tuple[Any, dict[str, str], dict[str, Any], Any]:
    """Return (kernel, types of its arguments, constants, config)."""
    case = SPLIT_K.get(name) or STREAM.get(name) or OUTER_K[name]
    config = config_of(name)
    types = {"a_ptr": f"*{case.dtype}", "b_ptr": f"*{case.dtype}", "out_ptr": f"*{case.dtype}", "slots_ptr": "*i32"}
    if name in STREAM:
        constants = stream.stream_constants(config, case.M, case.N, case.K)
        return stream._stream_kernel, types, constants, config
    strides = {"stride_ak": 1, ("stride_bk" if case.nk else "stride_bn"): 1}
    if name in OUTER_K:
        return outer_k._outer_k_kernel, types, outer_k.kernel_constants(config, case.K) | strides, config
    if case.mode is tiled.ATOMIC:
        types["out_ptr"] = "*fp32"
    constants = tiled.kernel_constants(config, case.M, case.K, case.mode.value)
    return tiled._split_k_kernel, types, constants | strides, config


def helion_kernel() -> tuple[Any, dict[str, str], dict[str, Any], Any]:
    """Return Helion's kernel for 16 x 1024 x 16384 in bf16, with the constants that its host code passes."""
    from groupbench.kernels.split_k import helion_barrier

    a = torch.empty(16, 16384, dtype=torch.bfloat16)
    b = torch.empty(1024, 16384, dtype=torch.bfloat16).t()
    config = helion_barrier.default_config(16, 1024, 16384, torch.bfloat16, HOPPER)
    compiled = helion_barrier.split_k_matmul_barrier.bind((a, b)).compile_config(config)
    kernel = compiled.__globals__["_helion_split_k_matmul_barrier"]
    stretch = 16384 // config.config["split_k"]
    constants = {"_NUM_SM": SMS, "_BLOCK_SIZE_2": stretch, "_RDIM_SIZE_6": config.config["split_k"]}
    types = {"partial": "*fp32", "a": "*bf16", "b": "*bf16", "out": "*bf16", "x_grid_sem": "*u32"}
    return kernel, types, constants, config


def strided_add() -> int:
    """Return the shared memory in bytes of the kernel over two dimensions, whose sizes and strides are tuples."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = elementwise._strided_kernel
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | {"n": "i32", "sizes": ("i32", "i32")}
    signature |= dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*bf16")
    signature |= {"x_strides": ("i32", "constexpr"), "y_strides": ("constexpr", "i32")}
    at = {name: i for i, name in enumerate(kernel.arg_names)}
    constants = {(at["x_strides"], 1): 1, (at["y_strides"], 0): 1, (at["NDIM"],): 2, (at["WIDE"],): False}
    constants[(at["BLOCK"],)] = elementwise.CONFIGS["strided"].block
    built = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    return int(built.metadata.shared)


def main() -> None:
    from compiling import compiled

    @dataclass
    class Plain:
        num_warps: int
        num_stages: int = 1

    rows: dict[str, Any] = {name: compiled(*inputs_of(name)) for name in sys.argv[1:]}
    tile = {"SPLITS": 64, "PDL": True, "BLOCK_M": 64, "BLOCK_N": 64, "PART": 256, "CHUNK": 32}
    rows["sum"] = compiled(tiled._sum_kernel, {"slots_ptr": "*i32", "out_ptr": "*bf16"}, tile, Plain(4))
    add = elementwise.CONFIGS["flat"]
    for dtype in ("bf16", "fp32"):
        types = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), f"*{dtype}")
        constants = {"WIDE": False, "BLOCK": add.block}
        rows[f"add_{dtype}"] = compiled(elementwise._flat_kernel, types, constants, Plain(add.num_warps))
    types = dict.fromkeys(("x_ptr", "y_ptr", "dy_ptr", "dx_ptr"), "*bf16")
    for name, kernel, inputs, warps in (
        ("row", softmax._whole_row_kernel, softmax.WHOLE_ROW, 16),
        ("row_backward", softmax._long_row_backward_kernel, softmax.WHOLE_ROW_BACKWARD, 32),
    ):
        constants = {"COLUMNS": inputs // 2, "BLOCK": softmax.BLOCK, "PACKED": 2}
        rows[name] = compiled(
            kernel, types, {n: constants[n] for n in kernel.arg_names if n in constants}, Plain(warps)
        )
    kernel, types, constants, config = helion_kernel()
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    plain = Plain(config.config["num_warps"], config.config["num_stages"])
    rows["helion_barrier"] = compiled(kernel, types, constants, plain)
    print(json.dumps({"strided": strided_add(), "rows": rows}))


@pytest.fixture(scope="module")
def built(compile_for_hopper: Callable[..., Any], pytestconfig: pytest.Config) -> dict[str, Any]:
    names = SPLIT_K.keys() | STREAM.keys() | OUTER_K.keys()
    return compile_for_hopper(__file__, *sorted(names if pytestconfig.getoption("exhaustive") else names - SIZES))


@pytest.mark.parametrize("name", all_of(NAMES))
def test_compiles_for_hopper_without_spills(name: str, built: dict[str, Any], spills: dict[str, int]) -> None:
    row = built["rows"][name]
    assert row["spilled_bytes"] <= spills.get(name, 0), row
    one_per_sm = name in SPLIT_K and not config_of(name).streamed
    programs = 1 if one_per_sm else 2  # per SM, as the rule for splits assumes
    assert row["shared_bytes"] <= HOPPER.room(programs), row


@pytest.mark.parametrize("name", all_of([*SPLIT_K, *OUTER_K]))
def test_wgmma_unless_fp32_or_few_rows(name: str, built: dict[str, Any]) -> None:
    case = SPLIT_K.get(name) or OUTER_K[name]
    assert (built["rows"][name]["wgmma"] > 0) == (case.M >= 64 and case.dtype != "fp32")


@pytest.mark.parametrize("name", all_of(STREAM))
def test_a_stream_passes_through_registers_alone(name: str, built: dict[str, Any]) -> None:
    """Loads take 16 bytes, those of B are marked, and only the sums of the warps use shared memory."""
    row, config = built["rows"][name], config_of(name)
    assert [load.split(".")[-2:] for load in row["once_loads"]] == [["v4", "b32"]]
    assert row["async_copies"] == []
    assert row["shared_bytes"] == config.num_warps * stream.ROWS * config.block_n * 4
    assert row["registers"] * config.num_warps * 32 <= 1 << 16
    assert row["local_bytes"] == 0


@pytest.mark.parametrize("name", all_of(SPLIT_K))
def test_streamed_loads_are_marked_for_the_l2_to_drop(name: str, built: dict[str, Any]) -> None:
    """Triton drops the policy of loads that it makes asynchronous copies, as those of A remain."""
    row = built["rows"][name]
    assert bool(row["once_loads"]) == config_of(name).streamed
    assert all(".v4." in load for load in row["once_loads"])
    assert row["async_copies"] == ["0x10"], "16 bytes each"


def test_the_strided_sum_compiles_with_tuples(built: dict[str, Any]) -> None:
    assert built["strided"] == 0


if __name__ == "__main__":
    main()
