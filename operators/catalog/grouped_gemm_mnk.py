"""Grouped GEMM over lists: C_g = A_g @ B_g, where every group has its own M, N and K.

The problem of Triton's tutorial 08-grouped-gemm. Matrices may be anywhere in memory, so a kernel finds them through a
table of pointers, sizes and leading dimensions on the device. Gradients are products of lists too: dA_g = dC_g @ B_g.T
and dB_g = A_g.T @ dC_g. The text of a shape lists M x K x N of each group:

    groups=192x128x320|256x192x448     the tutorial's example
    groups=64x64x64*16,W=nk            16 equal groups, B_g stored as [N, K]; A=km: A_g stored as [K, M]
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.backends import aligned, drawing, helion, lazy, no_cluster, triton
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES, dtype_name
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Backward, Example, Operator, Run
from groupbench.operators.sizes import shape_parser
from groupbench.operators.suites import Suites

if TYPE_CHECKING:
    from collections.abc import Sequence

Outputs = Callable[[], "tuple[Tensor, ...]"]
MAX_GROUPS, MAX_SIZE, MAX_TEXT = 1_000_000, 2**31 - 1, 20_000
_GROUP = re.compile(r"(\d{1,10})x(\d{1,10})x(\d{1,10})(?:\*(\d{1,7}))?", re.ASCII)
HELP = (
    "groups=M0xK0xN0|M1xK1xN1|..., a group MxKxN*COUNT stands for COUNT of them; ,A=km for A stored as [K, M], ,W=nk "
    "for B stored as [N, K]"
)


@dataclass(frozen=True)
class MnkShape:
    """The (M, K, N) of each group.

    km, nk  each A is stored as [K, M], each B as [N, K]
    """

    groups: tuple[tuple[int, int, int], ...]
    km: bool = False
    nk: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} groups: there must be 1 to {MAX_GROUPS}")
        if max(map(max, self.groups)) > MAX_SIZE:
            raise ValueError(f"M, K and N must be at most {MAX_SIZE}")
        if len(str(self)) > MAX_TEXT:
            raise ValueError(f"its text has more than {MAX_TEXT} characters")
        if sum(2 * M * (K + 1) * N for M, K, N in self.groups) >= 2**63:
            raise ValueError("the number of operations does not fit in 64 bits")

    @property
    def dims(self) -> dict[str, int]:
        """The sizes by name: G groups, M rows in total, the largest N and K."""
        rows, depths, columns = zip(*self.groups, strict=True)
        return {"G": len(rows), "M": sum(rows), "N": max(columns), "K": max(depths)}

    def __str__(self) -> str:
        runs = [("x".join(map(str, group)), len([*alike])) for group, alike in groupby(self.groups)]
        listed = "|".join(text + (f"*{count}" if count > 1 else "") for text, count in runs)
        return f"groups={listed}" + (",A=km" if self.km else "") + (",W=nk" if self.nk else "")


@shape_parser(HELP)
def parse_shape(text: str) -> MnkShape:
    """Parse a shape of the form in HELP. Raises ValueError that names the fault and the form."""
    first, *options = text.split(",")
    if not first.startswith("groups=") or len({*options}) != len(options) or {*options} - {"A=km", "W=nk"}:
        raise ValueError("a part is unknown, missing or given twice")
    groups: list[tuple[int, int, int]] = []
    for part in first.removeprefix("groups=").split("|"):
        match = _GROUP.fullmatch(part)
        if match is None:
            raise ValueError(f"group {part!r} is not of the form MxKxN")
        M, K, N, count = (int(value or 1) for value in match.groups())
        if not 1 <= count <= MAX_GROUPS - len(groups):
            raise ValueError(f"there must be 1 to {MAX_GROUPS} groups")
        groups += [(M, K, N)] * count
    return MnkShape(tuple(groups), km="A=km" in options, nk="W=nk" in options)


@dataclass(frozen=True)
class MnkInputs:
    a: tuple[Tensor, ...]  # G of [M_g, K_g], any strides
    b: tuple[Tensor, ...]  # G of [K_g, N_g], any strides


@dataclass(frozen=True)
class MnkStep:
    """The operands of the forward pass, and the outputs' gradients."""

    x: MnkInputs
    dc: tuple[Tensor, ...]  # G of [M_g, N_g]


