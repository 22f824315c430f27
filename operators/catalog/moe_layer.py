"""A mixture-of-experts layer: permute, grouped GEMM, SwiGLU, grouped GEMM, unpermute; forward, backward, both.

    out[t] = sum over j of weights[t, j] * down(silu(gate(x[t])) * up(x[t]))    of the expert ids[t, j]

    x [T, H]   ids, weights [T, k]   w_gate_up [G, 2F, H]   w_down [G, H, F]   out [T, H]

Modes: fwd without gradients; bwd, the gradients of x, weights and both matrices, from tensors saved by the forward
pass; fwd_bwd, both together as in a training step.

Precision fp8: inputs and outputs are in bf16, and the products' operands are quantised inside the call, in
DeepSeek-V3's recipe (kernels/moe/layer_fp8.py). The reference has the values in bf16, so the error is quantisation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupbench.operators.catalog import moe, placements
from groupbench.operators.catalog.backends import triton
from groupbench.operators.catalog.moe import MoeShape
from groupbench.operators.catalog.moe_unpermute import routing_weights
from groupbench.operators.catalog.shapes import MAX_WEIGHTS
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Backward, Operator, Run, Target

Layer = Callable[..., "Tensor"]  # (x, weights, w_gate_up, w_down) -> out, differentiable
GRADIENTS = ("dx", "dweights", "dw_gate_up", "dw_down")


@dataclass(frozen=True)
class LayerInputs:
    """A layer's tensors for one training step."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int64, -1 for an expert elsewhere
    weights: Tensor  # [T, k]
    w_gate_up: Tensor  # [G, 2F, H]
    w_down: Tensor  # [G, H, F]
    dout: Tensor  # [T, H], the gradient of the output
    rows: int  # number of choices with a local expert, on the host
    fp8: bool = False  # the products are in fp8; every operand is quantised in each call

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors with gradients, in GRADIENTS order."""
        return self.x, self.weights, self.w_gate_up, self.w_down


def make_inputs(shape: MoeShape, dtype: str, device: str, seed: int) -> LayerInputs:
    """Draw standard normal rows and gradients, and weights with deviation 1/sqrt(H) and 1/sqrt(F), as in new layers."""
    generator = torch.Generator(device).manual_seed(seed)
    fp8, dtype = dtype == "fp8", "bf16" if dtype == "fp8" else dtype

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch_dtype(dtype))
        return values.mul_(scale) if scale != 1 else values

    return LayerInputs(
        normal(shape.T, shape.H),
        moe.ids_of(shape, device),
        routing_weights(shape, dtype, device, generator),
        normal(shape.G, 2 * shape.F, shape.H, scale=shape.H**-0.5),
        normal(shape.G, shape.H, shape.F, scale=shape.F**-0.5),
        normal(shape.T, shape.H),
        shape.M,
        fp8,
    )


def reference(x: LayerInputs) -> Tensor:
    """Return the output [T, H], computed expert by expert in a wider dtype."""
    return _reference(x, gradients=False)["out"]


def reference_backward(x: LayerInputs) -> dict[str, Tensor]:
    """Return the gradients by name, in `decode`'s form."""
    outputs = _reference(x, gradients=True)
    return {name: outputs[name] for name in GRADIENTS}


def reference_both(x: LayerInputs) -> dict[str, Tensor]:
    return _reference(x, gradients=True)


def _reference(x: LayerInputs, gradients: bool) -> dict[str, Tensor]:
    """Compute the output, and gradients if wanted, in a wider dtype, with one expert's weights widened at a time."""
    from groupbench.kernels.grouped_gemm.reference import without_tf32

    wide = torch.float64 if x.x.dtype == torch.float32 else torch.float32
    out, dx = (torch.zeros_like(x.x, dtype=wide) for _ in range(2))
    dweights = torch.zeros_like(x.weights, dtype=wide)
    dw = [torch.zeros_like(w, dtype=wide) if gradients else None for w in (x.w_gate_up, x.w_down)]
    with without_tf32():
        for g in range(x.w_down.size(0)):
            token, choice = torch.nonzero(x.ids == g, as_tuple=True)
            if not token.numel():
                continue
            rows = (x.x[token], x.weights[token, choice], x.w_gate_up[g], x.w_down[g])
            leaves = [row.to(wide).requires_grad_(gradients) for row in rows]
            with torch.set_grad_enabled(gradients):
                gate, up = (leaves[0] @ leaves[2].T).chunk(2, -1)
                y = leaves[1][:, None] * ((torch.nn.functional.silu(gate) * up) @ leaves[3].T)
            out.index_add_(0, token, y.detach())
            if gradients:
                d = torch.autograd.grad(y, leaves, x.dout[token].to(wide))
                dx.index_add_(0, token, d[0])
                dweights[token, choice] = d[1]
                for whole, part in zip(dw, d[2:], strict=True):
                    assert whole is not None
                    whole[g] = part
    if not gradients:
        return {"out": out}
    gradients_in_order = (dx, dweights, *dw)
    return dict(zip(("out", *GRADIENTS), decode((out, *gradients_in_order)), strict=True))


