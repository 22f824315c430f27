"""A GPU's limits and features. No other kernel's module queries torch for them or hard-codes a GPU's numbers.

`device_of` queries the driver about a local GPU; `KNOWN` lists GPUs for compiling without one. Triton's interpreter
poses as a Hopper GPU with four SMs, so it runs the same code.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch

Config = TypeVar("Config")

KIB = 1024
RESERVED_BYTES = KIB  # shared memory that CUDA reserves in each program
HOPPER_FLOPS = 4096  # of an SM in a clock, dense, in 16 bits
INTERPRETER_SMS = 4  # enough for programs to take turns


@dataclass(frozen=True)
class Device:
    """A GPU's facts: which kernels can run on it, and how large tiles may be.

    Attributes:
        arch: Sm_90, gfx942, or "cpu" for Triton's interpreter.
        sms: Streaming multiprocessors, or compute units.
        shared_bytes: Shared memory that one program may use at most.
        shared_per_sm: Shared memory of all programs on an SM together.
        gb_per_s: Bandwidth of the memory by its clock and bus width; 0 if unknown.
        ghz: Highest clock of the SMs; 0 if unknown.
    """

    name: str
    arch: str
    sms: int
    shared_bytes: int
    shared_per_sm: int
    gb_per_s: float = 0.0
    ghz: float = 0.0

    @property
    def vendor(self) -> str:
        """Return "cuda", "hip", or "cpu" for the interpreter."""
        return "hip" if self.arch.startswith("gfx") else "cuda" if self.arch.startswith("sm_") else "cpu"

    @property
    def capability(self) -> tuple[int, int]:
        """Return CUDA's compute capability, (0, 0) elsewhere: ROCm's (9, 4) is not a Hopper GPU."""
        number = int(self.arch.removeprefix("sm_")) if self.vendor == "cuda" else 0
        return number // 10, number % 10

    @property
    def hopper(self) -> bool:
        """Return whether the GPU has wgmma and setmaxnreg, which no later GPU has."""
        return self.capability[0] == 9

    @property
    def operands_in_shared_memory(self) -> bool:
        """Return whether tensor cores read operands from shared memory (wgmma, tcgen05), not from registers (mma)."""
        return self.vendor == "cpu" or self.capability[0] in (9, 10, 11)

    @property
    def sums_in_tensor_memory(self) -> bool:
        """Return whether tensor cores keep sums in a separate memory (tcgen05), not in registers."""
        return self.capability[0] in (10, 11)

    @property
    def tma(self) -> bool:
        """Return whether the GPU has a tensor memory accelerator; the interpreter emulates it."""
        return self.vendor == "cpu" or self.capability >= (9, 0)

    @property
    def clusters(self) -> bool:
        """Return whether a cluster's programs share memory with TMA multicasts."""
        return self.capability[0] in (9, 10, 11)

    @property
    def chains(self) -> bool:
        """Return whether a launch may begin before the previous one has ended (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def ridge(self) -> float:
        """Return a 16-bit product's FLOPs in the time for reading a byte; Hopper only, else infinite.

        Products with fewer FLOPs per byte are limited by memory. It is 319 on an H100 and 218 on an H200.
        """
        if not self.hopper or not self.gb_per_s:
            return math.inf
        return HOPPER_FLOPS * self.sms * self.ghz / self.gb_per_s

    def room(self, per_sm: int = 1) -> int:
        """Return the shared-memory bytes for each of `per_sm` programs on an SM."""
        reserved = 0 if self.vendor == "hip" else RESERVED_BYTES
        return min(self.shared_bytes, self.shared_per_sm // per_sm - reserved)

    def buffers(self, num_stages: int, itemsize: int = 2) -> int:
        """Return how many tiles per operand a loop with `num_stages` holds in shared memory.

        Operands read from registers, as IEEE fp32 always is, leave their buffer a stage earlier.
        """
        return num_stages if self.operands_in_shared_memory and itemsize <= 2 else max(num_stages - 1, 1)


def _gpu(name: str, arch: str, sms: int, shared: int, per_sm: int, *speeds: float) -> Device:
    return Device(name, arch, sms, shared * KIB, per_sm * KIB, *speeds)


# CUDA C++ programming guide, compute capabilities; CDNA 3 instruction set guide, local data share.
KNOWN = {
    device.arch: device
    for device in (
        _gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 163, 164),
        _gpu("NVIDIA A10", "sm_86", 72, 99, 100),
        _gpu("NVIDIA L40S", "sm_89", 142, 99, 100),
        _gpu("NVIDIA H100 80GB HBM3", "sm_90", 132, 227, 228, 3352, 1.98),
        _gpu("NVIDIA B200", "sm_100", 148, 227, 228),
        _gpu("NVIDIA GeForce RTX 5090", "sm_120", 170, 99, 100),
        _gpu("AMD Instinct MI300X", "gfx942", 304, 64, 64),
    )
}
INTERPRETER = replace(KNOWN["sm_90"], name="cpu", arch="cpu", sms=INTERPRETER_SMS)


def device_of(device: torch.device) -> Device:
    """Return a local device's facts."""
    if device.type != "cuda":
        return INTERPRETER
    return _query(torch.cuda.current_device() if device.index is None else device.index)


