"""The experts of a layer with weights of mxfp4, as in gpt-oss, with its clamped gate and biases.

    out[t] = sum over j of weights[t, j] * (act(x[t] @ gate_up.T + bias_up) @ down.T + bias_down) of expert ids[t, j]

    x [T, H]   ids, weights [T, k]   gate_up [G, 2F, H], gate and up in turns   down [G, H, F]   out [T, H]
    act = gate * sigmoid(1.702 * gate) * (up + 1),  gate at most 7, up within -7..7

The reference multiplies the packed values in fp64. Activations have 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from groupbench.operators.catalog import models, moe
from groupbench.operators.catalog.backends import described, triton
from groupbench.operators.catalog.moe import MoeShape
from groupbench.operators.catalog.moe_layer import decode
from groupbench.operators.catalog.moe_unpermute import routing_weights
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.operator import Operator, Run
from groupbench.operators.suites import Suites

GROUP = 32  # values with one scale


@dataclass(frozen=True)
class LayerW4Inputs:
    """The operands of a layer; weights as in grouped_gemm_w4a16 with fmt=mxfp4."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int64, -1 for an expert elsewhere
    weights: Tensor  # [T, k]
    codes_up: Tensor  # [G, 2F, H/2] uint8
    scales_up: Tensor  # [G, 2F, H/32] uint8
    bias_up: Tensor  # [G, 2F]
    codes_down: Tensor  # [G, H, F/2] uint8
    scales_down: Tensor  # [G, H, F/32] uint8
    bias_down: Tensor  # [G, H]

    @property
    def operands(self) -> tuple[Any, Any, Any, Any]:
        """The packed weights and biases, in the order of FourBitExperts' arguments."""
        from groupbench.kernels.four_bit.formats import MXFP4, Weights

        H, F = self.x.shape[1], self.codes_up.shape[1] // 2
        up = Weights(MXFP4, H, self.codes_up, self.scales_up)
        return up, Weights(MXFP4, F, self.codes_down, self.scales_down), self.bias_up, self.bias_down


def make_inputs(shape: MoeShape, dtype: str, device: str, seed: int) -> LayerW4Inputs:
    """Draw standard normal rows and biases, and weights of deviation 1/sqrt(H) and 1/sqrt(F); pack the weights."""
    from groupbench.kernels.four_bit.formats import MXFP4, quantize_reference

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch_dtype(dtype))

    packed: list[list[Tensor]] = []
    for N, K in ((2 * shape.F, shape.H), (shape.H, shape.F)):
        parts = [quantize_reference(normal(1, N, K).float() * K**-0.5, MXFP4) for _ in range(shape.G)]
        packed.append([torch.cat(tensors) for tensors in ([w.codes for w in parts], [w.scales for w in parts])])
    weights = routing_weights(shape, dtype, device, generator)
    (codes_up, scales_up), (codes_down, scales_down) = packed
    return LayerW4Inputs(
        normal(shape.T, shape.H), moe.ids_of(shape, device), weights, codes_up, scales_up, normal(shape.G, 2 * shape.F),
        codes_down, scales_down, normal(shape.G, shape.H),
    )  # fmt: skip


def reference(x: LayerW4Inputs) -> Tensor:
    from groupbench.kernels.four_bit.layer import GPT_OSS, experts_reference

    return experts_reference(x.x, x.ids, x.weights, *x.operands, gate=GPT_OSS)


def flops(shape: MoeShape) -> int:
    return 6 * shape.M * shape.H * shape.F


def min_bytes(shape: MoeShape, dtype: str) -> int:
    """Count x, ids, routing weights, packed weights and biases of experts that have rows, and the output once."""
    active, (H, F) = sum(row > 0 for row in shape.rows), (shape.H, shape.F)
    packed = 2 * F * (H // 2 + -(-H // GROUP)) + H * (-(-F // 2) + -(-F // GROUP))
    elements = 2 * shape.T * H + active * (2 * F + H) + shape.choices
    return elements * BYTES[dtype] + active * packed + 8 * shape.choices


def prepare_torch(x: LayerW4Inputs) -> Run:
    """Dequantise, matmul, gate, matmul, index_add for each expert that has rows.

    Dequantise the weights of each expert in each call, and multiply with torch; sizes come from the ids.
    """
    from groupbench.kernels.four_bit.formats import dequantize

    up, down, bias_up, bias_down = x.operands

    def run() -> Tensor:
        out = torch.zeros_like(x.x)
        for g in range(down.G):
            token, choice = torch.nonzero(x.ids == g, as_tuple=True)
            if not token.numel():
                continue
            w_up, w_down = (dequantize(w[g], torch.float32)[0].to(x.x.dtype) for w in (up, down))
            both = x.x[token] @ w_up.T + bias_up[g]
            gate, linear = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
            y = (gate * torch.sigmoid(1.702 * gate) * (linear + 1)) @ w_down.T + bias_down[g]
            out.index_add_(0, token, y * x.weights[token, choice, None])
        return out

    return run


def prepare_groupbench(x: LayerW4Inputs) -> Run:
    """kernels.four_bit.FourBitExperts: counting sort, two products with packed weights, gate, weighted gather."""
    from groupbench.kernels.four_bit.layer import GPT_OSS, FourBitExperts

    experts = FourBitExperts(*x.operands, gate=GPT_OSS)
    return lambda: experts(x.x, x.ids, x.weights)


def _phase(tokens: int) -> tuple[MoeShape, ...]:
    return tuple(
        MoeShape(tokens * m.ranks, m.k, m.local, m.H, m.F, E=m.experts, routing="zipf(0.8)")
        for m, fmt in models.FOUR_BIT.items()
        if fmt == "mxfp4"
    )


def parse_shape(text: str) -> MoeShape:
    """Parse a layer's shape. Raises ValueError."""
    shape = moe.parse(text, layer=True)
    if shape.H % 2 or shape.F % 2:
        raise ValueError(f"shape {text!r}: H and F must be even, since two values share a byte")
    return shape


def _even(suite: tuple[MoeShape, ...]) -> tuple[MoeShape, ...]:
    return tuple(shape for shape in suite if shape.H % 2 == shape.F % 2 == 0)


MOE_LAYER_W4A16 = Operator(
    name="moe_layer_w4a16",
    baseline="torch",
    backends=(
        described(prepare_torch),
        described(prepare_groupbench, triton),
    ),
    suites=Suites(
        {
            "decode": partial(_phase, 64),
            "prefill": partial(_phase, 4096),
            "smoke": lambda: _even(tuple(moe.LAYER_SUITES["smoke"].values())),
        }
    ),
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[T, H]",
    dtypes=("bf16", "fp16"),
    output_dtype=lambda dtype: f"{dtype}_layer",
    decode=decode,
    parse_shape=parse_shape,
    shapes_help=moe.help_text(layer=True),
    on_trace=moe.on_trace,
    moves=("x", "weights"),
    reroute=moe.reroute,
)
