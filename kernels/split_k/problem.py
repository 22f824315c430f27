"""Define the product that the kernels of this folder compute, its operands, and the reference in plain torch.

out = a @ b        a [M, K]   b [K, N]   out [M, N]
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import interpreted, require_device, require_tensors, unsupported

MAX_SIZE = 2**31 - 1024  # an index one block further still fits into int32


def require_product(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless a [M, K] and b [K, N] fit together and can be multiplied here."""
    require_tensors(a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.size(1) != b.size(0):
        raise ValueError(f"expected a [M, K] and b [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"a and b need one dtype and one device: {a.dtype} on {a.device}, {b.dtype} on {b.device}")
    if max(*a.shape, b.size(1)) > MAX_SIZE:
        raise ValueError(f"M, N and K up to {MAX_SIZE}, got {tuple(a.shape)} and {tuple(b.shape)}")
    if reason := unsupported(a.dtype, interpreted()):
        raise ValueError(reason)
    require_device(a.device)


def split_k_reference(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    splits: int = 1,
) -> Tensor:  # [M, N] fp64
    """Return the product in fp64, summed over `splits` stretches of K."""
    stretches = torch.arange(a.size(1), device=a.device).tensor_split(splits)
    parts = [a[:, stretch].double() @ b[stretch].double() for stretch in stretches]
    return torch.stack(parts).sum(0)
