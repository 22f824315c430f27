"""Operands of scaled fp8 products for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import quantize
from groupbench.kernels.grouped_gemm.fp8 import BLOCKWISE

FIVE = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def scaled(a: Tensor, b: Tensor, sizes: tuple[int, ...], mode: str, tail: int = 0, device: str = "cpu") -> FIVE:
    """Return (a, scale_a, b, scale_b, offs), with NaN in rows past the groups, their scales, and between rows."""
    blockwise = mode == BLOCKWISE
    of_a = quantize.quantize_blocks_reference if blockwise else quantize.quantize_rows_reference
    of_b = quantize.quantize_weight_blocks_reference if blockwise else quantize.quantize_rows_reference
    (M, K), (G, N, _) = a.shape, b.shape
    q_a, q_b = (quantize.empty_fp8(rows, K, device) for rows in (M + tail, G * N))
    for q in (q_a, q_b):
        torch.as_strided(q, (q.size(0), q.stride(0)), q.stride()).fill_(float("nan"))
    values, scale = of_a(a)
    q_a[:M].copy_(values)
    if blockwise:
        scale_a = torch.full((scale.size(1), M + tail), float("nan"), device=device).t()
    else:
        scale_a = torch.full((M + tail,), float("nan"), device=device)
    scale_a[:M].copy_(scale)
    parts = [of_b(matrix) for matrix in b]
    q_b = q_b.unflatten(0, (G, N))
    q_b.copy_(torch.stack([values for values, _ in parts]))
    scale_b = torch.stack([scale for _, scale in parts]).to(device)
    return q_a, scale_a, q_b, scale_b, torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def drawn(sizes: tuple[int, ...], n: int, k: int, mode: str, tail: int = 0, device: str = "cpu") -> FIVE:
    """Return `scaled` of standard normal a [M, k] and b [G, n, k], always the same."""
    torch.manual_seed(0)
    return scaled(torch.randn(sum(sizes), k), torch.randn(len(sizes), n, k), sizes, mode, tail, device)
