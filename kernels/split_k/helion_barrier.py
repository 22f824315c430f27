"""Split-K in Helion, its two stages separated by a barrier of the whole grid: backend `helion_barrier`.

    partial[s] = a[:, stretch s] @ b[stretch s]      in fp32, stretches of `block_k` of K
    --- hl.barrier() ---
    out = partial[0] + partial[1] + ...

One launch. As many programs as SMs share the tiles of the first stage, wait for each other, and share those of the
second. One program sums every output in one order, so two runs agree to the bit, which atomic adds would not give. All
programs have to be on the GPU at once (Helion launches a cooperative grid). Triton's interpreter runs one program after
the other and would therefore wait at the barrier for ever.

From Helion's examples/split_k_barrier.py, with these changes. Partials are in fp32 for any dtype of the operands. There
are as many slots as stretches, instead of zeros for slots that rounding left empty. The slot is the first dimension, so
that neighbouring threads store neighbouring elements. In tiled.py only the programs of a tile wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import helion
import helion.language as hl
import torch
import triton
from helion.autotuner import PowerOfTwoFragment
from torch import Tensor

from groupbench.kernels.device import Device, device_of
from groupbench.kernels.helion_configs import compile_for, first_that_compiles
from groupbench.kernels.split_k import tiled
from groupbench.kernels.split_k.problem import require_product
from groupbench.kernels.split_k.tiled import config_key

WORKERS = 1  # programs per SM: a barrier of 132 programs costs less than one of 264


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=True, dot_precision="ieee")
def split_k_matmul_barrier(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
) -> Tensor:  # [M, N]
    M, K = a.shape
    N = b.size(1)
    split_k = hl.register_tunable("split_k", PowerOfTwoFragment(1, 512, 64))
    block_k = helion.next_power_of_2(helion.cdiv(K, split_k))
    partial = torch.empty((helion.cdiv(K, block_k), M, N), device=a.device, dtype=torch.float32)
    out = torch.empty((M, N), device=a.device, dtype=a.dtype)
    for tile_m, tile_n, stretch in hl.tile([M, N, K], block_size=[None, None, block_k]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(stretch.begin, stretch.end):
            acc = torch.addmm(acc, a[tile_m, tile_k], b[tile_k, tile_n])
        partial[stretch.id, tile_m, tile_n] = acc

    hl.barrier()

    for tile_m, tile_n in hl.tile([M, N]):
        out[tile_m, tile_n] = torch.sum(partial[:, tile_m, tile_n], dim=0).to(out.dtype)
    return out


def default_config(M: int, N: int, K: int, dtype: torch.dtype, device: Device) -> helion.Config:
    """Return the tile and splits of tiled.py's rule, the splits a power of two, with sums by tiles of 1024 partials."""
    rule = tiled.default_config(M, N, K, dtype, device)
    splits = min(triton.next_power_of_2(rule.splits), 512)
    stretch = triton.next_power_of_2(triton.cdiv(K, splits))
    sum_n = min(max(triton.next_power_of_2(N), 1), 16)
    sum_m = min(max(triton.next_power_of_2(M), 1), max(1, 1024 // (splits * sum_n)))
    return helion.Config(
        block_sizes=[rule.block_m, rule.block_n, min(rule.block_k, max(stretch, 16)), sum_m, sum_n],
        split_k=splits,
        num_warps=rule.num_warps,
        num_stages=5 if rule.streamed else rule.num_stages,  # here B goes through buffers, like A
        pid_type="persistent_blocked",
        num_sm_multiplier=WORKERS,
    )


def prepare_barrier(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Compile for these sizes, without tuning; the returned callable allocates output and partials and launches.

    Raises ValueError for operands that cannot be multiplied, and for those on a CPU.
    """
    require_product(a, b)
    if a.device.type != "cuda":
        raise ValueError("a grid-wide barrier cannot be interpreted, since programs run one after the other")
    (M, K), N = a.shape, b.size(1)
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)

    def prepare(config: helion.Config) -> Callable[[], Tensor]:
        return _prepare_with(a, b, config)

    if config is not None:
        return prepare(config)
    default = default_config(M, N, K, a.dtype, device_of(a.device))
    return first_that_compiles("helion_barrier", config_key(M, N, K, a.dtype), default, a, prepare)


def _prepare_with(a: Tensor, b: Tensor, config: helion.Config) -> Callable[[], Tensor]:
    """Run `prepare_barrier` with a config, for operands that were checked."""
    M, N = a.size(0), b.size(1)
    compiled = compile_for(split_k_matmul_barrier, without_ones(a, b), config)

    def run() -> Tensor:
        out: Tensor = compiled(*without_ones(a, b))
        return out[:M, :N] if M == 1 or N == 1 else out

    run()  # compiles the generated Triton code
    return run


def without_ones(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [K, N] with M, N and K of at least two.

    Helion 1.5 drops the index of a dimension of one element, and its mask. A second row or column repeats the first
    one, and the caller cuts it off. Along K the second product is zero.
    """
    if a.size(1) == 1:
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    return (a.expand(2, -1) if a.size(0) == 1 else a), (b.expand(-1, 2) if b.size(1) == 1 else b)
