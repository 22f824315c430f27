"""Grouped GEMM of fp8 (e4m3fn) with scales, in the two recipes of kernels/grouped_gemm/quantize.py.

`grouped_gemm_fp8` has one scale per row of activations and weights, `grouped_gemm_fp8_blockwise` one per 1 x 128 of
activations and 128 x 128 of weights (DeepSeek-V3). Inputs are quantised before the clock starts, from standard normal
values; quantize_fp8 is the operator that measures quantising. Outputs are bf16. The reference multiplies the same fp8
values, so an error comes from the kernel, not from quantisation. Weights are [G, N, K], the only layout that fp8 tensor
cores take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.backends import lazy, not_hopper
from groupbench.operators.catalog.grouped_gemm import flops, group_bounds, reroute
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Operator, Run, Target
from groupbench.operators.relayout import laid_out

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # elements with one scale in the block-wise recipe
CHUNK = 8192  # rows quantised at once, to keep the values in fp32 small


@dataclass(frozen=True)
class Fp8Inputs:
    """The operands and their scales, whose dimensions tell the recipe. `rows` follows from `offs`, on the host."""

    a: Tensor  # [M, K] e4m3fn
    scale_a: Tensor  # [M] fp32, or [M, K/128] with strides 1, M
    b: Tensor  # [G, N, K] e4m3fn
    scale_b: Tensor  # [G, N] fp32, or [G, N/128, K/128]
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int, blockwise: bool = False) -> Fp8Inputs:
    """Draw standard normal values and quantise them; each expert has its own weights.

    Rows of a and b start at multiples of 16 bytes.
    """
    import torch

    from groupbench.kernels.grouped_gemm import quantize as q

    generator = torch.Generator(device).manual_seed(seed)
    M, G, N, K = shape.M, shape.G, shape.N, shape.K
    blocks = math.ceil(K / BLOCK)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, K, generator=generator, device=device, dtype=torch.bfloat16)

    def scales(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.float32, device=device)

    a = q.empty_fp8(M, K, device)
    b = q.empty_fp8(G * N, K, device).unflatten(0, (G, N))
    scale_a = scales(blocks, M).t() if blockwise else scales(M)
    scale_b = scales(G, math.ceil(N / BLOCK), blocks) if blockwise else scales(G, N)
    of_activations = q.quantize_blocks_reference if blockwise else q.quantize_rows_reference
    of_weights = q.quantize_weight_blocks_reference if blockwise else q.quantize_rows_reference
    for first in range(0, M, CHUNK):
        part = slice(first, min(first + CHUNK, M))
        values, scale = of_activations(draw(part.stop - first))
        a[part].copy_(values)
        scale_a[part].copy_(scale)
    for g in range(G):
        values, scale = of_weights(draw(N))
        b[g].copy_(values)
        scale_b[g].copy_(scale)
    ends = torch.tensor(shape.rows, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    return Fp8Inputs(a, scale_a, b, scale_b, ends, shape.rows)


def parse_shape(text: str) -> GroupedShape:
    """Parse a shape as grouped_gemm does, always with W=nk. Raises ValueError."""
    shape = shapes.parse(text)
    if shape.shared:
        raise ValueError(f"shape {text!r}: fp8 weights differ by expert; omit B=shared")
    return replace(shape, nk=True)


def reference(x: Fp8Inputs) -> Tensor:
    from groupbench.kernels.grouped_gemm.fp8 import grouped_gemm_fp8_reference

    return grouped_gemm_fp8_reference(x.a, x.scale_a, x.b, x.scale_b, x.offs)


def min_bytes(shape: GroupedShape, dtype: str, blockwise: bool = False) -> int:
    """Count a once, b once for each expert that has rows, their scales, and the output in bf16 once."""
    active = sum(row > 0 for row in shape.rows)
    M, N, K = shape.M, shape.N, shape.K
    blocks = math.ceil(K / BLOCK)
    scales = M * blocks + active * math.ceil(N / BLOCK) * blocks if blockwise else M + active * N
    return M * K + active * N * K + 4 * scales + 2 * M * N


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: Fp8Inputs) -> Run:
    """Call cuBLASLt for each group, on a copy of its scales: they have to start at a multiple of 16 bytes."""
    import torch

    _require_multiples_of_16(x)
    if not x.a.is_cuda:
        _require_scales_by_row(x)
    problems = []
    for g, start, end in _groups(x):
        scale_a = x.scale_a[start:end, None]
        scale_a = laid_out(torch.empty_like(scale_a), scale_a)
        problems.append((x.a[start:end], x.b[g].t(), scale_a, x.scale_b[g][None], start, end))

    def run() -> Tensor:
        out = _empty_output(x)
        for a, b, scale_a, scale_b, start, end in problems:
            torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, out=out[start:end])
        return out

    return run


def _require_scales_by_row(x: Fp8Inputs) -> None:
    """Raise Unavailable if this build's product takes one scale for a matrix alone, as oneDNN's does."""
    import torch

    a = x.a.new_empty(16, 16)
    scales = x.scale_a.new_ones(16)
    try:
        torch._scaled_mm(a, a.t(), scales[:, None], scales[None], out_dtype=torch.bfloat16)
    except RuntimeError as error:
        raise Unavailable(f"torch {torch.__version__} has no row-wise fp8 product on this CPU: {error}") from error


def prepare_torch_scaled_grouped_mm(x: Fp8Inputs, fast_accum: bool = False) -> Run:
    import torch
    import torch.nn.functional as F

    _require_multiples_of_16(x)
    b = x.b.transpose(1, 2)
    scaled_grouped_mm = getattr(F, "scaled_grouped_mm", None)
    if scaled_grouped_mm is None:  # torch before 2.10
        return lambda: torch._scaled_grouped_mm(
            x.a, b, x.scale_a, x.scale_b, offs=x.offs, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
        )
    row_wise = F.ScalingType.RowWise
    return lambda: scaled_grouped_mm(
        *(x.a, b, x.scale_a, row_wise, x.scale_b, row_wise),
        offs=x.offs,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )


def prepare_torch_loop_blockwise(x: Fp8Inputs) -> Run:
    """Call cuBLASLt for each group, on copies in its layout: separate scales, rows padded to a multiple of 4."""
    import torch
    import torch.nn.functional as F

    _require_multiples_of_16(x)
    if not hasattr(F, "scaled_mm"):
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < (12, 9):
        raise Unavailable(
            f"cuBLASLt has block-wise scales from CUDA 12.9 on; this torch was built for {torch.version.cuda}"
        )
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    problems = []
    for g, start, end in _groups(x):
        rows = math.ceil((end - start) / 4) * 4
        a = x.a.new_empty(rows, x.a.shape[1])
        a.view(torch.uint8)[end - start :].zero_()
        laid_out(a[: end - start], x.a[start:end])
        scale_a = x.scale_a.new_zeros(x.scale_a.shape[1], rows).t()  # strides 1, rows
        laid_out(scale_a[: end - start], x.scale_a[start:end])
        blocks, width = math.ceil(x.scale_b.shape[2] / 4) * 4, x.scale_b.shape[2]
        scale_b = x.scale_b.new_zeros(x.scale_b.shape[1], blocks).t()  # [K/128 up to 4, N/128], strides 1, rows
        laid_out(scale_b[:width], x.scale_b[g].t())
        problems.append((a, x.b[g].t(), scale_a, scale_b, start, end))

    def run() -> Tensor:
        out = _empty_output(x)
        for a, b, scale_a, scale_b, start, end in problems:
            product = F.scaled_mm(a, b, scale_a, recipes[0], scale_b, recipes[1], output_dtype=torch.bfloat16)
            out[start:end].copy_(product[: end - start])
        return out

    return run


def prepare_cuda_cluster(x: Fp8Inputs) -> Run:
    from groupbench.kernels.grouped_gemm.cluster_fp8 import prepare_cluster_fp8, why_not_cluster_fp8

    if reason := why_not_cluster_fp8(x.a, x.b):
        raise Unavailable(reason)
    return prepare_cluster_fp8(x.a, x.scale_a, x.b, x.scale_b, x.offs)


def _groups(x: Fp8Inputs) -> list[tuple[int, int, int]]:
    """Return (g, first row, last row + 1) of each group that has rows."""
    return [(g, start, end) for g, start, end in group_bounds(x.rows) if start < end]


def _empty_output(x: Fp8Inputs) -> Tensor:
    import torch

    return torch.empty(x.a.shape[0], x.b.shape[1], dtype=torch.bfloat16, device=x.a.device)


def _require_multiples_of_16(x: Fp8Inputs) -> None:
    N, K = x.b.shape[1:]
    if x.a.is_cuda and (N % 16 or K % 16):
        raise Unavailable(f"torch's fp8 products need N and K to be multiples of 16, not N={N}, K={K}")


def _needs(low: tuple[int, int], high: tuple[int, int], need: str, cpu: bool = False) -> Callable[[Target], str | None]:
    """Return the `unavailable` of a backend for GPUs of capability low up to, not including, high.

    need  the reason, a clause that begins the message
    cpu   the backend runs on a CPU as well
    """

    def reason(target: Target) -> str | None:
        if target.device == "cpu":
            return None if cpu else f"{need}, and torch does not have it for a CPU"
        if target.capability is not None and not low <= target.capability < high:
            return f"{need}, and this GPU has capability {target.capability[0]}.{target.capability[1]}"
        return None

    return reason


_ANY = (99, 0)
_TRITON = _needs((9, 0), _ANY, "it needs TMA (capability 9.0 or newer)", cpu=True)
_TORCH_LOOP = _needs((8, 9), _ANY, "it needs fp8 tensor cores (capability 8.9 or newer)", cpu=True)
_TORCH_GROUPED = _needs((9, 0), (11, 0), "scaled_grouped_mm is for Hopper and Blackwell (9.0, 10.0)")
_TORCH_BLOCKWISE = _needs((9, 0), (10, 0), "cuBLASLt's 1x128 and 128x128 scales are for Hopper (9.0)")
_FAST = "bf16_fast_accum"
_OPERANDS = "a scale_a b scale_b offs"


def _rowwise(suite: dict[str, GroupedShape]) -> tuple[GroupedShape, ...]:
    """Return grouped_gemm's shapes with weights [G, N, K], not shared."""
    return tuple(dict.fromkeys(replace(shape, nk=True, shared=False) for shape in suite.values()))


