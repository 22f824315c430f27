"""Analyse a compiled kernel's code: instructions by kind, and programs per SM.

Instructions are counted in the machine code (SASS) by `nvdisasm`, which Triton's package and the CUDA toolkit include.
An instruction in a loop counts once.

Occupancy follows the limits in the CUDA C++ programming guide, table "Technical Specifications per Compute Capability",
and how registers and shared memory are handed out (the CUDA occupancy calculator).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Code, Kernel

DISASSEMBLY_S = 30.0
"""A disassembler that takes longer is given up."""

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_SASS_PRODUCT = re.compile(r"[HQIBD]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)")
_SASS_MMA = re.compile(r"[HQIBD]MMA\.(?:SP\.)?(16|8)(8)(\d+)\b")

_SASS_KINDS = (
    ("TMA load", re.compile(r"UTMALDG|UBLKCP")),
    ("TMA store", re.compile(r"UTMASTG|UTMAREDG")),
    ("async copy", re.compile(r"LDGSTS")),
    ("barrier", re.compile(r"BAR\.|UCGABAR_WAIT")),
    ("mbarrier wait", re.compile(r"SYNCS\.PHASECHK")),
    ("local load", re.compile(r"LDL\b")),
    ("local store", re.compile(r"STL\b")),
    ("atomic", re.compile(r"ATOM|RED\b|REDG")),
)


@dataclass(frozen=True)
class Limits:
    """One SM's resources on an architecture, shared by the programs on it."""

    warps: int
    programs: int
    shared_kib: int
    registers: int = 65_536


LIMITS = {
    "70": Limits(64, 32, 96),
    "75": Limits(32, 16, 64),
    "80": Limits(64, 32, 164),
    "86": Limits(48, 16, 100),
    "87": Limits(48, 16, 164),
    "89": Limits(48, 24, 100),
    "90": Limits(64, 32, 228),
    "100": Limits(64, 32, 228),
    "103": Limits(64, 32, 228),
    "120": Limits(48, 24, 100),
}
"""By compute capability."""

RESERVED_BYTES = 1024
"""Of shared memory, by the system for each program (compute capability 8.0 and above)."""


def described(kernels: Iterable[Kernel], code: Iterable[Code]) -> tuple[Kernel, ...]:
    """Return the kernels with the analysis results; a kernel without code is unchanged."""
    by_hash = {each.hash: each for each in code}
    return tuple(_described(kernel, by_hash.get(kernel.hash or "")) for kernel in kernels)


def _described(kernel: Kernel, code: Code | None) -> Kernel:
    if code is None:
        return kernel
    counts, arch = count(code.cubin), target(code.ptx or "")
    facts = {"arch": arch, "counted_in": "sass" if counts else None, "counts": counts}
    return msgspec.structs.replace(kernel, **facts, occupancy=occupancy(kernel, arch))


def with_launched(kernels: Iterable[Kernel], names: Sequence[str]) -> tuple[Kernel, ...]:
    """Return the kernels with launch counts, followed by those not compiled by Triton.

    Several kernels compiled under one name share the launches, which only the name tells.
    """
    counts = Counter(names)
    counted = [msgspec.structs.replace(kernel, launches=counts.get(kernel.name)) for kernel in kernels]
    compiled = {kernel.name for kernel in counted}
    others = [Kernel(name=name, external=True, launches=n) for name, n in counts.items() if name not in compiled]
    return (*counted, *others)


def target(ptx: str) -> str | None:
    """Return the PTX's architecture: `sm_90a`."""
    match = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    return match[1] if match else None


@lru_cache(maxsize=512)
def count(cubin: bytes | None) -> dict[str, int]:
    """Return instruction counts by kind; nothing without a disassembler."""
    sass = disassembled(cubin) if cubin else None
    return counts_in_sass(sass) if sass else {}


def counts_in_sass(text: str) -> dict[str, int]:
    """Return instruction counts by kind in a disassembler's output."""
    names = Counter(_SASS.findall(text))
    counts: Counter[str] = Counter()
    for name, number in names.items():
        if product := _SASS_PRODUCT.match(name):
            counts["wgmma m{}n{}k{}".format(*product.groups())] += number
        elif product := _SASS_MMA.match(name):
            counts["mma m{}n{}k{}".format(*product.groups())] += number
        elif name.startswith(("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA")):
            counts["tcgen05.mma"] += number
        counts.update({kind: number for kind, pattern in _SASS_KINDS if pattern.match(name)})
    return {"instructions": sum(names.values()), **dict(sorted(counts.items()))}


