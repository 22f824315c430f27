"""Permute tokens into expert order, the first step in a mixture-of-experts layer.

    x [T, H], ids [T, k]  ->  rows [T*k, H], offs [G], position [T, k]

`position[t, j]` is the row for token t's choice j, or -1 if the id is not in 0..G-1. Rows are sorted by expert, and
within an expert by token and choice, so there is exactly one right result. Rows from offs[-1] on belong to no choice;
they are not compared, and a backend may leave them out. A layer needs all three outputs to compute with the rows and to
return them to their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupbench.operators.catalog import moe
from groupbench.operators.catalog.backends import described, drawing, lazy
from groupbench.operators.catalog.moe import MoeShape
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Backend, Operator, Run


@dataclass(frozen=True)
class PermuteInputs:
    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int64, -1 for an expert elsewhere
    G: int  # number of local experts
    rows: int  # number of choices with a local expert, on the host


def make_inputs(shape: MoeShape, dtype: str, device: str, seed: int) -> PermuteInputs:
    """Draw standard normal rows and every token's experts."""
    x = drawing(dtype, device, seed)(shape.T, shape.H)
    return PermuteInputs(x, moe.ids_of(shape, device), shape.G, shape.M)


def reference(x: PermuteInputs) -> dict[str, Tensor]:
    from groupbench.kernels.moe.permute import permute_reference

    rows, routing = permute_reference(x.x.float(), x.ids, x.G)
    return {"rows": rows, "offs": as_bits(routing.offs), "position": as_bits(routing.position)}


def decode(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, offs as bits, position as bits); rows without a choice are zero.

    Raises TypeError if the output is not these three tensors, or the indices are not int32.
    """
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(x, torch.Tensor) for x in output):
        raise TypeError(f"the backend returned {type(output).__name__}, not three tensors (rows, offs, position)")
    rows, offs, position = output
    if (offs.dtype, position.dtype) != (torch.int32, torch.int32):
        raise TypeError(f"the backend returned offs in {offs.dtype} and position in {position.dtype}, not int32")
    real = min(max(int(offs[-1]), 0), rows.shape[0])
    held = rows.new_zeros(position.numel(), rows.shape[1])
    held[:real] = rows[:real]
    return held, as_bits(offs), as_bits(position)


def as_bits(numbers: Tensor) -> Tensor:
    """Return each number's 32 bits, [n, 32] fp32 with 0 and 1: a tolerance must not accept a wrong index."""
    shifts = torch.arange(32, device=numbers.device)
    return ((numbers.flatten()[:, None].long() >> shifts) & 1).float()


def min_bytes(shape: MoeShape, dtype: str) -> int:
    """Count each token's row and ids read once, and each row, position and offset written once."""
    return (shape.T + shape.M) * shape.H * BYTES[dtype] + shape.choices * (8 + 4) + 4 * shape.G


def prepare_torch(x: PermuteInputs) -> Run:
    """Stable sort of the ids, searchsorted, index_select and scatter; number of rows known on the host.

    Prepare a stable sort, a search in the sorted ids and index_select, without host sync.
    """
    k, drops = x.ids.size(1), x.rows < x.ids.numel()
    experts = torch.arange(x.G, device=x.ids.device)
    row = torch.arange(x.rows, dtype=torch.int32, device=x.ids.device)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        flat = x.ids.flatten()
        if drops:
            flat = flat.masked_fill(flat < 0, x.G)
        by_expert, order = flat.sort(stable=True)
        offs = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        if drops:
            order = order[: x.rows]
            position = torch.full(x.ids.shape, -1, dtype=torch.int32, device=x.ids.device)
        else:
            position = torch.empty(x.ids.shape, dtype=torch.int32, device=x.ids.device)
        position.view(-1).scatter_(0, order, row)
        return x.x.index_select(0, order // k), offs, position

    return run


MOE_PERMUTE = Operator(
    name="moe_permute",
    baseline="torch",
    backends=(
        described(prepare_torch),
        Backend(
            "triton",
            lazy("moe.permute:prepare_permute", "x ids G"),
            "counting sort in one launch or three that overlap, then each token's row is read once and stored k times",
            kind="triton",
        ),
        Backend(
            "helion",
            lazy("moe.helion_permute:prepare_helion_permute", "x ids G"),
            "counting sort in Triton, then the copy in Helion",
            kind="helion",
        ),
    ),
    make_inputs=make_inputs,
    reference=reference,
    flops=lambda shape: 0,
    min_bytes=min_bytes,
    returns=(
        "(rows [T*k, H], sorted by expert; offs [G] int32, where each expert's rows end; "
        "position [T, k] int32, the row of each choice, or -1)"
    ),
    decode=decode,
    reroute=moe.reroute,
    **moe.shape_fields(layer=False),
)
