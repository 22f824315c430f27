"""Find whether a row's result depends on the rest of the batch: the metric `batch_invariant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Placement, Run


def batch_invariant(prepare: Callable[[Any], Run], placements: Iterable[Placement]) -> bool | None:
    """Return whether a planted row's result has the same bits in every batch.

    Outputs with a row for each row of the inputs are compared; others, such as gradients of weights, sum over rows.

    Args:
        prepare: a backend's; it is called again for each batch.
        placements: batches with the same planted row.

    Returns:
        None with fewer than two batches that the backend can compute, or without such an output.
    """
    seen: list[tuple[bytes | None, ...]] = []
    for placement in placements:
        try:
            output = prepare(placement.inputs)()
        except Unavailable:
            continue
        parts = output if isinstance(output, (tuple, list)) else (output,)
        seen.append(tuple(_bits(part, placement) for part in parts))
    by_output = [bits for bits in zip(*seen, strict=True) if None not in bits]
    if len(seen) < 2 or not by_output:
        return None
    return all(len(set(bits)) == 1 for bits in by_output)


def _bits(output: Any, placement: Placement) -> bytes | None:
    """Return the bits of the planted row, or None for an output with other rows."""
    import torch

    if output.dim() < 2 or output.size(0) != placement.rows:
        return None
    bits: bytes = output[placement.row].detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return bits
