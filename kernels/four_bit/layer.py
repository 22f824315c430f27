"""A mixture-of-experts layer's experts with four-bit weights, for inference.

    out[t] = sum over j of weights[t, j] * (act(both) @ down.T + bias_down)
             with both = x[t] @ gate_up.T + bias_gate_up in the expert ids[t, j]

        x [T, H]   ids, weights [T, k]   gate_up [G, 2F, H]   down [G, H, F]   out [T, H]

    act = gate * sigmoid(alpha * gate) * (up + offset),  gate at most `limit`, up within -limit..limit

`both` is gate before up, or for gpt-oss their columns in turns. Activations are in 16 bits or, with `fp8`, quantised
row by row before each product, so weight and activation precisions are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.four_bit.formats import MXFP4, Weights, dequantize
from groupbench.kernels.four_bit.hopper import bind_hopper, unsuitable
from groupbench.kernels.four_bit.layout import Blocks, lay_out
from groupbench.kernels.four_bit.product import bind_w4
from groupbench.kernels.grouped_gemm.quantize import prepare_quantize
from groupbench.kernels.grouped_gemm.support import require_device, require_tensors
from groupbench.kernels.launch import Kept, launch
from groupbench.kernels.moe.permute import check_rows, combine_rows, permute_rows
from groupbench.kernels.moe.routing import check_ids

Run = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # of activations, their scales and offsets

BLOCK = 1024  # columns at a time


@dataclass(frozen=True)
class Gate:
    """The function from gate and up to an activation; see above."""

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0
    interleaved: bool = False


SILU = Gate()
GPT_OSS = Gate(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)


@triton.jit
def _activate(
    both_ptr,  # [M, 2F]
    act_ptr,  # [M, F]
    offs_ptr,  # [G]
    G,
    F,
    ALPHA: tl.constexpr,
    CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offs_ptr + G - 1):
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < F
            at_gate = both_ptr + row * 2 * F + (2 * columns if INTERLEAVED else columns)
            gate = tl.load(at_gate, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(at_gate + (1 if INTERLEAVED else F), mask=inside, other=0.0).to(tl.float32)
            if CLAMPED:  # NaN stays, unlike in tl.minimum
                gate = tl.where(gate > LIMIT, LIMIT, gate)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
            act = gate / (1 + tl.exp(-ALPHA * gate)) * (up + OFFSET)
            tl.store(act_ptr + row * F + columns, act.to(act_ptr.dtype.element_ty), mask=inside)


def activate(both: Tensor, offs: Tensor, gate: Gate) -> Tensor:
    """Return the activations [M, F] for both [M, 2F]; rows past offs[-1] are not written."""
    M, F = both.size(0), both.size(1) // 2
    act = both.new_empty(M, F)
    if M:
        launch(
            _activate, (M,), both, act, offs, offs.numel(), F,
            ALPHA=gate.alpha, CLAMPED=isfinite(gate.limit), LIMIT=gate.limit, OFFSET=gate.offset,
            INTERLEAVED=gate.interleaved, BLOCK=BLOCK,
        )  # fmt: skip
    return act


class FourBitExperts:
    """A layer's experts. A call returns the layer's output; weights are laid out once, for the GPU at hand.

    Args:
        gate_up: [G, 2F, H].
        down: [G, H, F].
        bias_gate_up: [G, 2F], or None.
        bias_down: [G, H], or None.
        gate: how gate and up become an activation.
        fp8: quantise activations to e4m3 before each product.

    Raises:
        ValueError: if the operands do not fit together.
    """

    def __init__(
        self, gate_up: Weights, down: Weights, bias_gate_up: Tensor | None = None, bias_down: Tensor | None = None,
        gate: Gate = SILU, fp8: bool = False,
    ) -> None:  # fmt: skip
        if gate_up.G != down.G or gate_up.N != 2 * down.K or gate_up.K != down.N:
            raise ValueError(
                f"gate_up [{gate_up.G}, {gate_up.N}, {gate_up.K}] and down [{down.G}, {down.N}, {down.K}] do not "
                "belong to one layer"
            )
        for bias, w in ((bias_gate_up, gate_up), (bias_down, down)):
            if bias is not None and bias.shape != (w.G, w.N):
                raise ValueError(f"expected a bias of {(w.G, w.N)}, got {tuple(bias.shape)}")
        self.gate, self.fp8, self.G, self.H = gate, fp8, down.G, down.N
        self._products = (_Product(gate_up, bias_gate_up, fp8), _Product(down, bias_down, fp8))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum over experts, [T, H]; a choice with an id not in 0..G-1 adds nothing.

        Args:
            x: [T, H].
            ids: [T, k], int32 or int64.
            weights: [T, k], any float dtype.
        """
        require_tensors(x=x, ids=ids, weights=weights)
        check_ids(ids, self.G)
        check_rows(x, ids)
        require_device(x.device)
        if x.size(1) != self.H or weights.shape != ids.shape:
            raise ValueError(f"expected x [T, {self.H}] and weights {tuple(ids.shape)}")
        rows, routing = permute_rows(x, ids, self.G)
        both = self._products[0](rows, routing.offs)
        y = self._products[1](activate(both, routing.offs, self.gate), routing.offs)
        return combine_rows(y, routing.position, weights)


