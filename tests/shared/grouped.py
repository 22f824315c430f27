"""The kernels of grouped products and their gradients, with the cases, operands and references of their tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fp8_operands import drawn
from torch import Tensor

from groupbench.kernels import cuda_source
from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.grouped_gemm import (
    cluster,
    cluster_fp8,
    cluster_tiles,
    cluster_wgrad,
    contiguous,
    flat,
    fp8,
    helion_jagged,
    helion_persistent,
    helion_wgrad,
    helion_worklist,
    pointer,
    wgrad,
)
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference, grouped_gemm_wgrad_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
HOPPER = GPU and device_of(DEVICE).hopper
NO_HOPPER = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: kernels for Hopper. No Hopper GPU")
NO_GPU = pytest.mark.skipif(not GPU, reason="NOT TESTED: kernels on a GPU. No GPU")
WITHOUT_NVRTC = cuda_source.why_not_nvrtc()
NO_NVRTC = pytest.mark.skipif(WITHOUT_NVRTC is not None, reason=f"NOT TESTED: CUDA C++. {WITHOUT_NVRTC}")
UNTUNED = replace(KNOWN["sm_90"], name="untuned")
"""An H100 without tuned configs."""


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]  # rows of each group
    n: int = 48
    k: int = 64
    weights: str = "rows"  # as [G, K, N]; "columns": as [G, N, K]; "apart": that with gaps; "shared": one, expanded
    pad_a: int = 0  # columns of A's storage past A
    tail: int = 0  # rows past the last group
    offs: torch.dtype = torch.int32
    a_by_columns: bool = False


CASES = {
    "even": Case((32, 32)),
    "one_group": Case((37,)),
    "empty_group_first": Case((0, 17, 32)),
    "empty_group_between": Case((20, 0, 0, 15)),
    "empty_group_last": Case((20, 33, 0)),
    "one_row_group": Case((32, 1, 40)),
    "all_one_row": Case((1, 1, 1, 1, 1)),
    "one_row_in_all": Case((0, 1, 0)),
    "one_row_and_one_column": Case((1,), n=1),
    "one_row_past_a_tile": Case((33, 65, 17)),
    "one_group_owns_all": Case((0, 0, 90, 0)),
    "more_groups_than_workers": Case((5, 3, 0, 16, 2, 7, 1, 4, 9)),
    "ragged_n_and_k": Case((21, 40), n=53, k=45),
    "k_below_a_tile": Case((18, 9), k=5),
    "n_below_a_tile": Case((18, 9), n=3),
    "n_and_k_of_one": Case((18, 9), n=1, k=1),
    "no_k": Case((18, 0, 9), k=0),
    "no_n": Case((18, 9), n=0),
    "no_rows": Case((0, 0, 0)),
    "no_rows_one_group": Case((0,)),
    "no_rows_in_groups": Case((0, 0), tail=7),
    "rows_past_the_groups": Case((19, 0, 30), tail=11),
    "strided_rows": Case((21, 40), n=53, k=45, pad_a=7),
    "a_by_columns": Case((21, 0, 40), pad_a=3, a_by_columns=True),
    "weights_by_columns": Case((21, 0, 40), n=53, k=45, weights="columns"),
    "weights_apart": Case((16, 0, 32, 16), n=32, weights="apart"),
    "weights_shared": Case((21, 0, 40), n=53, k=45, weights="shared"),
    "int64_offsets": Case((21, 0, 40), offs=torch.int64),
    "many_tiles": Case((130, 70), n=140, k=72),
}
RAGGED = Case((129, 0, 30, 1), n=144, k=72)


def products(case: Case, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Return a [M, K], b [G, K, N] and offs [G]; storage around a and b is NaN."""
    torch.manual_seed(0)
    G, rows, n, k = len(case.sizes), sum(case.sizes), case.n, case.k
    stored = torch.full((rows + case.tail, k + case.pad_a), float("nan"), dtype=dtype)
    stored[:rows, :k] = torch.randn(rows, k).to(dtype)
    stored = stored.t().contiguous().t() if case.a_by_columns else stored
    a = stored.to(DEVICE)[:, :k]
    if case.weights == "columns":
        b = torch.randn(G, n, k).to(DEVICE, dtype).transpose(1, 2)
    elif case.weights == "apart":
        wide = torch.full((2 * G, n, 2 * k), float("nan"), device=DEVICE, dtype=dtype)[::2, :, :k]
        b = wide.copy_(torch.randn(G, n, k)).transpose(1, 2)
    elif case.weights == "shared":
        b = torch.randn(k, n).to(DEVICE, dtype).expand(G, -1, -1)
    else:
        b = torch.randn(G, k, n).to(DEVICE, dtype)
    return a, b, ends(*case.sizes).to(case.offs)


