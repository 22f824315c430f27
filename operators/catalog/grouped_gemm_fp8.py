"""Grouped GEMM in fp8 (e4m3fn) with scales, in the two recipes from kernels/grouped_gemm/quantize.py.

Mode bwd computes both gradients as in training: dA in bf16, and dB added to a buffer in fp32 (`main_grad`). It needs
operands in further layouts, since fp8 tensor cores sum along the innermost dimension alone: the weights transposed, and
dC and A transposed with scales along the rows. They are quantised before the clock too.

`grouped_gemm_fp8` has one scale per row of activations and weights, `grouped_gemm_fp8_blockwise` one per 1 x 128 of
activations and 128 x 128 of weights (DeepSeek-V3). Inputs are quantised before the clock starts, from standard normal
values; quantize_fp8 measures quantising. Outputs are bf16. The reference multiplies the same fp8 values, so an error
comes from the kernel, not from quantisation. Weights are [G, N, K], the only layout for fp8 tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupbench.operators.catalog import placements, shapes
from groupbench.operators.catalog.backends import described, ends, lazy, not_hopper
from groupbench.operators.catalog.grouped_gemm import flops, group_bounds, reroute
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Backward, Operator, Run, Target
from groupbench.operators.relayout import laid_out

BLOCK = 128  # elements with one scale in the block-wise recipe
QUANTISED_AT_ONCE = 8192  # rows quantised at once, to keep the values in fp32 small


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
    """Draw standard normal values and quantise them; each expert has distinct weights.

    Rows in a and b start at multiples of 16 bytes.
    """
    from groupbench.kernels.grouped_gemm import quantize as q

    generator = torch.Generator(device).manual_seed(seed)
    M, G, N, K = shape.M, shape.G, shape.N, shape.K
    blocks = math.ceil(K / BLOCK)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, K, generator=generator, device=device, dtype=torch.bfloat16)

    def scales(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.float32, device=device)

    a = q.empty_fp8(M, K, device)
    b = q.empty_fp8(G * N, K, device).view(G, N, K)
    scale_a = scales(blocks, M).t() if blockwise else scales(M)
    scale_b = scales(G, math.ceil(N / BLOCK), blocks) if blockwise else scales(G, N)
    of_activations = q.quantize_blocks_reference if blockwise else q.quantize_rows_reference
    of_weights = q.quantize_weight_blocks_reference if blockwise else q.quantize_rows_reference
    for first in range(0, M, QUANTISED_AT_ONCE):
        part = slice(first, min(first + QUANTISED_AT_ONCE, M))
        values, scale = of_activations(draw(part.stop - first))
        a[part].copy_(values)
        scale_a[part].copy_(scale)
    for g in range(G):
        values, scale = of_weights(draw(N))
        b[g].copy_(values)
        scale_b[g].copy_(scale)
    return Fp8Inputs(a, scale_a, b, scale_b, ends(shape.rows, device), shape.rows)


@dataclass(frozen=True)
class Fp8Step:
    """The operands of both gradients. P is the number of rows with every group padded to blocks of 128."""

    x: Fp8Inputs
    dc: Tensor  # [M, N] e4m3fn
    scale_dc: Tensor  # [M] fp32, or [M, N/128] with strides 1, M
    bt: Tensor  # [G, K, N] e4m3fn, the weights transposed
    scale_bt: Tensor  # [G, K] fp32, or [G, K/128, N/128]
    dct: Tensor  # [N, P] e4m3fn, dc transposed
    scale_dct: Tensor  # [G, N] fp32, or [P/128, N]
    at: Tensor  # [K, P] e4m3fn, a transposed
    scale_at: Tensor  # [G, K] fp32, or [P/128, K]
    main_grad: Tensor  # [G, N, K] fp32, to which the gradient of the weights is added


def make_step(shape: GroupedShape, dtype: str, device: str, seed: int, blockwise: bool = False) -> Fp8Step:
    """Draw the inputs of the forward pass, and standard normal gradients. `main_grad` has the size of a sum of rows."""
    from groupbench.kernels.grouped_gemm import quantize as q

    x = make_inputs(shape, dtype, device, seed, blockwise)
    generator = torch.Generator(device).manual_seed(seed + 1)
    dc = torch.randn(shape.M, shape.N, generator=generator, device=device, dtype=torch.bfloat16)
    rows = q.quantize_blocks_reference(dc) if blockwise else q.quantize_rows_reference(dc)
    weights = [q.dequantize(b, scale) for b, scale in zip(x.b, x.scale_b, strict=True)]
    bt = q.empty_fp8(shape.G * shape.K, shape.N, device).unflatten(0, (shape.G, shape.K))
    by_group = []
    for values, w in zip(bt, weights, strict=True):
        quantized, scale = (q.quantize_weight_blocks_reference if blockwise else q.quantize_rows_reference)(w.T)
        values.copy_(quantized)
        by_group.append(scale)
    a = q.dequantize(x.a, x.scale_a)
    columns = (*q.quantize_groups_reference(dc, x.offs, blockwise), *q.quantize_groups_reference(a, x.offs, blockwise))
    main_grad = torch.randn(shape.G, shape.N, shape.K, generator=generator, device=device)
    return Fp8Step(x, *rows, bt, torch.stack(by_group), *columns, main_grad.mul_((shape.M / shape.G) ** 0.5))


def parse_shape(text: str) -> GroupedShape:
    """Parse a shape as grouped_gemm does, always with W=nk. Raises ValueError."""
    shape = shapes.parse_packed(text)
    if shape.shared:
        raise ValueError(f"shape {text!r}: fp8 weights differ by expert; omit B=shared")
    return replace(shape, nk=True)


reference = lazy("grouped_gemm.fp8:grouped_gemm_fp8_reference", "a scale_a b scale_b offs")


def min_bytes(shape: GroupedShape, dtype: str, blockwise: bool = False) -> int:
    """Count a once, b once for each expert with rows, their scales, and the bf16 output once."""
    active = sum(row > 0 for row in shape.rows)
    M, N, K = shape.M, shape.N, shape.K
    blocks = math.ceil(K / BLOCK)
    scales = M * blocks + active * math.ceil(N / BLOCK) * blocks if blockwise else M + active * N
    return M * K + active * N * K + 4 * scales + 2 * M * N


def reference_backward(step: Fp8Step) -> dict[str, Tensor]:
    """Return {"dA": [M, K], "dB": [G, N, K]} of the same fp8 values in fp32."""
    from groupbench.kernels.grouped_gemm.fp8 import grouped_gemm_fp8_reference
    from groupbench.kernels.grouped_gemm.fp8_wgrad import fp8_wgrad_reference

    wgrad = (step.dct, step.scale_dct, step.at, step.scale_at, step.x.offs, step.main_grad)
    return {
        "dA": grouped_gemm_fp8_reference(step.dc, step.scale_dc, step.bt, step.scale_bt, step.x.offs),
        "dB": fp8_wgrad_reference(*wgrad),
    }


def decode_outputs(output: Any) -> Any:
    """Return the outputs; raise TypeError unless dB, the last one of a gradient, is in fp32 and the others in bf16."""
    parts = list(output) if isinstance(output, (tuple, list)) else [output]
    expected = [torch.float32 if part == len(parts) - 1 and part else torch.bfloat16 for part in range(len(parts))]
    found = [getattr(part, "dtype", None) for part in parts]
    if found != expected:
        raise TypeError(f"the backend returned {found}, expected {expected}")
    return output


def min_bytes_backward(shape: GroupedShape, dtype: str) -> int:
    """Count dc, the used weights, dA; dc and a again as they are stored transposed; `main_grad` read and written."""
    active = sum(row > 0 for row in shape.rows)
    M, N, K = shape.M, shape.N, shape.K
    return 2 * M * N + active * N * K + 2 * M * K + M * K + 8 * shape.G * N * K


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: Fp8Inputs) -> Run:
    """One row-wise torch._scaled_mm for each group that has rows, sizes known on the host, into one output.

    Call cuBLASLt for each group, on copied scales: they have to start at a multiple of 16 bytes.
    """
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
    a = x.a.new_empty(16, 16)
    scales = x.scale_a.new_ones(16)
    try:
        torch._scaled_mm(a, a.t(), scales[:, None], scales[None], out_dtype=torch.bfloat16)
    except RuntimeError as error:
        raise Unavailable(f"torch {torch.__version__} has no row-wise fp8 product on this CPU: {error}") from error


def prepare_torch_scaled_grouped_mm(x: Fp8Inputs, fast_accum: bool = False) -> Run:
    """torch.nn.functional.scaled_grouped_mm, sums promoted to fp32: CUTLASS pointer-array kernels on Hopper."""
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
    """Call cuBLASLt for each group, on copies in cuBLASLt's layout: separate scales, rows padded to a multiple of 4."""
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


