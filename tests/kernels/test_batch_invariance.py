"""The bits of a row do not depend on its batch, in every operation that promises it (docs/guide/models.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupbench.kernels import ops
from groupbench.operators.measure.costs import batch_invariant
from groupbench.operators.registry import get_operator

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = "bf16" if GPU else "fp16"
# On a GPU the classes in which another kernel is chosen for few rows than for many.
PRODUCTS = (
    ("G=8,M=64,N=768,K=2048", "G=3,M=512,N=1024,K=512,W=nk", "G=16,M=64,N=4096,K=1536,W=nk")
    if GPU
    else ("G=3,M_g=9|0|15,N=32,K=48",)
)
LAYERS = ("T=64,k=4,G=16,H=1024,F=512", "T=64,k=8,G=128,H=2048,F=768") if GPU else ("T=6,k=2,G=3,H=32,F=16",)


def invariant(name: str, mode: str, text: str, prepare: Any) -> bool | None:
    operator = get_operator(name).in_mode(mode)
    inputs = operator.make_inputs(operator.parse_shape(text), DTYPE, DEVICE, 0)
    assert operator.placements is not None
    batches = operator.placements(inputs)
    if not GPU:
        batches = (batch for i, batch in enumerate(batches) if i % 9 == 0 and batch.rows < 200)
    return batch_invariant(prepare, batches)


def product(x: Any) -> Any:
    return lambda: ops.grouped_mm(x.a, x.b, x.offs)


def weight_gradient(x: Any) -> Any:
    return lambda: ops.grouped_mm(x.a.t(), x.dc, x.offs)


def backward(y: Any) -> Any:
    b = y.x.b.detach().requires_grad_()
    a = y.x.a.detach().requires_grad_()
    return lambda: _gradients(ops.grouped_mm(a, b, y.x.offs), y.dc, a, b)


def layer(x: Any) -> Any:
    return lambda: ops.moe_layer(x.x, x.ids, x.weights, x.w_gate_up, x.w_down)


def layer_backward(x: Any) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in x.leaves]
    return lambda: _gradients(ops.moe_layer(leaves[0], x.ids, *leaves[1:]), x.dout, *leaves)


def _gradients(out: Any, dout: Any, *leaves: Any) -> Any:
    out.backward(dout)
    return tuple(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("text", PRODUCTS)
@pytest.mark.parametrize(
    ("name", "mode", "prepare"),
    [
        ("grouped_gemm", "fwd", product),
        ("grouped_gemm", "bwd", backward),
        ("grouped_gemm_wgrad", "fwd", weight_gradient),
    ],
)
def test_products(name: str, mode: str, prepare: Any, text: str) -> None:
    assert invariant(name, mode, text, prepare) is True


@pytest.mark.parametrize("text", LAYERS)
@pytest.mark.parametrize(("mode", "prepare"), [("fwd", layer), ("bwd", layer_backward)])
def test_layer(mode: str, prepare: Any, text: str) -> None:
    assert invariant("moe_layer", mode, text, prepare) is True
