"""A grouped GEMM's weight gradient: dB[g] = A[rows of g].T @ dC[rows of g], in B's layout.

Shapes are the layer's, as in grouped_gemm. The sum runs over each group's rows, so tiles in different groups differ in
cost. The output has a matrix for each group, those without rows included.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.operators.catalog import placements, shapes
from groupbench.operators.catalog.backends import aligned, described, helion, lazy, no_cluster, triton
from groupbench.operators.catalog.grouped_gemm import flops, group_bounds, make_backward_inputs, reroute
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Operator, Run


@dataclass(frozen=True)
class WgradInputs:
    """The gradient's operands. `rows` follows from `offs`, on the host."""

    a: Tensor  # [M, K]
    dc: Tensor  # [M, N]
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host
    nk: bool  # the weights and their gradient are stored as [G, N, K]


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> WgradInputs:
    """Draw the forward's A, and a standard normal output gradient."""
    y = make_backward_inputs(shape, dtype, device, seed)
    return WgradInputs(y.x.a, y.dc, y.x.offs, y.x.rows, y.nk)


def min_bytes(shape: GroupedShape, dtype: str) -> int:
    """Count A and dC once, and every group's gradient once; a shared B has one for each group too."""
    elements = shape.M * (shape.K + shape.N) + shape.G * shape.K * shape.N
    return elements * BYTES[dtype]


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: WgradInputs) -> Run:
    """One torch.matmul for each group that has rows, sizes known on the host, into one output."""
    left, right = _by_layout(x, x.a, x.dc)
    problems = [(g, left[start:end].t(), right[start:end]) for g, start, end in group_bounds(x.rows)]
    P, Q = left.shape[1], right.shape[1]

    def run() -> Tensor:
        out = left.new_empty(len(problems), P, Q)
        for g, l_rows, r_rows in problems:
            if r_rows.shape[0]:
                torch.matmul(l_rows, r_rows, out=out[g])
            else:
                out[g].zero_()
        return out.transpose(1, 2) if x.nk else out

    return run


def prepare_torch_grouped_mm(x: WgradInputs) -> Run:
    """torch.nn.functional.grouped_mm of two matrices: ragged along the sum, offsets on the device."""
    left, right = _by_layout(x, aligned(x.a), aligned(x.dc))
    if x.nk:
        return lambda: F.grouped_mm(left.t(), right, offs=x.offs).transpose(1, 2)
    return lambda: F.grouped_mm(left.t(), right, offs=x.offs)


def prepare_cuda_cluster(x: WgradInputs) -> Run:
    """CUDA C++ for Hopper: clusters of two SMs share loads by multicast; groups of warps take turns."""
    from groupbench.kernels.grouped_gemm.cluster_tiles import unsuitable
    from groupbench.kernels.grouped_gemm.cluster_wgrad import prepare_cluster_wgrad

    a, dc = aligned(x.a), aligned(x.dc)
    _, right = _by_layout(x, a, dc)
    if reason := unsuitable(right.size(1), len(x.rows), a=a, dc=dc):
        raise Unavailable(reason)
    return prepare_cluster_wgrad(a, dc, x.offs, x.nk)


def _by_layout(x: WgradInputs, a: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right), with left.T @ right as the stored gradient."""
    return (dc, a) if x.nk else (a, dc)


GROUPED_GEMM_WGRAD = Operator(
    name="grouped_gemm_wgrad",
    baseline="torch_loop",
    backends=(
        described(prepare_torch_loop),
        described(prepare_torch_grouped_mm),
        triton(
            "triton_flat",
            lazy("grouped_gemm.wgrad:prepare_wgrad", "a dc offs nk", {"a": aligned, "dc": aligned}),
            "persistent programs over the tiles of all groups, ragged TMA loads; heavy groups first if that is faster",
        ),
        described(prepare_cuda_cluster, unavailable=no_cluster),
        helion(
            "helion_jagged",
            lazy("grouped_gemm.helion_wgrad:prepare_helion_wgrad", "a dc offs nk"),
            "one program for each tile of each group, a loop over its rows; after Helion's jagged examples",
        ),
    ),
    suites=shapes.weight_gradient_suites(),
    parse_shape=shapes.parse_packed,
    make_inputs=make_inputs,
    reference=lazy("grouped_gemm.reference:grouped_gemm_wgrad_reference", "a dc offs"),
    flops=flops,
    min_bytes=min_bytes,
    returns="[G, K, N]",
    shapes_help=shapes.HELP,
    on_trace=shapes.on_trace,
    reroute=reroute,
    placements=placements.of_sums,
    nonfinite=True,
)