def prepare_cuda_cluster_fast(x: Fp8Inputs) -> Run:
    """grouped_gemm's cuda_cluster with scales before the stores, sums that stay in the tensor cores."""
    from groupbench.kernels.grouped_gemm.cluster_fp8 import prepare_cluster_fp8, why_not_cluster_fp8

    if reason := why_not_cluster_fp8(x.a, x.b):
        raise Unavailable(reason)
    return prepare_cluster_fp8(x.a, x.scale_a, x.b, x.scale_b, x.offs)


def prepare_torch_bwd(step: Fp8Step, fast_accum: bool = True) -> Run:
    """Call torch's row-wise scaled_grouped_mm twice; the second product has ragged sums, and fp32 is added after it."""
    x, needs = step.x, replace(step.x, a=step.dc, b=step.bt)
    _require_multiples_of_16(needs)
    bt, at = step.bt.transpose(1, 2), step.at.t()
    # Ends of the padded groups, and scales of all columns of a group, [G * N] and [G * K].
    padded = ends(tuple(math.ceil(rows / BLOCK) * BLOCK for rows in x.rows), x.offs.device)
    scales = step.scale_dct.flatten(), step.scale_at.flatten()

    def run() -> tuple[Tensor, Tensor]:
        multiply = partial(torch._scaled_grouped_mm, out_dtype=torch.bfloat16, use_fast_accum=fast_accum)
        da = multiply(step.dc, bt, step.scale_dc, step.scale_bt, offs=x.offs)
        db = multiply(step.dct, at, *scales, offs=padded)
        return da, step.main_grad + db

    return run


