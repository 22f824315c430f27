"""Compile kernels for Hopper (sm_90) without one: no spills, shared memory as computed, wgmma in the code.

A process of its own compiles them: this file run as a script, since the tests' process interprets. Of each kernel a few
configs are compiled: those that fill registers or shared memory most, and one for each path through the code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch
import triton

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import (
    flat,
    flat_pointers,
    flat_specialized,
    fp8,
    fp8_specialized,
    wgrad,
    wgrad_specialized,
)
from groupbench.kernels.grouped_gemm.pointer import PointerConfig
from groupbench.kernels.moe import gate_up, permute, permute_fused, routing, swiglu

KernelCase = tuple[str, Any, dict[str, Any]]
HOPPER = KNOWN["sm_90"]
SMS = HOPPER.sms
GROUPS = 64
LARGE = flat.CONFIGS["large"]
TALLER = replace(flat.CONFIGS["specialized"], block_m=192, num_stages=3)
CASES: dict[str, KernelCase] = {
    "flat_large": ("flat", LARGE, {}),
    "flat_large_nk": ("flat", LARGE, {"nk": True}),
    "flat_many_256": ("flat", flat.CONFIGS["many"], {"nk": True, "G": 256}),
    "flat_halves": ("flat", replace(flat.CONFIGS["many"], flatten=False, halves=True), {"nk": True}),
    "flat_decode_nk": ("flat", flat.CONFIGS["decode"], {"nk": True}),
    "flat_specialized_nk": ("flat_specialized", flat.CONFIGS["specialized"], {"nk": True}),
    "flat_specialized_256": ("flat_specialized", flat.CONFIGS["specialized"], {"G": 256}),
    "flat_specialized_alone": ("flat_specialized", replace(flat.CONFIGS["specialized"], lockstep=0), {}),
    "flat_specialized_192_nk": ("flat_specialized", TALLER, {"nk": True}),
    "flat_specialized_192": ("flat_specialized", TALLER, {"G": 256}),
    "flat_specialized_192_columns_nk": ("flat_specialized", flat.CONFIGS["specialized_192"], {"nk": True}),
    "flat_specialized_192_columns": ("flat_specialized", flat.CONFIGS["specialized_192"], {"G": 256}),
    "pointers_large": ("pointers", flat_pointers.choose_config(999, torch.bfloat16, HOPPER), {}),
    "pointers_decode": ("pointers", flat_pointers.choose_config(8, torch.bfloat16, HOPPER), {}),
    "wgrad_large": ("wgrad", wgrad.CONFIGS["large"], {}),
    "wgrad_paired": ("wgrad", wgrad.default_config(999, 8, 4096, 4096, torch.bfloat16, HOPPER), {}),
    "wgrad_wide_and_dynamic": ("wgrad", replace(wgrad.CONFIGS["large"], dynamic=True), {}),
    "wgrad_specialized": ("wgrad_specialized", wgrad.CONFIGS["specialized"], {}),
    "wgrad_specialized_uneven": ("wgrad_specialized", wgrad.CONFIGS["specialized_uneven"], {}),
    "wgrad_specialized_192": ("wgrad_specialized", wgrad.CONFIGS["specialized_192"], {}),
    "wgrad_specialized_192_lockstep": (
        "wgrad_specialized",
        replace(wgrad.CONFIGS["specialized_192"], dynamic=False, lockstep=16),
        {},
    ),
    "wgrad_specialized_alone": ("wgrad_specialized", replace(wgrad.CONFIGS["specialized"], lockstep=0), {}),
    "wgrad_pointers": ("wgrad", wgrad.CONFIGS["pointers"], {"tma": False}),
    "wgrad_fp32": ("wgrad", wgrad.CONFIGS["fp32"], {"dtype": "fp32"}),
    "fp8_rowwise": ("fp8", fp8.CONFIGS[fp8.ROWWISE]["plain"], {"mode": fp8.ROWWISE}),
    "fp8_rowwise_fast": ("fp8", fp8.CONFIGS[fp8.ROWWISE_FAST]["plain"], {"mode": fp8.ROWWISE_FAST}),
    "fp8_blockwise": ("fp8", fp8.CONFIGS[fp8.BLOCKWISE]["plain"], {"mode": fp8.BLOCKWISE}),
    "fp8_blockwise_decode": ("fp8", fp8.CONFIGS[fp8.BLOCKWISE]["decode"], {"mode": fp8.BLOCKWISE}),
    "fp8_specialized_rowwise": ("fp8_specialized", fp8.SPECIALIZED, {"mode": fp8.ROWWISE}),
    "fp8_specialized_rowwise_256": ("fp8_specialized", fp8.SPECIALIZED, {"mode": fp8.ROWWISE, "G": 256}),
    "fp8_specialized_blockwise": ("fp8_specialized", fp8.SPECIALIZED, {"mode": fp8.BLOCKWISE}),
    "fp8_specialized_blockwise_256": ("fp8_specialized", fp8.SPECIALIZED, {"mode": fp8.BLOCKWISE, "G": 256}),
    "fp8_specialized_rowwise_fast": ("fp8_specialized", fp8.SPECIALIZED, {"mode": fp8.ROWWISE_FAST}),
    "gate_up_large": ("gate_up", gate_up.CONFIGS["large"], {}),
    "gate_up_large_training": ("gate_up", gate_up.CONFIGS["large"], {"save": True}),
    "gate_up_many_256_training": ("gate_up", replace(gate_up.CONFIGS["large"], num_stages=3), {"save": True, "G": 256}),
    "gate_up_decode": ("gate_up", gate_up.CONFIGS["decode"], {"G": 256}),
    "moe_spread": ("by_row", permute.choose_config(8192, 7168, 2), {"kernel": "spread"}),
    "moe_place_and_spread": (
        "by_row",
        permute_fused.choose_tokens(torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta"), 8, 128),
        {"kernel": "place_and_spread"},
    ),
    "moe_place_and_spread_of_wide": (
        "by_row",
        permute_fused.choose_tokens(torch.empty(8192, 2880, dtype=torch.bfloat16, device="meta"), 6, 32),
        {"kernel": "place_and_spread", "G": 32, "k": 6},
    ),
    "moe_combine": ("by_row", permute.choose_config(8192, 2048, 2, rows=8), {"kernel": "combine"}),
    "moe_combine_of_two": (
        "by_row",
        permute.choose_config(8192, 7168, 2, rows=2, vectors=4),
        {"kernel": "combine", "k": 2},
    ),
    "moe_swiglu_backward": ("by_row", permute.RowConfig(swiglu.MAX_BLOCK, 4), {"kernel": "swiglu_backward"}),
    "moe_count": ("by_row", permute.RowConfig(0, routing.WARPS), {"kernel": "count"}),
    "moe_scan": ("by_row", permute.RowConfig(0, routing.WARPS), {"kernel": "scan"}),
    "moe_place": ("by_row", permute.RowConfig(0, routing.WARPS), {"kernel": "place"}),
    "moe_route": ("by_row", permute.RowConfig(0, routing.WARPS), {"kernel": "route", "G": 256}),
}
# These combine what other cases compile apart: a config, the layout of weights, a number of groups, a schedule.
COMBINED = {
    *("flat_specialized_alone", "wgrad_wide_and_dynamic", "wgrad_specialized_uneven", "fp8_rowwise_fast"),
    *("fp8_specialized_rowwise_256", "gate_up_large_training", "moe_combine_of_two"),
    *("flat_large_nk", "flat_specialized_256", "flat_specialized_192_nk", "flat_specialized_192_columns"),
    *("wgrad_specialized_192_lockstep", "wgrad_specialized_alone", "fp8_specialized_rowwise"),
    *("fp8_specialized_blockwise_256", "gate_up_many_256_training", "moe_place_and_spread_of_wide"),
}


def tiles(config: Any) -> dict[str, Any]:
    """Return the constants that the configs of flat and fp8 share."""
    names = ("block_m", "block_n", "block_k", "group_m", "swap", "split_store", "flatten")
    return {"NUM_PROGRAMS": SMS * config.per_sm} | {name.upper(): getattr(config, name) for name in names}


def of_flat(config: flat.FlatConfig, nk: bool = False, G: int = GROUPS) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Return (kernel, types of its arguments, constants)."""
    m, n, k = config.block_m, config.block_n, config.block_k
    width = n // (2 if config.split_store else 1)
    types = {
        "a_desc": f"tensordesc<bf16[{m},{k}]>",
        "b_desc": f"tensordesc<bf16[1,{n},{k}]>" if nk else f"tensordesc<bf16[1,{k},{n}]>",
        "out_desc": f"tensordesc<bf16[1,1,{m},{width}]>",
        "out_ptr": "*bf16",
    }
    constants = tiles(config) | {"G": G, "G_POW2": G, "SHARED_B": False, "B_IS_NK": nk, "PRECISION": "ieee"}
    constants |= {"HALVES": config.halves}
    if config.halves:
        types["a_half_desc"] = f"tensordesc<bf16[{m // 2},{k}]>"
    else:
        constants["a_half_desc"] = None
    return flat._flat_kernel, types, constants


