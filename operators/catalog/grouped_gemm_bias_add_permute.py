"""Grouped GEMM, bias, elementwise operand and permuted output: permute((A @ B.T + D) * E) for groups of any sizes.

The problem from Composable Kernel's example 28_grouped_gemm_bias_e_permute; maths and layout are in
kernels/bias_add_permute/problem.py. E is multiplied (as in the example's README), added, or absent (as in the code).
The first suite has the example's eight groups, as drawn by `rand()` in glibc; the second draws others by the same
rules. Inputs are standard normal, each operand in a separate allocation. The output is one tensor per group.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.backends import described, drawing, lazy, triton
from groupbench.operators.catalog.inductor import compiled, no_gpu_to_compile_for
from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Backend, Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size, whole
from groupbench.operators.suites import Suites

if TYPE_CHECKING:
    from groupbench.kernels.bias_add_permute.problem import Group

OPS = ("mul", "add", "none")
EXAMPLES = {f"example_{op}": op for op in OPS}  # names of the suite's shapes
MAX_TEXT = 20_000  # characters, as in the record
_GROUP = re.compile(r"(\d{1,30})x(\d{1,30})x(\d{1,30}):(\d{1,30})x(\d{1,30}):(\d{1,30})", re.ASCII)
MAX_SIZE = 2**31 - 1  # rows, columns and K of a group: the kernels count them in 32 bits
HELP = (
    "G=2,groups=M0xM1xM2:N0xN1:K|M0xM1xM2:N0xN1:K,E=mul (or E=add, E=none; one group listed is used G times), "
    "G=8,groups=random(SEED),E=mul by the rules of Composable Kernel's example, or example_mul, example_add, "
    "example_none"
)


@dataclass(frozen=True)
class GroupSize:
    """One group's sizes: A [M0*M1*M2, K], B [N0*N1, K], output [M0, N0, M1, N1, M2]."""

    m: tuple[int, int, int]
    n: tuple[int, int]
    K: int

    def __post_init__(self) -> None:
        if min(*self.m, *self.n, self.K) < 0:
            raise ValueError(f"{self}: a size is negative")
        if max(self.M, self.N, self.K, *self.m, *self.n) > MAX_SIZE:
            raise ValueError(f"{self}: rows, columns and K must be at most {MAX_SIZE}")

    @property
    def M(self) -> int:
        return prod(self.m)

    @property
    def N(self) -> int:
        return prod(self.n)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.m))}:{'x'.join(map(str, self.n))}:{self.K}"


@dataclass(frozen=True)
class FusedShape:
    """The groups' sizes, and the operation on E: "mul", "add" or "none". Raises ValueError."""

    groups: tuple[GroupSize, ...]
    op: str = "mul"

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a shape needs at least one group")
        if self.op not in OPS:
            raise ValueError(f"E={self.op} is not one of {', '.join(OPS)}")
        if len(str(self)) > MAX_TEXT:
            raise ValueError(f"its text has more than {MAX_TEXT} characters")
        if 3 * sum(group.M * group.N * (group.K + 1) for group in self.groups) >= 2**63:
            raise ValueError("the number of operations does not fit in 64 bits")

    @property
    def dims(self) -> dict[str, int]:
        """The sizes by name: G groups, M rows in total, the largest N and K."""
        N, K = max(group.N for group in self.groups), max(group.K for group in self.groups)
        return {"G": len(self.groups), "M": sum(group.M for group in self.groups), "N": N, "K": K}

    def __str__(self) -> str:
        alike = len(set(self.groups)) == 1
        listed = self.groups[0] if alike else "|".join(map(str, self.groups))
        return f"G={len(self.groups)},groups={listed},E={self.op}"


# The draws of example 28 in glibc, where an unseeded rand() starts as if from srand(1).
@cache
def example_groups() -> tuple[GroupSize, ...]:
    return (
        GroupSize((12, 8, 256), (16, 128), 128),
        GroupSize((16, 12, 256), (4, 128), 128),
        GroupSize((8, 12, 256), (16, 128), 192),
        GroupSize((16, 16, 256), (12, 128), 64),
        GroupSize((12, 4, 256), (4, 128), 256),
        GroupSize((4, 16, 256), (8, 128), 192),
        GroupSize((12, 12, 256), (16, 128), 256),
        GroupSize((16, 8, 256), (12, 128), 192),
    )


@shape_parser(HELP)
def parse_shape(text: str) -> FusedShape:
    """Parse a shape as in HELP. Raises ValueError with the fault and the right form."""
    if text in EXAMPLES:
        return FusedShape(example_groups(), EXAMPLES[text])
    fields = fields_of(text, "G groups", "E")
    G, op, listed = size("G", fields["G"], MAX_TEXT), fields.get("E", "mul"), fields["groups"]
    if listed.startswith("random(") and listed.endswith(")"):
        return FusedShape(random_groups(G, whole("random", listed[len("random(") : -1])), op)
    groups = tuple(map(_parse_group, listed.split("|")))
    if len(groups) not in (1, G):
        raise ValueError(f"{len(groups)} groups are listed for G={G}")
    return FusedShape(groups * G if len(groups) == 1 else groups, op)


