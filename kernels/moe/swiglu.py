"""SwiGLU by itself, and its backward pass with all sums along a row; each reads its operands once.

    act = silu(gate) * up = gate * s * up,  s = 1 / (1 + exp(-gate))            both = [gate, up] [M, 2F]   act [M, F]

Backward, with w the weight that a row's output is multiplied by, and da the gradient of act before that weight:

    dgate = w * da * up * s * (1 + gate * (1 - s))
    dup   = w * da * gate * s
    weighted = w * act                 operand of the gradient of the second product's weights
    dw    = sum over f of da * act     the gradient of w

The last line is why the layer need not keep its second product: the gradient of a weight is <dout, y>, and with
y = act @ W and da = dout @ W.T that is <da, act>. act is computed again from gate and up, which are read anyway.

A program has one row and sums over it in a fixed order: bitwise the same in every call. Rows past offs[-1] are neither
read nor written. Sources: SonicMoE (arXiv 2512.14080), section on the backward pass, for <da, act>.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.launch import launch
from groupbench.kernels.moe.routing import Routing

MAX_BLOCK = 1024  # columns at a time: 16 bytes per thread of 128 in 16-bit dtypes


@triton.jit
def _swiglu_kernel(both_ptr, act_ptr, offs_ptr, G, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offs_ptr + G - 1):
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < F
            gate = tl.load(both_ptr + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
            act = gate / (1 + tl.exp(-gate)) * up
            tl.store(act_ptr + row * F + columns, act.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    both_ptr,  # [M, 2F]
    da_ptr,  # [M, F]
    weights_ptr,  # [M] by flat choice
    source_ptr,  # [M]
    offs_ptr,  # [G]
    dboth_ptr,  # [M, 2F]
    weighted_ptr,  # [M, F]
    dweights_ptr,  # [M] by flat choice
    G,
    F,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offs_ptr + G - 1):
        choice = tl.load(source_ptr + row)
        w = tl.load(weights_ptr + choice).to(tl.float32)
        products = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < F
            gate = tl.load(both_ptr + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
            da = tl.load(da_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
            s = 1 / (1 + tl.exp(-gate))
            silu = gate * s
            act = silu * up
            products += da * act
            da *= w
            DTYPE: tl.constexpr = dboth_ptr.dtype.element_ty
            dgate = da * up * s * (1 + gate * (1 - s))
            tl.store(dboth_ptr + row * 2 * F + columns, dgate.to(DTYPE), mask=inside)
            tl.store(dboth_ptr + row * 2 * F + F + columns, (da * silu).to(DTYPE), mask=inside)
            tl.store(weighted_ptr + row * F + columns, (w * act).to(DTYPE), mask=inside)
        tl.store(dweights_ptr + choice, tl.sum(products, 0).to(dweights_ptr.dtype.element_ty))


def swiglu(
    both: Tensor,  # [M, 2F] contiguous
    offs: Tensor,  # [G] end offsets
) -> Tensor:  # [M, F]; rows past offs[-1] are not written
    """Return silu(gate) * up of every row, for operands that were checked already."""
    M, F = both.size(0), both.size(1) // 2
    act = torch.empty(M, F, dtype=both.dtype, device=both.device)
    if act.numel():
        launch(_swiglu_kernel, (M,), both, act, offs, offs.numel(), F, BLOCK=_block(F), num_warps=4)
    return act


def swiglu_backward(
    da: Tensor,  # [M, F] contiguous
    both: Tensor,  # [M, 2F] contiguous
    weights: Tensor,  # [T, k], T*k = M
    routing: Routing,
) -> tuple[Tensor, Tensor, Tensor]:  # dboth [M, 2F], weighted [M, F], dweights [T, k]
    """Return the gradients for operands that were checked; that of a choice without a row is zero."""
    M, F = da.shape
    dboth, weighted = torch.empty_like(both), torch.empty_like(da)
    dweights = torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device)
    if da.numel():
        launch(
            _swiglu_backward_kernel, (M,),
            both, da, weights.contiguous(), routing.source, routing.offs, dboth, weighted,
            dweights, routing.offs.numel(), F, BLOCK=_block(F), num_warps=4,
        )  # fmt: skip
    return dboth, weighted, dweights


def _block(F: int) -> int:
    return min(MAX_BLOCK, triton.next_power_of_2(F))


# --- the same in torch ------------------------------------------------------------------------------------------------


def swiglu_reference(both: Tensor) -> Tensor:  # both [M, 2F]; act [M, F]
    """Return silu(gate) * up of every row in the dtype of both."""
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward_reference(
    da: Tensor, both: Tensor, weights: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `swiglu_backward` in da's dtype; rows past offs[-1] are zero."""
    rows = int(routing.offs[-1])
    source = routing.source[:rows].long()
    w = da.new_zeros(da.size(0), 1)
    w[:rows, 0] = weights.flatten()[source].to(da.dtype)
    gate, up = both.chunk(2, -1)
    s = torch.sigmoid(gate)
    act = gate * s * up
    dboth = torch.cat([w * da * up * s * (1 + gate * (1 - s)), w * da * gate * s], 1)
    dweights = da.new_zeros(weights.numel())
    dweights[source] = (da * act).sum(1)[:rows]
    return dboth, w * act, dweights.view(weights.shape).to(weights.dtype)
