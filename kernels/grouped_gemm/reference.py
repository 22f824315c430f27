"""Grouped GEMM in plain torch: the reference for every kernel in this folder.

    out[offs[g-1]:offs[g]] = a[offs[g-1]:offs[g]] @ b[g]        g = 0..G-1, with offs[-1] read as 0 for g = 0

Inputs are widened before the product (fp32 and fp64 to fp64, halves to fp32), and the result stays wide. The
reference's rounding is therefore far below a kernel's tolerance. TF32 is disabled during the product: it keeps 10 bits
of mantissa, no more than fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def grouped_gemm_reference(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G], int32 or int64 end offsets
) -> Tensor:  # [M, N], fp64 or fp32; rows past offs[-1] are zero
    """Return the grouped product by one matmul per group, in a wider dtype."""
    wide = _wide(a.dtype)
    out = torch.zeros(a.size(0), b.size(2), dtype=wide, device=a.device)
    start = 0
    with without_tf32():
        for g, end in enumerate(offs.tolist()):
            out[start:end] = a[start:end].to(wide) @ b[g].to(wide)
            start = end
    return out


def grouped_gemm_wgrad_reference(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N], the gradient of the output
    offs: Tensor,  # [G], int32 or int64 end offsets
) -> Tensor:  # [G, K, N], fp64 or fp32: the gradient of b; zero for a group without rows
    """Return a[rows of g].T @ dc[rows of g] for every group; rows past offs[-1] are ignored."""
    wide = _wide(a.dtype)
    out = torch.zeros(offs.numel(), a.size(1), dc.size(1), dtype=wide, device=a.device)
    start = 0
    with without_tf32():
        for g, end in enumerate(offs.tolist()):
            out[g] = a[start:end].to(wide).T @ dc[start:end].to(wide)
            start = end
    return out


def reference_list(
    group_a: Sequence[Tensor],  # G of [M_g, K_g]
    group_b: Sequence[Tensor],  # G of [K_g, N_g]
) -> list[Tensor]:  # G of [M_g, N_g], fp64 or fp32
    """Return products for separate tensors, each with a size."""
    with without_tf32():
        return [a.to(_wide(a.dtype)) @ b.to(_wide(b.dtype)) for a, b in zip(group_a, group_b, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute torch's fp32 products in full precision within this context."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
