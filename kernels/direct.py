"""Launch a compiled kernel by one call of the CUDA driver, with parameters kept in memory.

For each launch, Triton makes every TMA descriptor again, asks the driver about every pointer, and goes through five
functions in Python. That takes 35 µs on an H200's host. `Direct` keeps the arguments as the kernel reads them, writes
the new addresses among them and launches, in 5 µs, of which the driver takes 4. Kernels in CUDA C++ (cuda_source.py)
are launched in the same way.

`of_triton` depends on Triton's conventions, and checks them: the driver must report parameters of the same sizes. A
Triton with others costs time, not correctness. So does a driver that keeps addresses elsewhere in its descriptors.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupbench.kernels.device import cuda_driver

MAP_BYTES = 128
WORD = 8
MOST_BYTES, MOST_PARAMETERS = 4096, 256  # of direct.c
SIZES = {"i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
FLOATS = {"fp32": "f", "f32": "f", "fp64": "d"}
COOPERATIVE, OVERLAPPING = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION


class Unknown(Exception):
    """Raised for a kernel or an argument that only Triton's own launcher can take."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig: grid, block, shared memory, stream, attributes."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )  # fmt: skip


class Direct:
    """A kernel with its grid and parameters; a call passes addresses and launches.

    It may be called from any thread and on any stream.
    """

    def __init__(
        self,
        function: int,
        grid: Sequence[int],  # up to three sizes
        threads: int,
        shared: int,  # bytes of dynamic shared memory
        parameters: Parameters,
        flags: Sequence[int] = (),  # launch attributes to set
        owner: object = None,  # of the function
    ) -> None:
        self._owner = owner
        self.device = torch.cuda.current_device()
        self._words, places, self._at, self._by_driver = parameters.placed()
        self._attributes = (_Attribute * len(flags))(*[_Attribute(flag, 0, 1) for flag in flags])
        self._config = _Config(
            (*(*grid, 1, 1)[:3], threads, 1, 1, shared), None, ctypes.addressof(self._attributes), len(flags)
        )
        self._in_use = threading.Lock()  # the driver copies the arguments before a launch returns
        self._launch = cuda_driver().cuLaunchKernelEx
        self._fixed = ctypes.byref(self._config), ctypes.c_void_p(function), places, None
        first, size = ctypes.addressof(self._words), ctypes.sizeof(self._words)
        fits = size <= MOST_BYTES and len(places) <= MOST_PARAMETERS
        self._native = native() if fits and not self._by_driver else None
        numbers = [
            ctypes.cast(self._launch, ctypes.c_void_p).value, function, ctypes.addressof(self._config),
            first, size, len(places), len(self._at),
            *[place - first for place in places], *[WORD * at for at in self._at],
        ]  # fmt: skip
        self._plan = (ctypes.c_uint64 * len(numbers))(*numbers)  # as direct.c reads it
        self._plan_at = ctypes.addressof(self._plan)

    def __call__(self, addresses: Sequence[int], mask: int = 0) -> bool:
        """Do as `launch`. Return False if the driver refuses, or under another device."""
        return torch._C._cuda_getDevice() == self.device and self.launch(addresses, mask) == 0

    def launch(self, addresses: Sequence[int], mask: int = 0) -> int:
        """Launch with the addresses of the tensors and descriptors, in the order of their parameters. Does not wait.

        The kernel's device must be the current one. Returns the driver's result, such as the error for a thread that
        has not used CUDA yet; or -1 without a launch if an address has a bit of the mask.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if self._native is not None:
            return int(self._native(self._plan_at, mask, stream, *addresses))
        if any(address & mask for address in addresses):
            return -1
        with self._in_use:
            for at, address in zip(self._at, addresses, strict=True):
                self._words[at] = address
            for number, place in self._by_driver:
                cuda_driver().cuTensorMapReplaceAddress(place, ctypes.c_void_p(addresses[number]))
            self._config.stream = stream
            return int(self._launch(*self._fixed))


@cache
def native() -> Callable[..., int] | None:
    """Return the function of direct.c, compiled as Triton compiles its own launcher, or None where that fails.

    It takes half the time of a call through ctypes.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None  # importing it would enable the lock
    try:
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_suffix(".c").read_text()
        compiled: Callable[..., int] = compile_module_from_src(source, "groupbench_direct").launch
    except Exception:  # no compiler, no headers, another Triton
        return None
    return compiled


def of_triton(compiled: Any, grid: Sequence[int], args: Sequence[Any]) -> Direct:
    """Return a kernel that Triton compiled, with the arguments of a launch that it has just done, constants included.

    Raises:
        Unknown: only Triton can launch this kernel, or its conventions differ from those known here.
    """
    try:
        metadata, (warps, ctas, shared, *_) = compiled.metadata, compiled.packed_metadata
        unusual = ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size
        flags = {COOPERATIVE: metadata.launch_cooperative_grid, OVERLAPPING: metadata.launch_pdl}
        function, types = int(compiled.function), tuple(compiled.src.signature.values())
        described = iter(getattr(metadata, "tensordesc_meta", None) or ())
    except (AttributeError, TypeError, ValueError) as error:
        raise Unknown(str(error)) from None
    if unusual or torch.version.hip or len(types) != len(args):
        raise Unknown("clusters, scratch memory, ROCm, or other arguments")
    parameters = Parameters()
    for kind, arg in zip(types, args, strict=True):
        parameters.add(kind, arg, described)
    for _ in ("global scratch", "profile scratch"):
        parameters.append(bytes(WORD))
    _check_sizes(function, parameters.sizes)
    set_flags = [flag for flag, wanted in flags.items() if wanted]
    return Direct(function, grid, 32 * warps, shared, parameters, set_flags, compiled)


