"""Launch a kernel that Triton compiled by one call of the CUDA driver, with arguments kept from an earlier launch.

For each launch, Triton makes every TMA descriptor again, asks the driver about every pointer, and goes through five
functions in Python. That takes 35 µs on an H200's host. `Direct` keeps the arguments as the kernel reads them, writes
the new addresses among them and launches, in 8 µs.

It depends on Triton's conventions, and checks them when it is made: the driver must report parameters of the same
sizes, and a descriptor must contain its tensor's address at one place. A Triton with others costs time, not
correctness.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupbench.kernels.device import cuda_driver

MAP_BYTES = 128
WORD = 8
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
    """A compiled kernel with its grid and arguments; a call passes the tensors' addresses and launches.

    It may be called from any thread and on any stream.
    """

    def __init__(self, compiled: Any, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Keep the arguments of a launch that Triton has just done, constants included.

        Raises:
            Unknown: only Triton can launch this kernel, or its conventions differ from those known here.
        """
        try:
            metadata, (warps, ctas, shared, *_) = compiled.metadata, compiled.packed_metadata
            unusual = ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size
            flags = {COOPERATIVE: metadata.launch_cooperative_grid, OVERLAPPING: metadata.launch_pdl}
            self._function, types = int(compiled.function), tuple(compiled.src.signature.values())
            described = iter(getattr(metadata, "tensordesc_meta", None) or ())
        except (AttributeError, TypeError, ValueError) as error:
            raise Unknown(str(error)) from None
        if unusual or torch.version.hip or len(types) != len(args):
            raise Unknown("clusters, scratch memory, ROCm, or other arguments")
        self._compiled = compiled  # owns the function
        self.device = torch.cuda.current_device()
        parameters = _Parameters()
        for kind, arg in zip(types, args, strict=True):
            parameters.add(kind, arg, described)
        for _ in ("global scratch", "profile scratch"):
            parameters.append(bytes(WORD))
        _check_sizes(self._function, parameters.sizes)
        self._words, self._places, self._at = parameters.placed()
        set_flags = [flag for flag, wanted in flags.items() if wanted]
        self._attributes = (_Attribute * len(set_flags))(*[_Attribute(flag, 0, 1) for flag in set_flags])
        self._config = _Config(
            (*(*grid, 1, 1)[:3], 32 * warps, 1, 1, shared), None, ctypes.addressof(self._attributes), len(set_flags)
        )
        self._in_use = threading.Lock()  # the driver copies the arguments before a launch returns
        self._launch = cuda_driver().cuLaunchKernelEx
        self._fixed = ctypes.byref(self._config), ctypes.c_void_p(self._function), self._places, None

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launch with the addresses of the tensors and descriptors, in order of the arguments. Does not wait.

        Return False if the driver refuses, as in a thread that has not used CUDA yet, or under another device.
        """
        if torch._C._cuda_getDevice() != self.device:
            return False
        words = self._words
        with self._in_use:
            for at, address in zip(self._at, addresses, strict=True):
                words[at] = address
            self._config.stream = torch._C._cuda_getCurrentRawStream(self.device)
            return self._launch(*self._fixed) == 0


class _Parameters:
    """A kernel's parameters in memory."""

    def __init__(self) -> None:
        self._values: list[bytes] = []
        self._addressed: list[tuple[int, int]] = []  # (parameter, word) that holds a tensor's address
        self.sizes: list[int] = []

    def append(self, value: bytes) -> None:
        self._values.append(value)
        self.sizes.append(len(value))

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
            self._addressed.append((len(self.sizes), 0))
            self.append(struct.pack("Q", arg.data_ptr()))
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
        self._addressed.append((len(self.sizes), _address_word(value, arg.base.data_ptr())))
        self.append(value)
        for size in numbers[: len(arg.shape)]:
            self.append(struct.pack("i", size))
        for stride in numbers[len(arg.shape) :]:
            self.append(struct.pack("q", stride))

    def placed(self) -> tuple[Any, Any, list[int]]:
        """Return the memory as words, the addresses of all parameters, and the words that hold tensors' addresses."""
        starts, end = [], 0
        for value in self._values:
            end = -(-end // (size := MAP_BYTES if len(value) == MAP_BYTES else WORD)) * size
            starts.append(end)
            end += len(value)
        memory = (ctypes.c_char * (end + WORD + MAP_BYTES))()
        base = -ctypes.addressof(memory) % MAP_BYTES
        words = (ctypes.c_uint64 * (-(-end // WORD))).from_buffer(memory, base)
        first = ctypes.addressof(words)
        for start, value in zip(starts, self._values, strict=True):
            ctypes.memmove(first + start, value, len(value))
        places = (ctypes.c_void_p * len(starts))(*[first + start for start in starts])
        return words, places, [starts[parameter] // WORD + word for parameter, word in self._addressed]


def _address_word(value: bytes, address: int) -> int:
    """Return the place of a tensor's address in its descriptor, which the driver must change alone.

    Raises Unknown if it changes more.
    """
    moved = (ctypes.c_char * (2 * MAP_BYTES))()
    to = -ctypes.addressof(moved) % MAP_BYTES + ctypes.addressof(moved)
    ctypes.memmove(to, value, MAP_BYTES)
    elsewhere = address + (1 << 20)
    failed = cuda_driver().cuTensorMapReplaceAddress(ctypes.c_void_p(to), ctypes.c_void_p(elsewhere))
    before, after = struct.unpack("16Q", value), struct.unpack("16Q", ctypes.string_at(to, MAP_BYTES))
    changed = [at for at in range(16) if before[at] != after[at]]
    if failed or len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (address, elsewhere):
        raise Unknown("descriptors of another layout")
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
