"""Grouped GEMM: C[rows of g] = A[rows of g] @ B[g], the product in every mixture-of-experts layer.

Inputs are those of a layer: A with all experts' rows packed, one B for each expert, and each expert's end offset, on
the device. Backends import their kernels when they are prepared, so listing them does not need torch.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from groupbench.operators.catalog import placements, shapes
from groupbench.operators.catalog.backends import aligned, described, drawing, ends, helion, lazy, no_cluster, triton
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.dtypes import BYTES, dtype_name, torch_dtype
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Backward, Example, Operator, Run, Target


@dataclass(frozen=True)
class GroupedInputs:
    """The operands of a grouped GEMM. `rows` follows from `offs`, on the host; a shared B has stride 0 over groups.

    If the routing is interleaved, `rows` and `offs` are those of blocks of rows, and `experts` names each block's B.
    """

    a: Tensor  # [M, K]
    b: Tensor  # [G, K, N], any strides
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host
    experts: tuple[int, ...] = ()  # of each block of rows, if they are interleaved


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> GroupedInputs:
    """Draw a shape's inputs: standard normal values, distinct weights for each expert.

    With `shape.shared` they match TritonBench: one B for all groups and uniform values in [0, 1). Positive values draw
    less power, so the GPU runs at other clocks.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = torch.rand if shape.shared else torch.randn

    def values(*size: int) -> Tensor:
        return draw(*size, generator=generator, device=device, dtype=torch_dtype(dtype))

    a = values(shape.M, shape.K)
    if shape.shared:
        b = values(shape.K, shape.N).expand(shape.G, -1, -1)
    elif shape.nk:
        b = values(shape.G, shape.N, shape.K).transpose(1, 2)
    else:
        b = values(shape.G, shape.K, shape.N)
    if shape.block:
        blocks = shape.M // shape.block
        rows, experts = (shape.block,) * blocks, tuple(block % shape.G for block in range(blocks))
        return GroupedInputs(a, b, ends(rows, device), rows, experts)
    return GroupedInputs(a, b, ends(shape.rows, device), shape.rows)


def from_tritonbench(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor], w: Tensor | None = None, split: Tensor | None = None
) -> Example:
    """Convert TritonBench's matrix lists to an example: A is packed, a repeated B is kept once."""
    rows = tuple(a.shape[0] for a in group_a)
    shared = all(b is group_b[0] for b in group_b)
    b = group_b[0].expand(len(rows), -1, -1) if shared else torch.stack(list(group_b))
    shape = shapes.listed(rows, b.shape[2], b.shape[1], shared=shared)
    inputs = GroupedInputs(torch.cat(list(group_a)), b, ends(rows, str(group_a[0].device)), rows)
    return Example(shape, dtype_name(b.dtype) or str(b.dtype), inputs)


def groups_of(x: GroupedInputs) -> list[tuple[int, int, int]]:
    """Return (expert, first row, last row + 1) of each group, or of each block if the rows are interleaved."""
    bounds = group_bounds(x.rows)
    return [(e, start, end) for e, (_, start, end) in zip(x.experts or range(len(x.rows)), bounds, strict=True)]