def _parse_group(text: str) -> GroupSize:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ValueError(f"group {text!r} is not of the form M0xM1xM2:N0xN1:K")
    M0, M1, M2, N0, N1, K = map(int, match.groups())
    return GroupSize((M0, M1, M2), (N0, N1), K)


def random_groups(G: int, seed: int) -> tuple[GroupSize, ...]:
    """Draw G groups by the example's rules: M0, M1, N0 of 4 to 16 by 4, M2 = 256, N1 = 128, K of 64 to 256 by 64."""
    draws = random.Random(seed)
    return example_rules(G, lambda: int(4 * draws.random()))


def example_rules(G: int, draw: Callable[[], int]) -> tuple[GroupSize, ...]:
    """Return G groups, drawn in the example's order. `draw` returns 0 to 3."""
    groups = []
    for _ in range(G):
        M0, M1, N0, K = (4 * (draw() + 1), 4 * (draw() + 1), 4 * (draw() + 1), 64 * (draw() + 1))
        groups.append(GroupSize((M0, M1, 256), (N0, 128), K))
    return tuple(groups)


@dataclass(frozen=True)
class FusedInputs:
    groups: tuple[Group, ...]  # with a [M, K], b [N, K], d [N], e [M, N] or None; m is M0, M1, M2 and n is N0, N1
    op: str  # the operation on e: none, add or mul


def make_inputs(shape: FusedShape, dtype: str, device: str, seed: int) -> FusedInputs:
    """Draw standard normal operands."""
    from groupbench.kernels.bias_add_permute.problem import Group

    values = drawing(dtype, device, seed)
    return FusedInputs(
        tuple(
            Group(
                a=values(size.M, size.K),
                b=values(size.N, size.K),
                d=values(size.N),
                e=None if shape.op == "none" else values(size.M, size.N),
                m=size.m,
                n=size.n,
            )
            for size in shape.groups
        ),
        shape.op,
    )


def reference(x: FusedInputs) -> dict[str, Tensor]:
    """Return {"F0": [M0 * N0, M1 * N1 * M2], ...}, with rows as `decode` returns them."""
    from groupbench.kernels.bias_add_permute.problem import bias_add_permute_reference

    return {f"F{g}": _rows(out) for g, out in enumerate(bias_add_permute_reference(x.groups, x.op))}


def decode(output: Any) -> tuple[Tensor, ...]:
    """Return outputs [M0, N0, M1, N1, M2] as matrices [M0 * N0, M1 * N1 * M2]. Raises TypeError for other outputs.

    Errors are judged by row, and a row with M2 elements can be a single element. The mean over so few rounding errors
    may be far from the expected one, so rows must be longer.
    """
    if not isinstance(output, (tuple, list)) or not all(isinstance(x, torch.Tensor) and x.dim() == 5 for x in output):
        raise TypeError(f"the backend returned {type(output).__name__}, not a tuple of tensors [M0, N0, M1, N1, M2]")
    if len({x.dtype for x in output}) > 1:
        raise TypeError(f"the backend returned outputs of {', '.join(sorted({str(x.dtype) for x in output}))}")
    return tuple(map(_rows, output))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(2).flatten(0, 1)


def flops(shape: FusedShape) -> int:
    """Count the operations in the product, the bias and the elementwise operation, if any."""
    after = 1 if shape.op == "none" else 2
    return sum(group.M * group.N * (2 * group.K + after) for group in shape.groups)


def min_bytes(shape: FusedShape, dtype: str) -> int:
    """Count A, B, D, E and the output once for each group with an output."""
    matrices = 1 if shape.op == "none" else 2
    elements = 0
    for group in shape.groups:
        if group.M and group.N:
            elements += (group.M + group.N) * group.K + group.N + matrices * group.M * group.N
    return elements * BYTES[dtype]


# --- backends ---------------------------------------------------------------------------------------------------------


def steps(group: Group, op: str) -> Tensor:
    """Compute one group as a torch user would, one operation per line: [M0, N0, M1, N1, M2]."""
    c = group.a @ group.b.t()
    c = c + group.d
    if group.e is not None:
        c = c * group.e if op == "mul" else c + group.e
    return c.view(*group.m, *group.n).permute(0, 3, 1, 4, 2).contiguous()


def prepare_torch_unfused(x: FusedInputs) -> Run:
    """torch's own operations per group: a product, an addition, E, and a copy of the permuted view."""
    return lambda: tuple(steps(group, x.op) for group in x.groups)


