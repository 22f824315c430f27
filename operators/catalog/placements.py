"""Batches that share one row or one group, to find whether its result depends on the rest of the batch.

After Horace He, "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025): a model whose products are
not batch invariant answers differently at another load of its server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.backends import ends
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.operator import Placement

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import BackwardInputs, GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_wgrad import WgradInputs
    from groupbench.operators.catalog.moe_layer import LayerInputs

SIZES = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 512)
"""Rows of the planted row's group: around the tile sizes of kernels and around multiples of 8 and 16 rows."""


def placements(rows: tuple[int, ...], gather: Callable[[list[int], tuple[int, ...]], Any]) -> Iterator[Placement]:
    """Yield batches in which the first row is planted: first, in the middle and last in its group, for each of SIZES.

    The other rows, their groups' sizes and the total change from one batch to the next. A batch takes rows of the
    original inputs, again and again if it has more.

    Args:
        rows: rows of each group in the original inputs.
        gather: (index, rows) -> the inputs whose row i is the original row `index[i]`, in groups of `rows`.
    """
    group = next((g for g, count in enumerate(rows) if count), None)
    if group is None:
        return
    total = sum(rows)
    for size in SIZES:
        for place in sorted({0, size // 2, size - 1}):
            draw = random.Random(f"{size} {place}")
            sizes = [draw.choice((0, 1, draw.randrange(2, 65), 64)) for _ in rows]
            sizes[group] = size
            index = [draw.randrange(total) for _ in range(sum(sizes))]
            planted = sum(sizes[:group]) + place
            index[planted] = 0
            yield Placement(gather(index, tuple(sizes)), planted, len(index))


def of_groups(x: GroupedInputs) -> Iterator[Placement]:
    """Yield batches of a grouped product, also of fp8 with a scale for each row or for parts of it."""

    def gather(index: list[int], rows: tuple[int, ...]) -> GroupedInputs:
        by_row: dict[str, Any] = {n: rows_at(getattr(x, n), index) for n in ("a", "scale_a") if hasattr(x, n)}
        return replace(x, **by_row, offs=ends(rows, x.offs.device), rows=rows)

    return placements(x.rows, gather)


def of_saved(y: BackwardInputs) -> Iterator[Placement]:
    """Yield batches of a grouped product's backward pass."""

    def gather(index: list[int], rows: tuple[int, ...]) -> BackwardInputs:
        x = replace(y.x, a=rows_at(y.x.a, index), offs=ends(rows, y.x.offs.device), rows=rows)
        return replace(y, x=x, dc=rows_at(y.dc, index))

    return placements(y.x.rows, gather)


def of_sums(x: WgradInputs) -> Iterator[Placement]:
    """Yield batches of a gradient of weights, a sum over each group's rows. A whole group is planted.

    Its place among the rows changes with the other groups' sizes.
    """
    kept = next((g for g, count in enumerate(x.rows) if count), None)
    if kept is None:
        return
    first, total = sum(x.rows[:kept]), sum(x.rows)
    for seed in range(3 * len(SIZES)):
        draw = random.Random(seed)
        sizes = [draw.choice((0, 1, draw.randrange(2, 65), 64)) for _ in x.rows]
        sizes[kept] = x.rows[kept]
        index = [draw.randrange(total) for _ in range(sum(sizes))]
        start = sum(sizes[:kept])
        index[start : start + x.rows[kept]] = range(first, first + x.rows[kept])
        a, dc = (rows_at(tensor, index) for tensor in (x.a, x.dc))
        inputs = replace(x, a=a, dc=dc, offs=ends(tuple(sizes), x.offs.device), rows=tuple(sizes))
        yield Placement(inputs, kept, len(sizes))


def of_tokens(x: LayerInputs) -> Iterator[Placement]:
    """Yield batches of a layer, whose rows are tokens. A token keeps its experts and its routing weights."""

    def gather(index: list[int], rows: tuple[int, ...]) -> LayerInputs:
        ids = rows_at(x.ids, index)
        by_row: dict[str, Any] = {name: rows_at(getattr(x, name), index) for name in ("x", "weights", "dout")}
        return replace(x, **by_row, ids=ids, rows=int((ids >= 0).sum()))

    return placements((x.ids.size(0),), gather)


def rows_at(x: Tensor, index: list[int]) -> Tensor:
    """Return rows of x in its layout: padded rows stay padded, columns stay contiguous."""
    by_column = x.dim() > 1 and x.stride(0) < x.stride(-1)
    strides = (1, len(index)) if by_column else x.stride()
    out = torch.empty_strided((len(index), *x.shape[1:]), strides, dtype=x.dtype, device=x.device)
    at = torch.tensor(index, device=x.device)
    if x.element_size() == 1:  # fp8 cannot be indexed
        out.view(torch.uint8).copy_(x.view(torch.uint8)[at])
    else:
        out.copy_(x[at])
    return out
