"""Row softmax, and its gradient, in Triton: row_softmax's backend `triton`.

    y[m, n]  = exp(x[m, n] - max_n x[m, n]) / sum_n exp(...)            x, y, dy, dx [M, N]
    dx[m, n] = y[m, n] * (dy[m, n] - sum_n y[m, n] dy[m, n])

A softmax in torch's elementary operations reads the row for its maximum, for the sum and for the quotient. Here a
program owns a row (or several short ones), so a kernel is bound by reading and writing the row once.

Rows with up to WHOLE_ROW elements stay in registers. Longer ones are read twice, in blocks: first for the maximum and
sum, and then, mostly from L2, for the quotient. The first pass has a maximum and a sum in each lane. When a lane's
maximum grows, its sum so far shrinks by exp(old - new); this is flash attention's online softmax.

Sums are in fp32. exp2 takes x * log2(e), since the GPU has an instruction for base two only.

After gpu-mode/triton-tutorials, items c and d in its course, and Triton's tutorial 02-fused-softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import DTYPES, require_device, require_tensors
from groupbench.kernels.launch import Launch

# Elements that a program keeps in registers. A row of 32,768 takes so many that one program fits on an SM and waits for
# its loads: forward, two passes are faster (0.33 ms for half a gigabyte on an H200, not 0.39 ms; a copy takes 0.26).
WHOLE_ROW = 16384
WHOLE_ROW_BACKWARD = 32768  # 0.39 ms, as a copy of as many bytes; two passes 0.41
TILE = 4096  # elements of short rows in a program
BLOCK = 8192  # elements of a long row that are read at once


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
def _long_row_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N  # of this program's row
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
def _long_row_backward_kernel(y_ptr, dy_ptr, dx_ptr, M, N, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        at = start + first + columns
        inside = first + columns < N
        y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products += y * tl.load(dy_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.sum(products, 0)
    for first in range(0, N, BLOCK):
        at = start + first + columns
        inside = first + columns < N
        y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + at, (y * (dy - total)).to(dx_ptr.dtype.element_ty), mask=inside)


def prepare_softmax(x: Tensor) -> Callable[[], Tensor]:  # [M, N] contiguous -> [M, N]
    """Check x; the returned callable allocates the output and launches. Raises ValueError for other operands."""
    return _prepare(_short_rows_kernel, _long_row_kernel, x)


def prepare_softmax_backward(
    y: Tensor,  # [M, N] contiguous, the output of the forward pass
    dy: Tensor,  # [M, N] contiguous, its gradient
) -> Callable[[], Tensor]:  # [M, N], the gradient of x
    """Check the operands; the returned callable allocates the gradient and launches. Raises ValueError for others."""
    return _prepare(_short_rows_backward_kernel, _long_row_backward_kernel, y, dy)


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


def _prepare(short_rows: object, long_row: object, *operands: Tensor) -> Callable[[], Tensor]:
    """Choose the kernel by row length."""
    require_rows(*operands)
    first = operands[0]
    M, N = first.shape
    if M == 0 or N == 0:
        return lambda: torch.empty_like(first)
    columns = triton.next_power_of_2(N)
    if columns <= (WHOLE_ROW if len(operands) == 1 else WHOLE_ROW_BACKWARD):
        rows = max(1, TILE // columns)
        warps = 8 if columns > WHOLE_ROW else max(4, min(16, rows * columns // 1024))
        launch = Launch(short_rows, (triton.cdiv(M, rows),), ROWS=rows, COLUMNS=columns, num_warps=warps)
    else:
        block, warps = (BLOCK, 16) if len(operands) == 1 else (2 * BLOCK, 32)
        launch = Launch(long_row, (M,), BLOCK=block, num_warps=warps)

    def run() -> Tensor:
        out = torch.empty_like(first)
        launch(*operands, out, M, N)
        return out

    return run


def softmax_reference(x: Tensor) -> Tensor:
    """Return each row's softmax in fp64."""
    powers = (x.double() - x.double().amax(1, keepdim=True)).exp()
    return powers / powers.sum(1, keepdim=True)


def softmax_backward_reference(y: Tensor, dy: Tensor) -> Tensor:
    """Return the rows' gradient in fp64."""
    y, dy = y.double(), dy.double()
    return y * (dy - (y * dy).sum(1, keepdim=True))