def prepare_torch_linear(x: FusedInputs) -> Run:
    """torch.nn.functional.linear per group, then E written to the permuted view: the fewest passes.

    Add the bias in the product, and write the last operation's result through the permuted view.
    """
    last: dict[str, Callable[..., Tensor]] = {"mul": torch.mul, "add": torch.add}

    def of(group: Group) -> Tensor:
        out = group.a.new_empty(group.permuted)
        view = out.permute(0, 2, 4, 1, 3)  # as [M0, M1, M2, N0, N1]
        c = F.linear(group.a, group.b, group.d).view(view.shape)
        if group.e is None:
            view.copy_(c)
        else:
            last[x.op](c, group.e.view(view.shape), out=view)
        return out

    return lambda: tuple(map(of, x.groups))


def prepare_torch_compile(x: FusedInputs, max_autotune: bool = False) -> Run:
    """torch.compile of torch_unfused, all groups in one function: cuBLAS products, the rest generated.

    Compile one function for all groups and these sizes.
    """
    return compiled(lambda groups: tuple(steps(group, x.op) for group in groups), x.groups, max_autotune=max_autotune)


def _listed(*texts: str) -> tuple[GroupSize, ...]:
    return tuple(map(_parse_group, texts))


# Edge cases: no size is a multiple of a tile; groups without rows, without columns; one row; K = 0.
@cache
def corners() -> dict[str, tuple[GroupSize, ...]]:
    return {
        "odd": _listed("3x5x7:3x11:33", "1x2x37:5x3:45"),
        "empty_groups": _listed("2x2x16:2x32:64", "0x4x256:4x128:64", "2x3x8:0x128:64", "1x1x64:1x16:32"),
        "one_row": _listed("1x1x1:2x24:40", "4x2x8:1x1:16"),
        "no_rows_at_all": _listed("0x4x256:8x128:64"),
        "no_sum": _listed("1x2x16:2x8:0", "1x2x16:2x8:16"),
        "one_group": _listed("2x2x32:2x32:64"),
    }


def _attention() -> tuple[FusedShape, ...]:
    """Return the projections of attention in one launch: x @ W + bias, written by head.

    Q and V become [B, heads, S, D], and K becomes [B, heads, D, S], as the product with Q reads it. The models are
    Llama 3 8B and 70B, Qwen3-30B and gpt-oss, with fewer heads of K and V than of Q.
    """
    models = ((2, 2048, 4096, 32, 8, 128), (1, 4096, 8192, 64, 8, 128), (2, 4096, 2048, 32, 4, 128))
    return tuple(
        FusedShape(
            (
                GroupSize((B, S, 1), (heads, D), hidden),
                GroupSize((B, 1, S), (shared, D), hidden),
                GroupSize((B, S, 1), (shared, D), hidden),
            ),
            "none",
        )
        for B, S, hidden, heads, shared, D in (*models, (1, 4096, 2880, 64, 8, 64))
    )


def _depthwise() -> tuple[FusedShape, ...]:
    """Return depthwise-separable convolutions of 3 x 3 (MobileNetV2's), a group for each block of 32 channels.

    The rows are patches of B images [B * pixels, 9 * 32]. E is the gate of the activation, and the output is [B,
    channels, pixels], not the product's [B * pixels, channels].
    """
    layers = ((96, 56), (192, 28), (384, 14), (576, 14), (960, 7))
    return tuple(
        FusedShape((GroupSize((32, 1, side * side), (32, 1), 9 * 32),) * (channels // 32), "mul")
        for channels, side in layers
    )


GROUPED_GEMM_BIAS_ADD_PERMUTE = Operator(
    name="grouped_gemm_bias_add_permute",
    baseline="torch_unfused",
    backends=(
        described(prepare_torch_unfused),
        described(prepare_torch_linear),
        described(prepare_torch_compile, unavailable=no_gpu_to_compile_for),
        Backend(
            "torch_compile_max",
            lambda x: prepare_torch_compile(x, max_autotune=True),
            "the same with max_autotune: Triton products with the rest as epilogue if those are faster",
            unavailable=no_gpu_to_compile_for,
        ),
        triton(
            "triton_fused",
            lazy("bias_add_permute.fused:prepare_fused", "groups op"),
            "one launch sweeps over the tiles of all groups; table of pointers, TMA, product transposed for the store",
        ),
    ),
    suites=Suites(
        {
            "example": lambda: tuple(FusedShape(example_groups(), op) for op in OPS),
            "random": lambda: tuple(
                FusedShape(random_groups(G, seed=G), op) for G in (1, 16, 64) for op in ("mul", "none")
            ),
            "attention": _attention,
            "depthwise": _depthwise,
            "corners": lambda: tuple(FusedShape(groups, "mul") for groups in corners().values()),
            "smoke": lambda: tuple(map(FusedShape, corners().values(), cycle(OPS))),
        }
    ),
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="a tuple with [M0, N0, M1, N1, M2] of each group",
    decode=decode,
    shapes_help=HELP,
)
