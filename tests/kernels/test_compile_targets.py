"""Compile the default configs for GPUs that this machine lacks, each within its GPU's shared memory.

By default a few kernels per GPU are compiled, with --exhaustive all of them. None of them runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch

from groupbench.kernels import outer_k
from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.device import KNOWN, Device, fitted
from groupbench.kernels.grouped_gemm import contiguous, flat, flat_pointers, fp8, pointer, quantize, wgrad
from groupbench.kernels.moe import gate_up, permute, routing
from groupbench.kernels.split_k import tiled

BF16 = torch.bfloat16
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
# The kernels that the default run compiles, by architecture: those that come closest to its limit.
FEW = {
    "sm_80": ("split_k_128",),
    "sm_86": ("contiguous",),
    "sm_89": ("pointer",),
    "sm_100": ("fp8_rowwise_fast_plain", "flat_large"),
    "sm_120": ("flat_large", "fp8_blockwise_large"),
    "gfx942": ("contiguous", "route"),
}
Source = tuple[Any, dict[str, str], dict[str, Any], Any]  # kernel, types of its arguments, constants, config


def grouped(gpu: Device) -> dict[str, Callable[[], Source]]:
    """Return the kernels that read by TMA."""
    import test_compile as hopper

    cases: dict[str, Callable[[], Source]] = {}
    for rows, name in ((8, "decode"), (20, "decode_32"), (60, "small"), (4000, "large")):
        M, G = 64 * rows, 64
        flat_config = flat.default_config(M, G, BF16, gpu)
        cases[f"flat_{name}"] = lambda c=flat_config: (*hopper.of_flat(c, nk=True), c)  # type: ignore[misc]
        up = gate_up.choose_config(M, G, 4096, 4096, BF16, gpu)
        cases[f"gate_up_{name}"] = lambda c=up: (*hopper.of_gate_up(c), c)  # type: ignore[misc]
        of_wgrad = wgrad.default_config(M, G, 4096, 4096, BF16, gpu)
        cases[f"wgrad_{name}"] = lambda c=of_wgrad: (*hopper.of_wgrad(c), c)  # type: ignore[misc]
        for mode in fp8.MODES:
            for which, config, _ in fp8.configs_for(mode, M, G, 4096, 4096, gpu):
                if not config.specialized and which in ("default", "plain"):
                    label = f"fp8_{mode}_{'plain' if which == 'plain' else name}"
                    cases[label] = lambda c=config, mode=mode: (*hopper.of_fp8(c, mode), c)  # type: ignore[misc]
        if f"fp8_{fp8.BLOCKWISE}_large" not in cases:
            cases[f"fp8_{fp8.BLOCKWISE}_large"] = cases[f"fp8_{fp8.BLOCKWISE}_plain"]
    cases |= {f"fused_{name}": lambda n=name: of_fused(gpu, n) for name in ("none", "operand")}  # type: ignore[misc]
    for kind, kernel in (("rows", quantize._quantize_rows_kernel), ("blocks", quantize._quantize_blocks_kernel)):
        cases[f"quantize_{kind}"] = lambda k=kernel: of_quantize(k)  # type: ignore[misc]
    many = flat.default_config(256 * 500, 256, BF16, gpu)
    cases["flat_many"] = lambda: (*hopper.of_flat(many, nk=True, G=256), many)
    return cases


def of_fused(gpu: Device, name: str) -> Source:
    """Return bias_add_permute's default config of a name, for operands in bf16, or in fp32 for the name "fp32"."""
    import test_compile_bias_add_permute as hopper

    which, _, op = name.partition("_")
    op = op or ("none" if which in ("none", "pointers") else "mul")
    dtype, text = (torch.float32, "fp32") if which == "fp32" else (BF16, "bf16")
    config = fitted(fused.CONFIGS[which], lambda smaller: fused.illegal(smaller, dtype, op, gpu))
    return hopper.inputs_of(config, op, text, even=True)


def of_quantize(kernel: Any) -> Source:
    types = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"SMALLEST": quantize.SMALLEST_AMAX, "EMULATED": False}
    if kernel is quantize._quantize_rows_kernel:
        constants |= {"WHOLE": True, "BLOCK_K": quantize.WHOLE_ROW}
        return kernel, types, constants, permute.RowConfig(0, 8)
    constants |= {"BLOCK_M": quantize.TILE_ROWS, "BLOCK_K": quantize.SCALE_BLOCK}
    return kernel, types, constants, permute.RowConfig(0, 4)


