"""Make the offset table for Helion's kernels: all groups' starts and ends, on the GPU, by each call.

One launch writes the table and zeros the rows without a group. A callable, or a CUDA graph, therefore follows the
offsets' values when it runs. The host reads none of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.experts import zero_past
from groupbench.kernels.grouped_gemm.support import worker_count


@triton.jit
def _tabulate(
    offs_ptr,  # [G]
    table_ptr,  # [G + 1]
    out_ptr,  # [M, N]
    M,
    N,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    if tl.program_id(0) == 0:
        groups = tl.arange(0, G_POW2)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0)
        tl.store(table_ptr, 0)
        tl.store(table_ptr + 1 + groups, ends, mask=groups < G)
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, N, NUM_PROGRAMS, 1024)


def empty_table(offs: Tensor, wide: bool) -> Tensor:  # [G + 1]
    """Return an empty table for `tabulate`. Row indices get the table's dtype: int64 with `wide`, else int32."""
    return torch.empty(offs.numel() + 1, dtype=torch.int64 if wide else torch.int32, device=offs.device)


def tabulate(
    offs: Tensor,  # [G], int32 or int64 end offsets
    table: Tensor,  # [G + 1]: start of every group, and end of the last
    out: Tensor | None = None,  # [M, N], contiguous: its rows past the last group's become zero
) -> None:
    """Fill the table from the offsets, and zero the output's rows past offs[-1], in one launch."""
    programs = 1 if out is None else worker_count(offs.device)
    M, N = (0, 0) if out is None else out.shape
    G = offs.numel()
    _tabulate[(programs,)](
        offs, table, offs if out is None else out, M, N, G=G, G_POW2=triton.next_power_of_2(G), NUM_PROGRAMS=programs
    )