def make_inputs(shape: MnkShape, dtype: str, device: str, seed: int) -> MnkInputs:
    """Draw standard normal operands, each in its own allocation."""
    normal = drawing(dtype, device, seed)
    a = tuple(normal(K, M).t() if shape.km else normal(M, K) for M, K, _ in shape.groups)
    return MnkInputs(a, tuple(normal(N, K).t() if shape.nk else normal(K, N) for _, K, N in shape.groups))


def make_step(shape: MnkShape, dtype: str, device: str, seed: int) -> MnkStep:
    """Draw the inputs of the forward pass, and standard normal gradients."""
    normal = drawing(dtype, device, seed + 1)
    return MnkStep(make_inputs(shape, dtype, device, seed), tuple(normal(M, N) for M, _, N in shape.groups))


def from_tritonbench(group_a: Sequence[Tensor], group_b: Sequence[Tensor], *more: Tensor) -> Example:
    """Convert the lists of TritonBench's grouped_gemm to an example, without a copy."""
    sizes = tuple((*a.shape, b.size(1)) for a, b in zip(group_a, group_b, strict=True))
    dtype = group_a[0].dtype
    return Example(MnkShape(sizes), dtype_name(dtype) or str(dtype), MnkInputs(tuple(group_a), tuple(group_b)))


def reference(x: MnkInputs) -> dict[str, Tensor]:
    return _named("C", x)


def reference_backward(y: MnkStep) -> dict[str, Tensor]:
    """Return {"dA0": [M_0, K_0], ..., "dB0": [K_0, N_0], ...} in a wider dtype."""
    return _named("dA", _dgrad(y)) | _named("dB", _wgrad(y))


def _named(name: str, x: MnkInputs) -> dict[str, Tensor]:
    from groupbench.kernels.grouped_gemm.reference import reference_list

    return {f"{name}{g}": out for g, out in enumerate(reference_list(x.a, x.b))}


def _dgrad(y: MnkStep) -> MnkInputs:
    return MnkInputs(y.dc, tuple(b.t() for b in y.x.b))


def _wgrad(y: MnkStep) -> MnkInputs:
    return MnkInputs(tuple(a.t() for a in y.x.a), y.dc)


def flops(shape: MnkShape) -> int:
    return sum(2 * M * K * N for M, K, N in shape.groups)


def min_bytes(shape: MnkShape, dtype: str, matrices: tuple[int, int, int] = (1, 1, 1)) -> int:
    """Count the A, B and C of each group that has an output, as often as `matrices` says."""
    a, b, c = matrices
    sizes = (a * M * K + b * K * N + c * M * N for M, K, N in shape.groups if M and N)
    return sum(sizes) * BYTES[dtype]


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch_loop(x: MnkInputs) -> Outputs:
    pairs = list(zip(x.a, x.b, strict=True))
    return lambda: tuple(a @ b for a, b in pairs)


