"""Compile CUDA C++ for the GPU at hand and launch it, by NVRTC, which torch brings along, and the driver.

Triton cannot express everything a GPU can do, such as TMA loads multicast to a cluster of SMs. A kernel in CUDA C++
can. NVRTC compiles it in a second or two, without nvcc. Each process compiles a kernel once.

    cubin = compile_cuda(source, {"STAGES": 4}, "sm_90a")
    kernel = CudaKernel(cubin, "my_kernel", shared_bytes=100_000)
    launch = kernel.bind(132, 384, [tensor, tensor_map, 7], moving=(0, 1))
    launch(other_tensor.data_ptr(), other_tensor.data_ptr())

Sources: the CUDA driver API and NVRTC manuals.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.device import cuda_driver, has_context, make_context_current
from groupbench.kernels.direct import Direct, Parameters
from groupbench.kernels.launch import require_current

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
    """Return `source` as machine code for a GPU, such as sm_90a. The constants become macros.

    Raises OSError without NVRTC, and RuntimeError with the compiler's messages if the source does not compile.
    """
    cubin, _ = _compile(source, constants, arch)
    return cubin


def compile_with_log(source: str, constants: Mapping[str, object], arch: str) -> tuple[bytes, str]:
    """Do as `compile_cuda`, and also return ptxas' report: registers, spills, warnings."""
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
    """A tensor's description for TMA, a kernel argument with 128 bytes."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]
    tensor: Tensor


def tensor_map(
    tensor: Tensor,  # of 8-bit or 16-bit elements; its address must be a multiple of 16
    sizes: Sequence[int],  # of each dimension, the innermost first
    strides: Sequence[int],  # in elements, of each dimension but the innermost, whose stride is 1
    box: Sequence[int],  # of each dimension, for one access; the innermost has 128 bytes, swizzled
) -> TensorMap:
    """Return the map for boxes with the 128-byte swizzle; accesses past the sizes read zero and write nothing.

    The map keeps the tensor's memory. Raises RuntimeError if the driver refuses it, such as for strides other than
    multiples of 16 bytes.
    """
    count = len(sizes)
    if tensor.is_cuda and not has_context():
        make_context_current(torch.cuda.current_device())
    made = _aligned_map()
    made.tensor = tensor
    _check(
        cuda_driver().cuTensorMapEncodeTiled(
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


class CudaKernel:
    """A kernel from a compiled module, loaded on the current device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        """Load the kernel. `shared_bytes` is the dynamic shared memory. Raises RuntimeError if the driver refuses."""
        self.device = torch.cuda.current_device()
        make_context_current(self.device)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        driver = cuda_driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        _check(driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes))

    def bind(
        self,
        grid: int,
        threads: int,
        arguments: Sequence[Tensor | TensorMap | int | None],  # an integer is passed as int, None as a null pointer
        moving: Sequence[int],  # numbers of the tensors and maps, in ascending order, whose address each call passes
    ) -> Callable[..., None]:
        """Return this kernel's launch with arguments: it takes the addresses of the moving ones and does not wait.

        A map is moved to a tensor with the same shape, strides and dtype. Neither it nor a moving tensor is kept. The
        launch may be called from any thread and on any stream. It raises ValueError under another current device, and
        RuntimeError if the driver refuses.
        """
        parameters = Parameters()
        for number, argument in enumerate(arguments):
            if isinstance(argument, TensorMap):
                parameters.append_map(bytes(argument), argument.tensor.data_ptr())
            elif isinstance(argument, int):
                parameters.append(struct.pack("i", argument))
            else:
                address = 0 if argument is None else argument.data_ptr()
                if number in moving:
                    parameters.append_address(address)
                else:
                    parameters.append(struct.pack("Q", address))
        assert self._function.value is not None
        direct = Direct(self._function.value, (grid,), threads, self._shared_bytes, parameters, owner=self)

        def launch(*addresses: int) -> None:
            if not direct(addresses):
                require_current(direct.device)
                make_context_current(direct.device)  # in a thread that has not used CUDA yet
                _check(direct.launch(addresses))

        return launch


def _aligned_map() -> TensorMap:
    """Return an empty map at a suitable address: ctypes aligns a structure for its fields alone."""
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + TENSOR_MAP_ALIGNMENT))()
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT)


# --- libraries --------------------------------------------------------------------------------------------------------


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({result})")


@cache
def _nvrtc() -> ctypes.CDLL:
    """Load NVRTC: from torch's dependencies, else the system's. Raises OSError with the reason."""
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
    """Return a result from NVRTC, by the functions for the size and the bytes."""
    size = ctypes.c_size_t()
    _check_nvrtc(size_of(program, ctypes.byref(size)))
    memory = ctypes.create_string_buffer(size.value)
    _check_nvrtc(read(program, memory))
    return memory.raw
