"""The layer and its parts as operations of torch: `moe_layer`, `permute`, `unpermute`, `quantize`.

    moe_layer   out[t] = sum over j of weights[t, j] * down(silu(gate(x[t])) * up(x[t])) of the expert ids[t, j]
    permute     rows[position[t, j]] = x[t], sorted by expert         unpermute   the weighted sum of each token's rows
    quantize    x as q * scale, in fp8

The formulas and kernels are those of moe/ and grouped_gemm/quantize.py. The gradient of `permute` is `unpermute`
without weights, and that of `unpermute` spreads the rows again.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.choose import on_runnable_device
from groupbench.kernels.grouped_gemm.quantize import E4M3, SCALE_BLOCK
from groupbench.kernels.grouped_gemm.support import unsupported
from groupbench.kernels.launch import Kept
from groupbench.kernels.moe import layer
from groupbench.kernels.moe import permute as rows_of
from groupbench.kernels.moe.routing import Routing, check_ids
from groupbench.kernels.ops.define import autocast_enabled, cast_by_autocast, define, direct


def moe_layer(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64; -1 for a choice without an expert here
    weights: Tensor,  # [T, k], any float dtype
    w_gate_up: Tensor,  # [G, 2F, H]
    w_down: Tensor,  # [G, H, F]
    recompute: bool = False,
) -> Tensor:
    """Return the output [T, H] of a mixture-of-experts layer, differentiable once in all but `ids`.

    A token's result has the same bits whatever the other tokens are. Under autocast, x and the matrices are cast as
    torch.matmul would cast them; weights keep their dtype.

    Args:
        x: one row for each token.
        ids: the experts of each token.
        weights: the factors of these experts.
        w_gate_up: matrices of gates, and below them those of up projections.
        w_down: matrices of down projections.
        recompute: gather rows again in the backward pass instead of saving them.

    Raises:
        ValueError: operands do not fit together. If their dtype or device does not suit the kernels, torch computes
            the layer; `layer_fallback_reason` gives the reason.
    """
    operands = (x, ids, weights, w_gate_up, w_down)
    key = _problem(*operands) if direct(*operands) and not autocast_enabled() else None
    if key is not None and _ready.get(key):
        return _around_dispatcher(*operands, _keeps(*operands), recompute, True)
    layer.check_layer(*operands)
    x, w_gate_up, w_down = cast_by_autocast(x, w_gate_up, w_down)
    kernels = layer_fallback_reason(x, w_gate_up, w_down) is None
    H = x.size(1)
    made = tuple(each.resolve_neg() for each in layer.pad_sizes(x, w_gate_up, w_down))
    if key is not None and kernels and all(map(operator.is_, made, (x, w_gate_up, w_down))):
        _ready.add(key, True)
    x, w_gate_up, w_down = made
    keep = _keeps(x, ids, weights, w_gate_up, w_down)
    run: Any = _around_dispatcher if direct(*operands) else lambda *args: _moe_layer(*args)[0]
    out: Tensor = run(x, ids, weights, w_gate_up, w_down, keep, recompute, kernels)
    return out if out.size(1) == H else out[:, :H]


_ready: Kept[bool] = Kept()
"""Problem classes whose operands the kernels take as they are. Checking them takes as long as a launch."""


def _problem(*operands: Tensor) -> Hashable:
    """Return all facts of the operands that a check depends on, or None for operands that are not on a GPU."""
    if not all(isinstance(x, Tensor) and x.is_cuda for x in operands):
        return None
    return tuple([(x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in operands])


def _keeps(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> bool:
    """Return whether a backward pass may follow."""
    wanted = x.requires_grad or weights.requires_grad or w_gate_up.requires_grad or w_down.requires_grad
    return wanted and torch.is_grad_enabled()


def _around_dispatcher(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool, recompute: bool,
    kernels: bool,
) -> Tensor:  # fmt: skip
    if not keep:
        return layer.forward(_parts(kernels), x, ids, weights, w_gate_up, w_down, False)[0]
    out: Tensor = _Direct.apply(x, ids, weights, w_gate_up, w_down, keep, recompute, kernels)
    return out


def layer_fallback_reason(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> str | None:
    """Return why torch would compute this layer, or None if groupbench's kernels do."""
    x, w_gate_up, w_down = cast_by_autocast(x, w_gate_up, w_down)
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if w.dtype != x.dtype or w.device != x.device:
            raise ValueError(f"{name} is {w.dtype} on {w.device}, and x is {x.dtype} on {x.device}")
    return _unfit(x)


