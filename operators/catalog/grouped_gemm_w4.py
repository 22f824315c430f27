"""Grouped GEMM with four-bit weights: `grouped_gemm_w4a16` and, with fp8 activations, `grouped_gemm_w4a8`.

    out[rows of g] = a[rows of g] @ w[g].T + bias[g]        a [M, K]   w [G, N, K]   out [M, N]

Formats of weights are those of kernels/four_bit/formats.py; a shape names one (fmt=mxfp4). Inputs are packed before the
clock starts, from standard normal values; quantize_w4 measures packing. A backend that wants the weights in another
layout repacks them in `prepare`: the metrics prepare_ms and kept_mib report that. The reference multiplies the packed
values in fp64, so an error comes from the kernel, not from quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from groupbench.operators.catalog import w4_shapes
from groupbench.operators.catalog.backends import lazy, no_interpreted_bf16, not_hopper
from groupbench.operators.catalog.grouped_gemm import flops, group_bounds, reroute
from groupbench.operators.catalog.w4_shapes import W4Shape
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import torch_dtype
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Operator, Run, Target

if TYPE_CHECKING:
    from groupbench.kernels.four_bit.formats import Weights

BLOCK = 128  # of K, with one scale of fp8 activations


@dataclass(frozen=True)
class W4Inputs:
    """The operands. `rows` follows from `offs`, on the host."""

    a: Tensor  # [M, K]
    scale_a: Tensor | None  # of fp8 activations: [M] fp32, or [M, K/128] with strides 1, M
    codes: Tensor  # [G, N, K/2] uint8, two codes in a byte, the one of even k in the lower half
    scales: Tensor  # [G, N, K/group] uint8 (e8m0) or bf16
    zeros: Tensor | None  # the same size, uint8, for formats with zero points
    bias: Tensor | None  # [G, N] bf16
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host
    fmt: str  # name of the weights' format
    K: int  # of a row

    @property
    def weights(self) -> Weights:
        from groupbench.kernels.four_bit.formats import Weights, parse_format

        return Weights(parse_format(self.fmt), self.K, self.codes, self.scales, self.zeros)


def make_inputs(shape: W4Shape, dtype: str, device: str, seed: int) -> W4Inputs:
    """Draw standard normal activations and weights; pack the weights, expert by expert."""
    from groupbench.kernels.four_bit.formats import quantize_reference
    from groupbench.kernels.grouped_gemm import quantize as fp8

    generator = torch.Generator(device).manual_seed(seed)
    M, G, N, K, fmt = shape.M, shape.G, shape.N, shape.K, shape.format

    def draw(*size: int, as_: str = "bf16") -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch_dtype(as_))

    a, scale_a = draw(M, K, as_="fp16" if dtype == "fp16" else "bf16"), None
    if dtype == "fp8":
        quantized = (fp8.quantize_blocks_reference if shape.blockwise else fp8.quantize_rows_reference)(a)
        a = fp8.empty_fp8(M, K, device)
        a.copy_(quantized[0])
        scale_a = quantized[1]
        if shape.blockwise:
            scale_a = torch.empty(scale_a.shape[::-1], device=device).t().copy_(scale_a)
    codes = torch.empty(G, N, -(-K // 2), dtype=torch.uint8, device=device)
    groups = (G, N, fmt.groups(K))
    scales = torch.empty(groups, dtype=torch.uint8 if fmt.floating else torch.bfloat16, device=device)
    zeros = torch.empty(groups, dtype=torch.uint8, device=device) if fmt.zero_point else None
    for g in range(G):
        w = quantize_reference(draw(1, N, K), fmt)
        codes[g], scales[g] = w.codes[0], w.scales[0]
        if zeros is not None and w.zeros is not None:
            zeros[g] = w.zeros[0]
    bias = draw(G, N) if shape.bias else None
    offs = torch.tensor(shape.rows, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    return W4Inputs(a, scale_a, codes, scales, zeros, bias, offs, shape.rows, shape.fmt, K)


def min_bytes(shape: W4Shape, dtype: str) -> int:
    """Count a, packed weights, scales, zero points and bias of experts that have rows, and the output once."""
    active = sum(row > 0 for row in shape.rows)
    M, N, K = shape.M, shape.N, shape.K
    scales = M * (-(-K // BLOCK) if shape.blockwise else 1) * 4 if dtype == "fp8" else 0
    activations = M * K * (1 if dtype == "fp8" else 2) + scales
    return activations + active * N * (shape.format.row_bytes(K) + 2 * shape.bias) + 2 * M * N


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: W4Inputs) -> Run:
    """Dequantise the weights of each expert that has rows, in each call, and multiply with torch.matmul."""
    from groupbench.kernels.four_bit.formats import dequantize

    dtype = x.a.dtype if x.scale_a is None else torch.bfloat16
    weights = x.weights
    problems = [(g, start, end, weights[g]) for g, start, end in group_bounds(x.rows) if start < end]

    def run() -> Tensor:
        out = torch.empty(x.a.shape[0], x.codes.shape[1], dtype=dtype, device=x.a.device)
        a = _activations(x, dtype)
        for g, start, end, w in problems:
            y = torch.matmul(a[start:end], dequantize(w, torch.float32)[0].to(dtype).T)
            if x.scale_a is not None and x.scale_a.ndim == 1:
                y = y * x.scale_a[start:end, None]
            out[start:end] = y if x.bias is None else y + x.bias[g]
        return out

    return run


def _activations(x: W4Inputs, dtype: torch.dtype) -> Tensor:
    """Return the activations in 16 bits; row-wise scales are left to the product, which makes fp8 exact."""
    from groupbench.kernels.grouped_gemm.quantize import dequantize

    if x.scale_a is None:
        return x.a
    return x.a.to(dtype) if x.scale_a.ndim == 1 else dequantize(x.a, x.scale_a).to(dtype)


def prepare_dequantized(x: W4Inputs) -> Run:
    """Dequantise all weights in `prepare`; the call is groupbench's product in 16 bits."""
    from groupbench.kernels import ops
    from groupbench.kernels.four_bit.formats import dequantize

    dtype, weights = x.a.dtype, x.weights
    w = torch.empty(weights.G, weights.N, weights.K, dtype=dtype, device=x.a.device)
    for g in range(weights.G):
        w[g] = dequantize(weights[g], torch.float32)[0]
    b = w.transpose(1, 2)
    return lambda: ops.grouped_mm(x.a, b, x.offs, bias=x.bias)