def anywhere(gpu: Device) -> dict[str, Callable[[], Source]]:
    """Return the kernels that read by pointers."""
    import test_compile as hopper

    def of_pointer() -> Source:
        config = pointer.default_config(gpu, BF16)
        constants = {name.upper(): getattr(config, name) for name in ("block_m", "block_n", "block_k", "group_m")}
        constants |= {"A_K_UNIT": True, "B_N_UNIT": False, "ALIGN": 8, "PRECISION": "ieee"}
        return pointer._pointer_kernel, {"table_ptr": "*i64", "c_ptr": "*bf16"}, constants, config

    def of_contiguous() -> Source:
        config = contiguous.default_config(gpu, BF16)
        names = ("block_m", "block_n", "block_k", "super_group_m", "group_size_m")
        constants = {name.upper(): getattr(config, name) for name in names}
        constants |= {"HAS_MAP": True, "EVEN_K": True, "PRECISION": "ieee", "stride_ak": 1, "stride_wk": 1}
        types = dict.fromkeys(("a_ptr", "w_ptr", "out_ptr"), "*bf16")
        return contiguous._contiguous_kernel, types, constants, config

    def of_split_k(M: int, dtype: str = "bf16") -> Source:
        of = {"bf16": BF16, "fp32": torch.float32}[dtype]
        config = tiled.default_config(M, 4096, 14336, of, gpu)
        types = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{dtype}") | {"slots_ptr": "*i32"}
        constants = tiled.kernel_constants(config, M, 14336, tiled.FIXUP.value, gpu.vendor == "cuda")
        return tiled._split_k_kernel, types, constants | {"stride_ak": 1, "stride_bk": 1}, config

    def of_route(kernel: str) -> Source:
        config = permute.RowConfig(0, routing.WARPS)
        jitted, types, constants = hopper.of_by_row(config, kernel, G=256)
        return jitted, types, constants | {"CHAINED": gpu.chains}, config

    def of_pointers(rows: int) -> Source:
        config = flat_pointers.choose_config(rows, BF16, gpu)
        return (*hopper.of_pointers(config), config)

    def of_wgrad(dtype: str) -> Source:
        config = wgrad.pointer_config({"bf16": BF16, "fp32": torch.float32}[dtype], gpu)
        return (*hopper.of_wgrad(config, dtype, tma=False), config)

    def of_outer_k(dtype: str) -> Source:
        of = {"bf16": BF16, "fp32": torch.float32}[dtype]
        config = outer_k.default_config(gpu, of)
        names = ("block_m", "block_n", "block_k")
        constants = {name.upper(): getattr(config, name) for name in names} | {"EVEN_K": True, "PRECISION": "ieee"}
        types = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{dtype}")
        return outer_k._outer_k_kernel, types, constants | {"stride_ak": 1, "stride_bn": 1}, config

    cases: dict[str, Callable[[], Source]] = {"pointer": of_pointer, "contiguous": of_contiguous}
    cases |= {f"outer_k_{dtype}": lambda d=dtype: of_outer_k(d) for dtype in ("bf16", "fp32")}  # type: ignore[misc]
    cases |= {f"fused_{name}": lambda n=name: of_fused(gpu, n) for name in ("pointers", "pointers_mul", "fp32")}  # type: ignore[misc]
    cases |= {f"pointers_{rows}": lambda rows=rows: of_pointers(rows) for rows in (8, 60, 999)}  # type: ignore[misc]
    cases |= {f"wgrad_pointers_{dtype}": lambda d=dtype: of_wgrad(d) for dtype in ("bf16", "fp32")}  # type: ignore[misc]
    cases |= {f"split_k_{M}": lambda M=M: of_split_k(M) for M in (16, 64, 128)}  # type: ignore[misc]
    cases["split_k_fp32"] = lambda: of_split_k(64, "fp32")
    cases |= {kernel: lambda k=kernel: of_route(k) for kernel in ("count", "scan", "place", "route")}  # type: ignore[misc]
    return cases


def cases_of(arch: str) -> dict[str, Callable[[], Source]]:
    gpu = replace(KNOWN[arch], name="untuned")
    return anywhere(gpu) | (grouped(gpu) if gpu.tma else {})


def main() -> None:
    """Compile the cases in the arguments, `sm_90:large`, or all of a GPU, `sm_90:`; print their shared memory."""
    from compiling import built

    rows: dict[str, Any] = {}
    for target in sys.argv[1:]:
        arch, _, name = target.partition(":")
        cases = cases_of(arch)
        for each in [name] if name else cases:
            kernel, types, constants, config = cases[each]()
            try:
                shared = built(kernel, types, constants, config, kernel.arg_names, arch).metadata.shared
            except Exception as error:
                shared = f"{type(error).__name__}: {error}"[-400:]
            rows[f"{arch}:{each}"] = shared
    print(json.dumps(rows))


def target_names(which: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{arch}:{name}" for arch, names in which.items() for name in names]


def check(rows: dict[str, Any], names: list[str]) -> None:
    assert list(rows) == names
    limits = {arch: gpu.shared_bytes for arch, gpu in KNOWN.items()}
    wrong = {
        name: shared
        for name, shared in rows.items()
        if not isinstance(shared, int) or shared > limits[name.split(":")[0]]
    }
    assert not wrong


def test_the_largest_defaults_fit_their_gpus(compile_for_hopper: Callable[..., Any]) -> None:
    names = target_names(FEW)
    check(compile_for_hopper(__file__, *names), names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_every_default_fits_its_gpu(arch: str, compile_for_hopper: Callable[..., Any]) -> None:
    rows = compile_for_hopper(__file__, f"{arch}:")
    assert len(rows) > 10
    check(rows, list(rows))


if __name__ == "__main__":
    main()
