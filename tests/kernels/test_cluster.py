"""Test the CUDA C++ kernels with clusters of two SMs: operands, memory and, on Hopper, the counters of launches."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouped import (
    DEVICE,
    FLAT_TILES,
    HOPPERS,
    LONG,
    NARROW,
    NO_HOPPER,
    SHORT,
    Case,
    Kernel,
    each,
    gradients,
    products,
)
from torch import Tensor

from groupbench.kernels import cuda_source
from groupbench.kernels.device import device_of
from groupbench.kernels.grouped_gemm import cluster, cluster_fp8, cluster_tiles, cluster_wgrad, flat
from groupbench.kernels.grouped_gemm.lockstep_counter import ARRIVALS, arrivals
from groupbench.kernels.grouped_gemm.quantize import E4M3


@pytest.mark.parametrize(
    ("of", "G", "N", "text"),
    [
        (torch.float32, 2, 64, "not torch.float32"),
        (torch.float16, 257, 64, "257 groups"),
        (torch.float16, 2, 64, ""),
        (E4M3, 257, 64, "257 groups"),
        (E4M3, 2, 64, ""),
    ],
)
def test_operands_that_it_cannot_take_have_a_reason(of, G, N, text):
    a, b = torch.zeros(8, 64).to(of), torch.zeros(1, N, 64).to(of).expand(G, -1, -1)
    if of == E4M3:
        assert text in str(cluster_fp8.why_not_cluster_fp8(a, b))
        assert "not torch.bfloat16" in str(cluster_fp8.why_not_cluster_fp8(a.bfloat16(), b.bfloat16()))
    else:
        assert text in str(cluster_tiles.unsuitable(N, G, a=a, b=b.mT))


def test_launches_that_may_overlap_share_no_counters(monkeypatch):
    def counters(stream: int, capturing: bool = False) -> Tensor:
        monkeypatch.setattr(cluster_tiles, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        return cluster_tiles.launch_counters(torch.device("cpu"))

    first = counters(7)
    assert (first.dtype, first.tolist()) == (torch.int64, [0, 0])
    assert counters(7) is first
    of_threads = [counters(cluster_tiles.STREAM_PER_THREAD) for _ in range(2)]
    others = [counters(8), counters(7, capturing=True), counters(7, capturing=True), *of_threads]
    assert len({id(some) for some in (first, *others)}) == 6


@NO_HOPPER
def test_another_thread_binds_a_loaded_kernel():
    b = torch.randn(2, 128, 256, device=DEVICE, dtype=torch.bfloat16)
    offs = torch.tensor([3, 200], device=DEVICE, dtype=torch.int32)

    def product(rows: int) -> Tensor:
        a = torch.ones(rows, 128, device=DEVICE, dtype=torch.bfloat16)
        return cluster.prepare_cluster(a, b, offs, SHORT, trusted=True)()

    def describe() -> None:  # a thread that has not used CUDA
        cluster_tiles.ragged_map(b, 256, 256, [64, 16])

    first = product(256)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(describe).result()
        assert torch.equal(pool.submit(product, 300).result()[:200], first[:200])


def test_a_map_keeps_the_memory_that_it_describes(monkeypatch):
    driver = SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 0)
    monkeypatch.setattr(cuda_source, "cuda_driver", lambda: driver)
    rows = torch.zeros(8, 64, dtype=torch.float16)
    alive = weakref.ref(rows)
    described = cuda_source.tensor_map(rows, [64, 8], [64], [64, 8])
    del rows
    assert alive() is not None
    del described
    assert alive() is None


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


@NO_HOPPER
def test_rows_past_the_groups_stay_as_they_are_if_asked(poisoned):
    a, b, offs = products(Case((150, 140), n=200, k=104, tail=30))
    with poisoned():
        out = cluster.prepare_cluster(a, b, offs, zero_rest=False)()
    assert out[290:].isnan().all()


of_weights = cluster_wgrad.prepare_cluster_wgrad
COUNTED: dict[str, tuple[Any, Any, int]] = {
    "long": (partial(cluster.prepare_cluster, config=LONG), products, 512),
    "short": (partial(cluster.prepare_cluster, config=replace(SHORT, lockstep=4)), products, 512),
    **{
        f"wgrad_{n}": (partial(of_weights, config=replace(NARROW, lockstep=4, from_end=n)), gradients, 192)
        for n in (0, 3, 7)
    },
}


@NO_HOPPER
@pytest.mark.parametrize(("prepare", "operands", "k"), COUNTED.values(), ids=COUNTED)
def test_every_launch_of_clusters_leaves_its_counters_at_zero(prepare, operands, k):
    counters = cluster_tiles.launch_counters(torch.device("cuda", torch.cuda.current_device()))
    wave = 384 * (device_of(DEVICE).sms // 2)
    few = (9000, 0, 31), (5,), (0, 1), (0, 0)
    for rows in (*few, (100,) * 66, (100,) * 67, (4000,) * 8, (wave,), (wave + 384,)):
        prepare(*operands(Case(rows, 256, k), torch.bfloat16))()
        assert counters.tolist() == [0, 0]


@NO_HOPPER
@each({name: kernel for name, kernel in HOPPERS.items() if name.startswith("cluster_fp8")})
def test_groups_of_warps_without_rows_wait_for_late_warps(kernel: Kernel):
    """Many tiles of few steps leave warps without products. If those give a stage back too early, a launch hangs."""
    run = kernel.prepare(*kernel.operands(Case((50, 300, 70, 500) * 32, 520, 768)))
    first = run()
    for _ in range(200):
        out = run()
    assert torch.equal(out, first)


# --- the counter of kernels with specialised warps --------------------------------------------------------------------


def counter() -> Tensor:
    return arrivals(DEVICE, device_of(DEVICE).sms)


def launch() -> int:
    """Return the arrivals of all programs in one launch."""
    return ARRIVALS * device_of(DEVICE).sms


@NO_HOPPER
@each({name: HOPPERS[name] for name in ("flat", "flat_192", "flat_192_columns", "wgrad")})
def test_every_launch_adds_the_same_to_the_counter(kernel: Kernel):
    """Later launches, of the other kernel too, find their start in the sum of the earlier ones."""
    before = int(counter())
    assert before % launch() == 0
    for count, rows in enumerate(((9000, 0, 31), (5,), (0, 1), (4000,) * 8), 1):
        kernel.prepare(*kernel.operands(Case(rows, 2048, 1024), torch.bfloat16))()
        assert int(counter()) == before + count * launch()


@NO_HOPPER
@pytest.mark.parametrize("config", FLAT_TILES.values(), ids=str)
def test_a_counter_of_any_value_ends_no_launch_and_changes_no_result(config):
    """Launches that overlap share the counter; an aborted one leaves any value. That of a graph is the graph's."""
    operands = products(Case((4000,) * 8, n=2048, k=512), torch.bfloat16)
    run = flat.prepare_flat(*operands, config)
    expected, before = run(), int(counter())
    try:
        for value in (-1, 1, launch() - 1, 2**62, -(2**62)):
            counter().fill_(value)
            assert torch.equal(run(), expected)
    finally:
        counter().fill_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat.prepare_flat(*operands, config, trusted=True)()
    before = int(counter())
    graph.replay()
    assert int(counter()) == before
