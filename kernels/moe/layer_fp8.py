"""layer.py's mixture-of-experts layer with products in fp8, forward and backward, in DeepSeek-V3's recipe.

Inputs, weights and gradients are in 16 bits, and every product's operands are quantised in each call: rows with a scale
per 128 columns, weights per 128 x 128, and operands for weight gradients, which sum over rows, per 128 rows.

    forward
      route                                                          routing.py
      row_blocks        blocks of 128 rows of one expert             quantize.py
      quantize_weights  both forms of w_gate_up and w_down           grouped_gemm/quantize.py
      quantize_rows_of  x's rows, gathered and quantised            quantize.py
      fp8 product       both [M, 2F]                                 grouped_gemm/fp8.py
      swiglu_quantized  act
      fp8 product       y [M, H]
      unpermute         out, with the weights                        permute.py

    backward
      quantize_rows_of  dy, dout's rows
      fp8 product       da [M, F]
      swiglu_backward_quantized   dboth, weights * act, dweights
      fp8 wgrad         dw_down, dw_gate_up                          grouped_gemm/fp8_wgrad.py
      fp8 product       dboth @ w_gate_up
      unpermute         dx

H and F must be divisible by 128. The recipe: DeepSeek-V3 report, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupbench.kernels.grouped_gemm.fp8 import bind_blockwise, prepare_fp8
from groupbench.kernels.grouped_gemm.fp8_wgrad import prepare_fp8_wgrad
from groupbench.kernels.grouped_gemm.quantize import SCALE_BLOCK, quantize_weights
from groupbench.kernels.grouped_gemm.support import require_device
from groupbench.kernels.moe.layer import check_layer
from groupbench.kernels.moe.permute import combine_rows
from groupbench.kernels.moe.quantize import (
    Quantized,
    quantize_rows_of,
    row_blocks,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from groupbench.kernels.moe.routing import Routing, route


def moe_layer_fp8(
    x: Tensor,  # [T, H]
    ids: Tensor,  # [T, k], int32 or int64
    weights: Tensor,  # [T, k], any float dtype
    w_gate_up: Tensor,  # [G, 2F, H]
    w_down: Tensor,  # [G, H, F]
) -> Tensor:  # [T, H]
    """Return the layer's output, differentiable once in x, weights, w_gate_up and w_down.

    Raises ValueError if operands do not fit together or cannot run, and for sizes the recipe does not have.
    """
    check_layer(x, ids, weights, w_gate_up, w_down)
    require_device(x.device)
    H, F = w_down.shape[1:]
    if H % SCALE_BLOCK or F % SCALE_BLOCK:
        raise ValueError(f"H={H}, F={F}: in fp8 both have to be multiples of {SCALE_BLOCK}")
    if x.numel() == 0 or x.dtype == torch.float32:
        raise ValueError("fp8 needs at least one token, in fp16 or bf16")
    out: Tensor = _Layer.apply(x.contiguous(), ids, weights, w_gate_up.contiguous(), w_down.contiguous())
    return out


def _product(a: Quantized, w: tuple[Tensor, Tensor], offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a [M, K] times the weights [G, N, K]: [M, N]."""
    bound = bind_blockwise(*a, w[0], offs, dtype)
    if bound is not None:
        return bound(*a, *w, offs)
    return prepare_fp8(*a, *w, offs, out_dtype=dtype, trusted=True)()


def _wgrad(dc: Quantized, a: Quantized, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight gradient [G, N, K]."""
    return prepare_fp8_wgrad(*dc, *a, offs, blockwise=True, out_dtype=dtype)()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        routing = route(ids, w_down.size(0))
        gate_up, gate_up_s, gate_up_t, gate_up_t_s = quantize_weights(w_gate_up)
        down, down_s, down_t, down_t_s = quantize_weights(w_down)
        blocks = row_blocks(routing)
        rows, rows_t = quantize_rows_of(x, routing, blocks, by_columns=ctx.needs_input_grad[3])
        both = _product(rows, (gate_up, gate_up_s), routing.offs, x.dtype)
        act = swiglu_quantized(both, blocks)
        y = _product(act, (down, down_s), routing.offs, x.dtype)
        saved = (*(rows_t or (None, None)), both, weights, gate_up_t, gate_up_t_s, down_t, down_t_s)
        ctx.save_for_backward(*saved, blocks, routing.offs, routing.position, routing.source)
        return combine_rows(y, routing.position, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows_t, rows_t_s, both, weights, gate_up_t, gate_up_t_s, down_t, down_t_s, blocks, *where = ctx.saved_tensors
        routing = Routing(*where)
        offs, dtype = routing.offs, dout.dtype
        wants_x, _, _, wants_gate_up, wants_down = ctx.needs_input_grad
        dy, dy_t = quantize_rows_of(dout.contiguous(), routing, blocks, by_columns=wants_down)
        da = _product(dy, (down_t, down_t_s), offs, dtype)
        dboth, dboth_t, weighted, dweights = swiglu_backward_quantized(da, both, weights, routing, blocks)
        dw_down = _wgrad(dy_t, weighted, offs, dtype) if dy_t is not None else None
        dw_gate_up = _wgrad(dboth_t, Quantized(rows_t, rows_t_s), offs, dtype) if wants_gate_up else None
        dx = None
        if wants_x:
            dx = combine_rows(_product(dboth, (gate_up_t, gate_up_t_s), offs, dtype), routing.position, None)
        return dx, None, dweights, dw_gate_up, dw_down
