"""Row softmax, and its gradient, in Triton: row_softmax's backend `triton`.

    y[m, n]  = exp(x[m, n] - max_n x[m, n]) / sum_n exp(...)            x, y, dy, dx [M, N]
    dx[m, n] = y[m, n] * (dy[m, n] - sum_n y[m, n] dy[m, n])

A softmax in torch's elementary operations reads the row for its maximum, for the sum and for the quotient. Here a
program owns a row (or several short ones), and reads it once: a kernel is as fast as a copy.

    short rows     several in registers, in fp32
    whole rows     one in registers, in 16 bits: as floats, rows of 32,768 elements would fill all registers of an SM
    longer rows    a second pass reads L2. Its bandwidth is the limit, so that the gradient keeps a part in registers.
                   In the softmax, the first pass has a maximum and a sum in each lane. When a lane's maximum grows, the
                   sum so far shrinks by exp(old - new); this is flash attention's online softmax.

Sums are in fp32. exp2 takes x * log2(e), since the GPU has an instruction for base two only.

After gpu-mode/triton-tutorials, items c and d in its course, and Triton's tutorial 02-fused-softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import DTYPES, interpreted, require_device, require_tensors
from groupbench.kernels.launch import Launch

TILE = 4096  # elements of short rows in a program
SHORT_ROW = 8192
WHOLE_ROW = 131072  # bytes of a row that is kept in registers
WHOLE_ROW_BACKWARD = 65536  # of each of both rows
BLOCK = 8192  # elements of a long row that are read at once


@triton.jit
def _again(x, PACKED: tl.constexpr):
    """Return x as if from elsewhere, so that the compiler does not keep what it has already computed from x.

    PACKED is the number of elements in 32 bits, or 0 where there is no such instruction.
    """
    if PACKED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACKED)
    return x


@triton.jit
def _short_rows_kernel(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # this program's rows
    columns = tl.arange(0, COLUMNS)  # a power of two, so some columns may be past the row's end
    at = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    # exp(-inf) is 0: elements past the end change neither the maximum nor the sum.
    x = tl.load(x_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    x *= 1.4426950408889634  # log2(e)
    highest = tl.max(x, 1)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # of a row past M: -inf - -inf would be NaN
    powers = tl.exp2(x - highest[:, None])
    y = powers / tl.sum(powers, 1)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _whole_row_kernel(x_ptr, y_ptr, M, N, COLUMNS: tl.constexpr, PACKED: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N  # of this program's row
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + start + columns, mask=columns < N, other=-float("inf"))
    highest = tl.max(x, 0).to(tl.float32) * 1.4426950408889634
    total = tl.sum(tl.exp2(_again(x, PACKED).to(tl.float32) * 1.4426950408889634 - highest), 0)
    # exp2(x - log2(total)) is exp2(x) / total.
    y = tl.exp2(_again(x, PACKED).to(tl.float32) * 1.4426950408889634 - (highest + tl.log2(total)))
    tl.store(y_ptr + start + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _long_row_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -1e30, tl.float32)  # of each lane; finite, since -inf - -inf would be NaN
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        inside = first + columns < N
        x = tl.load(x_ptr + start + first + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(highest, x)
        total = total * tl.exp2(highest - higher) + tl.exp2(x - higher)
        highest = higher
    top = tl.max(highest, 0)  # of the row
    scale = 1 / tl.sum(total * tl.exp2(highest - top), 0)
    for first in range(0, N, BLOCK):
        inside = first + columns < N
        x = tl.load(x_ptr + start + first + columns, mask=inside, other=0.0, eviction_policy="evict_first")
        y = tl.exp2(x.to(tl.float32) * 1.4426950408889634 - top) * scale
        tl.store(y_ptr + start + first + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _short_rows_backward_kernel(y_ptr, dy_ptr, dx_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    at = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _long_row_backward_kernel(
    y_ptr, dy_ptr, dx_ptr, M, N, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * N
    kept, columns = tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    # The first part of the row stays in registers. The rest is read again, from L2.
    first_y = tl.load(y_ptr + start + kept)
    first_dy = tl.load(dy_ptr + start + kept)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(COLUMNS, N, BLOCK):
        at = start + first + columns
        inside = first + columns < N
        y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products += y * tl.load(dy_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.sum(products, 0) + tl.sum(first_y.to(tl.float32) * first_dy.to(tl.float32), 0)
    for first in range(COLUMNS, N, BLOCK):
        at = start + first + columns
        inside = first + columns < N
        y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + at, (y * (dy - total)).to(dx_ptr.dtype.element_ty), mask=inside)
    dx = _again(first_y, PACKED).to(tl.float32) * (_again(first_dy, PACKED).to(tl.float32) - total)
    tl.store(dx_ptr + start + kept, dx.to(dx_ptr.dtype.element_ty))


def prepare_softmax(x: Tensor) -> Callable[[], Tensor]:  # [M, N] contiguous -> [M, N]
    """Check x; the returned callable allocates the output and launches. Raises ValueError for other operands."""
    require_rows(x)
    M, columns = x.size(0), triton.next_power_of_2(max(1, x.size(1)))
    row_bytes = columns * x.element_size()
    if columns <= SHORT_ROW:
        return _prepare(_short_rows(_short_rows_kernel, M, columns), x)
    if row_bytes <= WHOLE_ROW:
        warps = max(8, row_bytes // 8192)
        return _prepare(Launch(_whole_row_kernel, (M,), COLUMNS=columns, PACKED=_packed(x), num_warps=warps), x)
    return _prepare(Launch(_long_row_kernel, (M,), BLOCK=BLOCK, num_warps=16), x)


def prepare_softmax_backward(
    y: Tensor,  # [M, N] contiguous, the output of the forward pass
    dy: Tensor,  # [M, N] contiguous, its gradient
) -> Callable[[], Tensor]:  # [M, N], the gradient of x
    """Check the operands; the returned callable allocates the gradient and launches. Raises ValueError for others."""
    require_rows(y, dy)
    M, columns = y.size(0), triton.next_power_of_2(max(1, y.size(1)))
    kept = WHOLE_ROW_BACKWARD // y.element_size()
    if columns <= kept:
        return _prepare(_short_rows(_short_rows_backward_kernel, M, columns), y, dy)
    fixed = {"COLUMNS": kept, "BLOCK": BLOCK, "PACKED": _packed(y), "num_warps": 32}
    return _prepare(Launch(_long_row_backward_kernel, (M,), **fixed), y, dy)


def require_rows(*operands: Tensor) -> None:
    """Raise ValueError or TypeError unless the operands are contiguous, with one shape [M, N] and one dtype."""
    first = operands[0]
    for x in operands:
        require_tensors(x=x)
        if x.ndim != 2 or not x.is_contiguous() or x.dtype not in DTYPES:
            raise ValueError(f"expected [M, N], contiguous, in one of {DTYPES}, got {tuple(x.shape)}, {x.dtype}")
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError("operands need one shape, one dtype and one device")
    require_device(first.device)


def _short_rows(kernel: object, M: int, columns: int) -> Launch:
    rows = max(1, TILE // columns)
    warps = 8 if columns > 2 * SHORT_ROW else max(4, min(16, rows * columns // 1024))
    return Launch(kernel, (triton.cdiv(M, rows),), ROWS=rows, COLUMNS=columns, num_warps=warps)


def _packed(x: Tensor) -> int:
    """Return PACKED of `_again`, whose instruction is of NVIDIA's GPUs."""
    return 0 if interpreted() or torch.version.hip else 4 // x.element_size()


def _prepare(launch: Launch, *operands: Tensor) -> Callable[[], Tensor]:
    first = operands[0]
    M, N = first.shape

    def run() -> Tensor:
        out = torch.empty_like(first)
        if M and N:
            launch(*operands, out, M, N)
        return out

    return run


def softmax_reference(x: Tensor) -> Tensor:
    """Return each row's softmax in fp64."""
    powers = x.to(torch.float64, copy=True)  # and in place, since fp64 has four times the bytes
    powers.sub_(x.amax(1, keepdim=True)).exp_()
    return powers.div_(powers.sum(1, keepdim=True))


def softmax_backward_reference(y: Tensor, dy: Tensor) -> Tensor:
    """Return the rows' gradient in fp64."""
    y, dy = y.double(), dy.double()
    return dy.sub((y * dy).sum(1, keepdim=True)).mul_(y)
