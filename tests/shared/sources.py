"""The kernels that test_compile.py and test_compile_targets.py compile: types of their arguments, constants, config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout

from groupbench.kernels import elementwise, outer_k
from groupbench.kernels.attention import softmax
from groupbench.kernels.bias_add_permute import fused, fused_specialized
from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import (
    flat,
    flat_pointers,
    flat_specialized,
    fp8,
    fp8_specialized,
    quantize,
    wgrad,
    wgrad_specialized,
)
from groupbench.kernels.moe import gate_up, permute, permute_fused, routing, swiglu
from groupbench.kernels.split_k import stream, tiled

Source = tuple[Any, dict[str, str], dict[str, Any], Any]  # kernel, types of its arguments, constants, config
HOPPER = KNOWN["sm_90"]
SMS = HOPPER.sms
GROUPS = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPED = "block_m block_n block_k group_m"
TILES = f"{GROUPED} swap split_store flatten"
"""The fields that the configs of flat and fp8 share."""


@dataclass
class Plain:
    num_warps: int
    num_stages: int = 3


def fields(config: Any, names: str) -> dict[str, Any]:
    """Return fields of a config as the constants of the same names."""
    return {name.upper(): getattr(config, name) for name in names.split()}


def described(shape: list[int], dtype: str = "bf16") -> str:
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}]>"


def swizzled(dtype: str, bits: int, swizzle: int, *shape: int) -> str:
    """Return the type of a descriptor of Gluon, whose tiles lie swizzled in shared memory."""
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{NVMMASharedLayout(swizzle, bits, rank=len(shape))!r}>"


def of_flat(config: flat.FlatConfig, nk: bool = False, G: int = GROUPS) -> Source:
    m, n, k = config.block_m, config.block_n, config.block_k
    types = {
        "a_desc": described([m, k]),
        "b_desc": described([1, n, k] if nk else [1, k, n]),
        "out_desc": described([1, 1, m, n // (2 if config.split_store else 1)]),
        "a_half_desc": described([m // 2, k]),
        "out_ptr": "*bf16",
    }
    constants = {"G": G, "G_POW2": G, "SHARED_B": False, "B_IS_NK": nk, "PRECISION": "ieee"}
    constants |= fields(config, f"{TILES} halves") | {"NUM_PROGRAMS": SMS * config.per_sm}
    return flat._flat_kernel, types, constants | ({} if config.halves else {"a_half_desc": None}), config


def of_pointers(config: Any) -> Source:
    """Return the same for strides and sizes without known divisors."""
    constants = {"NUM_PROGRAMS": SMS, "G": GROUPS, "G_POW2": GROUPS, "EVEN_K": False, "PRECISION": "ieee"}
    types = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), "*bf16")
    return flat_pointers._flat_pointer_kernel, types, constants | fields(config, GROUPED), config


def of_wgrad(config: wgrad.WgradConfig, dtype: str = "bf16", tma: bool = True) -> Source:
    p, q, m = config.block_p, config.block_q, config.block_m
    types = dict.fromkeys(("x", "y", "out"), f"*{dtype}")
    if tma:
        shapes = {"x": [1, 1, m, p], "y": [1, 1, m, q], "out": [1, p, q // (2 if config.split_store else 1)]}
        types = {name: described(shape, dtype) for name, shape in shapes.items()}
    constants = fields(config, "block_p block_q block_m group_p split_store dynamic") | {"stride_xp": 1, "stride_yq": 1}
    constants |= {"TMA": tma, "DTYPE": wgrad._TRITON_DTYPES[DTYPES[dtype]], "NUM_PROGRAMS": SMS * config.per_sm}
    return wgrad._wgrad_kernel, types, constants, config


def of_fp8(config: fp8.Fp8Config, mode: str) -> Source:
    m, n, k = config.block_m, config.block_n, config.block_k
    types = {
        "a_desc": described([m, k], "fp8e4nv"),
        "b_desc": described([1, n, k], "fp8e4nv"),
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "out_desc": described([1, 1, m, n // (2 if config.split_store else 1)]),
        "out_ptr": "*bf16",
    }
    constants = {"G": GROUPS, "G_POW2": GROUPS, "FAST_ACCUM": mode == fp8.ROWWISE_FAST}
    constants |= fields(config, TILES) | {"NUM_PROGRAMS": SMS * config.per_sm, "SCALE_BLOCK": scale_block(mode)}
    return fp8._fp8_kernel, types, constants, config


def scale_block(mode: str) -> int:
    return fp8.SCALE_BLOCK if mode == fp8.BLOCKWISE else 0


def of_flat_specialized(config: flat.FlatConfig, nk: bool = False, G: int = GROUPS) -> Source:
    k, groups = config.block_k, config.block_m // 64
    main, side = {256: (256, 0), 192: (128, 64)}[config.block_n]
    types = {
        "a_desc": swizzled("bf16", 16, 128, 64, k),
        "b_desc": swizzled("bf16", 16, 128, *((1, main, k) if nk else (1, k, main))),
        "side_desc": swizzled("bf16", 16, 128, *((1, side or main, k) if nk else (1, k, side or main))),
        "out_desc": swizzled("bf16", 16, 128, 1, 1, 64, 64 if groups == 2 else main // 2),
        "out_ptr": "*bf16",
        "arrivals_ptr": "*i64",
    }
    constants = {"G": G, "G_POW2": G, "SHARED_B": False, "B_IS_NK": nk, "NUM_PROGRAMS": SMS, "SIDE": side}
    constants |= fields(config, "lockstep group_m") | {"STAGES": config.num_stages, "GROUPS": groups}
    constants |= {"BUFFERS": 2 if groups == 2 else 1}
    return flat_specialized._flat_specialized_kernel, types, constants, config


def of_wgrad_specialized(config: wgrad.WgradConfig) -> Source:
    q, m = config.block_q, config.block_m
    types = {
        "x_desc": swizzled("bf16", 16, 128, 1, 1, m, 64),
        "y_desc": swizzled("bf16", 16, 128, 1, 1, m, q),
        "out_desc": swizzled("bf16", 16, 128, 1, 64, q // (4 if config.block_p == 128 else 2)),
        "arrivals_ptr": "*i64",
    }
    constants = {"NUM_PROGRAMS": SMS, "STAGES": config.num_stages, "GROUPS": config.block_p // 64}
    constants |= fields(config, "dynamic group_p lockstep")
    return wgrad_specialized._wgrad_specialized_kernel, types, constants, config


def of_fp8_specialized(mode: str, G: int = GROUPS) -> Source:
    config = fp8.SPECIALIZED
    m, n, k = config.block_m, config.block_n, config.block_k
    types = {
        "a_desc": swizzled("fp8e4nv", 8, 128, m, k),
        "b_desc": swizzled("fp8e4nv", 8, 128, n, k),
        "out_desc": swizzled("bf16", 16, n // 2, 1, 1, m // 2, n // 4),
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    constants = {"G": G, "G_POW2": G, "NUM_PROGRAMS": SMS, "GROUP_M": config.group_m, "STAGES": config.num_stages}
    constants |= {"SCALE_BLOCK": scale_block(mode), "FAST_ACCUM": mode == fp8.ROWWISE_FAST}
    return fp8_specialized._fp8_specialized_kernel, types, constants, config


def of_gate_up(config: gate_up.GateUpConfig, save: bool = False, G: int = GROUPS) -> Source:
    m, f, k = config.block_m, config.block_f, config.block_k
    types = dict.fromkeys(("act_desc", "gate_desc", "up_desc"), described([1, 1, m, f]))
    types |= {"a_desc": described([m, k]), "w_desc": described([1, 1 if config.swap else 2, f, k])}
    constants = fields(config, "block_m block_f block_k group_m swap flatten")
    constants |= {"NUM_PROGRAMS": SMS * config.per_sm, "G": G, "G_POW2": G, "SAVE": save, "PRECISION": "ieee"}
    constants |= {"DTYPE": gate_up.TRITON_DTYPES[torch.bfloat16]}
    return gate_up._gate_up_kernel, types, constants | ({} if save else {"gate_desc": None, "up_desc": None}), config


BY_ROW = {
    "spread": permute._spread_kernel,
    "place_and_spread": permute_fused._place_and_spread_kernel,
    "combine": permute._combine_kernel,
    "swiglu_backward": swiglu._swiglu_backward_kernel,
    "count": routing._count_kernel,
    "scan": routing._scan_kernel,
    "place": routing._place_kernel,
    "route": routing._route_kernel,
}


def of_row(kernel: str, config: Any = None, G: int = 128, k: int = 8, chained: bool = True) -> Source:
    """Return the same for kernels of the MoE layer without products."""
    jitted, config = BY_ROW[kernel], config or permute.RowConfig(0, routing.WARPS)
    values = ("x", "y", "out", "both", "da", "weights", "dboth", "weighted", "dweights")
    types = dict.fromkeys((f"{name}_ptr" for name in values), "*bf16") | {"ids_ptr": "*i64"}
    constants = {
        "G": G,
        "BINS": G,
        "K": k,
        "CHOICES": triton.next_power_of_2(k),
        "BLOCK_H": config.block_h,
        "SPLITS": 1,
    }
    constants |= {"CHAINED": chained, "EVICT": "evict_first", "WEIGHTED": True, "stride_xh": 1, "stride_yh": 1}
    constants |= {"AT_ONCE": permute.AT_ONCE, "TOKENS": getattr(config, "tokens", None), "BLOCK": config.block_h}
    if kernel in ("count", "scan", "place", "route"):
        constants |= {"CHOICES": routing.BLOCK, "BLOCK": routing.BLOCK}
        constants |= {"ROWS": routing.SCANNED[0], "EXPERTS": routing.SCANNED[1]}
    if kernel == "swiglu_backward":
        del constants["G"]  # which it takes at run time
    return jitted, types, {name: value for name, value in constants.items() if name in jitted.arg_names}, config


def of_fused(config: fused.FusedConfig, op: str, dtype: str = "bf16", even: bool = True) -> Source:
    """Return bias_add_permute's kernel. `even`: every size is a multiple of the tile's."""
    types = {"table_ptr": "*i64", "sweeps_ptr": "*i32", "out_ptr": f"*{dtype}"}
    constants = fields(config, "block_m block_n block_k tma")
    constants |= {"OP": op, "NUM_FIELDS": len(fused.FIELDS), "PRECISION": "ieee"}
    constants |= dict.fromkeys(("A_UNIT", "B_UNIT", "E_UNIT"), True)
    constants |= dict.fromkeys(("ALIGN_K", "ALIGN_M", "ALIGN_N"), 4 if dtype == "fp32" else 8)
    constants |= dict.fromkeys(("EVEN_M", "EVEN_N", "EVEN_K", "WHOLE_M", "WHOLE_N"), even)
    return fused._fused_kernel, types, constants, config


def of_fused_specialized(op: str, dtype: str = "bf16", even: bool = True) -> Source:
    types = {"sweeps_ptr": "*i64", "taken_ptr": "*i32", "out_ptr": f"*{dtype}"}
    config = fused_specialized.CONFIG
    constants = fields(config, "block_m block_n block_k") | {"OP": op, "WIDTH": fused_specialized.WIDTH}
    constants |= {"STAGES": config.num_stages, "A_TILES": fused_specialized.A_TILES}
    constants |= dict.fromkeys(("EVEN", "WHOLE_M", "WHOLE_N"), even)
    return fused_specialized._fused_specialized_kernel, types, constants, config


def of_pointers_to(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{dtype}") | {"slots_ptr": "*i32"}


def of_split_k(M: int, N: int, K: int, dtype: str = "bf16", nk: bool = True, mode: Any = tiled.FIXUP,
               config: Any = None, compiled: bool = True) -> Source:  # fmt: skip
    config = config or tiled.choose_config(M, N, K, DTYPES[dtype], SMS)
    types = of_pointers_to(dtype) | ({"out_ptr": "*fp32"} if mode is tiled.ATOMIC else {})
    constants = tiled.kernel_constants(config, M, K, mode.value, compiled)
    return tiled._split_k_kernel, types, constants | {"stride_ak": 1, "stride_bk" if nk else "stride_bn": 1}, config


def of_stream(M: int, N: int, K: int, dtype: str = "bf16") -> Source:
    config = stream.choose_stream(M, N, K, SMS)
    return stream._stream_kernel, of_pointers_to(dtype), stream.stream_constants(config, M, N, K), config


def of_outer_k(dtype: str = "bf16", nk: bool = False, config: Any = None) -> Source:
    config = config or outer_k.default_config(HOPPER, DTYPES[dtype])
    constants = outer_k.kernel_constants(config, 4096) | {"stride_ak": 1, "stride_bk" if nk else "stride_bn": 1}
    return outer_k._outer_k_kernel, of_pointers_to(dtype), constants, config


def of_add(dtype: str) -> Source:
    config = elementwise.CONFIGS["flat"]
    types = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), f"*{dtype}")
    return elementwise._flat_kernel, types, {"WIDE": False, "BLOCK": config.block}, Plain(config.num_warps, 1)


def of_sum() -> Source:
    constants = {"SPLITS": 64, "PDL": True, "BLOCK_M": 64, "BLOCK_N": 64, "PART": 256, "CHUNK": 32}
    return tiled._sum_kernel, {"slots_ptr": "*i32", "out_ptr": "*bf16"}, constants, Plain(4, 1)


def of_softmax(kernel: Any, size: int, warps: int) -> Source:
    types = dict.fromkeys(("x_ptr", "y_ptr", "dy_ptr", "dx_ptr"), "*bf16")
    constants = {"COLUMNS": size // 2, "BLOCK": softmax.BLOCK, "PACKED": 2}
    return kernel, types, {name: constants[name] for name in kernel.arg_names if name in constants}, Plain(warps, 1)


def of_helion_barrier() -> Source:
    """Return Helion's kernel for 16 x 1024 x 16384 in bf16, with the constants that its host code passes."""
    from groupbench.kernels.split_k import helion_barrier

    a = torch.empty(16, 16384, dtype=torch.bfloat16)
    b = torch.empty(1024, 16384, dtype=torch.bfloat16).t()
    config = helion_barrier.default_config(16, 1024, 16384, torch.bfloat16, HOPPER)
    compiled = helion_barrier.split_k_matmul_barrier.bind((a, b)).compile_config(config)
    kernel, splits = compiled.__globals__["_helion_split_k_matmul_barrier"], config.config["split_k"]
    constants = {"_NUM_SM": SMS, "_BLOCK_SIZE_2": 16384 // splits, "_RDIM_SIZE_6": splits}
    types = {"partial": "*fp32", "a": "*bf16", "b": "*bf16", "out": "*bf16", "x_grid_sem": "*u32"}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return kernel, types, constants, Plain(config.config["num_warps"], config.config["num_stages"])


def of_quantize(kernel: Any) -> Source:
    types = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"SMALLEST": quantize.SMALLEST_AMAX, "EMULATED": False}
    if kernel is quantize._quantize_rows_kernel:
        return kernel, types, constants | {"WHOLE": True, "BLOCK_K": quantize.WHOLE_ROW}, Plain(8)
    return kernel, types, constants | {"BLOCK_M": quantize.TILE_ROWS, "BLOCK_K": quantize.SCALE_BLOCK}, Plain(4)


