"""Quantisation to fp8 for a training step, in CUDA C++ for Hopper: by rows and by columns in one pass.

    by rows     q [M, K], scale [K/128, M]       one scale per 128 columns in a row
    by columns  q_t [K, P], scale_t [P/128, K]   one scale per 128 rows in a column; transposed

A column's bytes come from 128 rows. Triton exchanges them between threads one by one, and that takes five times as long
as the memory. In quantize.cu a thread has eight rows and eight columns, so it writes eight bytes at a time in both
forms.

Every matrix has 16 bits and whole blocks of 128 columns. Results are those of quantize.py and moe/quantize.py, bit by
bit, except that the gradient of SwiGLU is rounded to bfloat16 before it is quantised. Without a GPU, tests compile the
kernels but cannot run them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import CudaKernel, compile_cuda, why_not_nvrtc
from groupbench.kernels.device import device_of
from groupbench.kernels.launch import Kept

SIDE = 128  # rows and columns of a tile
THREADS = 256
TILES = {"rows_kernel": 2, "swiglu_kernel": 4, "swiglu_backward_kernel": 4}  # adjacent ones of a program
_COMING, _VALUES, _SCALES = 8 * 16 * THREADS, SIDE * SIDE, 8 * SIDE * 2 + SIDE * 4
DYNAMIC_BYTES = {  # pieces on their way, columns with scales, and a number for each row
    "rows_kernel": _COMING + _SCALES + _VALUES + SIDE * 4,
    "swiglu_kernel": 2 * _COMING,
    "swiglu_backward_kernel": 2 * _COMING + 3 * _SCALES + 2 * _VALUES + SIDE * 4,
}
DTYPES = (torch.bfloat16, torch.float16)
_bound: Kept[Callable[..., None]] = Kept()


def unsuitable(*operands: Tensor) -> str | None:
    """Return why the kernels cannot take these matrices, or None if they can."""
    for x in operands:
        if x.device.type != "cuda" or not device_of(x.device).hopper:
            return "the kernels need a Hopper GPU"
        if x.dtype not in DTYPES:
            return f"the kernels quantise {' and '.join(map(str, DTYPES))}, not {x.dtype}"
        if x.size(-1) % SIDE or x.stride(-2) % 8 or x.data_ptr() % 16:
            return f"rows are not whole blocks of {SIDE} columns at multiples of 16 bytes"
    return why_not_nvrtc()


def launch(name: str, programs: int, like: Tensor, *arguments: Tensor | int | None) -> None:
    """Launch a kernel of quantize.cu for matrices of `like`'s dtype, on its device."""
    moving = tuple(number for number, argument in enumerate(arguments) if isinstance(argument, Tensor))
    fixed = tuple(None if isinstance(argument, Tensor) else argument for argument in arguments)
    key = (name, like.dtype, torch.cuda.current_device(), programs, fixed, moving)
    bound = _bound.get(key) or _bound.add(key, _kernel(*key[:3]).bind(programs, THREADS, fixed, moving))
    bound(*[argument.data_ptr() for argument in arguments if isinstance(argument, Tensor)])


def launch_tiles(name: str, row_blocks: int, columns: int, like: Tensor, *arguments: Tensor | int | None) -> None:
    """Launch a kernel over all tiles of a matrix with so many tile rows."""
    programs = row_blocks * -(-columns // (SIDE * TILES[name]))
    launch(name, programs, like, *arguments, TILES[name])


@cache
def _kernel(name: str, dtype: torch.dtype, device: int) -> CudaKernel:
    return CudaKernel(cubin(dtype), name, DYNAMIC_BYTES.get(name, 0))


@cache
def cubin(dtype: torch.dtype) -> bytes:
    """Return the kernels' machine code for matrices of a dtype."""
    source = Path(__file__).with_name("quantize.cu").read_text()
    return compile_cuda(source, {"IS_BF16": int(dtype == torch.bfloat16)}, "sm_90a")