def decode(output: Any) -> Any:
    """Return the output, or several outputs in a form whose rows can be compared. Raises TypeError.

    The accuracy check judges every row and every 64 x 64 block separately. All gradients for a token's few routing
    weights may be close to zero, in particular if most experts are on other ranks. dweights is therefore reshaped to 64
    long rows, or fewer if 64 does not divide the size. A dw_gate_up row may be close to zero too if the expert has a
    single token, so dw_gate_up is transposed.
    """
    if isinstance(output, torch.Tensor):
        return output
    outputs = list(output) if isinstance(output, (tuple, list)) else []
    if len(outputs) not in (4, 5) or not all(isinstance(part, torch.Tensor) for part in outputs):
        raise TypeError(f"the backend returned {type(output).__name__}, not {', '.join(('out', *GRADIENTS))}")
    weights = outputs[-3]
    rows = math.gcd(64, weights.numel()) if weights.numel() else 1
    outputs[-3], outputs[-2] = weights.reshape(rows, -1), outputs[-2].transpose(-1, -2)
    return tuple(outputs)


# --- operations and bytes ---------------------------------------------------------------------------------------------


def flops(shape: MoeShape) -> int:
    """Count the operations in three products [M, H] x [H, F], or transposed."""
    return 6 * shape.M * shape.H * shape.F


def _bytes(dtype: str) -> int:
    return BYTES["bf16" if dtype == "fp8" else dtype]


def _weights_read(shape: MoeShape) -> int:
    return sum(row > 0 for row in shape.rows) * 3 * shape.H * shape.F


def min_bytes(shape: MoeShape, dtype: str) -> int:
    """Count x, ids, routing weights, the weights for experts with rows, and the output once; no intermediates."""
    elements = 2 * shape.T * shape.H + _weights_read(shape) + shape.choices
    return elements * _bytes(dtype) + 8 * shape.choices


def min_bytes_backward(shape: MoeShape, dtype: str) -> int:
    """Count x, dout and the used weights once; dx and all experts' gradients once."""
    elements = 3 * shape.T * shape.H + _weights_read(shape) + 3 * shape.G * shape.H * shape.F + 2 * shape.choices
    return elements * _bytes(dtype) + 8 * shape.choices


