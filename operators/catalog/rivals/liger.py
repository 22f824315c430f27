"""Liger Kernel's fused mixture-of-experts layer (LinkedIn), in Triton: forward, and a recomputing backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from groupbench.operators.catalog.moe_layer import backward, both, forward
from groupbench.operators.catalog.rivals.package import RivalPackage
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.errors import Unavailable

if TYPE_CHECKING:
    from groupbench.operators.catalog.moe_layer import Layer, LayerInputs

PACKAGE = RivalPackage("liger-kernel", "liger_kernel.ops.fused_moe", "rivals-liger")


def layer(x: LayerInputs) -> Layer:
    """Return Liger's layer. Raises Unavailable if a choice has no local expert: Liger has no id for that."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    if x.rows < x.ids.numel():
        raise Unavailable("it does not take choices of experts on other ranks (id -1)")

    def run(tokens: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        out: Tensor = LigerFusedMoEFunction.apply(tokens, w_gate_up, w_down, x.ids.to(torch.int32), weights)
        return out

    return run


BACKENDS = (
    PACKAGE.backend(
        "moe_layer",
        "liger",
        partial(forward, layer),
        "Liger Kernel's fused MoE: Triton, its own autotuning; the backward recomputes tensors that it did not save",
        kind="triton",
        unavailable=PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0)),
        prepare_bwd=partial(backward, layer),
        prepare_fwd_bwd=partial(both, layer),
    ),
)
