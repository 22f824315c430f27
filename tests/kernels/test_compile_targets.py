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
import sources
import torch

from groupbench.kernels import outer_k
from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.device import KNOWN, Device, fitted
from groupbench.kernels.grouped_gemm import contiguous, flat, flat_pointers, fp8, pointer, quantize, wgrad
from groupbench.kernels.moe import gate_up
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


def by_tma(gpu: Device) -> dict[str, tuple[Any, ...]]:
    """Return the kernels that read by TMA: how to make each, and the arguments."""
    cases: dict[str, tuple[Any, ...]] = {}
    for rows, name in ((8, "decode"), (20, "decode_32"), (60, "small"), (4000, "large")):
        M, G = 64 * rows, 64
        cases[f"flat_{name}"] = sources.of_flat, flat.default_config(M, G, BF16, gpu), True
        cases[f"gate_up_{name}"] = sources.of_gate_up, gate_up.choose_config(M, G, 4096, 4096, BF16, gpu)
        cases[f"wgrad_{name}"] = sources.of_wgrad, wgrad.default_config(M, G, 4096, 4096, BF16, gpu)
        for mode in fp8.MODES:
            for which, config, _ in fp8.configs_for(mode, M, G, 4096, 4096, gpu):
                if not config.specialized and which in ("default", "plain"):
                    label = f"fp8_{mode}_{'plain' if which == 'plain' else name}"
                    cases[label] = sources.of_fp8, config, mode
        cases.setdefault(f"fp8_{fp8.BLOCKWISE}_large", cases.get(f"fp8_{fp8.BLOCKWISE}_plain", ()))
    cases |= {f"fused_{name}": of_fused(gpu, name) for name in ("none", "operand")}
    kernels = {"rows": quantize._quantize_rows_kernel, "blocks": quantize._quantize_blocks_kernel}
    cases |= {f"quantize_{kind}": (sources.of_quantize, kernel) for kind, kernel in kernels.items()}
    cases["flat_many"] = sources.of_flat, flat.default_config(256 * 500, 256, BF16, gpu), True, 256
    return cases


def of_fused(gpu: Device, name: str) -> tuple[Any, ...]:
    """Return bias_add_permute's default config of a name, for operands in bf16, or in fp32 for the name "fp32"."""
    which, _, op = name.partition("_")
    op = op or ("none" if which in ("none", "pointers") else "mul")
    dtype = "fp32" if which == "fp32" else "bf16"
    config = fitted(fused.CONFIGS[which], lambda c: fused.illegal(c, sources.DTYPES[dtype], op, gpu))
    return sources.of_fused, config, op, dtype


def of_pointer(gpu: Device) -> sources.Source:
    config = pointer.default_config(gpu, BF16)
    constants = {"A_K_UNIT": True, "B_N_UNIT": False, "ALIGN": 8, "PRECISION": "ieee"}
    types = {"table_ptr": "*i64", "c_ptr": "*bf16"}
    return pointer._pointer_kernel, types, constants | sources.fields(config, sources.GROUPED), config


def of_contiguous(gpu: Device) -> sources.Source:
    config = contiguous.default_config(gpu, BF16)
    constants = sources.fields(config, "block_m block_n block_k super_group_m group_size_m")
    constants |= {"HAS_MAP": True, "EVEN_K": True, "PRECISION": "ieee", "stride_ak": 1, "stride_wk": 1}
    return contiguous._contiguous_kernel, dict.fromkeys(("a_ptr", "w_ptr", "out_ptr"), "*bf16"), constants, config


def by_pointers(gpu: Device) -> dict[str, tuple[Any, ...]]:
    """Return the kernels that read by pointers, as `by_tma`."""
    cases: dict[str, tuple[Any, ...]] = {"pointer": (of_pointer, gpu), "contiguous": (of_contiguous, gpu)}
    for name in ("bf16", "fp32"):
        of = sources.DTYPES[name]
        cases[f"outer_k_{name}"] = sources.of_outer_k, name, False, outer_k.default_config(gpu, of)
        cases[f"wgrad_pointers_{name}"] = sources.of_wgrad, wgrad.pointer_config(of, gpu), name, False
    cases |= {f"fused_{name}": of_fused(gpu, name) for name in ("pointers", "pointers_mul", "fp32")}
    for rows in (8, 60, 999):
        cases[f"pointers_{rows}"] = sources.of_pointers, flat_pointers.choose_config(rows, BF16, gpu)
    for label, M, dtype in (("16", 16, "bf16"), ("64", 64, "bf16"), ("128", 128, "bf16"), ("fp32", 64, "fp32")):
        config = tiled.default_config(M, 4096, 14336, sources.DTYPES[dtype], gpu)
        more = dtype, True, tiled.FIXUP, config, gpu.vendor == "cuda"
        cases[f"split_k_{label}"] = sources.of_split_k, M, 4096, 14336, *more
    for kernel in ("count", "scan", "place", "route"):
        cases[kernel] = sources.of_row, kernel, None, 256, 8, gpu.chains
    return cases


def main() -> None:
    """Compile the cases in the arguments, `sm_90:large`, or all of a GPU, `sm_90:`; print their shared memory."""
    from compiling import built

    rows: dict[str, Any] = {}
    for target in sys.argv[1:]:
        arch, _, name = target.partition(":")
        gpu = replace(KNOWN[arch], name="untuned")
        cases = by_pointers(gpu) | (by_tma(gpu) if gpu.tma else {})
        for each in [name] if name else cases:
            make, *arguments = cases[each]
            kernel, types, constants, config = make(*arguments)
            try:
                shared = built(kernel, types, constants, config, kernel.arg_names, arch).metadata.shared
            except Exception as error:
                shared = f"{type(error).__name__}: {error}"[-400:]
            rows[f"{arch}:{each}"] = shared
    print(json.dumps(rows))


def check(rows: dict[str, Any]) -> None:
    limits = {arch: gpu.shared_bytes for arch, gpu in KNOWN.items()}
    wrong = {name: n for name, n in rows.items() if not isinstance(n, int) or n > limits[name.split(":")[0]]}
    assert not wrong


def test_the_largest_defaults_fit_their_gpus(compile_for_hopper: Callable[..., Any]) -> None:
    names = [f"{arch}:{name}" for arch, few in FEW.items() for name in few]
    rows = compile_for_hopper(__file__, *names)
    assert list(rows) == names
    check(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_every_default_fits_its_gpu(arch: str, compile_for_hopper: Callable[..., Any]) -> None:
    rows = compile_for_hopper(__file__, f"{arch}:")
    assert len(rows) > 10
    check(rows)


if __name__ == "__main__":
    main()