def prepare_torch_loop_bwd(step: Fp8Step) -> Run:
    """Call cuBLASLt's row-wise product for each group and gradient, and add in fp32."""
    dgrad = prepare_torch_loop(replace(step.x, a=step.dc, scale_a=step.scale_dc, b=step.bt, scale_b=step.scale_bt))
    problems, first = [], 0
    for g, rows in enumerate(step.x.rows):
        last = first + math.ceil(rows / BLOCK) * BLOCK
        if rows:
            dct, at = step.dct[:, first:last], step.at[:, first:last]
            problems.append((g, dct, at.t(), step.scale_dct[g][:, None], step.scale_at[g][None]))
        first = last

    def run() -> tuple[Tensor, Tensor]:
        da, db = dgrad(), step.main_grad.clone()
        for g, dct, at, scale_dct, scale_at in problems:
            db[g] += torch._scaled_mm(dct, at, scale_dct, scale_at, out_dtype=torch.bfloat16)
        return da, db

    return run


def prepare_triton_bwd(step: Fp8Step, fast_accum: bool = False) -> Run:
    from groupbench.kernels.grouped_gemm.fp8 import prepare_fp8
    from groupbench.kernels.grouped_gemm.fp8_wgrad import prepare_fp8_wgrad

    offs, blockwise = step.x.offs, step.scale_dc.ndim == 2
    dgrad = prepare_fp8(step.dc, step.scale_dc, step.bt, step.scale_bt, offs, fast_accum)
    columns = step.dct, step.scale_dct, step.at, step.scale_at
    wgrad = prepare_fp8_wgrad(*columns, offs, blockwise, step.main_grad, fast_accum=fast_accum)
    return lambda: (dgrad(), wgrad())


def _trained(backend: Backend, prepare_bwd: Callable[[Fp8Step], Run]) -> Backend:
    """Return the backend with the modes bwd and fwd_bwd."""

    def both(step: Fp8Step) -> Run:
        forward, backward = backend.prepare(step.x), prepare_bwd(step)
        return lambda: (forward(), *backward())

    return replace(backend, prepare_bwd=prepare_bwd, prepare_fwd_bwd=both)


def _flat(name: str, about: str, fast_accum: bool = False, tolerance: str | None = None) -> Backend:
    prepare = lazy("grouped_gemm.fp8:prepare_fp8", "a scale_a b scale_b offs", fast_accum=fast_accum)
    backend = Backend(name, prepare, about, kind="triton", unavailable=_TRITON, tolerance=tolerance)
    return _trained(backend, partial(prepare_triton_bwd, fast_accum=fast_accum))