def of_pointers(config: PointerConfig) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Return the same for strides and sizes without known divisors."""
    names = ("block_m", "block_n", "block_k", "group_m")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"NUM_PROGRAMS": SMS, "G": GROUPS, "G_POW2": GROUPS, "EVEN_K": False, "PRECISION": "ieee"}
    return flat_pointers._flat_pointer_kernel, dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), "*bf16"), constants


def of_wgrad(
    config: wgrad.WgradConfig, dtype: str = "bf16", tma: bool = True
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    p, q, m = config.block_p, config.block_q, config.block_m
    width = q // (2 if config.split_store else 1)
    types = dict.fromkeys(("x", "y", "out"), f"*{dtype}")
    if tma:
        shapes = {"x": [1, 1, m, p], "y": [1, 1, m, q], "out": [1, p, width]}
        types = {name: f"tensordesc<{dtype}[{','.join(map(str, shape))}]>" for name, shape in shapes.items()}
    of = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    names = ("block_p", "block_q", "block_m", "group_p", "split_store", "dynamic")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"TMA": tma, "DTYPE": wgrad._TRITON_DTYPES[of], "NUM_PROGRAMS": SMS * config.per_sm}
    return wgrad._wgrad_kernel, types, constants | {"stride_xp": 1, "stride_yq": 1}


def of_fp8(config: fp8.Fp8Config, mode: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
    m, n, k = config.block_m, config.block_n, config.block_k
    types = {
        "a_desc": f"tensordesc<fp8e4nv[{m},{k}]>",
        "b_desc": f"tensordesc<fp8e4nv[1,{n},{k}]>",
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "out_desc": f"tensordesc<bf16[1,1,{m},{n // (2 if config.split_store else 1)}]>",
        "out_ptr": "*bf16",
    }
    constants = tiles(config) | {"G": GROUPS, "G_POW2": GROUPS, "FAST_ACCUM": mode == fp8.ROWWISE_FAST}
    return fp8._fp8_kernel, types, constants | {"SCALE_BLOCK": fp8.SCALE_BLOCK if mode == fp8.BLOCKWISE else 0}


def descriptor(dtype: str, bits: int, swizzle: int, *shape: int) -> str:
    """Return the type of a descriptor of Gluon, whose tiles lie swizzled in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{NVMMASharedLayout(swizzle, bits, rank=len(shape))!r}>"


