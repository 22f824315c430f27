"""The two passes of a mixture-of-experts layer: permute, gate and up, SwiGLU, down, unpermute.

    out[t] = sum over j of weights[t, j] * (silu(x[t] @ gate.T) * (x[t] @ up.T)) @ down.T
             with gate, up = w_gate_up[g, :F], w_gate_up[g, F:] and down = w_down[g] of the expert g = ids[t, j]

        x [T, H]   ids, weights [T, k]   w_gate_up [G, 2F, H]   w_down [G, H, F]   out [T, H]

    forward             5 launches for a few tokens, 6 or 7 for more, no host sync; rows M = T*k
      route             offs, position, source                       routing.py
      permute           rows [M, H]                                  permute.py, permute_fused.py
      gate_up           both [M, 2F], act [M, F] in one launch       gate_up.py
      product           y [M, H] = act @ down.T                      product.py: grouped_gemm/flat.py
      unpermute         out, with the weights                        permute.py

    backward
      permute           dy [M, H] = rows of dout, without weights
      product           da [M, F] = dy @ down
      swiglu_backward   dboth [M, 2F], weighted [M, F], dweights     swiglu.py: weights enter here, by row
      wgrad             dw_down = dy.T @ weighted, dw_gate_up = dboth.T @ rows
      product           dboth @ w_gate_up [M, H]
      unpermute         dx, without weights

The backward pass needs `both` and `rows`. It does not need y (swiglu.py explains why), and computes act again while it
reads both. With `recompute` it also gathers the rows again: that saves M*H values and costs one more permutation.

`ops.moe_layer` connects them to autograd, and is the function to call.

A choice with an id outside 0..G-1 adds nothing to the output, and the weight's gradient is zero.

If H or F is not a multiple of 16 bytes, every call pads all operands with zeros, weights included: correct, but slow.

Sources: SonicMoE (arXiv 2512.14080) for the choice of saved tensors and for the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nn
from torch import Tensor

from groupbench.kernels.grouped_gemm import choose
from groupbench.kernels.grouped_gemm.support import TMA_BYTES, require_tensors
from groupbench.kernels.moe.gate_up import gate_up, gate_up_reference
from groupbench.kernels.moe.permute import (
    check_rows,
    combine_reference,
    combine_rows,
    permute_reference,
    permute_rows,
    spread_reference,
    spread_rows,
)
from groupbench.kernels.moe.product import product
from groupbench.kernels.moe.routing import Routing, check_ids
from groupbench.kernels.moe.swiglu import swiglu_backward, swiglu_backward_reference


@dataclass(frozen=True)
class Parts:
    """The functions that make up the layer, by kernels or in plain torch; the formulas below serve both."""

    permute: Callable[[Tensor, Tensor, int], tuple[Tensor, Routing]]
    spread: Callable[[Tensor, Tensor], Tensor]
    combine: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gate_up: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
    product: Callable[[Tensor, Tensor, Tensor], Tensor]  # a [M, K], b [G, K, N], offs -> [M, N]
    wgrad: Callable[[Tensor, Tensor, Tensor], Tensor]  # a [M, K], dc [M, N], offs -> [G, N, K]
    swiglu_backward: Callable[[Tensor, Tensor, Tensor, Routing], tuple[Tensor, Tensor, Tensor]]


def pad_sizes(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands, padded with zeros if H or F is not a multiple of 16 bytes."""
    H, F = x.size(1), w_down.size(2)
    step = TMA_BYTES // x.element_size()
    more_h, more_f = -H % step, -F % step
    if not more_h and not more_f:
        return x, w_gate_up, w_down
    halves = nn.pad(w_gate_up.unflatten(1, (2, F)), (0, more_h, 0, more_f))
    return nn.pad(x, (0, more_h)), halves.flatten(1, 2), nn.pad(w_down, (0, more_f, 0, more_h))