class Parameters:
    """A kernel's parameters in memory."""

    def __init__(self) -> None:
        self._values: list[bytes] = []
        self._addressed: list[tuple[int, int | None]] = []  # (parameter, word) that holds a tensor's address
        self.sizes: list[int] = []

    def append(self, value: bytes) -> None:
        self._values.append(value)
        self.sizes.append(len(value))

    def append_address(self, address: int) -> None:
        """Append a pointer that each launch passes."""
        self._addressed.append((len(self.sizes), 0))
        self.append(struct.pack("Q", address))

    def append_map(self, value: bytes, address: int) -> None:
        """Append a descriptor that each launch moves from this address to another one."""
        self._addressed.append((len(self.sizes), _address_word(value, address)))
        self.append(value)

    def add(self, kind: Any, arg: Any, described: Any) -> None:
        """Append an argument of a type in Triton's signature."""
        if kind == "constexpr":
            if isinstance(arg, Tensor):
                raise Unknown("a tensor among the constants")
        elif not isinstance(kind, str):
            raise Unknown(f"an argument of type {kind}")
        elif kind.startswith("tensordesc"):
            self._add_map(arg, next(described, None))
        elif kind.startswith("*"):
            if not isinstance(arg, Tensor):
                raise Unknown("a pointer without a tensor")
            self.append_address(arg.data_ptr())
        elif kind in SIZES:
            self.append(int(arg).to_bytes(SIZES[kind], "little", signed=int(arg) < 0))
        elif kind in FLOATS:
            self.append(struct.pack(FLOATS[kind], arg))
        else:
            raise Unknown(f"an argument of type {kind}")

    def _add_map(self, arg: Any, metadata: Any) -> None:
        if metadata is None:
            raise Unknown("a descriptor that the kernel takes apart")
        from triton.backends.nvidia.driver import make_tensordesc_arg

        made, *numbers = make_tensordesc_arg(arg, metadata)
        if len(numbers) != 2 * len(arg.shape) or not re.fullmatch(r".*CUtensorMap", type(made).__name__):
            raise Unknown("descriptors of another form")
        value = ctypes.string_at(id(made) + type(made).__basicsize__ - MAP_BYTES, MAP_BYTES)
        self.append_map(value, arg.base.data_ptr())
        for size in numbers[: len(arg.shape)]:
            self.append(struct.pack("i", size))
        for stride in numbers[len(arg.shape) :]:
            self.append(struct.pack("q", stride))

    def placed(self) -> tuple[Any, Any, list[int], list[tuple[int, ctypes.c_void_p]]]:
        """Return the memory as words, the addresses of all parameters, and the words that hold tensors' addresses.

        Only the driver can move descriptors with an unknown word: (number of the address, place). Their word is unused.
        """
        starts, end = [], 0
        for value in self._values:
            end = -(-end // (size := MAP_BYTES if len(value) == MAP_BYTES else WORD)) * size
            starts.append(end)
            end += len(value)
        memory = (ctypes.c_char * (end + 2 * WORD + MAP_BYTES))()
        base = -ctypes.addressof(memory) % MAP_BYTES
        unused = -(-end // WORD)
        words = (ctypes.c_uint64 * (unused + 1)).from_buffer(memory, base)
        first = ctypes.addressof(words)
        for start, value in zip(starts, self._values, strict=True):
            ctypes.memmove(first + start, value, len(value))
        places = (ctypes.c_void_p * len(starts))(*[first + start for start in starts])
        at = [unused if word is None else starts[n] // WORD + word for n, word in self._addressed]
        by_driver = [
            (number, ctypes.c_void_p(first + starts[n]))
            for number, (n, word) in enumerate(self._addressed)
            if word is None
        ]
        return words, places, at, by_driver


def _address_word(value: bytes, address: int) -> int | None:
    """Return the word of a tensor's address in its descriptor, or None if the driver would change more than this."""
    moved = (ctypes.c_char * (2 * MAP_BYTES))()
    to = -ctypes.addressof(moved) % MAP_BYTES + ctypes.addressof(moved)
    ctypes.memmove(to, value, MAP_BYTES)
    elsewhere = address + (1 << 20)
    failed = cuda_driver().cuTensorMapReplaceAddress(ctypes.c_void_p(to), ctypes.c_void_p(elsewhere))
    before, after = struct.unpack("16Q", value), struct.unpack("16Q", ctypes.string_at(to, MAP_BYTES))
    changed = [at for at in range(16) if before[at] != after[at]]
    if failed or len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (address, elsewhere):
        return None
    return changed[0]


def _check_sizes(function: int, sizes: Sequence[int]) -> None:
    """Raise Unknown unless the driver reports parameters of these sizes for a function."""
    reported: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        ask = cuda_driver().cuFuncGetParamInfo
    except AttributeError:
        raise Unknown("a driver before CUDA 12.4") from None
    handle = ctypes.c_void_p(function)
    while len(reported) <= len(sizes) and not ask(
        handle, ctypes.c_size_t(len(reported)), ctypes.byref(offset), ctypes.byref(size)
    ):
        reported.append(size.value)
    if reported != list(sizes):
        raise Unknown(f"parameters of {reported} bytes instead of {list(sizes)}")