def prepare_torch_bmm(x: MnkInputs) -> Outputs:
    """Stack groups of equal sizes in each call, and multiply them by one torch.bmm."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for g, (a, b) in enumerate(zip(x.a, x.b, strict=True)):
        alike.setdefault((*a.shape, b.size(1)), []).append(g)
    if len(alike) == len(x.a) > 1:
        raise Unavailable("no two groups have equal sizes: torch_loop measures the same")

    def run() -> tuple[Tensor, ...]:
        outputs: dict[int, Tensor] = {}
        for groups in alike.values():
            product = torch.bmm(torch.stack([x.a[g] for g in groups]), torch.stack([x.b[g] for g in groups]))
            outputs.update(zip(groups, product.unbind(), strict=True))
        return tuple(outputs[g] for g in range(len(outputs)))

    return run


def prepare_torch_foreach(x: MnkInputs) -> Outputs:
    multiply = getattr(torch, "_foreach_mm", None)
    if multiply is None:
        raise Unavailable(f"torch {torch.__version__} has no _foreach_mm")
    return lambda: tuple(multiply(x.a, x.b))


def _aligned(matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(aligned, matrices))


_ALIGNED = {"a": _aligned, "b": _aligned}


def _in_all_modes(make: Callable[..., Backend], name: str, prepare: Callable[[Any], Run], source: str) -> Backend:
    """Return a backend whose gradients are computed by its product of lists too."""

    def prepare_bwd(y: MnkStep) -> Run:
        dgrad, wgrad = prepare(_dgrad(y)), prepare(_wgrad(y))
        return lambda: (*dgrad(), *wgrad())

    def prepare_fwd_bwd(y: MnkStep) -> Run:
        forward, backward = prepare(y.x), prepare_bwd(y)
        return lambda: (*forward(), *backward())

    return make(name, prepare, source, prepare_bwd=prepare_bwd, prepare_fwd_bwd=prepare_fwd_bwd)


# --- suites -----------------------------------------------------------------------------------------------------------


def _shapes(*texts: str) -> Callable[[], tuple[MnkShape, ...]]:
    return lambda: tuple(map(parse_shape, texts))


LORA_RANKS = (8, 16, 32, 64, 128, 8, 16, 16, 64, 32, 16, 8, 128, 64, 32, 16)
LORA_ROWS = (64, 1, 300, 17, 128, 512, 40, 96, 7, 256, 33, 200, 80, 144, 5, 165)  # 2,048 tokens of 16 requests


def _lora() -> tuple[MnkShape, ...]:
    """Return 16 adapters on one layer of Llama 3 8B: x @ A and (x @ A) @ B of its projection q, then of one token each.

    A is stored as [rank, H] and B as [H, rank], as peft does.
    """
    H = 4096
    down = [tuple((T, H, r) for T, r in zip(rows, LORA_RANKS, strict=True)) for rows in (LORA_ROWS, (1,) * 16)]
    up = [tuple((T, r, H) for T, _, r in groups) for groups in down]
    return tuple(MnkShape(groups, nk=True) for groups in (*down, *up))


def _vision() -> tuple[MnkShape, ...]:
    """Return products over the scales of a detector on 800 x 1216 pixels, and over heads of unlike sizes.

    A feature pyramid's lateral 1 x 1 convolutions of C2 to C5; RetinaNet's outputs of five scales (9 anchors,
    80 classes, 4 sides); the four stages of Swin-B's first MLP; heads for boxes, classes, masks and key points.
    """
    scales = ((60800, 256), (15200, 512), (3800, 1024), (950, 2048))
    levels = (15200, 3800, 950, 247, 70)
    swin = ((60800, 128), (15200, 256), (3800, 512), (950, 1024))
    heads = ((1000, 1024, 324), (1000, 1024, 81), (100, 256, 80), (784, 256, 17), (196, 512, 28))
    return (
        MnkShape(tuple((M, K, 256) for M, K in scales), nk=True),
        MnkShape(tuple((M, 256, N) for M in levels for N in (720, 36)), nk=True),
        MnkShape(tuple((M, K, 4 * K) for M, K in swin), nk=True),
        MnkShape(heads * 4, nk=True),
    )


def random_groups(G: int, largest: int, seed: int) -> tuple[tuple[int, int, int], ...]:
    """Draw G groups with sizes that are multiples of 8 up to `largest`; small ones are as likely as large ones."""
    draw = random.Random(seed)
    steps = largest // 8

    def size() -> int:
        return 8 * max(1, round(math.pow(steps, draw.random())))

    return tuple((size(), size(), size()) for _ in range(G))


def _random() -> tuple[MnkShape, ...]:
    return tuple(
        MnkShape(random_groups(G, largest, seed=G), nk=nk)
        for G, largest in ((4, 4096), (16, 512), (64, 256), (64, 2048), (256, 512))
        for nk in (False, True)
    )


GROUPED_GEMM_MNK = Operator(
    name="grouped_gemm_mnk",
    baseline="torch_loop",
    backends=(
        _in_all_modes(Backend, "torch_loop", prepare_torch_loop, "one torch.matmul for each group"),
        _in_all_modes(
            Backend,
            "torch_bmm",
            prepare_torch_bmm,
            "one torch.bmm for groups of equal sizes, which are stacked in each call",
        ),
        _in_all_modes(
            Backend, "torch_foreach", prepare_torch_foreach, "torch._foreach_mm: products of lists in one call"
        ),
        _in_all_modes(
            triton,
            "triton_pointer",
            lazy("grouped_gemm.pointer:prepare_pointer", "a b"),
            "table of pointers, sizes and leading dimensions, static schedule; after Triton's tutorial 08-grouped-gemm",
        ),
        _in_all_modes(
            triton,
            "triton_tma",
            lazy("grouped_gemm.mnk_tma:prepare_mnk_tma", "a b", _ALIGNED),
            "the same schedule, TMA descriptors made on the device; after the tutorial's TMA variant",
        ),
        _in_all_modes(
            partial(Backend, unavailable=no_cluster),
            "cuda_cluster",
            lazy("grouped_gemm.mnk_cluster:prepare_mnk_cluster", "a b", _ALIGNED, ("unsuitable", "a b")),
            "CUDA C++ for Hopper: clusters of two SMs share loads by multicast, maps of each group in a table",
        ),
        _in_all_modes(
            helion,
            "helion_pointers",
            lazy("grouped_gemm.mnk_helion:prepare_mnk_helion", "a b"),
            "persistent workers over all groups' tiles, loads through stacks of pointers",
        ),
    ),
    suites=Suites(
        {
            "tutorial": _shapes(
                "groups=192x128x320|256x192x448", *(f"groups={n}x{n}x{n}*4" for n in (128, 256, 512, 1024))
            ),
            "ragged": _shapes(
                "groups=384x64x128|0x512x256|640x1024x96",
                "groups=512x256x512|1x256x512|255x128x64",
                "groups=129x1000x257|257x360x641|1x2880x1",
                "groups=1000x2048x1024",
                "groups=128x0x64|128x64x64",
                "groups=100x77x1000|37x1000x77,A=km,W=nk",
            ),
            "lora": _lora,
            "vision": _vision,
            "random": _random,
            "smoke": _shapes(
                "groups=32x16x48|16x40x8|8x8x8",
                "groups=33x17x65|0x16x16|1x45x33|16x8x0",
                "groups=24x0x40|24x32x16,A=km",
                "groups=40x72x56,W=nk",
                "groups=16x24x32*3,A=km,W=nk",
            ),
        }
    ),
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="a tuple with [M_g, N_g] of each group",
    shapes_help=HELP,
    from_tritonbench=from_tritonbench,
)

_FURTHER: dict[str, Any] = {"suites": GROUPED_GEMM_MNK.suites, "make_inputs": make_step}
GROUPED_GEMM_MNK = replace(
    GROUPED_GEMM_MNK,
    backward=Backward(
        reference=reference_backward,
        flops=lambda shape: 2 * flops(shape),
        min_bytes=partial(min_bytes, matrices=(2, 2, 1)),
        returns="the dA [M_g, K_g] of all groups, then the dB [K_g, N_g]",
        moves=("dc",),  # the rest was saved by the forward pass
        **_FURTHER,
    ),
    forward_backward=Backward(
        reference=lambda y: reference(y.x) | reference_backward(y),
        flops=lambda shape: 3 * flops(shape),
        min_bytes=partial(min_bytes, matrices=(2, 2, 2)),
        returns="the C [M_g, N_g] of all groups, then the dA [M_g, K_g], then the dB [K_g, N_g]",
        **_FURTHER,
    ),
)
