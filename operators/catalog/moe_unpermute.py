"""Weighted sum over each token's expert rows, the last step in a mixture-of-experts layer.

    out[t] = sum over j of weights[t, j] * y[position[t, j]]       y [T*k, H]   position, weights [T, k]   out [T, H]

A choice at position -1 adds nothing. Rows without a choice are NaN, so a backend reading them is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupbench.operators.catalog import moe
from groupbench.operators.catalog.backends import described, lazy
from groupbench.operators.catalog.moe import MoeShape
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.operator import Backend, Operator, Run


@dataclass(frozen=True)
class UnpermuteInputs:
    """The rows and their tokens. torch's backends need `order` and `rows`, which a permutation by sorting returns."""

    y: Tensor  # [T*k, H]
    position: Tensor  # [T, k] int32, the row of each choice, or -1
    weights: Tensor  # [T, k]
    order: Tensor  # [rows] int64, the flat index of each row's choice
    rows: int  # number of choices that have a row, on the host


def make_inputs(shape: MoeShape, dtype: str, device: str, seed: int) -> UnpermuteInputs:
    """Draw standard normal rows, and weights summing to 1 over a token's choices."""
    from groupbench.kernels.moe.routing import route_reference

    generator = torch.Generator(device).manual_seed(seed)
    y = torch.randn(shape.choices, shape.H, generator=generator, device=device, dtype=torch_dtype(dtype))
    y[shape.M :] = math.nan
    routing = route_reference(moe.ids_of(shape, device), shape.G)
    weights = routing_weights(shape, dtype, device, generator)
    return UnpermuteInputs(y, routing.position, weights, routing.source[: shape.M].long(), shape.M)


def reroute(shape: MoeShape, x: UnpermuteInputs, seed: int) -> bool:
    from groupbench.kernels.moe.routing import route_reference

    ids = moe.ids_of(shape, str(x.position.device))
    changed = moe.reroute_ids(ids, shape.G, seed)
    routing = route_reference(ids, shape.G)
    x.position.copy_(routing.position)
    x.order.copy_(routing.source[: shape.M].long())
    return changed


def routing_weights(shape: MoeShape, dtype: str, device: str, generator: object) -> Tensor:  # [T, k]
    """Return the softmax over standard normal scores."""
    scores = torch.randn(shape.T, shape.k, generator=generator, device=device)  # type: ignore[call-overload]
    return torch.softmax(scores, -1).to(torch_dtype(dtype))


def reference(x: UnpermuteInputs) -> Tensor:
    from groupbench.kernels.moe.permute import combine_reference

    wide = torch.float64 if x.y.dtype == torch.float32 else torch.float32
    return combine_reference(x.y.to(wide), x.position, x.weights)


def flops(shape: MoeShape) -> int:
    return 2 * shape.M * shape.H


def min_bytes(shape: MoeShape, dtype: str) -> int:
    """Count each row, position and weight read once, and each token written once."""
    return (shape.T + shape.M) * shape.H * BYTES[dtype] + shape.choices * (4 + BYTES[dtype])


def prepare_torch(x: UnpermuteInputs) -> Run:
    """index_select into the order of tokens, multiply, sum over k."""
    T, k = x.position.shape
    at = x.position.flatten().clamp_min(0)
    without_row = (x.position < 0).view(T, k, 1) if x.rows < at.numel() else None

    def run() -> Tensor:
        rows = x.y.index_select(0, at).view(T, k, x.y.shape[1])
        if without_row is not None:
            rows = rows.masked_fill(without_row, 0)
        return (rows * x.weights[:, :, None]).sum(1)

    return run


def prepare_torch_index_add(x: UnpermuteInputs) -> Run:
    """Multiply, then index_add_ into zeros: atomics, with rounding at each addition."""
    T, k = x.position.shape
    token = x.order // k

    def run() -> Tensor:
        weighted = x.y[: x.rows] * x.weights.flatten()[x.order, None]
        return x.y.new_zeros(T, x.y.size(1)).index_add_(0, token, weighted)

    return run


_SUMMED = "{dtype}_summed"  # both round every weighted row before they add it

MOE_UNPERMUTE = Operator(
    name="moe_unpermute",
    baseline="torch",
    backends=(
        described(prepare_torch, tolerance=_SUMMED),
        described(prepare_torch_index_add, tolerance=_SUMMED),
        Backend(
            "triton",
            lazy("moe.permute:prepare_unpermute", "y position weights"),
            "one program per token: k rows gathered and summed in fp32, in the order of j",
            kind="triton",
        ),
        Backend(
            "helion",
            lazy("moe.helion_permute:prepare_helion_unpermute", "y position weights"),
            "the same in Helion",
            kind="helion",
        ),
    ),
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[T, H]",
    reroute=reroute,
    **moe.shape_fields(layer=False),
)
