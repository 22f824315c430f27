"""Sum two tensors, element by element: the first kernel in every Triton tutorial, for any size, strides and dtype.

    out = x + y        x, y of one shape, after broadcasting; out has the order of dimensions that x has in memory

The kernel is bound by memory: it moves 3 * numel elements, and should be as fast as a copy with as many bytes. It
therefore also measures bandwidth.

Operands that are stored without gaps and in the same order, transposed or not, are one flat array of any shape. Program
i adds elements i * BLOCK to (i + 1) * BLOCK, with loads of 16 bytes per thread and a mask at the end. Other operands
(slices, broadcast ones, a transposed one with one that is not) are addressed by index: the kernel splits an element's
number into coordinates and multiplies them by each operand's strides. Mergeable dimensions are merged first, so matrix
slices have two dimensions left.

After gpu-mode/triton-tutorials, lesson 2 (vector_addition_tutorial.py). A mask replaces the size that must fit. New
here are strides, the 16-bit dtypes and blocks filling a thread's widest load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import DTYPES, require_device, require_tensors
from groupbench.kernels.launch import Launch


@dataclass(frozen=True)
class AddConfig:
    """A program's elements, and the warps."""

    block: int
    num_warps: int


CONFIGS = {
    # 32 bytes per thread and operand in 16-bit dtypes, 64 in fp32: two to four 16-byte loads of each are in flight.
    "flat": AddConfig(4096, num_warps=8),
    # Division by each size: more registers per element, fewer elements.
    "strided": AddConfig(1024, num_warps=4),
    # The cost in the interpreter depends on the number of operations, not of elements.
    "cpu": AddConfig(1 << 16, num_warps=4),
}


@triton.jit
def _flat_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    out_ptr,  # [n]
    n,
    WIDE: tl.constexpr,  # n + BLOCK passes 2**31
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    at = first * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    x = tl.load(x_ptr + at, mask=ok)
    y = tl.load(y_ptr + at, mask=ok)
    tl.store(out_ptr + at, _sum(x, y, out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _sum(x, y, dtype: tl.constexpr):
    """Return the sum, computed in fp32 and rounded once, as torch does."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(dtype)


@triton.jit
def _strided_kernel(
    x_ptr,
    y_ptr,
    out_ptr,  # contiguous in the order of `sizes`
    n,
    sizes,  # of each dimension, the innermost last
    x_strides,
    y_strides,
    NDIM: tl.constexpr,
    WIDE: tl.constexpr,  # n + BLOCK passes 2**31
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    if WIDE:  # otherwise 32 bits, in which a division takes a third of the time
        first = first.to(tl.int64)
    at = first * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    rest = at
    x_at = tl.zeros((BLOCK,), dtype=tl.int64)
    y_at = tl.zeros((BLOCK,), dtype=tl.int64)
    for i in tl.static_range(NDIM):
        coordinate = (rest % sizes[NDIM - 1 - i]).to(tl.int64)
        rest = rest // sizes[NDIM - 1 - i]
        x_at += coordinate * x_strides[NDIM - 1 - i]
        y_at += coordinate * y_strides[NDIM - 1 - i]
    x = tl.load(x_ptr + x_at, mask=ok)
    y = tl.load(y_ptr + y_at, mask=ok)
    tl.store(out_ptr + at, _sum(x, y, out_ptr.dtype.element_ty), mask=ok)


def prepare_add(
    x: Tensor,  # any shape and strides
    y: Tensor,  # of a shape that broadcasts with x's
    config: AddConfig | None = None,
) -> Callable[[], Tensor]:
    """Check the operands; the returned callable allocates the output and launches.

    Raises TypeError for anything but tensors, and ValueError for unsupported operands.
    """
    require_tensors(x=x, y=y)
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(f"x and y need one dtype and one device: {x.dtype} on {x.device}, {y.dtype} on {y.device}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{x.dtype} is not one of {', '.join(map(str, DTYPES))}")
    require_device(x.device)
    try:
        x, y = torch.broadcast_tensors(x, y)
    except RuntimeError as error:
        raise ValueError(f"{tuple(x.shape)} and {tuple(y.shape)} do not broadcast") from error
    n = x.numel()
    if n == 0:
        return lambda: torch.empty_like(x)
    flat = same_order(x, y)
    if config is None:
        config = CONFIGS["cpu" if x.device.type == "cpu" else "flat" if flat else "strided"]
    grid = (triton.cdiv(n, config.block),)
    wide = n + config.block >= 2**31
    if flat:
        launch = Launch(_flat_kernel, grid, WIDE=wide, BLOCK=config.block, num_warps=config.num_warps)

        def run_flat() -> Tensor:
            out = torch.empty_like(x)  # keeps the order of dimensions
            launch(x, y, out, n)
            return out

        return run_flat
    reach = [max(strides) for strides in zip(x.stride(), y.stride(), strict=True)]
    order = sorted(range(x.dim()), key=lambda dim: -reach[dim])  # the longest strides first
    sizes, x_strides, y_strides = merged(x.permute(order), y.permute(order))
    shape = [x.size(dim) for dim in order]
    back = [order.index(dim) for dim in range(x.dim())]
    fixed = {"NDIM": len(sizes), "WIDE": wide, "BLOCK": config.block, "num_warps": config.num_warps}
    launch = Launch(_strided_kernel, grid, **fixed)

    def run() -> Tensor:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        launch(x, y, out, n, sizes, x_strides, y_strides)
        return out.permute(back)

    return run


def same_order(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y, with one shape, are flat arrays in the same order."""
    strides = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
    others = [stride for size, stride in zip(y.shape, y.stride(), strict=True) if size != 1]
    expected = 1
    for size, stride in sorted(strides, key=lambda pair: pair[1]):
        if stride != expected:
            return False
        expected *= size
    return others == [stride for _, stride in strides]


def merged(x: Tensor, y: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (sizes, strides of x, strides of y), without dimensions of one and with neighbours merged if possible."""
    dims: list[tuple[int, int, int]] = []
    for size, sx, sy in zip(x.shape, x.stride(), y.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (sx * size, sy * size):
            dims[-1] = (dims[-1][0] * size, sx, sy)
        else:
            dims.append((size, sx, sy))
    assert math.prod(size for size, _, _ in dims) == x.numel()
    sizes, x_strides, y_strides = zip(*dims, strict=True) if dims else ((1,), (0,), (0,))
    return sizes, x_strides, y_strides


def add_reference(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum in fp64, without rounding to the operands' dtype."""
    return x.double() + y.double()