def permute(
    x: Tensor,  # [T, H]
    ids: Tensor,  # [T, k], int32 or int64; -1 for a choice without an expert here
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # rows [T*k, H], offs [G] int32, position [T, k] int32
    """Return the rows of all choices sorted by expert, where each expert's rows end, and the row of each choice.

    Rows from offs[-1] on belong to no choice and have arbitrary values. A choice without a row has position -1.
    Differentiable once in x. Raises ValueError for operands that do not fit together.
    """
    check_ids(ids, num_experts)
    rows_of.check_rows(x, ids)
    rows, offs, position = _permute(x.resolve_neg(), ids, num_experts, _unfit(x) is None)
    return rows, offs, position


def unpermute(
    y: Tensor,  # [rows, H]
    position: Tensor,  # [T, k] int32, of `permute`
    weights: Tensor | None = None,  # [T, k], any float dtype; None: all are 1
) -> Tensor:  # [T, H]
    """Return the weighted sum of each token's rows, differentiable once in y and weights.

    Positions are not checked. Raises ValueError for operands whose shapes do not fit together.
    """
    if y.dim() != 2 or position.dim() != 2 or position.dtype != torch.int32:
        raise ValueError(
            f"expected y [rows, H] and position [T, k] in int32, got {tuple(y.shape)} and {tuple(position.shape)} in "
            f"{position.dtype}"
        )
    if weights is not None and (weights.shape != position.shape or not weights.is_floating_point()):
        raise ValueError(f"expected weights {tuple(position.shape)} in a float dtype, got {tuple(weights.shape)}")
    out: Tensor = _unpermute(y.resolve_neg(), position, weights, _unfit(y) is None)
    return out


def quantize(x: Tensor, blockwise: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [M, K] in fp8 (e4m3fn), and its scales in fp32: the operands of `scaled_grouped_mm`. No gradient.

    Args:
        x: a matrix with rows of stride 1.
        blockwise: one scale for each 128 columns of a row, [M, K/128] stored column by column, instead of [M].
    """
    if x.dim() != 2 or x.stride(1) != 1 or not x.is_floating_point():
        raise ValueError(f"expected [M, K] with rows of stride 1, got {tuple(x.shape)}, {x.stride()}, {x.dtype}")
    q, scale = _quantize(x.resolve_neg(), blockwise, _unfit(x) is None)
    return q, scale


def _unfit(x: Tensor) -> str | None:
    """Return why the kernels cannot take a tensor like this, or None if they can."""
    return on_runnable_device(x) or unsupported(x.dtype, x.device.type == "cpu")


# --- the layer --------------------------------------------------------------------------------------------------------


def _parts(kernels: bool) -> layer.Parts:
    return layer.TRITON if kernels else layer.REFERENCE


def _nothing_saved(x: Tensor) -> Iterator[Tensor]:
    """Yield empty tensors in place of those that the backward pass needs."""
    return (x.new_empty(0, dtype=dtype) for dtype in (x.dtype, x.dtype, *[torch.int32] * 3))


def _layer(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool, recompute: bool,
    kernels: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, and the tensors that the backward pass needs: rows, both, offs, position, source; else empty ones."""
    out, saved = layer.forward(_parts(kernels), x, ids, weights, w_gate_up, w_down, keep)
    if saved is None:
        return out, *_nothing_saved(x)
    rows = x.new_empty(0) if recompute else saved.rows
    return out, rows, saved.both, saved.routing.offs, saved.routing.position, saved.routing.source


def _layer_fake(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool, recompute: bool,
    kernels: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (T, H), k, (G, _, F) = x.shape, ids.size(1), w_down.shape
    out, M = x.new_empty(T, H), T * k
    if not keep:
        return out, *_nothing_saved(x)
    rows = x.new_empty(0) if recompute else x.new_empty(M, H)
    offs, position, source = (x.new_empty(size, dtype=torch.int32) for size in ((G,), (T, k), (M,)))
    return out, rows, x.new_empty(M, 2 * F), offs, position, source


def _layer_grad(
    dout: Tensor, rows: Tensor, both: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, offs: Tensor,
    position: Tensor, source: Tensor, wanted: Sequence[bool], recompute: bool, kernels: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dx, dweights, dw_gate_up and dw_down; those that are not wanted are empty."""
    w_gate_up, w_down = w_gate_up.contiguous(), w_down.contiguous()
    saved = layer.Saved(rows, both, weights, w_gate_up, w_down, Routing(offs, position, source))
    a, b, c, d = wanted
    got = layer.backward(_parts(kernels), saved, dout.resolve_neg(), (a, b, c, d), recompute)
    return tuple(dout.new_empty(0) if each is None else each.contiguous() for each in got)


def _layer_grad_fake(
    dout: Tensor, rows: Tensor, both: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, offs: Tensor,
    position: Tensor, source: Tensor, wanted: Sequence[bool], recompute: bool, kernels: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = ((dout, dout.shape), (weights, weights.shape), (w_gate_up, w_gate_up.shape), (w_down, w_down.shape))
    return tuple(
        of.new_empty(shape) if want else dout.new_empty(0) for (of, shape), want in zip(like, wanted, strict=True)
    )


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    _save(ctx, inputs, output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, w_gate_up, w_down, _, ctx.recompute, ctx.kernels = inputs
    _, rows, *rest = output
    ctx.save_for_backward(x if ctx.recompute else rows, rest[0], weights, w_gate_up, w_down, *rest[1:])


def _backward_layer(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[2], needs[3], needs[4]]
    # With create_graph, the gradients need the nodes that refuse a second derivative.
    gradients: Any = _layer_grad if not torch.is_grad_enabled() and direct(dout) else _layer_grad_op
    got = gradients(dout, *ctx.saved_tensors, wanted, ctx.recompute, ctx.kernels)
    dx, dweights, dw_gate_up, dw_down = (each if want else None for each, want in zip(got, wanted, strict=True))
    return dx, None, dweights, dw_gate_up, dw_down, None, None, None


_layer_grad_op = define(
    "moe_layer_grad(Tensor dout, Tensor rows, Tensor both, Tensor weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor offs, Tensor position, Tensor source, bool[] wanted, bool recompute, bool kernels) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _layer_grad,
    _layer_grad_fake,
)
_moe_layer = define(
    "moe_layer(Tensor x, Tensor ids, Tensor weights, Tensor w_gate_up, Tensor w_down, bool keep, bool recompute, "
    "bool kernels) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
    gradients=(_save_layer, _backward_layer),
)


class _Direct(torch.autograd.Function):
    """The same for calls that need no dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _layer(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _backward_layer(ctx, dout)


# --- permute and unpermute --------------------------------------------------------------------------------------------


def _permute_rows(x: Tensor, ids: Tensor, G: int, kernels: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, routing = (rows_of.permute_rows if kernels else rows_of.permute_reference)(x, ids, G)
    return rows, routing.offs, routing.position


def _permute_fake(x: Tensor, ids: Tensor, G: int, kernels: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(ids.size(0) * ids.size(1), x.size(1))
    return rows, x.new_empty(G, dtype=torch.int32), x.new_empty(ids.shape, dtype=torch.int32)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.kernels = inputs[3]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])


def _backward_permute(ctx: Any, drows: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (position,) = ctx.saved_tensors
    return torch.ops.groupbench.unpermute_grad(drows, position, None, ctx.kernels), None, None, None


_permute = define(
    "permute(Tensor x, Tensor ids, int G, bool kernels) -> (Tensor, Tensor, Tensor)",
    _permute_rows,
    _permute_fake,
    gradients=(_save_permute, _backward_permute),
)


def _combine(y: Tensor, position: Tensor, weights: Tensor | None, kernels: bool) -> Tensor:
    return (rows_of.combine_rows if kernels else rows_of.combine_reference)(y.resolve_neg(), position, weights)


def _combine_fake(y: Tensor, position: Tensor, weights: Tensor | None, kernels: bool) -> Tensor:
    return y.new_empty(position.size(0), y.size(1))


def _spread(
    dout: Tensor, y: Tensor | None, position: Tensor, weights: Tensor | None, rows: int, wants_rows: bool, kernels: bool
) -> tuple[Tensor, Tensor]:
    """Return dy [rows, H], if it is wanted, and, of a y that is given, dweights [T, k]."""
    held, at = position >= 0, position.clamp_min(0).long()
    dy = dweights = dout.new_empty(0)
    if y is not None and weights is not None:
        of_choice = (y[at].float() * dout.float()[:, None]).sum(2)
        dweights = torch.where(held, of_choice, 0.0).to(weights.dtype)
    if wants_rows:
        each = dout[:, None].expand(-1, position.size(1), -1)
        if weights is not None:
            each = each * weights.to(dout.dtype)[:, :, None]
        # Choices without a row go to a further row, which is cut off.
        to = torch.where(held, at, rows).flatten()
        dy = dout.new_zeros(rows + 1, dout.size(1)).index_copy(0, to, each.reshape(-1, dout.size(1)))[:rows].clone()
    return dy, dweights


def _spread_fake(
    dout: Tensor, y: Tensor | None, position: Tensor, weights: Tensor | None, rows: int, wants_rows: bool, kernels: bool
) -> tuple[Tensor, Tensor]:
    dy = dout.new_empty(rows, dout.size(1)) if wants_rows else dout.new_empty(0)
    return dy, dout.new_empty(0) if y is None or weights is None else weights.new_empty(weights.shape)


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, position, weights, ctx.kernels = inputs
    ctx.rows = y.size(0)
    ctx.wants_weights = weights is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(y if ctx.wants_weights else None, position, weights)


def _backward_unpermute(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    y, position, weights = ctx.saved_tensors
    wants = ctx.needs_input_grad[0]
    dy, dweights = torch.ops.groupbench.spread_grad(dout, y, position, weights, ctx.rows, wants, ctx.kernels)
    return dy if wants else None, None, dweights if ctx.wants_weights else None, None


define("unpermute_grad(Tensor y, Tensor position, Tensor? weights, bool kernels) -> Tensor", _combine, _combine_fake)
define(
    "spread_grad(Tensor dout, Tensor? y, Tensor position, Tensor? weights, SymInt rows, bool wants_rows, bool kernels) "
    "-> (Tensor, Tensor)",
    _spread,
    _spread_fake,
)
_unpermute = define(
    "unpermute(Tensor y, Tensor position, Tensor? weights, bool kernels) -> Tensor",
    _combine,
    _combine_fake,
    gradients=(_save_unpermute, _backward_unpermute),
)


# --- fp8 --------------------------------------------------------------------------------------------------------------


def _quantized(x: Tensor, blockwise: bool, kernels: bool) -> tuple[Tensor, Tensor]:
    from groupbench.kernels.grouped_gemm import quantize as fp8

    if kernels:
        return fp8.prepare_quantize(x, blockwise)()
    return (fp8.quantize_blocks_reference if blockwise else fp8.quantize_rows_reference)(x)


def _quantized_fake(x: Tensor, blockwise: bool, kernels: bool) -> tuple[Tensor, Tensor]:
    (M, K), padded = x.shape, (x.size(1) + 15) // 16 * 16
    q = x.new_empty(M, padded, dtype=E4M3)[:, :K]
    if not blockwise:
        return q, x.new_empty(M, dtype=torch.float32)
    return q, x.new_empty((K + SCALE_BLOCK - 1) // SCALE_BLOCK, M, dtype=torch.float32).t()


_quantize = define("quantize(Tensor x, bool blockwise, bool kernels) -> (Tensor, Tensor)", _quantized, _quantized_fake)
