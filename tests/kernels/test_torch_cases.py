"""Test the grouped products of PyTorch's own tests (test_matmul_cuda.py, 2d_3d and 2d_2d).

Four groups of 16 rows, N of 32, K of 64. Either operand is stored by rows or by columns, dense or cut out of larger
storage; some groups are empty.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import flat, wgrad

G, M, N, K = 4, 16, 32, 64
Prepare = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]


def worklist(a: Tensor, b: Tensor, offs: Tensor) -> Callable[[], Tensor]:
    from groupbench.kernels.grouped_gemm.helion_worklist import prepare_helion_worklist

    return prepare_helion_worklist(a, b, offs)


def cut(*sizes: int, by_rows: bool, strided: bool) -> Tensor:
    """Return a random tensor, its rows or columns contiguous.

    If strided, it is every second element of the outer dimensions and half of the innermost one of larger storage.
    """
    *outer, rows, columns = sizes
    wide = 1 + strided
    inner, outermost = (columns, rows) if by_rows else (rows, columns)
    stored = torch.randn(*(wide * size for size in outer), outermost, wide * inner, dtype=torch.float16)
    stored = stored[..., :inner]
    stored = stored[::wide] if outer else stored
    return stored if by_rows else stored.transpose(-2, -1)


def ends(empty: bool, rows: int) -> Tensor:
    offs = torch.arange(1, G + 1, dtype=torch.int32) * rows
    if empty:  # the second group is empty, the first has the rows of both
        offs[0] = offs[1]
    return offs


def layouts(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrise a test over the layouts of both operands, by default over every pair of two of its choices."""
    for name, ids in (
        ("empty", ["full", "empty"]),
        ("strided", ["dense", "strided"]),
        ("b_by_rows", ["b_columns", "b_rows"]),
        ("a_by_rows", ["a_columns", "a_rows"]),
    ):
        test = pytest.mark.parametrize(name, [False, True], ids=ids)(test)
    return pytest.mark.pairwise(test)


@layouts
@pytest.mark.parametrize("prepare", [flat.prepare_flat, worklist], ids=["flat", "worklist"])
def test_rows_in_groups(prepare: Prepare, a_by_rows, b_by_rows, strided, empty, device, poisoned, check) -> None:
    """PyTorch's 2d_3d, the forward pass."""
    torch.manual_seed(0)
    a = cut(G * M, K, by_rows=a_by_rows, strided=strided).to(device)
    b = cut(G, N, K, by_rows=b_by_rows, strided=strided).to(device).transpose(1, 2)
    offs = ends(empty, M)
    run = prepare(a, b, offs.to(device))
    with poisoned():
        out = run()
    begin, expected = 0, torch.empty(G * M, N)
    for g, end in enumerate(offs.tolist()):
        expected[begin:end] = a[begin:end].float().cpu() @ b[g].float().cpu()
        begin = end
    check(out, expected.to(device), torch.float16)


@layouts
def test_sums_in_groups(a_by_rows, b_by_rows, strided, empty, device, poisoned, check) -> None:
    """PyTorch's 2d_2d, the gradient of weights: the sum runs over groups of 64."""
    torch.manual_seed(0)
    a = cut(M, G * K, by_rows=a_by_rows, strided=strided).to(device).t()
    dc = cut(N, G * K, by_rows=b_by_rows, strided=strided).to(device).t()
    offs = ends(empty, K)
    run = wgrad.prepare_wgrad(a, dc, offs.to(device))
    with poisoned():
        out = run()
    begin, expected = 0, torch.zeros(G, M, N)
    for g, end in enumerate(offs.tolist()):
        expected[g] = a[begin:end].float().cpu().t() @ dc[begin:end].float().cpu()
        begin = end
    check(out, expected.to(device), torch.float16)