def group_bounds(rows: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return (g, first row, last row + 1) for each group."""
    return [(g, end - row, end) for g, (row, end) in enumerate(zip(rows, accumulate(rows), strict=True))]


def reroute(shape: GroupedShape, x: GroupedInputs, seed: int) -> bool:
    """Write another routing's offsets for as many rows. Return whether they differ from the shape's.

    Groups that share one B are not rerouted, since the result would not change; nor are interleaved rows.
    """
    if shape.shared or shape.block:
        return False
    rows = other_rows(shape.rows, seed)
    x.offs.copy_(ends(rows, "cpu"))
    return rows != shape.rows


def other_rows(rows: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return other group sizes with the same sum.

    An even seed gives an extreme routing: groups of 0 to 7 rows, and all others in one group. An odd one moves a row or
    two of each of a few groups to the next.
    """
    draw, sizes = random.Random(seed), list(rows)
    if seed % 2 == 0:
        owner, total = draw.randrange(len(sizes)), sum(sizes)
        small = [0 if g == owner else draw.randrange(8) for g in range(len(sizes))]
        left = list(accumulate((-size for size in small), initial=total))  # rows that are left before each group
        sizes = [min(size, max(rest, 0)) for size, rest in zip(small, left[:-1], strict=True)]
        sizes[owner] += total - sum(sizes)
    else:
        for g in draw.sample(range(len(sizes) - 1), min(3, len(sizes) - 1)):
            part = min(sizes[g], draw.randrange(1, 3))
            sizes[g], sizes[g + 1] = sizes[g] - part, sizes[g + 1] + part
    return tuple(sizes)


def reference(x: GroupedInputs) -> Tensor:
    from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference, reference_list

    if x.experts:
        return torch.cat(
            reference_list(*zip(*((x.a[start:end], x.b[e]) for e, start, end in groups_of(x)), strict=True))
        )
    return grouped_gemm_reference(x.a, x.b, x.offs)


def flops(shape: GroupedShape) -> int:
    return 2 * shape.M * shape.N * shape.K


def min_bytes(shape: GroupedShape, dtype: str) -> int:
    """Count A once, B once for each expert with rows (once in total if shared), C once."""
    return (shape.M * shape.K + _weights_read(shape) + shape.M * shape.N) * BYTES[dtype]


def _weights_read(shape: GroupedShape) -> int:
    """Return the element count in the B matrices of groups with rows."""
    active = 1 if shape.shared else sum(row > 0 for row in shape.rows)
    return active * shape.K * shape.N


# --- mode bwd ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardInputs:
    """The tensors saved by the forward pass, and the output's gradient."""

    x: GroupedInputs
    dc: Tensor  # [M, N]
    nk: bool  # the weights and their gradient are stored as [G, N, K]


def make_backward_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> BackwardInputs:
    """Draw the inputs of the forward pass, and a standard normal gradient. Raises Unavailable for interleaved rows."""
    if shape.block:
        raise Unavailable(NOT_PACKED)
    dc = drawing(dtype, device, seed + 1)(shape.M, shape.N)
    return BackwardInputs(make_inputs(shape, dtype, device, seed), dc, shape.nk)


def reference_backward(x: BackwardInputs) -> dict[str, Tensor]:
    """Return {"dA": [M, K], "dB": [G, K, N]} in fp32 or better; a shared B has a gradient for each group."""
    from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference, grouped_gemm_wgrad_reference

    return {
        "dA": grouped_gemm_reference(x.dc, x.x.b.transpose(1, 2), x.x.offs),
        "dB": grouped_gemm_wgrad_reference(x.x.a, x.dc, x.x.offs),
    }


def min_bytes_backward(shape: GroupedShape, dtype: str) -> int:
    """Count A, dC and B's used matrices once; dA and every group's dB once."""
    M, N, K = shape.M, shape.N, shape.K
    return (2 * M * K + M * N + _weights_read(shape) + shape.G * K * N) * BYTES[dtype]


def prepare_torch_loop_bwd(x: BackwardInputs) -> Run:
    """Call torch.matmul twice for each group with rows; other groups' gradients are zero."""
    problems = [(g, slice(start, end)) for g, start, end in group_bounds(x.x.rows)]
    (M, K), (G, _, N) = x.x.a.shape, x.x.b.shape

    def run() -> tuple[Tensor, Tensor]:
        da = x.dc.new_empty(M, K)
        db = x.dc.new_empty(G, N, K).transpose(1, 2) if x.nk else x.dc.new_empty(G, K, N)
        for g, rows in problems:
            if rows.start == rows.stop:
                db[g].zero_()
                continue
            torch.matmul(x.dc[rows], x.x.b[g].t(), out=da[rows])
            if x.nk:
                torch.matmul(x.dc[rows].t(), x.x.a[rows], out=db[g].t())
            else:
                torch.matmul(x.x.a[rows].t(), x.dc[rows], out=db[g])
        return da, db

    return run


def prepare_torch_grouped_mm_bwd(x: BackwardInputs) -> Run:
    """Prepare torch's own derivative of F.grouped_mm. The forward pass runs here."""
    a, b = (aligned(operand).detach().requires_grad_() for operand in (x.x.a, x.x.b))
    out = F.grouped_mm(a, b, offs=x.x.offs)
    dc = aligned(x.dc)
    return lambda: torch.autograd.grad(out, (a, b), dc, retain_graph=True)


def prepare_triton_flat_bwd(x: BackwardInputs) -> Run:
    from groupbench.kernels.grouped_gemm.flat import prepare_flat
    from groupbench.kernels.grouped_gemm.wgrad import prepare_wgrad

    a, dc = aligned(x.x.a), aligned(x.dc)
    dgrad = prepare_flat(dc, x.x.b.transpose(1, 2), x.x.offs)
    wgrad = prepare_wgrad(a, dc, x.x.offs, x.nk)
    return lambda: (dgrad(), wgrad())


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: GroupedInputs) -> Run:
    """One torch.matmul for each group that has rows, sizes known on the host, into one output."""
    problems = [(x.a[start:end], x.b[e], start, end) for e, start, end in groups_of(x) if start < end]
    M, N = x.a.shape[0], x.b.shape[2]

    def run() -> Tensor:
        out = x.a.new_empty(M, N)
        for a, b, start, end in problems:
            torch.matmul(a, b, out=out[start:end])
        return out

    return run