def gradients(case: Case, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Return a [M, K], dc [M, N] and offs [G]; rows that belong to no group are NaN."""
    a, _, offs = products(case, dtype)
    rows = sum(case.sizes)
    dc = torch.full((rows + case.tail, case.n + case.pad_a), float("nan"), dtype=dtype)[:, : case.n]
    dc[:rows] = torch.randn(rows, case.n, generator=torch.Generator().manual_seed(1)).to(dtype)
    return a, dc.to(DEVICE), offs


def ends(*rows: int) -> Tensor:
    return torch.tensor(rows).cumsum(0).to(DEVICE, torch.int32)


def matrix(rows: int, columns: int, how: str, dtype: torch.dtype) -> Tensor:
    """Return a random matrix [rows, columns] with NaN in the storage between its elements."""
    if how == "columns":
        return torch.randn(columns, rows).to(DEVICE, dtype).t()
    if how == "strided":
        wide = torch.full((rows, 2 * columns), float("nan"), device=DEVICE, dtype=dtype)
        wide[:, ::2] = torch.randn(rows, columns).to(DEVICE, dtype)
        return wide[:, ::2]
    return torch.randn(rows, columns).to(DEVICE, dtype)


@dataclass(frozen=True)
class Kernel:
    prepare: Callable[..., Callable[[], Tensor]]
    operands: Callable[..., tuple[Tensor, ...]] = products  # of a case and a dtype; the last ones are the offsets
    reference: Callable[..., Tensor] = grouped_gemm_reference
    rereads: bool = True  # the offsets, at every call
    hopper: bool = False

    def bind(self, case: Case, *operands: Tensor) -> Callable[[], Tensor]:
        of_weights = self.operands is gradients and case.weights == "columns"
        return self.prepare(*operands, nk=True) if of_weights else self.prepare(*operands)


def of_weights(prepare: Callable[..., Any], **more: Any) -> Kernel:
    return Kernel(prepare, gradients, grouped_gemm_wgrad_reference, **more)


def of_fp8(mode: str, prepare: Callable[..., Any] | None = None, config: Any = None, **more: Any) -> Kernel:
    def operands(case: Case, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
        *x, offs = drawn(case.sizes, case.n, case.k, mode, case.tail, DEVICE.type)
        return *x, offs.to(case.offs)

    fast = mode == fp8.ROWWISE_FAST
    plain = partial(fp8.prepare_fp8, fast_accum=fast, out_dtype=torch.float16, config=config)
    return Kernel(prepare or plain, operands, fp8.grouped_gemm_fp8_reference, **more)


def prepare_pointer(a: Tensor, b: Tensor, offs: Tensor, config: Any = None) -> Callable[[], Tensor]:
    starts = [0, *offs.tolist()]
    run = pointer.prepare_pointer_packed([a[start:end] for start, end in pairwise(starts)], list(b), config)
    # The pointer kernel takes groups only; its caller adds the rows past them.
    return lambda: torch.nn.functional.pad(run(), (0, 0, 0, a.size(0) - starts[-1]))


def prepare_contiguous(a: Tensor, b: Tensor, offs: Tensor, config: Any = None) -> Callable[[], Tensor]:
    return contiguous.prepare_contiguous(a, b.transpose(1, 2), offs, config)


BACKENDS = {
    "triton_pointer": Kernel(prepare_pointer, rereads=False),
    "triton_flat": Kernel(flat.prepare_flat),
    "triton_contiguous": Kernel(prepare_contiguous, rereads=False),
    "helion_jagged": Kernel(helion_jagged.prepare_helion_jagged),
    "helion_persistent": Kernel(helion_persistent.prepare_helion_persistent),
    "helion_worklist": Kernel(helion_worklist.prepare_helion_worklist),
    "triton_wgrad": of_weights(wgrad.prepare_wgrad),
    "triton_wgrad_dynamic": of_weights(partial(wgrad.prepare_wgrad, config=wgrad.CONFIGS["cpu_dynamic"])),
    "helion_wgrad": of_weights(helion_wgrad.prepare_helion_wgrad),
}
FP8 = {f"fp8_{mode}": of_fp8(mode) for mode in fp8.MODES if GPU or mode != fp8.ROWWISE_FAST}  # else the same

SPECIALIZED = flat.CONFIGS["specialized"]
FLAT_TILES = {"": SPECIALIZED, "_192": replace(SPECIALIZED, block_m=192, num_stages=3)}
FLAT_TILES["_192_columns"] = flat.CONFIGS["specialized_192"]
LOCKSTEP, UNEVEN, TALLER = (wgrad.CONFIGS[f"specialized{name}"] for name in ("", "_uneven", "_192"))
LONG, LONGEST, SHORT, NARROW = (getattr(cluster_tiles, name) for name in ("LONG", "LONGEST", "SHORT", "NARROW"))


def on_hopper(make: Callable[..., Kernel], prepare: Callable[..., Any], **configs: Any) -> dict[str, Kernel]:
    return {name: make(partial(prepare, config=config), hopper=True) for name, config in configs.items()}


def specialized_fp8(mode: str) -> Kernel:
    # Short accumulators would show in fp16.
    out_dtype = torch.bfloat16 if mode == fp8.ROWWISE_FAST else torch.float16
    prepare = partial(fp8.prepare_fp8, fast_accum=mode == fp8.ROWWISE_FAST, out_dtype=out_dtype, config=fp8.SPECIALIZED)
    return of_fp8(mode, prepare, hopper=True)


HOPPERS = {
    **on_hopper(Kernel, flat.prepare_flat, **{f"flat{name}": config for name, config in FLAT_TILES.items()}),
    **on_hopper(Kernel, cluster.prepare_cluster, cluster=None, cluster_short=replace(SHORT, lockstep=4)),
    **on_hopper(of_weights, wgrad.prepare_wgrad, wgrad=LOCKSTEP, wgrad_uneven=UNEVEN, wgrad_192=TALLER),
    **on_hopper(of_weights, cluster_wgrad.prepare_cluster_wgrad, wgrad_longest=LONGEST, wgrad_narrow=NARROW),
    **{f"specialized_fp8_{mode}": specialized_fp8(mode) for mode in fp8.MODES},
    **on_hopper(
        partial(of_fp8, fp8.ROWWISE_FAST),
        cluster_fp8.prepare_cluster_fp8,
        **{f"cluster_fp8_{number}": config for number, config in enumerate(cluster_tiles.TILES)},
    ),
}
"""The kernels that only a Hopper GPU runs, in the configs that differ most."""

FURTHER = {
    **on_hopper(
        Kernel,
        flat.prepare_flat,
        **{f"flat{name}_{n}": replace(c, lockstep=n) for name, c in FLAT_TILES.items() for n in (0, 4, 16)},
    ),
    **on_hopper(
        Kernel,
        cluster.prepare_cluster,
        **{f"cluster_{number}": config for number, config in enumerate(cluster_tiles.TILES)},
        cluster_long_alone=replace(LONG, group_m=4, lockstep=0),
        cluster_longest_close=replace(LONGEST, lockstep=4),
        cluster_short_close=replace(SHORT, group_m=2, lockstep=4),
        cluster_narrow_apart=replace(NARROW, lockstep=16),
    ),
    **on_hopper(
        of_weights,
        wgrad.prepare_wgrad,
        wgrad_close=replace(LOCKSTEP, lockstep=4),
        wgrad_dynamic=replace(LOCKSTEP, lockstep=0, dynamic=True),
        wgrad_short_steps=replace(UNEVEN, dynamic=False, lockstep=32),
        wgrad_192_lockstep=replace(TALLER, dynamic=False, lockstep=16),
        wgrad_192_static=replace(TALLER, dynamic=False),
    ),
    **on_hopper(
        of_weights,
        cluster_wgrad.prepare_cluster_wgrad,
        wgrad_long=LONG,
        wgrad_short=SHORT,
        wgrad_short_close=replace(SHORT, group_m=2, lockstep=4),
        wgrad_narrow_alone=replace(NARROW, lockstep=0, stages=4, buffers=3),
        wgrad_longest_alone=replace(LONGEST, lockstep=0),
        wgrad_mixed=replace(NARROW, from_end=3),
        wgrad_from_end=replace(LONG, lockstep=16, from_end=7),
    ),
    **on_hopper(
        partial(of_fp8, fp8.ROWWISE_FAST),
        cluster_fp8.prepare_cluster_fp8,
        cluster_fp8_close=replace(SHORT, lockstep=4, group_m=2),
    ),
}
"""Further configs of theirs."""


def each(kernels: dict[str, Kernel]) -> pytest.MarkDecorator:
    """Parametrise a test over kernels, those for Hopper only if there is one."""
    params = [
        pytest.param(kernel, id=name, marks=NO_HOPPER if kernel.hopper else ()) for name, kernel in kernels.items()
    ]
    return pytest.mark.parametrize("kernel", params)
