"""Compiles the weights' gradient for Hopper (sm_90) and prints, a line of JSON a config, what ptxas said of it.

Not a test: test_wgrad.py runs it in a process where Triton compiles instead of interpreting. No GPU is needed. Exit
code 77 where the Triton at hand cannot be asked so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
import triton.language as tl

from groupbench.kernels.grouped_gemm import wgrad

DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def compiled(config: wgrad.WgradConfig, dtype: str, tma: bool) -> dict[str, object]:
    """Registers, spills and shared memory of the kernel with this config."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = wgrad._wgrad_kernel
    width = config.block_q // (2 if config.split_store else 1)
    tiles = {
        "x": f"[1, 1, {config.block_m}, {config.block_p}]",
        "y": f"[1, 1, {config.block_m}, {config.block_q}]",
        "out": f"[1, {config.block_p}, {width}]",
    }
    constants: dict[str, object] = {
        "TMA": tma,
        "DTYPE": DTYPES[dtype],
        "NUM_PROGRAMS": 132 * config.per_sm,
        "BLOCK_P": config.block_p,
        "BLOCK_Q": config.block_q,
        "BLOCK_M": config.block_m,
        "GROUP_P": config.group_p,
        "SPLIT_STORE": config.split_store,
        "DYNAMIC": config.dynamic,
        "stride_xp": 1,
        "stride_yq": 1,
    }
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in tiles:
            signature[name] = f"tensordesc<{dtype}{tiles[name]}>" if tma else f"*{dtype}"
        else:
            signature[name] = "*i32" if name.endswith("_ptr") else "i32"
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = [n for n in ("P", "Q", "stride_x", "stride_y") if tma] + [
        "offs_ptr",
        "plan_ptr",
        *(tiles if not tma else ()),
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={index[name]: value for name, value in constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    said = ptxas(built.asm["ptx"])
    return {
        "config": config.__dict__,
        "dtype": dtype,
        "tma": tma,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "shared_bytes": built.metadata.shared,
        "wgmma": built.asm["ptx"].count("wgmma.mma_async"),
    }


def ptxas(ptx: str) -> str:
    """What the assembler says of PTX for sm_90a."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [program, "-v", "--gpu-name=sm_90a", file, "-o", Path(folder) / "kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    named = {
        config: "fp32" if name == "fp32" else "bf16" for name, config in wgrad.CONFIGS.items() if "cpu" not in name
    }
    # The order of tiles is a number in the code and changes nothing of its kind.
    tried = {replace(config, group_p=8): "bf16" for rows in (1, 5000) for config in wgrad.candidates(rows)}
    for config, dtype in (tried | named).items():
        print(json.dumps(compiled(config, dtype, tma=config != wgrad.CONFIGS["pointers"])))


if __name__ == "__main__":
    try:
        from triton.backends.compiler import GPUTarget  # noqa: F401
        from triton.compiler import ASTSource  # noqa: F401
    except ImportError as error:
        print(f"this Triton compiles for no other machine: {error}", file=sys.stderr)
        sys.exit(77)
    main()