GROUPED_GEMM_FP8 = Operator(
    name="grouped_gemm_fp8",
    baseline="torch_loop",
    backends=(
        Backend(
            "torch_loop",
            prepare_torch_loop,
            "one row-wise torch._scaled_mm for each group that has rows, sizes known on the host, into one output",
            unavailable=_TORCH_LOOP,
        ),
        Backend(
            "torch_scaled_grouped_mm",
            prepare_torch_scaled_grouped_mm,
            "torch.nn.functional.scaled_grouped_mm, sums promoted to fp32: CUTLASS pointer-array kernels on Hopper",
            unavailable=_TORCH_GROUPED,
        ),
        Backend(
            "torch_scaled_grouped_mm_fast",
            partial(prepare_torch_scaled_grouped_mm, fast_accum=True),
            "the same with use_fast_accum: sums stay in the tensor cores",
            unavailable=_TORCH_GROUPED,
            tolerance=_FAST,
        ),
        Backend(
            "triton_flat",
            lazy("grouped_gemm.fp8:prepare_fp8", _OPERANDS),
            "grouped_gemm's triton_flat with scales in the epilogue, sums promoted to fp32 every 128 of K",
            kind="triton",
            unavailable=_TRITON,
        ),
        Backend(
            "triton_flat_fast",
            lazy("grouped_gemm.fp8:prepare_fp8", _OPERANDS, fast_accum=True),
            "the same with sums that stay in the tensor cores",
            kind="triton",
            unavailable=_TRITON,
            tolerance=_FAST,
        ),
        Backend(
            "cuda_cluster_fast",
            prepare_cuda_cluster,
            "grouped_gemm's cuda_cluster with scales before the stores, sums that stay in the tensor cores",
            unavailable=not_hopper,
            tolerance=_FAST,
        ),
    ),
    suites=shapes.SUITES.each(_rowwise),
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[M, N] bf16",
    dtypes=("fp8",),
    output_dtype=lambda dtype: "bf16",
    shapes_help=shapes.HELP,
    on_trace=shapes.on_trace,
    reroute=reroute,
)

GROUPED_GEMM_FP8_BLOCKWISE = replace(
    GROUPED_GEMM_FP8,
    name="grouped_gemm_fp8_blockwise",
    backends=(
        Backend(
            "torch_loop",
            prepare_torch_loop_blockwise,
            "one torch.nn.functional.scaled_mm (cuBLASLt) for each group that has rows, sizes known on the host",
            unavailable=_TORCH_BLOCKWISE,
        ),
        Backend(
            "triton_flat",
            lazy("grouped_gemm.fp8:prepare_fp8", _OPERANDS),
            "grouped_gemm's triton_flat, each product of 128 of K scaled and added in fp32; recipe of DeepSeek-V3",
            kind="triton",
            unavailable=_TRITON,
        ),
    ),
    make_inputs=partial(make_inputs, blockwise=True),
    min_bytes=partial(min_bytes, blockwise=True),
)
