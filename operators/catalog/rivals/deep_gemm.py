"""DeepGEMM's contiguous grouped GEMMs (DeepSeek; the build published by SGLang): bf16, and fp8 with block-wise scales.

In the contiguous layout each group starts at an alignment multiple, and a list holds each row's expert, -1 for padding.
`deep_gemm` copies packed rows into this layout and the output back, inside the call and on the device.
`deep_gemm_product` is the product alone, for groups in alignment multiples. The difference between the two is the
layout's cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.rivals.package import RivalPackage, require, row_counts, weights_nk
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Run

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_fp8 import Fp8Inputs

PACKAGE = RivalPackage(
    "sgl-deep-gemm",
    "deep_gemm",
    "rivals-deep-gemm",
    note="it loads only with the torch and CUDA that it was built for",
)
ALIGNMENT = 128
"""Alignment of groups if the package does not export its own."""


@dataclass(frozen=True)
class Padded:
    """Packed rows' places in the padded layout, and the experts."""

    place: Tensor  # [M] int64, of each packed row
    expert: Tensor  # [P] int32, of each padded row; -1 for padding


def padded_rows(M: int, G: int, alignment: int) -> int:
    """Return the rows in a layout with room for any M rows in G groups, each padded to the alignment."""
    return math.ceil((M + G * (alignment - 1)) / alignment) * alignment


def pad(
    counts: Tensor,  # [G] int32, rows of each group
    M: int,
    alignment: int,
) -> Padded:
    """Compute the layout on the device, with no host sync. The counts sum to M."""
    ends = counts.cumsum(0)
    padded = (counts + alignment - 1) // alignment * alignment
    moved = (padded.cumsum(0) - padded) - (ends - counts)  # by how many rows each group moves
    row = torch.arange(M, device=counts.device)
    group = torch.searchsorted(ends, row, right=True)
    place = row + moved[group]
    expert = torch.full((padded_rows(M, len(counts), alignment),), -1, dtype=torch.int32, device=counts.device)
    expert.index_copy_(0, place, group.to(torch.int32))
    return Padded(place, expert)


def _product(x: GroupedInputs | Fp8Inputs) -> tuple[tuple[Tensor, ...], int, Callable[..., Any], torch.dtype]:
    """Return the operands with rows, the number of columns, the product of such operands, and the output's dtype."""
    import deep_gemm

    from groupbench.operators.catalog.grouped_gemm_fp8 import Fp8Inputs

    def fp8(a: Tensor, scale_a: Tensor, out: Tensor, expert: Tensor) -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scale_a), weights, out, expert)

    def bf16(a: Tensor, out: Tensor, expert: Tensor) -> None:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, expert)

    if isinstance(x, Fp8Inputs):
        weights, (N, K) = (x.b, x.scale_b), x.b.shape[1:]
        require(128, N=N, K=K)
        return (x.a, x.scale_a), N, fp8, torch.bfloat16
    b = weights_nk(x.b)
    require(8, N=b.shape[1], K=b.shape[2])
    return (x.a,), b.shape[1], bf16, x.a.dtype


def prepare(x: GroupedInputs | Fp8Inputs) -> Run:
    """Copy rows into the padded layout, multiply, and copy the output's rows back."""
    sources, N, product, dtype = _product(x)
    M, alignment = x.a.shape[0], _alignment()
    counts, P = row_counts(x.offs), padded_rows(M, x.offs.numel(), alignment)

    def run() -> Tensor:
        layout = pad(counts(), M, alignment)
        out = x.a.new_empty(P, N, dtype=dtype)
        product(*(_scattered(source, layout.place, P) for source in sources), out, layout.expert)
        return out.index_select(0, layout.place)

    return run


def prepare_product(x: GroupedInputs | Fp8Inputs) -> Run:
    sources, N, product, dtype = _product(x)
    expert = _aligned_experts(x)

    def run() -> Tensor:
        out = x.a.new_empty(x.a.shape[0], N, dtype=dtype)
        product(*sources, out, expert)
        return out

    return run


def _scattered(source: Tensor, place: Tensor, rows: int) -> Tensor:
    """Return [rows, ...] with the source's rows at their places. fp8 has no index_copy_, so it is copied as bytes."""
    out = source.new_empty(rows, source.shape[1])
    fp8 = source.element_size() == 1
    (out.view(torch.uint8) if fp8 else out).index_copy_(0, place, source.view(torch.uint8) if fp8 else source)
    return out


def _alignment() -> int:
    import deep_gemm

    read_alignment = getattr(deep_gemm, "get_mk_alignment_for_contiguous_layout", None)
    return int(read_alignment()) if read_alignment else ALIGNMENT


def _aligned_experts(x: GroupedInputs | Fp8Inputs) -> Tensor:
    """Return each row's expert, [M] int32. Raises Unavailable if a group is not an alignment multiple."""
    alignment = _alignment()
    odd = next((rows for rows in x.rows if rows % alignment), None)
    if odd is not None or sum(x.rows) != x.a.shape[0]:
        raise Unavailable(f"the product alone needs groups of multiples of {alignment} rows, not {odd}; see deep_gemm")
    experts = torch.arange(len(x.rows), dtype=torch.int32)
    return torch.repeat_interleave(experts, torch.tensor(x.rows)).to(x.a.device)


_SOURCE = "DeepGEMM, JIT-compiled CUDA; rows are copied into its padded layout and back inside the call"
_PRODUCT = "DeepGEMM's product alone, for groups of multiples of 128 rows; each row's expert is listed beforehand"
_bf16, _fp8 = PACKAGE.unavailable(("bf16",)), PACKAGE.unavailable(("fp8",), below=(10, 0))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "deep_gemm", prepare, _SOURCE, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm", "deep_gemm_product", prepare_product, _PRODUCT, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm_dgrad", "deep_gemm", prepare, _SOURCE, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm_fp8_blockwise", "deep_gemm", prepare, _SOURCE, unavailable=_fp8),
    PACKAGE.backend("grouped_gemm_fp8_blockwise", "deep_gemm_product", prepare_product, _PRODUCT, unavailable=_fp8),
)