def cuda_capability() -> tuple[int, int]:
    """Return the current GPU's compute capability, (0, 0) if it is not NVIDIA's."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability()


@cache
def _query(index: int) -> Device:
    """Return the facts from torch and the driver about a GPU, by CUDA index."""
    from triton.runtime import driver

    properties = torch.cuda.get_device_properties(index)
    limits = driver.active.utils.get_device_properties(index)
    shared = limits["max_shared_mem"]  # Triton checks a kernel against this when it loads it
    if torch.version.hip:
        arch, per_sm = properties.gcnArchName.split(":")[0], shared
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        per_sm = getattr(properties, "shared_memory_per_multiprocessor", shared + RESERVED_BYTES)
    # Clocks are in kHz; memory transfers two bits per pin in each.
    gb_per_s = 2 * limits.get("mem_clock_rate", 0) * limits.get("mem_bus_width", 0) / 8e6
    ghz = limits.get("sm_clock_rate", 0) / 1e6
    return Device(properties.name, arch, properties.multi_processor_count, shared, per_sm, gb_per_s, ghz)


def halved(device: Device) -> Device:
    """Return the device with half the shared memory, for compilers needing more than estimated."""
    return replace(device, shared_bytes=device.shared_bytes // 2, shared_per_sm=device.shared_per_sm // 2)


def fitted(config: Config, illegal: Callable[[Config], str | None], *sides: str) -> Config:
    """Return the config, or the nearest legal one: fewer stages, then smaller tiles.

    Args:
        config: A dataclass with num_stages, perhaps per_sm.
        sides: Names of its fields that are the tile's two sides.

    Return the config itself if no smaller one is legal either.
    """
    smaller = _smaller(config, sides or ("block_m", "block_n"))
    return next((candidate for candidate in smaller if not illegal(candidate)), config)


def _smaller(config: Any, sides: tuple[str, ...]) -> Iterator[Any]:
    """Yield the config, then smaller ones: fewer stages, one program per SM, half the larger side, down to 32."""
    names = {field.name for field in fields(config)}
    while True:
        for per_sm in sorted({1, getattr(config, "per_sm", 1)}, reverse=True):
            for num_stages in range(config.num_stages, min(config.num_stages, 2) - 1, -1):
                yield replace(config, num_stages=num_stages, **({"per_sm": per_sm} if "per_sm" in names else {}))
        side = max(sides, key=lambda name: getattr(config, name))
        if getattr(config, side) <= 32:
            return
        config = replace(config, **{side: getattr(config, side) // 2})


@cache
def cuda_driver() -> ctypes.CDLL:
    """Return the CUDA driver's library. Raises OSError without one."""
    return ctypes.CDLL("libcuda.so.1")


_thread = threading.local()


def has_context() -> bool:
    """Return whether `make_context_current` was called in this thread."""
    return getattr(_thread, "has_context", False)


def make_context_current(device: int) -> None:
    """Make a device's context current in this thread.

    Torch does so when a thread first needs it. The driver's functions, such as those that make TMA descriptors, do not,
    and fail with "invalid device context" in a thread that has not used torch's CUDA yet.
    """
    torch.cuda.set_device(device)
    context = ctypes.c_void_p()
    cuda_driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:  # with CUDA before 12
        torch.empty(1, device="cuda").zero_()
    _thread.has_context = True