def of_flat_specialized(
    config: flat.FlatConfig, nk: bool = False, G: int = GROUPS
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    k, groups = config.block_k, config.block_m // 64
    main, side = {256: (256, 0), 192: (128, 64)}[config.block_n]
    types = {
        "a_desc": descriptor("bf16", 16, 128, 64, k),
        "b_desc": descriptor("bf16", 16, 128, *((1, main, k) if nk else (1, k, main))),
        "side_desc": descriptor("bf16", 16, 128, *((1, side or main, k) if nk else (1, k, side or main))),
        "out_desc": descriptor("bf16", 16, 128, 1, 1, 64, 64 if groups == 2 else main // 2),
        "out_ptr": "*bf16",
        "arrivals_ptr": "*i64",
    }
    constants = {"G": G, "G_POW2": G, "SHARED_B": False, "B_IS_NK": nk, "NUM_PROGRAMS": SMS, "GROUP_M": config.group_m}
    constants |= {"LOCKSTEP": config.lockstep, "STAGES": config.num_stages, "GROUPS": groups, "SIDE": side}
    return flat_specialized._flat_specialized_kernel, types, constants | {"BUFFERS": 2 if groups == 2 else 1}


def of_wgrad_specialized(config: wgrad.WgradConfig) -> tuple[Any, dict[str, str], dict[str, Any]]:
    q, m = config.block_q, config.block_m
    types = {
        "x_desc": descriptor("bf16", 16, 128, 1, 1, m, 64),
        "y_desc": descriptor("bf16", 16, 128, 1, 1, m, q),
        "out_desc": descriptor("bf16", 16, 128, 1, 64, q // (4 if config.block_p == 128 else 2)),
        "arrivals_ptr": "*i64",
    }
    names = ("dynamic", "group_p", "lockstep")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"NUM_PROGRAMS": SMS, "STAGES": config.num_stages, "GROUPS": config.block_p // 64}
    return wgrad_specialized._wgrad_specialized_kernel, types, constants


def of_fp8_specialized(config: fp8.Fp8Config, mode: str, G: int = GROUPS) -> tuple[Any, dict[str, str], dict[str, Any]]:
    m, n, k = config.block_m, config.block_n, config.block_k
    types = {
        "a_desc": descriptor("fp8e4nv", 8, 128, m, k),
        "b_desc": descriptor("fp8e4nv", 8, 128, n, k),
        "out_desc": descriptor("bf16", 16, n // 2, 1, 1, m // 2, n // 4),
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    constants = {"G": G, "G_POW2": G, "NUM_PROGRAMS": SMS, "GROUP_M": config.group_m, "STAGES": config.num_stages}
    constants |= {"SCALE_BLOCK": fp8.SCALE_BLOCK if mode == fp8.BLOCKWISE else 0}
    return fp8_specialized._fp8_specialized_kernel, types, constants | {"FAST_ACCUM": mode == fp8.ROWWISE_FAST}


def of_gate_up(
    config: gate_up.GateUpConfig, save: bool = False, G: int = GROUPS
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    m, f, k = config.block_m, config.block_f, config.block_k
    types = dict.fromkeys(("act_desc", "gate_desc", "up_desc"), f"tensordesc<bf16[1,1,{m},{f}]>")
    types |= {"a_desc": f"tensordesc<bf16[{m},{k}]>"}
    types |= {"w_desc": f"tensordesc<bf16[1,{1 if config.swap else 2},{f},{k}]>"}
    names = ("block_m", "block_f", "block_k", "group_m", "swap", "flatten")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"NUM_PROGRAMS": SMS * config.per_sm, "G": G, "G_POW2": G, "SAVE": save, "PRECISION": "ieee"}
    constants |= {"DTYPE": gate_up.TRITON_DTYPES[torch.bfloat16]}
    return gate_up._gate_up_kernel, types, constants | ({} if save else {"gate_desc": None, "up_desc": None})


def of_by_row(
    config: permute.RowConfig | permute_fused.TokensConfig, kernel: str, G: int = 128, k: int = 8
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Return the same for kernels without products."""
    values = ("x", "y", "out", "both", "da", "weights", "dboth", "weighted", "dweights")
    types = dict.fromkeys((f"{name}_ptr" for name in values), "*bf16") | {"ids_ptr": "*i64"}
    if kernel in ("spread", "combine"):
        constants = {"K": k, "BLOCK_H": config.block_h, "SPLITS": 1, "stride_xh": 1, "stride_yh": 1, "WEIGHTED": True}
        constants |= {"CHAINED": True, "EVICT": "evict_first", "CHOICES": triton.next_power_of_2(k)}
        constants |= {"AT_ONCE": permute.AT_ONCE}
    elif isinstance(config, permute_fused.TokensConfig):
        constants = {"G": G, "BINS": G, "K": k, "CHOICES": triton.next_power_of_2(k), "TOKENS": config.tokens}
        constants |= {"BLOCK_H": config.block_h, "CHAINED": True, "stride_xh": 1}
    elif kernel == "swiglu_backward":
        constants = {"BLOCK": config.block_h}
    else:
        constants = {"G": G, "BINS": G, "CHOICES": routing.BLOCK, "BLOCK": routing.BLOCK, "CHAINED": True}
        constants |= {"ROWS": routing.SCANNED[0], "EXPERTS": routing.SCANNED[1]}
    jitted = {
        "spread": permute._spread_kernel,
        "place_and_spread": permute_fused._place_and_spread_kernel,
        "combine": permute._combine_kernel,
        "swiglu_backward": swiglu._swiglu_backward_kernel,
        "count": routing._count_kernel,
        "scan": routing._scan_kernel,
        "place": routing._place_kernel,
        "route": routing._route_kernel,
    }[kernel]
    return jitted, types, {name: value for name, value in constants.items() if name in jitted.arg_names}


@pytest.fixture(scope="module")
def built(compile_for_hopper: Callable[..., Any], pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    names = CASES.keys() if pytestconfig.getoption("exhaustive") else CASES.keys() - COMBINED
    rows: dict[str, dict[str, Any]] = compile_for_hopper(__file__, *sorted(names))
    assert rows.keys() == names
    return rows


@pytest.mark.parametrize("error", ["raise SystemExit('spilled')", "from triton.compiler import spilled"])
def test_a_compile_error_fails_and_does_not_skip(
    error: str, tmp_path: Path, built: Any, compile_for_hopper: Callable[[str], Any]
) -> None:
    (tmp_path / "script.py").write_text(error)
    with pytest.raises((AssertionError, pytest.skip.Exception), match="spilled") as raised:
        compile_for_hopper(str(tmp_path / "script.py"))
    assert raised.type is AssertionError


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in COMBINED else ()) for name in CASES]
)
def test_a_config_compiles_for_hopper_without_spills(
    name: str, built: dict[str, dict[str, Any]], spills: dict[str, int]
) -> None:
    of, config, more = CASES[name]
    row = built[name]
    assert row["spilled_bytes"] <= spills.get(name, 0), row
    assert row["shared_bytes"] <= HOPPER.room(getattr(config, "per_sm", 1)), row
    if of == "wgrad" and more.get("tma", True):
        dtype = torch.float32 if more.get("dtype") == "fp32" else torch.bfloat16
        assert row["shared_bytes"] <= wgrad.shared_bytes(config, dtype) + 1024, "barriers come on top"
    if of == "pointers":
        return  # 16 rows go to mma.sync
    assert row["wgmma"] > 0 or more.get("dtype") == "fp32" or of == "by_row", row


def main() -> None:
    from compiling import compiled

    makers = {"flat": of_flat, "wgrad": of_wgrad, "fp8": of_fp8, "gate_up": of_gate_up, "by_row": of_by_row}
    makers |= {"pointers": of_pointers, "fp8_specialized": of_fp8_specialized, "flat_specialized": of_flat_specialized}
    makers |= {"wgrad_specialized": of_wgrad_specialized}
    odd = {"pointers": flat_pointers._flat_pointer_kernel.arg_names}
    rows = {}
    for name in sys.argv[1:]:
        of, config, more = CASES[name]
        rows[name] = compiled(*makers[of](config, **more), config, odd=odd.get(of, ("G",)))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