LARGE, MANY = flat.CONFIGS["large"], flat.CONFIGS["many"]
SPECIALIZED, COLUMNS = flat.CONFIGS["specialized"], flat.CONFIGS["specialized_192"]
TALLER = replace(SPECIALIZED, block_m=192, num_stages=3)
WGRAD, WGRAD_TALLER = wgrad.CONFIGS["large"], wgrad.CONFIGS["specialized_192"]


def tokens(H: int, k: int, G: int) -> Any:
    return permute_fused.choose_tokens(torch.empty(8192, H, dtype=torch.bfloat16, device="meta"), k, G)


CASES: dict[str, tuple[Any, ...]] = {
    "flat_large": (of_flat, LARGE),
    "flat_large_nk": (of_flat, LARGE, True),
    "flat_many_256": (of_flat, MANY, True, 256),
    "flat_halves": (of_flat, replace(MANY, flatten=False, halves=True), True),
    "flat_decode_nk": (of_flat, flat.CONFIGS["decode"], True),
    "flat_specialized_nk": (of_flat_specialized, SPECIALIZED, True),
    "flat_specialized_256": (of_flat_specialized, SPECIALIZED, False, 256),
    "flat_specialized_alone": (of_flat_specialized, replace(SPECIALIZED, lockstep=0)),
    "flat_specialized_192_nk": (of_flat_specialized, TALLER, True),
    "flat_specialized_192": (of_flat_specialized, TALLER, False, 256),
    "flat_specialized_192_columns_nk": (of_flat_specialized, COLUMNS, True),
    "flat_specialized_192_columns": (of_flat_specialized, COLUMNS, False, 256),
    "pointers_large": (of_pointers, flat_pointers.choose_config(999, torch.bfloat16, HOPPER)),
    "pointers_decode": (of_pointers, flat_pointers.choose_config(8, torch.bfloat16, HOPPER)),
    "wgrad_large": (of_wgrad, WGRAD),
    "wgrad_paired": (of_wgrad, wgrad.default_config(999, 8, 4096, 4096, torch.bfloat16, HOPPER)),
    "wgrad_wide_and_dynamic": (of_wgrad, replace(WGRAD, dynamic=True)),
    "wgrad_pointers": (of_wgrad, wgrad.CONFIGS["pointers"], "bf16", False),
    "wgrad_fp32": (of_wgrad, wgrad.CONFIGS["fp32"], "fp32"),
    "wgrad_specialized": (of_wgrad_specialized, wgrad.CONFIGS["specialized"]),
    "wgrad_specialized_uneven": (of_wgrad_specialized, wgrad.CONFIGS["specialized_uneven"]),
    "wgrad_specialized_192": (of_wgrad_specialized, WGRAD_TALLER),
    "wgrad_specialized_192_lockstep": (of_wgrad_specialized, replace(WGRAD_TALLER, dynamic=False, lockstep=16)),
    "wgrad_specialized_alone": (of_wgrad_specialized, replace(wgrad.CONFIGS["specialized"], lockstep=0)),
    **{f"fp8_{mode}": (of_fp8, fp8.CONFIGS[mode]["plain"], mode) for mode in fp8.MODES},
    "fp8_blockwise_decode": (of_fp8, fp8.CONFIGS[fp8.BLOCKWISE]["decode"], fp8.BLOCKWISE),
    **{f"fp8_specialized_{mode}": (of_fp8_specialized, mode) for mode in fp8.MODES},
    **{f"fp8_specialized_{mode}_256": (of_fp8_specialized, mode, 256) for mode in (fp8.ROWWISE, fp8.BLOCKWISE)},
    "gate_up_large": (of_gate_up, gate_up.CONFIGS["large"]),
    "gate_up_large_training": (of_gate_up, gate_up.CONFIGS["large"], True),
    "gate_up_many_256_training": (of_gate_up, replace(gate_up.CONFIGS["large"], num_stages=3), True, 256),
    "gate_up_decode": (of_gate_up, gate_up.CONFIGS["decode"], False, 256),
    "moe_spread": (of_row, "spread", permute.choose_config(8192, 7168, 2)),
    "moe_place_and_spread": (of_row, "place_and_spread", tokens(2048, 8, 128)),
    "moe_place_and_spread_of_wide": (of_row, "place_and_spread", tokens(2880, 6, 32), 32, 6),
    "moe_combine": (of_row, "combine", permute.choose_config(8192, 2048, 2, rows=8)),
    "moe_combine_of_two": (of_row, "combine", permute.choose_config(8192, 7168, 2, rows=2, vectors=4), 128, 2),
    "moe_swiglu_backward": (of_row, "swiglu_backward", permute.RowConfig(swiglu.MAX_BLOCK, 4)),
    **{f"moe_{name}": (of_row, name) for name in ("count", "scan", "place")},
    "moe_route": (of_row, "route", None, 256),
    "seed": (of_split_k, 16, 16, 4096),
    "seed_fp32": (of_split_k, 16, 16, 4096, "fp32"),
    "seed_long": (of_split_k, 16, 16, 131072),
    "square": (of_split_k, 64, 64, 32768),
    "decode": (of_split_k, 16, 4096, 4096),
    "decode_kn": (of_split_k, 16, 4096, 4096, "bf16", False),
    "decode_32": (of_split_k, 32, 4096, 14336),
    "decode_64": (of_split_k, 64, 4096, 14336),
    "decode_64_fp32": (of_split_k, 64, 4096, 4096, "fp32"),
    "wide": (of_split_k, 128, 4096, 4096),
    "leave": (of_split_k, 64, 512, 32768, "bf16", True, tiled.LEAVE),
    "atomic": (of_split_k, 64, 512, 32768, "bf16", True, tiled.ATOMIC),
    # Up to 16 rows and weights as [N, K]: stream.py takes them on Hopper.
    "stream_seed": (of_stream, 16, 16, 4096),
    "stream_router": (of_stream, 16, 128, 2880),
    "stream_long": (of_stream, 16, 16, 131072),
    "stream_long_64": (of_stream, 16, 64, 65536),
    "stream_split": (of_stream, 16, 1024, 16384),
    "stream_narrow": (of_stream, 16, 2112, 7168),
    "stream_decode": (of_stream, 16, 4096, 4096),
    "stream_one_row": (of_stream, 1, 4096, 14336),
    "stream_ragged": (of_stream, 9, 2111, 7184),
    "stream_fp16": (of_stream, 16, 4096, 4096, "fp16"),
    "outer_k": (of_outer_k,),
    "outer_k_nk": (of_outer_k, "bf16", True),
    "outer_k_fp32": (of_outer_k, "fp32"),
    "sum": (of_sum,),
    "add_bf16": (of_add, "bf16"),
    "add_fp32": (of_add, "fp32"),
    "helion_barrier": (of_helion_barrier,),
    "row": (of_softmax, softmax._whole_row_kernel, softmax.WHOLE_ROW, 16),
    "row_backward": (of_softmax, softmax._long_row_backward_kernel, softmax.WHOLE_ROW_BACKWARD, 32),
    "none": (of_fused, fused.CONFIGS["none"], "none"),
    "none_ragged": (of_fused, fused.CONFIGS["none"], "none", "bf16", False),
    "mul": (of_fused, fused.CONFIGS["operand"], "mul"),
    "mul_ragged": (of_fused, fused.CONFIGS["operand"], "mul", "bf16", False),
    "add": (of_fused, fused.CONFIGS["operand"], "add", "fp16"),
    "pointers_ragged": (of_fused, fused.CONFIGS["pointers"], "none", "bf16", False),
    "pointers_mul_ragged": (of_fused, fused.CONFIGS["pointers"], "mul", "bf16", False),
    "fp32_ragged": (of_fused, fused.CONFIGS["fp32"], "mul", "fp32", False),
    # The configs that tuning may choose, including the kernel's own above.
    **{
        f"candidate_{op}_{i}": (of_fused, config, op)
        for op in ("none", "mul")
        for i, config in enumerate(fused.candidates(op))
    },
    "specialized_none": (of_fused_specialized, "none"),
    "specialized_none_ragged": (of_fused_specialized, "none", "fp16", False),
    "specialized_mul": (of_fused_specialized, "mul"),
    "specialized_mul_ragged": (of_fused_specialized, "mul", "bf16", False),
    "specialized_add": (of_fused_specialized, "add", "fp16"),
}
