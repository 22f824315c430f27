"""Compile CUDA C++ for the GPU at hand and launch it, by NVRTC, which torch brings along, and the driver.

Triton cannot express everything that a GPU can do, such as loads that TMA multicasts to a cluster of SMs. A kernel in
CUDA C++ can. NVRTC compiles it in a second or two, without nvcc. Each process compiles a kernel once.

    cubin = compile_cuda(source, {"STAGES": 4}, "sm_90a")
    kernel = CudaKernel(cubin, "my_kernel", shared_bytes=100_000)
    kernel(grid=132, threads=384, arguments=[tensor, tensor_map, 7])

Sources: the CUDA driver API and NVRTC manuals.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
TENSOR_MAP_TYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*; bytes: 0
SWIZZLE_128B, PROMOTE_TO_256B = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
TENSOR_MAP_ALIGNMENT = 64  # bytes


def why_not_nvrtc() -> str | None:
    """Return why CUDA C++ cannot be compiled here, or None if it can."""
    try:
        _nvrtc()
    except OSError as error:
        return str(error)
    return None


def compile_cuda(source: str, constants: Mapping[str, object], arch: str) -> bytes:
    """Return the machine code of `source` for a GPU, such as sm_90a. The constants become macros.

    Raises OSError without NVRTC, and RuntimeError with the compiler's messages if the source does not compile.
    """
    cubin, _ = _compile(source, constants, arch)
    return cubin


def compile_with_log(source: str, constants: Mapping[str, object], arch: str) -> tuple[bytes, str]:
    """Do as `compile_cuda`, and also return the report of ptxas: registers, spills, warnings."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    # From CUDA 12.9 on, NVRTC finds compiled kernels in a cache of the driver, which holds no reports.
    caches = (major.value, minor.value) >= (12, 9)
    return _compile(source, constants, arch, *["--no-cache"] * caches)


def _compile(source: str, constants: Mapping[str, object], arch: str, *options: str) -> tuple[bytes, str]:
    """Return (machine code, report)."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    arguments = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v", *options]
    encoded = (ctypes.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
    text = (defined + source).encode()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(arguments), encoded)
        log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode().strip()
        if failed:
            raise RuntimeError(f"NVRTC could not compile the kernel:\n{log}")
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class TensorMap(ctypes.Structure):
    """The description of a tensor that TMA reads or writes, a kernel argument of 128 bytes."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]
    tensor: Tensor


def tensor_map(
    tensor: Tensor,  # of 8-bit or 16-bit elements; its address must be a multiple of 16
    sizes: Sequence[int],  # of each dimension, the innermost first
    strides: Sequence[int],  # in elements, of each dimension but the innermost, whose stride is 1
    box: Sequence[int],  # of each dimension, for one access; the innermost has 128 bytes, swizzled
) -> TensorMap:
    """Return the map for boxes with the 128-byte swizzle; accesses past the sizes read zero and write nothing.

    The map keeps the tensor's memory. Raises RuntimeError if the driver refuses it, such as for strides that are not
    multiples of 16 bytes.
    """
    count = len(sizes)
    made = _aligned_map()
    made.tensor = tensor
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(made),
            TENSOR_MAP_TYPES[tensor.dtype],
            count,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * count)(*sizes),
            (ctypes.c_uint64 * (count - 1))(*[stride * tensor.element_size() for stride in strides]),
            (ctypes.c_uint32 * count)(*box),
            (ctypes.c_uint32 * count)(*[1] * count),
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            SWIZZLE_128B,
            PROMOTE_TO_256B,
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        )
    )
    return made


def move_map(described: TensorMap, tensor: Tensor) -> None:
    """Make a map describe another tensor of the same shape, strides and dtype."""
    _check(_driver().cuTensorMapReplaceAddress(ctypes.byref(described), ctypes.c_void_p(tensor.data_ptr())))


class CudaKernel:
    """A kernel of a compiled module, loaded on the current device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        """Load the kernel. `shared_bytes` is its dynamic shared memory. Raises RuntimeError if the driver refuses."""
        torch.cuda.current_stream()  # makes the device's context current
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        _check(driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes))

    def __call__(self, grid: int, threads: int, arguments: Sequence[Tensor | TensorMap | int | None]) -> None:
        """Launch on the current stream; integers are passed as int, None as a null pointer.

        Does not wait. Raises RuntimeError.
        """
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(
                self._function, grid, 1, 1, threads, 1, 1, self._shared_bytes, stream, addresses, None
            )
        )


def _value(argument: Tensor | TensorMap | int | None) -> ctypes.Structure | ctypes.c_void_p | ctypes.c_int:
    if isinstance(argument, TensorMap):
        return argument
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(argument.data_ptr() if argument is not None else None)


def _aligned_map() -> TensorMap:
    """Return an empty map at a suitable address: ctypes aligns a structure for its fields alone."""
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + TENSOR_MAP_ALIGNMENT))()
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT)


# --- libraries --------------------------------------------------------------------------------------------------------


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({result})")


@cache
def _nvrtc() -> ctypes.CDLL:
    """Load NVRTC: of the packages that torch depends on, else the system's. Raises OSError with the reason."""
    folders = [
        Path(folder) / "lib"
        for package in ("nvidia.cuda_nvrtc", "nvidia.cu13", "nvidia.cu12")
        if (spec := _spec(package)) is not None
        for folder in spec.submodule_search_locations or ()
    ]
    for folder in folders:
        for library in sorted(folder.glob("libnvrtc.so.*")):
            if re.fullmatch(r"libnvrtc\.so\.[0-9]+", library.name):
                # NVRTC opens this library by name, and finds it if it is already loaded.
                for builtins in folder.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                return ctypes.CDLL(str(library))
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError as error:
        raise OSError(f"CUDA's runtime compiler was not found: install nvidia-cuda-nvrtc ({error})") from None


def _spec(package: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ModuleNotFoundError:  # its parent is missing
        return None


def _check_nvrtc(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC error {result}")


def _read(program: ctypes.c_void_p, size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer) -> bytes:
    """Return a result of NVRTC, by its functions for the size and for the bytes."""
    size = ctypes.c_size_t()
    _check_nvrtc(size_of(program, ctypes.byref(size)))
    memory = ctypes.create_string_buffer(size.value)
    _check_nvrtc(read(program, memory))
    return memory.raw