def prepare_torch_int4(x: W4Inputs) -> Run:
    """Call torch's product with int4 weights for each group that has rows; weights are repacked in its layout."""
    w, (G, N, _) = x.weights, x.codes.shape
    if w.fmt.floating or w.fmt.group not in (32, 64, 128, 256) or N % 8 or x.K % 128:
        raise Unavailable("it takes int4 with groups of 32 to 256, N a multiple of 8 and K of 128")
    swapped = x.codes >> 4 | x.codes << 4  # the first code of a pair in the upper half
    packed = [torch._convert_weight_to_int4pack(swapped[g], 8) for g in range(G)]
    zeros = torch.zeros_like(w.scales) if w.zeros is None else (8 - w.zeros.float()) * w.scales.float()
    scales = torch.stack((w.scales, zeros.to(w.scales.dtype)), -1).transpose(1, 2).contiguous()
    problems = [(g, slice(start, end)) for g, start, end in group_bounds(x.rows) if start < end]

    def run() -> Tensor:
        out = x.a.new_empty(x.a.shape[0], N)
        for g, rows in problems:
            y = torch._weight_int4pack_mm(x.a[rows], packed[g], w.fmt.group, scales[g])
            out[rows] = y if x.bias is None else y + x.bias[g]
        return out

    return run


def _no_bf16_hopper(target: Target) -> str | None:
    if reason := not_hopper(target):
        return reason
    return None if target.dtype in ("bf16", "fp8") else f"its kernel multiplies bf16 or fp8, not {target.dtype}"


def _not_on_gpu(target: Target) -> str | None:
    return None if target.device == "cuda" and target.dtype == "bf16" else "torch's product with int4 needs a GPU, bf16"


PRODUCT = "a scale_a weights offs bias"  # the inputs of a kernel
_LOOP = "dequantise an expert's weights, torch.matmul; for each group that has rows, in every call"
_TRITON = Backend(
    "triton",
    lazy("four_bit.product:prepare_w4", PRODUCT),
    "one flat loop over all tiles; codes become 16-bit values in registers, sums are scaled group by group in fp32",
    kind="triton",
    unavailable=no_interpreted_bf16,
)

_CUDA = Backend(
    "cuda",
    lazy("four_bit.hopper:prepare_hopper", PRODUCT, refuse=("unsuitable", "a weights")),
    "CUDA C++ for Hopper: weights as wgmma's left operand, made in registers from a layout of its own, repacked once",
    unavailable=_no_bf16_hopper,
)


def _shapes_of(suite: dict[str, W4Shape]) -> tuple[W4Shape, ...]:
    return tuple(suite.values())


GROUPED_GEMM_W4A16 = Operator(
    name="grouped_gemm_w4a16",
    baseline="torch_loop",
    backends=(
        Backend("torch_loop", prepare_torch_loop, _LOOP),
        Backend(
            "dequantized",
            prepare_dequantized,
            "groupbench.kernels.ops.grouped_mm on weights dequantised in prepare, four times the bytes",
            kind="triton",
            unavailable=no_interpreted_bf16,
        ),
        Backend(
            "torch_int4",
            prepare_torch_int4,
            "torch._weight_int4pack_mm, which torchao calls, for each group that has rows; repacked once",
            unavailable=_not_on_gpu,
        ),
        _TRITON,
        _CUDA,
    ),
    suites=w4_shapes.SUITES.each(_shapes_of),
    parse_shape=partial(w4_shapes.parse, fp8=False),
    make_inputs=make_inputs,
    reference=lazy("four_bit.formats:grouped_gemm_w4_reference", PRODUCT),
    flops=flops,
    min_bytes=min_bytes,
    returns="[M, N]",
    dtypes=("bf16", "fp16"),
    shapes_help=w4_shapes.HELP,
    on_trace=w4_shapes.on_trace,
    moves=("a", "bias"),
    reroute=reroute,
)

GROUPED_GEMM_W4A8 = replace(
    GROUPED_GEMM_W4A16,
    name="grouped_gemm_w4a8",
    backends=(Backend("torch_loop", prepare_torch_loop, _LOOP), _TRITON, replace(_CUDA, tolerance="bf16_fast_accum")),
    parse_shape=partial(w4_shapes.parse, fp8=True),
    returns="[M, N] bf16",
    dtypes=("fp8",),
    output_dtype=lambda dtype: "bf16",
    shapes_help=f"{w4_shapes.HELP}; scales=1x128 for activations with a scale for every 128 of K",
    moves=("a", "scale_a", "bias"),
)
