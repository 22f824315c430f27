"""Row softmax, and its gradient, in Helion: row_softmax's backend `helion`.

    y[m, n]  = exp(x[m, n] - max_n x[m, n]) / sum_n exp(...)            x, y, dy, dx [M, N]
    dx[m, n] = y[m, n] * (dy[m, n] - sum_n y[m, n] dy[m, n])

Written as torch would be, with a row tile in place of the matrix: Helion chooses the loops. A row longer
than a tile is read in a loop (`reduction_loops`). After Helion's examples/softmax.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch
import triton
from torch import Tensor

from groupbench.kernels.attention.softmax import WHOLE_ROW, require_rows
from groupbench.kernels.helion_configs import compile_for

LOOP = 8192  # elements of a longer row that are read at once


@helion.kernel(static_shapes=True)
def softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        values = x[tile, :].to(torch.float32) * 1.4426950408889634  # log2(e): the GPU computes powers of two
        shifted = values - torch.amax(values, dim=1, keepdim=True)
        powers = hl.inline_triton(
            "tl.exp2({0})", args=(shifted,), output_like=shifted
        )  # the interpreter has no libdevice
        out[tile, :] = (powers / torch.sum(powers, dim=1, keepdim=True)).to(x.dtype)
    return out


@helion.kernel(static_shapes=True)
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    for tile in hl.tile(y.size(0)):
        values, gradient = y[tile, :].to(torch.float32), dy[tile, :].to(torch.float32)
        total = torch.sum(values * gradient, dim=1, keepdim=True)
        dx[tile, :] = (values * (gradient - total)).to(y.dtype)
    return dx


def default_config(N: int) -> helion.Config:
    """Return the config for rows with N elements: whole rows while they fit in registers."""
    columns = triton.next_power_of_2(N)
    looped = columns > WHOLE_ROW
    rows = max(1, 4096 // columns)
    warps = max(4, min(16, columns // 1024))
    return helion.Config(block_sizes=[rows], reduction_loops=[LOOP if looped else None], num_warps=warps, num_stages=1)


def prepare_softmax_helion(x: Tensor, config: helion.Config | None = None) -> Callable[[], Tensor]:  # [M, N] -> [M, N]
    """Compile for this shape, without tuning; the returned callable allocates the output and launches."""
    return _prepare(softmax, config, x)


def prepare_softmax_backward_helion(
    y: Tensor,  # [M, N], the output of the forward pass
    dy: Tensor,  # [M, N], its gradient
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [M, N], the gradient of x
    """Compile for this shape, without tuning; the returned callable allocates the gradient and launches."""
    return _prepare(softmax_backward, config, y, dy)


def _prepare(kernel: Any, config: helion.Config | None, *operands: Tensor) -> Callable[[], Tensor]:
    require_rows(*operands)
    M, N = operands[0].shape
    if M == 0 or N == 0:
        return lambda: torch.empty_like(operands[0])
    rows = tuple(x.expand(2, -1) if M == 1 else x for x in operands)  # Helion drops the index of a single row
    compiled = compile_for(kernel, rows, config or default_config(N))

    def run() -> Tensor:
        out: Tensor = compiled(*rows)
        return out[:M]

    if operands[0].device.type == "cuda":
        run()  # compiles the generated Triton code
    return run