def prepare_torch_grouped_mm(x: GroupedInputs) -> Run:
    """torch.nn.functional.grouped_mm: CUTLASS pointer-array kernels on Hopper, offsets on the device."""
    a, b = aligned(x.a), aligned(x.b)
    return lambda: F.grouped_mm(a, b, offs=x.offs)


def prepare_aten_grouped_mm(x: GroupedInputs) -> Run:
    """torch_grouped_mm with the packing of a list of tensors timed; TritonBench's baseline of grouped_gemm."""
    groups, weights, last = torch.split(x.a, list(x.rows)), x.b.unbind(), list(itertools.accumulate(x.rows))

    def run() -> Tensor:
        a, b = _padded(torch.cat(groups)), _padded(torch.stack(weights))
        return F.grouped_mm(a, b, offs=torch.tensor(last, device=a.device, dtype=torch.int32))

    return run


def _padded(x: Tensor) -> Tensor:
    """Return a contiguous tensor, or a copy with rows in multiples of 16 bytes."""
    step, width = 16 // x.element_size(), x.shape[-1]
    if width % step == 0:
        return x
    return x.new_empty(*x.shape[:-1], math.ceil(width / step) * step)[..., :width].copy_(x)


def prepare_triton_pointer(x: GroupedInputs) -> Run:
    """Device tables of pointers and sizes, static schedule; after Triton's tutorial 08-grouped-gemm."""
    from groupbench.kernels.grouped_gemm.pointer import prepare_pointer_packed

    return prepare_pointer_packed(torch.split(x.a, list(x.rows)), [x.b[e] for e, _, _ in groups_of(x)])


def prepare_triton_contiguous(x: GroupedInputs) -> Run:
    """One expert per block of rows, super-grouped persistent order; after gpu-mode/triton-tutorials lesson 5."""
    from groupbench.kernels.grouped_gemm.contiguous import prepare_blocks, prepare_contiguous

    w = x.b.transpose(1, 2)
    return prepare_blocks(x.a, w, x.experts, x.rows[0]) if x.experts else prepare_contiguous(x.a, w, x.offs)


NOT_PACKED = "it needs each expert's rows together, and these are interleaved"
INTERLEAVED = ("torch_loop", "triton_pointer", "triton_contiguous")  # backends that take interleaved rows


def _packed_only(backend: Backend) -> Backend:
    """Return the backend, which refuses interleaved rows unless it takes them."""

    def prepare(x: GroupedInputs) -> Run:
        if x.experts:
            raise Unavailable(NOT_PACKED)
        return backend.prepare(x)

    return backend if backend.name in INTERLEAVED else replace(backend, prepare=prepare)


def prepare_cuda_cluster(x: GroupedInputs) -> Run:
    """CUDA C++ for Hopper: clusters of two SMs share loads of B by multicast; after CUTLASS."""
    from groupbench.kernels.grouped_gemm.cluster import prepare_cluster
    from groupbench.kernels.grouped_gemm.cluster_tiles import unsuitable
    from groupbench.kernels.grouped_gemm.support import stored_weights

    a = aligned(x.a)
    G, _, N = x.b.shape
    if reason := unsuitable(N, G, a=a, b=stored_weights(x.b)[0]):
        raise Unavailable(reason)
    return prepare_cluster(a, x.b, x.offs)