def _groups(x: Fp8Inputs) -> list[tuple[int, int, int]]:
    """Return (g, first row, last row + 1) for each group with rows."""
    return [(g, start, end) for g, start, end in group_bounds(x.rows) if start < end]


def _empty_output(x: Fp8Inputs) -> Tensor:
    return torch.empty(x.a.shape[0], x.b.shape[1], dtype=torch.bfloat16, device=x.a.device)


def _require_multiples_of_16(x: Fp8Inputs) -> None:
    N, K = x.b.shape[1:]
    if x.a.is_cuda and (N % 16 or K % 16):
        raise Unavailable(f"torch's fp8 products need N and K to be multiples of 16, not N={N}, K={K}")


def _needs(low: tuple[int, int], high: tuple[int, int], need: str, cpu: bool = False) -> Callable[[Target], str | None]:
    """Return a backend's `unavailable` for GPUs from capability low up to, not including, high.

    Args:
        need: The reason, a clause that begins the message.
        cpu: The backend runs on a CPU as well.
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


def _rowwise(suite: dict[str, GroupedShape]) -> tuple[GroupedShape, ...]:
    """Return grouped_gemm's shapes with weights [G, N, K], not shared."""
    return tuple(dict.fromkeys(replace(shape, nk=True, shared=False) for shape in suite.values() if not shape.block))


def _trainable(suite: dict[str, GroupedShape]) -> tuple[GroupedShape, ...]:
    """Return the shapes without those whose weights' gradient is too large to check."""
    return tuple(shape for shape in _rowwise(suite) if shape.G * shape.K * shape.N <= shapes.MAX_WEIGHTS)


def _gradients(blockwise: bool) -> dict[str, Any]:
    """Return the modes bwd and fwd_bwd of a recipe."""
    backward = Backward(
        make_inputs=partial(make_step, blockwise=blockwise),
        reference=reference_backward,
        flops=lambda shape: 2 * flops(shape),
        min_bytes=min_bytes_backward,
        returns="(dA [M, K] bf16, dB [G, N, K] fp32)",
        moves=("dc", "dct", "main_grad"),  # the rest was saved by the forward pass
        suites=shapes.SUITES.each(_trainable),
    )
    both = replace(
        backward,
        reference=lambda step: {"out": reference(step.x), **reference_backward(step)},
        flops=lambda shape: 3 * flops(shape),
        min_bytes=lambda shape, dtype: min_bytes_backward(shape, dtype) + min_bytes(shape, dtype, blockwise),
        returns="(out [M, N] bf16, dA [M, K] bf16, dB [G, N, K] fp32)",
        moves=("x.a", "dc", "dct", "main_grad"),
    )
    return {"backward": backward, "forward_backward": both}


GROUPED_GEMM_FP8 = Operator(
    name="grouped_gemm_fp8",
    baseline="torch_loop",
    backends=(
        _trained(described(prepare_torch_loop, unavailable=_TORCH_LOOP), prepare_torch_loop_bwd),
        _trained(
            described(prepare_torch_scaled_grouped_mm, unavailable=_TORCH_GROUPED),
            partial(prepare_torch_bwd, fast_accum=False),
        ),
        _trained(
            Backend(
                "torch_scaled_grouped_mm_fast",
                partial(prepare_torch_scaled_grouped_mm, fast_accum=True),
                "the same with use_fast_accum: sums stay in the tensor cores",
                unavailable=_TORCH_GROUPED,
                tolerance=_FAST,
            ),
            prepare_torch_bwd,
        ),
        _flat(
            "triton_flat",
            "grouped_gemm's triton_flat with scales in the epilogue, sums promoted to fp32 every 128 of K",
        ),
        _flat("triton_flat_fast", "the same with sums that stay in the tensor cores", True, _FAST),
        described(prepare_cuda_cluster_fast, unavailable=not_hopper, tolerance=_FAST),
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
    placements=placements.of_groups,
    decode=decode_outputs,
    **_gradients(blockwise=False),
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
        _flat(
            "triton_flat",
            "grouped_gemm's triton_flat, each product of 128 of K scaled and added in fp32; recipe of DeepSeek-V3",
        ),
    ),
    make_inputs=partial(make_inputs, blockwise=True),
    min_bytes=partial(min_bytes, blockwise=True),
    **_gradients(blockwise=True),
)