def min_bytes_both(shape: MoeShape, dtype: str) -> int:
    """Count the bytes of the backward pass, and the output."""
    return min_bytes_backward(shape, dtype) + shape.T * shape.H * _bytes(dtype)


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_layer(x: LayerInputs) -> Layer:
    """Build a layer from torch's operations, with torch's derivatives and no host sync.

    It sorts the ids (stable), selects rows, calls grouped_mm twice with SwiGLU in between, selects rows in token order,
    multiplies and sums. The derivative of index_select uses atomic adds; that of x[...] would sort.
    """
    import torch
    import torch.nn.functional as F

    from groupbench.kernels.moe.layer import pad_sizes

    (T, k), (G, H, _), rows = x.ids.shape, x.w_down.shape, x.rows
    experts = torch.arange(G, device=x.ids.device)
    row = torch.arange(rows, device=x.ids.device)
    drops = rows < x.ids.numel()

    def layer(tokens: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        tokens, w_gate_up, w_down = pad_sizes(tokens, w_gate_up, w_down)  # sizes that grouped_mm takes
        flat = x.ids.flatten()
        if drops:
            flat = flat.masked_fill(flat < 0, G)
        by_expert, order = flat.sort(stable=True)
        offs = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        order = order[:rows]
        a = tokens.index_select(0, order // k)
        gate, up = F.grouped_mm(a, w_gate_up.transpose(1, 2), offs=offs).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=offs)
        if drops:
            # Only some choices have rows: weight and add these.
            weighted = y * weights.flatten().index_select(0, order)[:, None]
            return torch.zeros_like(tokens).index_add(0, order // k, weighted)[:, :H]
        position = torch.empty_like(order).scatter_(0, order, row)
        return (y.index_select(0, position).view(T, k, y.shape[1]) * weights[:, :, None]).sum(1)[:, :H]

    return layer


def compiled_layer(x: LayerInputs) -> Layer:
    compiled: Layer = torch.compile(torch_layer(x), dynamic=False)
    return compiled


# --- Triton -----------------------------------------------------------------------------------------------------------


def triton_layer(x: LayerInputs, recompute: bool = False) -> Layer:
    from groupbench.kernels import ops
    from groupbench.kernels.moe.layer_fp8 import moe_layer_fp8

    if x.fp8:
        if recompute:
            raise Unavailable("in fp8 it has no recomputation")
        if x.x.size(1) % 128 or x.w_down.size(2) % 128 or not x.x.numel():
            raise Unavailable("in fp8 it needs tokens, and H and F in multiples of 128")
        return lambda tokens, weights, w_gate_up, w_down: moe_layer_fp8(tokens, x.ids, weights, w_gate_up, w_down)
    if reason := ops.layer_fallback_reason(x.x, x.w_gate_up, x.w_down):
        raise Unavailable(reason)
    return lambda tokens, weights, w_gate_up, w_down: ops.moe_layer(
        tokens, x.ids, weights, w_gate_up, w_down, recompute=recompute
    )


def no_forward(x: LayerInputs) -> Run:
    raise Unavailable("differs from triton only in the backward pass: see mode fwd_bwd")


# --- the modes of any layer -------------------------------------------------------------------------------------------


def forward(layer_of: Callable[[LayerInputs], Layer], x: LayerInputs) -> Run:
    layer = layer_of(x)

    def run() -> Tensor:
        with torch.no_grad():
            return layer(*x.leaves)

    return run


def backward(layer_of: Callable[[LayerInputs], Layer], x: LayerInputs) -> Run:
    leaves = _leaves(x)
    out = layer_of(x)(*leaves)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


def both(layer_of: Callable[[LayerInputs], Layer], x: LayerInputs) -> Run:
    layer, leaves = layer_of(x), _leaves(x)

    def run() -> tuple[Tensor, ...]:
        out = layer(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, x.dout))

    return run


def _leaves(x: LayerInputs) -> tuple[Tensor, ...]:
    return tuple(operand.detach().requires_grad_() for operand in x.leaves)


def not_in_fp8(target: Target) -> str | None:
    return "torch has no layer in fp8; compare with precision bf16" if target.dtype == "fp8" else None


def no_compiler(target: Target) -> str | None:
    if reason := not_in_fp8(target):
        return reason
    return "torch.compile of the layer needs a GPU" if target.device != "cuda" else None


def _trainable(suite: dict[str, MoeShape]) -> tuple[MoeShape, ...]:
    return tuple(shape for shape in suite.values() if 3 * shape.G * shape.H * shape.F <= MAX_WEIGHTS)


TRAINING_SUITES = moe.LAYER_SUITES.without("decode", "prefill").each(_trainable)
"""The suites without inference (decode, prefill), and without shapes whose gradient is too large to check."""


MOE_LAYER = Operator(
    name="moe_layer",
    baseline="torch",
    backends=(
        Backend(
            "torch",
            partial(forward, torch_layer),
            "sort, index_select, grouped_mm, silu * up, grouped_mm, index_select, multiply, sum; torch's derivatives",
            unavailable=not_in_fp8,
            prepare_bwd=partial(backward, torch_layer),
            prepare_fwd_bwd=partial(both, torch_layer),
        ),
        Backend(
            "torch_compile",
            partial(forward, compiled_layer),
            "torch.compile of the same: Inductor fuses all but the products and the sort",
            unavailable=no_compiler,
            prepare_fwd_bwd=partial(both, compiled_layer),
        ),
        triton(
            "triton",
            partial(forward, triton_layer),
            "counting sort, SwiGLU inside the first grouped GEMM, weighted gather; formulas after SonicMoE",
            prepare_bwd=partial(backward, triton_layer),
            prepare_fwd_bwd=partial(both, triton_layer),
        ),
        triton(
            "triton_recompute",
            no_forward,
            "the same, but permutes the rows again in the backward pass instead of saving them",
            prepare_fwd_bwd=partial(both, partial(triton_layer, recompute=True)),
        ),
    ),
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[T, H]",
    output_dtype=lambda dtype: f"{dtype}_layer",
    dtypes=("bf16", "fp16", "fp32", "fp8"),
    decode=decode,
    reroute=moe.reroute,
    placements=placements.of_tokens,
    backward=Backward(
        make_inputs=make_inputs,
        reference=reference_backward,
        flops=lambda shape: 2 * flops(shape),
        min_bytes=min_bytes_backward,
        moves=("dout",),  # the rest was saved by the forward pass
        placements=placements.of_tokens,
        returns="(dx [T, H], dweights [T, k], dw_gate_up [G, 2F, H], dw_down [G, H, F])",
        suites=TRAINING_SUITES,
    ),
    forward_backward=Backward(
        make_inputs=make_inputs,
        reference=reference_both,
        flops=lambda shape: 3 * flops(shape),
        min_bytes=min_bytes_both,
        reroute=moe.reroute,
        placements=placements.of_tokens,
        returns="(out [T, H], dx [T, H], dweights [T, k], dw_gate_up [G, 2F, H], dw_down [G, H, F])",
        suites=TRAINING_SUITES,
    ),
    **moe.shape_fields(layer=True),
)