def prepare_groupbench(x: GroupedInputs) -> Run:
    """groupbench.kernels.ops.grouped_mm: what a model calls, with the kernel that it chooses for the problem."""
    from groupbench.kernels import ops

    a, b = aligned(x.a), x.b
    return lambda: ops.grouped_mm(a, b, x.offs)


def prepare_groupbench_bwd(x: BackwardInputs) -> Run:
    """Prepare the derivative of `ops.grouped_mm`. The forward pass runs here."""
    from groupbench.kernels import ops

    a, b = (operand.detach().requires_grad_() for operand in (aligned(x.x.a), x.x.b))
    out, dc = ops.grouped_mm(a, b, x.x.offs), aligned(x.dc)
    return lambda: torch.autograd.grad(out, (a, b), dc, retain_graph=True)


def prepare_torch_compile(x: GroupedInputs) -> Run:
    """torch.compile of grouped_mm with Inductor's Triton template alone, tuned by Inductor for the problem."""
    from groupbench.operators.catalog.inductor import prepare_grouped_mm

    return prepare_grouped_mm(aligned(x.a), aligned(x.b), x.offs)


def no_inductor_template(target: Target) -> str | None:
    if target.device != "cuda" or (target.capability or (9, 0)) < (9, 0):
        return "Inductor's Triton template of grouped_mm needs an NVIDIA GPU, Hopper or newer"
    return None


BACKENDS = (
    described(prepare_torch_loop, prepare_bwd=prepare_torch_loop_bwd),
    described(prepare_torch_grouped_mm, prepare_bwd=prepare_torch_grouped_mm_bwd),
    described(prepare_aten_grouped_mm, only_as_baseline=True),
    described(prepare_groupbench, triton, prepare_bwd=prepare_groupbench_bwd),
    described(prepare_torch_compile, unavailable=no_inductor_template),
    described(prepare_triton_pointer, triton),
    triton(
        "triton_flat",
        lazy("grouped_gemm.flat:prepare_flat", "a b offs", {"a": aligned}),
        "one flat loop over all tiles, TMA loads, ragged TMA store; after triton_kernels' persistent matmul",
        prepare_bwd=prepare_triton_flat_bwd,
    ),
    described(prepare_cuda_cluster, unavailable=no_cluster),
    described(prepare_triton_contiguous, triton),
    helion(
        "helion_jagged",
        lazy("grouped_gemm.helion_jagged:prepare_helion_jagged", "a b offs"),
        "one program for each group; after Helion's examples/grouped_gemm.py",
    ),
    helion(
        "helion_persistent",
        lazy("grouped_gemm.helion_persistent:prepare_helion_persistent", "a b offs"),
        "persistent workers over the tiles of all groups; after Helion's examples/grouped_gemm.py",
    ),
    helion(
        "helion_worklist",
        lazy("grouped_gemm.helion_worklist:prepare_helion_worklist", "a b offs", {"a": aligned}),
        "a list of tiles made on the device, then TMA loads without masks; after Helion's pretuned DeepGEMM kernel",
    ),
)

GROUPED_GEMM = Operator(
    name="grouped_gemm",
    baseline="torch_loop",
    backends=tuple(map(_packed_only, BACKENDS)),
    suites=shapes.SUITES.each(lambda suite: tuple(suite.values())),
    suite_baselines={"tritonbench": "aten_grouped_mm"},
    parse_shape=shapes.parse,
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[M, N]",
    shapes_help=shapes.HELP,
    from_tritonbench=from_tritonbench,
    on_trace=shapes.on_trace,
    reroute=reroute,
    placements=placements.of_groups,
    nonfinite=True,
    backward=Backward(
        make_inputs=make_backward_inputs,
        reference=reference_backward,
        flops=lambda shape: 2 * flops(shape),
        min_bytes=min_bytes_backward,
        returns="(dA [M, K], dB [G, K, N])",
        moves=("dc",),  # the rest was saved by the forward pass
        placements=placements.of_saved,
        suites=shapes.weight_gradient_suites(),
    ),
)
