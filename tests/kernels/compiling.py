"""Compile kernels for GPUs that this machine lacks, for tests that run themselves as scripts (see conftest.py)."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager

# As conftest.py does: Helion imports scikit-learn for a search that no test runs.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]

LOG = "ptxas.log"
"""A file of Triton's cache that these functions add to the kernel's own."""


def target_of(arch: str) -> GPUTarget:
    """Return Triton's target for an architecture, such as sm_90 or gfx942."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def built(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    config: Any,
    odd: Collection[str] = ("G",),  # sizes that need not be multiples of 16
    arch: str = "sm_90",
) -> Any:
    """Return the kernel, compiled to machine code. Passes the compiler's exceptions on."""
    signature, aligned = {}, []
    for name in kernel.arg_names:
        signature[name] = "constexpr" if name in constants else types.get(name, "*i32" if "_ptr" in name else "i32")
        if name not in constants and "tensordesc" not in signature[name]:
            # As Triton specialises the sizes, strides and addresses of operands that TMA can read; `odd` may be any.
            pointers = signature["x"].startswith("*") if "x" in signature else False
            if name.endswith("_ptr") or signature[name].startswith("*") or (name not in odd and not pointers):
                aligned.append(name)
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature,
        constexprs={index[name]: value for name, value in constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": getattr(config, "num_stages", 3)}
    target = target_of(arch)
    if getattr(config, "registers", None) is not None and target.backend == "cuda":
        options["maxnreg"] = config.registers
    return triton.compile(source, target=target, options=options)


def built_with_log(*arguments: Any) -> tuple[str, Any]:
    """Return the output of ptxas about a kernel, and the kernel. Compile it if Triton's cache lacks either."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        code = built(*arguments)
    cache = get_cache_manager(code.metadata.hash)
    if printed.getvalue():
        return Path(cache.put(printed.getvalue(), LOG, binary=False)).read_text(), code
    if (log := cache.get_file(LOG)) is not None:
        return Path(log).read_text(), code
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        return built_with_log(*arguments)


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    config: Any,
    odd: Collection[str] = ("G",),
    arch: str = "sm_90",
) -> dict[str, Any]:
    """Return ptxas's numbers of registers and memory, and the memory and wgmma instructions in Triton's PTX."""
    output, code = built_with_log(kernel, types, constants, config, odd, arch)
    ptx = code.asm["ptx"]
    labels = ("registers", "bytes spill stores", "bytes stack frame")
    numbers = [re.search(rf"(\d+) {label}", output) for label in labels]
    registers, spilled, stack = (int(number[1]) for number in numbers if number)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "local_bytes": stack,
        "shared_bytes": code.metadata.shared,
        "barriers_shared": barriers_that_share(ptx),
        "wgmma": ptx.count("wgmma.mma_async"),
        "stores": sorted(set(re.findall(r"st\.global[\w.:]*", ptx))),
        "once_loads": sorted(set(re.findall(r"ld\.global\.L1::evict_first[\w.:]*", ptx))),
        "async_copies": sorted(set(re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))),
    }


def barriers_that_share(ptx: str) -> list[str]:
    """Return the addresses of mbarriers in shared memory that overlap with another one or with a TMA descriptor."""
    offsets = dict(re.findall(r"add\.s32 \t(%r\d+), %r\d+, (\d+);", ptx))
    initialised = re.findall(r"mbarrier\.init[\w.:]* \[\s*(%r\d+|global_smem\+\d+)", ptx)
    places = [offsets.get(place, place.rpartition("+")[2]) for place in initialised]
    wide = dict(re.findall(r"cvt\.u64\.u32 \t(%rd\d+), (%r\d+);", ptx))
    descriptors = {
        int(offsets[wide[name]])
        for name in re.findall(r"tensormap\.replace[\w.:]* \[ ?(%rd\d+)", ptx)
        if wide.get(name) in offsets
    }
    return sorted(
        {
            place
            for place in places
            if places.count(place) > 1 or any(place.isdigit() and 0 <= int(place) - at < 128 for at in descriptors)
        }
    )
