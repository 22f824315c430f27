"""The grouped products as operations of torch: `grouped_mm` and `scaled_grouped_mm`.

    a [M, K]    @ b [G, K, N]   rows of a by group       c [M, N], rows past offs[-1] are zero
    a [P, R]    @ b [R, Q]      the sum by group         c [G, P, Q], zero for a group without rows

    of the first   da = dc @ b.T by rows               db = a.T @ dc, the second form
    of the second  da = b @ dc.T by rows, transposed   db = a.T @ dc by rows

Other forms, dtypes and devices are computed by torch's own operation; `fallback_reason` gives the reason.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from groupbench.kernels.grouped_gemm.choose import (
    Launches,
    gradient_of_any,
    launches_again,
    launches_of,
    product_of_any,
    stored_nk,
    unfit,
)
from groupbench.kernels.ops.define import (
    autocast_enabled,
    cast_by_autocast,
    define,
    direct,
    refuse_derivative,
    refuse_vmap,
    transformed,
)


def grouped_mm(
    a: Tensor,  # [M, K]; [P, R] with a b of two dimensions
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view; or [R, Q]
    offs: Tensor | None = None,  # [G] int32 or int64: where each group's rows end
    bias: Tensor | None = None,  # [N], or [G, N]: one for each group
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply by groups, as `torch.nn.functional.grouped_mm` does, differentiable once in a, b and bias.

    The host does not read `offs`, so that a CUDA graph follows later changes of their values. Their values are not
    checked (`check_offsets`). A row's result has the same bits whatever the other rows, groups and offsets are.

    Args:
        a: left operand, whose rows belong to groups. With a two-dimensional `b`, its columns do.
        b: one matrix for each group, any strides; or the rows of all groups.
        offs: end offsets, which must not decrease.
        bias: added to each row of a group.
        out_dtype: dtype of the result; torch's own operation computes one that differs from the operands'.

    Returns:
        [M, N], zero in rows past offs[-1]; or [G, P, Q].
    """
    if offs is not None and out_dtype is None and bias is None and direct(a, b, offs) and not autocast_enabled():
        launches = launches_again(a, b, offs)
        if launches is not None:
            return _eager(launches, a, b, offs)
    a, b = cast_by_autocast(a, b)
    if unfit(a, b, offs, out_dtype) is not None:
        return _by_torch(a, b, offs, bias, out_dtype)
    assert offs is not None
    out: Tensor
    if transformed():
        out = _Transformed.apply(a, b, offs)
    elif not direct(a, b, offs):
        out = torch.ops.groupbench.grouped_mm(a, b, offs)
    else:
        out = _eager(launches_of(a, b, offs) if b.dim() == 3 else _SUMS, a, b, offs)
    return out if bias is None else _add_bias(out, bias, offs)