def disassembled(cubin: bytes) -> str | None:
    """Return a cubin's machine code as text; None where no disassembler is found, or it cannot read the cubin.

    The data-flow analysis (-ndf) is left out. It takes a quarter of the time, and only adds labels.
    """
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [tool, "-c", "-ndf", file.name], capture_output=True, text=True, timeout=DISASSEMBLY_S
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            return None
    return done.stdout if done.returncode == 0 and _SASS.search(done.stdout) else None


def disassembler() -> str | None:
    """Return the path of `nvdisasm`: from Triton's setting, from PATH, or in Triton's package."""
    named = os.environ.get("TRITON_NVDISASM_PATH")
    if named and Path(named).is_file():
        return named
    package = importlib.util.find_spec("triton")  # finds the package without importing it
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if path.is_file():
            return str(path)
    return shutil.which("nvdisasm")


def occupancy(kernel: Kernel, arch: str | None) -> float | None:
    """Return the share of an SM's warps resident at once; None if a fact is unknown.

    The rules follow the CUDA occupancy calculator: registers are allocated to warps in units of 256, shared memory to
    programs in units of 128 bytes.
    """
    limits = LIMITS.get((arch or "").removeprefix("sm_").rstrip("af"))
    warps = kernel.config.get("num_warps")
    if limits is None or not isinstance(warps, int) or warps < 1 or not kernel.registers:
        return None
    a_warp = 256 * math.ceil(32 * kernel.registers / 256)
    # Registers belong to one of four schedulers, each of which holds whole warps.
    by_registers = 4 * (limits.registers // 4 // a_warp) // warps
    shared = 128 * math.ceil((kernel.shared_bytes or 0) / 128) + RESERVED_BYTES
    programs = min(limits.programs, limits.warps // warps, by_registers, (limits.shared_kib << 10) // shared)
    return programs * warps / limits.warps


def metrics_of(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return a cell's metrics from the compiled kernels; none that is unknown for one of them.

    Counts are summed over kernels; registers and shared memory are the largest, occupancy the smallest. Stages count in
    matrix-multiplying kernels, if any, since helper kernels have no pipeline.
    """
    ours = [kernel for kernel in kernels if not kernel.external]
    values = {name: (combine, [fact(kernel) for kernel in ours]) for name, (combine, fact) in _METRICS.items()}
    values["stages"] = min, [stages(kernel) for kernel in [kernel for kernel in ours if products(kernel)] or ours]
    return {name: float(combine(each)) for name, (combine, each) in values.items() if each and None not in each}


def _counted(*kinds: str) -> Callable[[Kernel], int | None]:
    """Return the number of a kernel's instructions of these kinds, as a function of the kernel."""
    return lambda kernel: sum(kernel.counts.get(kind, 0) for kind in kinds) if kernel.counted_in else None


_METRICS: dict[str, tuple[Callable[[list[Any]], float], Callable[[Kernel], float | None]]] = {
    "spills": (sum, lambda kernel: None if kernel.spills is None else 4 * kernel.spills),
    "registers": (max, lambda kernel: kernel.registers),
    "shared_kib": (max, lambda kernel: None if kernel.shared_bytes is None else kernel.shared_bytes / 1024),
    "occupancy": (min, lambda kernel: kernel.occupancy),
    "matrix_ops": (sum, lambda kernel: sum(products(kernel).values()) if kernel.counted_in else None),
    "tma_loads": (sum, _counted("TMA load")),
    "barriers": (sum, _counted("barrier", "mbarrier wait")),
    "local_ops": (sum, _counted("local load", "local store")),
}
"""How kernels are combined in a metric, and the metric of each."""


def products(kernel: Kernel) -> dict[str, int]:
    """Return a kernel's matrix-instruction counts, by name, such as `wgmma m64n256k16`."""
    return {name: number for name, number in kernel.counts.items() if "mma" in name}


def stages(kernel: Kernel) -> int | None:
    """Return a kernel's pipeline stages: from a constant if it has one, or from the compiler."""
    number = kernel.config.get("STAGES", kernel.config.get("NUM_STAGES", kernel.config.get("num_stages")))
    return number if isinstance(number, int) else None