def check_layer(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
    """Raise ValueError unless all shapes fit together, and TypeError for an operand that is not a tensor."""
    require_tensors(x=x, ids=ids, weights=weights, w_gate_up=w_gate_up, w_down=w_down)
    if w_gate_up.ndim != 3 or w_down.ndim != 3:
        raise ValueError(
            f"expected w_gate_up [G, 2F, H] and w_down [G, H, F], got {tuple(w_gate_up.shape)} and "
            f"{tuple(w_down.shape)}"
        )
    G, H, F = w_down.shape
    if w_gate_up.shape != (G, 2 * F, H) or F == 0 or H == 0:
        raise ValueError(
            f"w_down {tuple(w_down.shape)} needs w_gate_up [{G}, {2 * F}, {H}], F and H at least 1; "
            f"got {tuple(w_gate_up.shape)}"
        )
    check_ids(ids, G)
    check_rows(x, ids)
    if x.size(1) != H:
        raise ValueError(f"expected x [T, {H}], got {tuple(x.shape)}")
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"expected weights {list(ids.shape)} in a float dtype, got {list(weights.shape)} in {weights.dtype}"
        )


@dataclass(frozen=True)
class Saved:
    """The tensors that the forward pass saves for the backward pass."""

    rows: Tensor  # [M, H]; with `recompute` x itself, [T, H]
    both: Tensor  # [M, 2F]
    weights: Tensor  # [T, k]
    w_gate_up: Tensor  # [G, 2F, H]
    w_down: Tensor  # [G, H, F]
    routing: Routing


def forward(
    parts: Parts, x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool,
    recompute: bool = False,
) -> tuple[Tensor, Saved | None]:  # fmt: skip
    """Return out [T, H] and, with `keep`, the tensors for `backward`."""
    w_gate_up, w_down = w_gate_up.contiguous(), w_down.contiguous()
    rows, routing = parts.permute(x, ids, w_down.size(0))
    act, both = parts.gate_up(rows, w_gate_up, routing.offs, keep)
    y = parts.product(act, w_down.transpose(1, 2), routing.offs)
    out = parts.combine(y, routing.position, weights)
    if both is None:
        return out, None
    return out, Saved(x if recompute else rows, both, weights, w_gate_up, w_down, routing)


def backward(
    parts: Parts, saved: Saved, dout: Tensor, wanted: tuple[bool, bool, bool, bool] = (True,) * 4,
    recompute: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the wanted gradients: dx [T, H], dweights [T, k], dw_gate_up [G, 2F, H] and dw_down [G, H, F]."""
    offs, position = saved.routing.offs, saved.routing.position
    dx = dw_gate_up = dw_down = None
    dy = parts.spread(dout, position)
    da = parts.product(dy, saved.w_down, offs)
    dboth, weighted, dweights = parts.swiglu_backward(da, saved.both, saved.weights, saved.routing)
    del da
    if wanted[3]:
        dw_down = parts.wgrad(weighted, dy, offs)
    del dy, weighted
    if wanted[2]:
        rows = parts.spread(saved.rows, position) if recompute else saved.rows
        dw_gate_up = parts.wgrad(rows, dboth, offs)
        del rows
    if wanted[0]:
        dx = parts.combine(parts.product(dboth, saved.w_gate_up, offs), position, None)
    return dx, dweights if wanted[1] else None, dw_gate_up, dw_down


def _wgrad(a: Tensor, dc: Tensor, offs: Tensor) -> Tensor:
    # As the gradient of weights [G, N, K], since the tuned configs are for this layout.
    return choose.gradient(a, dc, offs, nk=True).transpose(1, 2)


TRITON = Parts(permute_rows, spread_rows, combine_rows, gate_up, product, _wgrad, swiglu_backward)


# --- the same in torch ------------------------------------------------------------------------------------------------


def _product_reference(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(a.size(0), b.size(2))
    start = 0
    for g, end in enumerate(offs.tolist()):
        out[start:end] = a[start:end] @ b[g]
        start = end
    return out


def _wgrad_reference(a: Tensor, dc: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(offs.numel(), dc.size(1), a.size(1))
    start = 0
    for g, end in enumerate(offs.tolist()):
        out[g] = dc[start:end].T @ a[start:end]
        start = end
    return out


REFERENCE = Parts(
    permute_reference,
    spread_reference,
    combine_reference,
    gate_up_reference,
    _product_reference,
    _wgrad_reference,
    swiglu_backward_reference,
)


def moe_layer_reference(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Return the layer's output expert by expert, in the operands' dtype, differentiable by torch itself."""
    out = torch.zeros_like(x)
    for g in range(w_down.size(0)):
        token, choice = torch.nonzero(ids == g, as_tuple=True)
        gate, up = (x[token] @ w_gate_up[g].T).chunk(2, -1)
        y = (nn.silu(gate) * up) @ w_down[g].T
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out