class _Product:
    """One product with four-bit weights. Launches are bound once per row count."""

    def __init__(self, w: Weights, bias: Tensor | None, fp8: bool) -> None:
        self._weights, self._bias, self._fp8 = w, bias, fp8
        self._blocks: Blocks | None = None
        self._bound: Kept[Run] = Kept()

    def __call__(self, a: Tensor, offs: Tensor) -> Tensor:
        scale_a = None
        if self._fp8:
            a, scale_a = prepare_quantize(a, False)()
        key = (a.shape, a.stride(), a.dtype, offs.dtype)
        run = self._bound.get(key) or self._bound.add(key, self._bind(a, scale_a, offs))
        return run(a, scale_a, offs)

    def _bind(self, a: Tensor, scale_a: Tensor | None, offs: Tensor) -> Run:
        w = self._weights
        if unsuitable(a, w) is None:
            try:
                self._blocks = self._blocks or lay_out(w, self._fp8)
            except ValueError:  # scales that differ too much for e4m3
                return bind_w4(a, scale_a, w, self._bias)
            bias = None if self._bias is None else self._bias.to(torch.bfloat16)
            return bind_hopper(a, scale_a, self._blocks, offs, bias)
        return bind_w4(a, scale_a, w, self._bias)


def of_gpt_oss(tensors: Mapping[str, Tensor], prefix: str = "", fp8: bool = False) -> FourBitExperts:
    """Return the experts for a layer in a gpt-oss checkpoint, in mxfp4.

    Args:
        tensors: the checkpoint's tensors, by name.
        prefix: what the layer's expert names begin with, such as `model.layers.0.mlp.experts.`.
        fp8: quantise activations to e4m3 before each product.
    """

    def weights(name: str) -> Weights:
        blocks, scales = tensors[f"{prefix}{name}_blocks"], tensors[f"{prefix}{name}_scales"]
        return Weights(MXFP4, scales.size(-1) * MXFP4.group, blocks.flatten(2).contiguous(), scales.contiguous())

    biases = [tensors.get(f"{prefix}{name}_bias") for name in ("gate_up_proj", "down_proj")]
    return FourBitExperts(weights("gate_up_proj"), weights("down_proj"), biases[0], biases[1], GPT_OSS, fp8)


def experts_reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weights, down: Weights, bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None, gate: Gate = SILU,
) -> Tensor:  # fmt: skip
    """Return the layer's output [T, H] in fp64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for g in range(down.G):
        token, choice = torch.nonzero(ids == g, as_tuple=True)
        both = x[token].double() @ dequantize(gate_up[g])[0].T
        both = both if bias_gate_up is None else both + bias_gate_up[g].double()
        first, second = (both[:, ::2], both[:, 1::2]) if gate.interleaved else both.chunk(2, -1)
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
        y = (first * torch.sigmoid(gate.alpha * first) * (second + gate.offset)) @ dequantize(down[g])[0].T
        y = y if bias_down is None else y + bias_down[g].double()
        out.index_add_(0, token, y * weights[token, choice, None].double())
    return out