def fallback_reason(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why torch's own operation would compute this product, or None if groupbench's kernels do."""
    a, b = cast_by_autocast(a, b)
    return unfit(a, b, offs, out_dtype)


def _by_torch(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if offs is not None and offs.dtype == torch.int64:
        offs = offs.to(torch.int32)
    out = F.grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
    return out if bias is None else _add_bias(out, bias, offs if a.dim() == 2 and b.dim() == 3 else None)


def _add_bias(out: Tensor, bias: Tensor, offs: Tensor | None) -> Tensor:
    """Add bias [N] or [G, N] to the rows of groups; rows past the last group stay zero."""
    if out.dim() == 3:
        return out + (bias if bias.dim() == 1 else bias[:, None, :])
    if offs is None:
        return out + bias
    G, N = offs.size(0), out.size(1)
    group = torch.searchsorted(offs, torch.arange(out.size(0), device=out.device, dtype=offs.dtype), right=True)
    rows = torch.cat([bias.expand(G, N), bias.new_zeros(1, N)]).index_select(0, group)
    return out + rows.to(out.dtype)


# --- the operation ----------------------------------------------------------------------------------------------------


def _compute(a: Tensor, b: Tensor, offs: Tensor, nk: bool = False) -> Tensor:
    return product_of_any(a, b, offs) if b.dim() == 3 else gradient_of_any(a.t(), b, offs, nk)


def _compute_out_of_place(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return _compute(a, b, offs)


def _fake(a: Tensor, b: Tensor, offs: Tensor, nk: bool = False) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.size(0), b.size(2))
    G, P, Q = offs.size(0), a.size(0), b.size(1)
    return a.new_empty(G, Q, P).transpose(1, 2) if nk else a.new_empty(G, P, Q)


def _gradients(
    multiply: Any, dc: Tensor, a: Tensor | None, b: Tensor | None, offs: Tensor, nk: bool, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the wanted gradients of c = a @ b by groups; a is needed for b's, b for a's."""
    da = db = None
    if dc.dim() == 2:
        if needs[0] and b is not None:
            da = multiply(dc, b.transpose(1, 2), offs, False)
        if needs[1] and a is not None:
            db = multiply(a.t(), dc, offs, nk)
    else:
        if needs[0] and b is not None:
            da = multiply(b, dc.transpose(1, 2), offs, False).t()
        if needs[1] and a is not None:
            db = multiply(a.t(), dc, offs, False)
    return da, db


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Save only the operands that the requested gradients need."""
    a, b, offs = inputs
    wants_a, wants_b = ctx.needs_input_grad[:2]
    ctx.nk = b.dim() == 3 and stored_nk(b)
    ctx.save_for_backward(a if wants_b else None, b if wants_a else None, offs)


def _backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offs = ctx.saved_tensors
    multiply = torch.ops.groupbench.grouped_mm_grad
    return *_gradients(multiply, dc, a, b, offs, ctx.nk, ctx.needs_input_grad[:2]), None


define("grouped_mm_grad(Tensor a, Tensor b, Tensor offs, bool nk) -> Tensor", _compute, _fake)
define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor",
    _compute_out_of_place,
    _fake,
    gradients=(_save, _backward),
    cast=("a", "b"),
)


class _Sums:
    """Launches for the second form."""

    nk = False

    def product(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return _compute(a, b, offs)

    def gradient_of_a(self, dc: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return _compute(b, dc.transpose(1, 2), offs).t()

    def gradient_of_b(self, dc: Tensor, a: Tensor, offs: Tensor) -> Tensor:
        return _compute(a.t(), dc, offs)


_SUMS = _Sums()


class _Eager(torch.autograd.Function):
    """The same gradients for calls that need no dispatcher.

    Without `setup_context`, with which torch inspects the signature at every call.
    """

    @staticmethod
    def forward(ctx: Any, launches: Launches | _Sums, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ctx.launches = launches
        _, wants_a, wants_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, offs)
        return launches.product(a, b, offs)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        a, b, offs = ctx.saved_tensors
        launches = ctx.launches
        if torch.is_grad_enabled() or not direct(dc):
            # With create_graph, the gradients need the nodes that refuse a second derivative.
            wanted = b is not None, a is not None
            return None, *_gradients(_Gradient.apply, dc, a, b, offs, launches.nk, wanted), None
        da = None if b is None else launches.gradient_of_a(dc, b, offs)
        return None, da, None if a is None else launches.gradient_of_b(dc, a, offs), None


# Function.apply only looks for transforms and their remains, which `direct` has excluded, in as much time as the rest.
_apply = super(torch.autograd.Function, _Eager).apply


def _eager(launches: Launches | _Sums, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        return cast(Tensor, _apply(launches, a, b, offs))
    return launches.product(a, b, offs)


class _Transformed(torch.autograd.Function):
    """The same gradients for torch.func, which cannot use registered ones."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return _compute(a, b, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, (inputs[0], inputs[1], inputs[2]), output)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, offs = ctx.saved_tensors
        return *_gradients(_Gradient.apply, dc, a, b, offs, ctx.nk, ctx.needs_input_grad[:2]), None

    @staticmethod
    def vmap(*args: Any) -> Any:
        return refuse_vmap("groupbench::grouped_mm")()


class _Gradient(torch.autograd.Function):
    """A product of a backward pass, which has no derivative."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, offs: Tensor, nk: bool) -> Tensor:
        return _compute(a, b, offs, nk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return refuse_derivative("groupbench::grouped_mm_grad")(ctx)

    @staticmethod
    def vmap(*args: Any) -> Any:
        return refuse_vmap("groupbench::grouped_mm_grad")()


# --- fp8 --------------------------------------------------------------------------------------------------------------


def scaled_grouped_mm(
    mat_a: Tensor,  # [M, K] e4m3fn
    mat_b: Tensor,  # [G, K, N] e4m3fn, a transposed view of weights stored as [G, N, K]
    scale_a: Tensor | list[Tensor],  # [M] fp32; block-wise [M, K/128], stored column by column
    scale_recipe_a: Any,  # torch.nn.functional.ScalingType
    scale_b: Tensor | list[Tensor],  # [G, N] fp32; block-wise [G, N/128, K/128]
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,  # [G]
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:  # [M, N]
    """Multiply scaled fp8 by groups of rows, with the signature of `torch.nn.functional.scaled_grouped_mm`.

    groupbench computes the recipes RowWise (both) and BlockWise1x128 with BlockWise128x128, and torch's own operation
    all others; `scaled_fallback_reason` gives the reason. It has no gradient.
    """
    reason = scaled_fallback_reason(
        mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, bias, offs, output_dtype,
        contraction_dim, use_fast_accum,
    )  # fmt: skip
    if reason is not None:
        by_torch: Any = F.scaled_grouped_mm  # type: ignore[attr-defined]
        computed: Tensor = by_torch(
            mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, bias, offs,
            output_dtype, contraction_dim, use_fast_accum,
        )  # fmt: skip
        return computed
    assert offs is not None
    arguments = (mat_a, mat_b, _only(scale_a), _only(scale_b), offs, output_dtype or torch.bfloat16, use_fast_accum)
    out: Tensor
    if direct(mat_a, mat_b, offs):
        out = _scaled(*arguments)
    else:
        out = torch.ops.groupbench.scaled_grouped_mm(*arguments)
    return out


def scaled_fallback_reason(
    mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_recipe_a: Any, scale_b: Any, scale_recipe_b: Any,
    swizzle_a: Any = None, swizzle_b: Any = None, bias: Any = None, offs: Any = None,
    output_dtype: torch.dtype | None = torch.bfloat16, contraction_dim: Any = (), use_fast_accum: bool = False,
) -> str | None:  # fmt: skip
    """Return why torch's own operation would compute this product, or None if groupbench's kernels do."""
    from groupbench.kernels.grouped_gemm.quantize import E4M3

    a, b = _only(scale_a), _only(scale_b)
    recipes = (_recipe_name(scale_recipe_a), _recipe_name(scale_recipe_b))
    if recipes not in (("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise128x128")) or a is None or b is None:
        return f"recipes {recipes[0]} and {recipes[1]}"
    if bias is not None or contraction_dim or _recipe_name(swizzle_a) not in ("None", "NO_SWIZZLE"):
        return "with bias, swizzle or contraction_dim"
    if mat_a.dtype != E4M3 or mat_b.dtype != E4M3:
        return f"operands of {mat_a.dtype} and {mat_b.dtype}"
    if (reason := unfit(a.new_empty(()).expand(mat_a.shape), a.new_empty(()).expand(mat_b.shape), offs)) is not None:
        return reason
    if mat_a.stride(1) != 1 or mat_b.stride(1) != 1 or mat_a.size(1) % 16 or mat_a.dim() != 2 or mat_b.dim() != 3:
        return "operands whose K is not contiguous, or not a multiple of 16"
    if output_dtype not in (None, torch.bfloat16, torch.float16):
        return f"output_dtype={output_dtype}"
    return "use_fast_accum block-wise" if use_fast_accum and recipes[0] != "RowWise" else None


def _only(scale: Any) -> Any:
    """Return the scale of a list of one."""
    if isinstance(scale, (list, tuple)):
        return scale[0] if len(scale) == 1 else None
    return scale


def _recipe_name(recipe: Any) -> str:
    recipe = _only(recipe)
    return str(getattr(recipe, "name", recipe))


def _scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    from groupbench.kernels.grouped_gemm.cluster_fp8 import prepare_cluster_fp8, why_not_cluster_fp8
    from groupbench.kernels.grouped_gemm.fp8 import prepare_fp8

    nk, scale_b = b.transpose(1, 2), scale_b.contiguous()
    if scale_a.dim() == 2 and scale_a.stride(0) != 1:
        scale_a = scale_a.t().contiguous().t()
    if fast and out_dtype == torch.bfloat16 and a.size(0) >= 64 * nk.size(0) and why_not_cluster_fp8(a, nk) is None:
        return prepare_cluster_fp8(a, scale_a, nk, scale_b, offs, trusted=True)()
    out = prepare_fp8(a, scale_a, nk, scale_b, offs, fast, out_dtype, trusted=True)()
    return out.contiguous()


def _scaled_fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(a.size(0), b.size(2), dtype=out_dtype)


define(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType out_dtype, "
    "bool fast) -> Tensor",
    _scaled,
    _scaled_fake,
)
