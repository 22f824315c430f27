"""Test the CUDA C++ kernel with clusters of two SMs: which operands it takes and, on Hopper, its results."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from groupbench.kernels import cuda_source
from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.grouped_gemm import cluster, cluster_tiles
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference

HOPPER = torch.cuda.is_available() and device_of(torch.device("cuda")).hopper
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the kernel with clusters. No Hopper GPU")
WITHOUT_NVRTC = cuda_source.why_not_nvrtc()
needs_nvrtc = pytest.mark.skipif(WITHOUT_NVRTC is not None, reason=f"NOT TESTED: CUDA C++. {WITHOUT_NVRTC}")
H100 = KNOWN["sm_90"]
TILES = cluster_tiles.TILES


# --- when it runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", cluster_tiles.candidates(), ids=str)
def test_every_candidate_is_legal_on_hopper_alone(config):
    assert cluster.illegal(config, torch.bfloat16, H100) is None
    assert "sm_80" in str(cluster.illegal(config, torch.bfloat16, KNOWN["sm_80"]))


@pytest.mark.parametrize(
    ("change", "of", "text"),
    [
        ({"stages": 5}, torch.float16, "5 stages and 2 buffers take"),
        ({"rows": 96}, torch.float16, "a tile of 96 x 256"),
        ({"rows": 128, "columns": 96}, torch.float16, "a tile of 128 x 96"),
        ({"rows": 256}, torch.float16, "2 parts of 256 columns do not fit"),
        ({"rows": 320, "columns": 64, "in_turns": True}, torch.float16, "5 parts of 64 columns do not fit"),
        ({"shared": "both"}, torch.float16, "not 'both'"),
        ({"buffers": 4}, torch.float16, "bytes of"),
        ({"group_m": 0}, torch.float16, "at least 1"),
        ({"lockstep": 3}, torch.float16, "lockstep must be 0, or at least 4"),
        ({"from_end": 8}, torch.float16, "from_end is 0 to 7"),
        ({}, torch.float32, "not torch.float32"),
    ],
)
def test_illegal_configs_have_a_reason(change, of, text):
    assert text in str(cluster_tiles.illegal(replace(cluster_tiles.LONG, **change), of, H100))


def test_tiles_that_cost_the_same_are_taken_from_the_front():
    config = replace(cluster_tiles.LONG, from_end=1)
    assert "from_end has no use" in str(cluster.illegal(config, torch.bfloat16, H100))


@pytest.mark.parametrize(
    ("of", "G", "N", "text"),
    [(torch.float32, 2, 64, "not torch.float32"), (torch.float16, 257, 64, "257 groups"), (torch.float16, 2, 64, "")],
)
def test_operands_that_it_cannot_take_have_a_reason(of, G, N, text):
    assert text in str(
        cluster_tiles.unsuitable(N, G, a=torch.zeros(8, 64, dtype=of), b=torch.zeros(1, 64, N, dtype=of))
    )


def test_launches_that_may_overlap_share_no_counters(monkeypatch):
    def counters(stream: int, capturing: bool = False) -> Tensor:
        monkeypatch.setattr(cluster_tiles, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        return cluster_tiles.launch_counters(torch.device("cpu"))

    first = counters(7)
    assert (first.dtype, first.tolist()) == (torch.int64, [0, 0])
    assert counters(7) is first
    others = [
        counters(8),
        counters(7, capturing=True),
        counters(7, capturing=True),
        counters(cluster_tiles.STREAM_PER_THREAD),
        counters(cluster_tiles.STREAM_PER_THREAD),
    ]
    assert len({id(some) for some in (first, *others)}) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_does_not_run_without_a_gpu(make_case, make_inputs):
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        cluster.prepare_cluster(*make_inputs(make_case("two", (21, 40)), torch.float16))


def test_a_map_keeps_the_memory_that_it_describes(monkeypatch):
    monkeypatch.setattr(
        cuda_source, "cuda_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 0)
    )
    rows = torch.zeros(8, 64, dtype=torch.float16)
    alive = weakref.ref(rows)
    described = cuda_source.tensor_map(rows, [64, 8], [64], [64, 8])
    del rows
    assert alive() is not None
    del described
    assert alive() is None


# --- compiled without a GPU -------------------------------------------------------------------------------------------


# Each compiles for two seconds. Two configs stay, which differ in the shared operand and in whether warps take turns.
SPILL_TESTS = [
    pytest.param(
        config,
        of,
        nk,
        marks=()
        if (config, of, nk) in ((cluster_tiles.LONG, torch.float16, True), (cluster_tiles.SHORT, torch.bfloat16, False))
        else pytest.mark.exhaustive,
    )
    for config in TILES
    for of in cluster_tiles.DTYPES
    for nk in (False, True)
]


@needs_nvrtc
@pytest.mark.parametrize(("config", "of", "nk"), SPILL_TESTS, ids=str)
def test_it_compiles_without_spills(config, of, nk):
    check_machine_code(config, of, nk, not nk, torch.int64 if nk else torch.int32)


@needs_nvrtc
@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=() if config == cluster_tiles.LONG else pytest.mark.exhaustive) for config in TILES],
    ids=str,
)
def test_it_compiles_for_fp8_without_spills(config):
    check_machine_code(config, E4M3, True, False, torch.int32)


def check_machine_code(config, of, nk, shared, offsets):
    cubin, log = cuda_source.compile_with_log(
        cluster_tiles.source("cluster.cu", config.columns),
        cluster.named_constants(config, of, nk, shared, offsets),
        "sm_90a",
    )
    assert cubin.startswith(b"\x7fELF")
    assert " 0 bytes stack frame, 0 bytes spill stores" in log
    assert "wgmma" not in log  # ptxas warns if it serialises them
    assert f"{cluster_tiles.STATIC_BYTES} bytes smem" in log


@needs_nvrtc
def test_source_that_does_not_compile_is_reported():
    with pytest.raises(RuntimeError, match=r"kernel.cu\(2\): error"):
        cuda_source.compile_cuda("void f() { missing(ONE); }", {"ONE": 1}, "sm_90a")


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize("weights", ["rows", "columns", "shared"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "tail"),
    [
        ((0, 300, 0, 129, 1, 128, 64, 193, 257, 65), 704, 1096, 5),  # tiles that end in M, N and K
        ((0, 0, 0), 304, 256, 40),
        ((5,) * 200, 264, 128, 0),
        ((70_000,), 136, 48, 0),  # many tiles of one step
        ((256 * 20,), 256, 4096, 0),
        ((256 * 44, 256 * 22), 1024, 512, 0),  # full waves: no tile is cut
        ((256 * 66 + 1,), 512, 192, 3),  # a last wave of two tiles, each with a single row
        ((256 * 33 + 140,), 512, 192, 3),  # a last wave of two tiles, cut
    ],
    ids=["ragged", "no_rows", "many_groups", "one_step", "even", "full_waves", "one_row", "cut_wave"],
)
def test_results(weights, rows, n, k, tail, make_case, make_inputs, check_calls):
    a, b, offs = make_inputs(make_case("case", rows, n=n, k=k, weights=weights, tail=tail), torch.bfloat16)
    expected = grouped_gemm_reference(a, b, offs)
    for config in (
        *TILES,
        replace(cluster_tiles.LONG, group_m=4, lockstep=0),
        replace(cluster_tiles.LONGEST, lockstep=4),
        replace(cluster_tiles.SHORT, group_m=2, lockstep=4),
        replace(cluster_tiles.NARROW, lockstep=16),
    ):
        check_calls(cluster.prepare_cluster(a, b, offs, config), expected, torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("weights", ["rows", "columns"])
def test_sums_are_those_of_the_flat_kernel(weights, make_case, make_inputs):
    from groupbench.kernels.grouped_gemm import flat

    a, b, offs = make_inputs(make_case("case", (3000, 0, 1111), n=1024, k=1000, weights=weights), torch.float16)
    of_flat = flat.prepare_flat(a, b, offs, flat.CONFIGS["specialized"])()
    assert torch.equal(cluster.prepare_cluster(a, b, offs.long())(), of_flat)


@needs_hopper
def test_every_expert_reads_its_own_weights_at_the_tails(make_case, make_inputs, check):
    """NaN in the next expert's weights and rows must not leak through tiles that overhang in N, K and M."""
    a, b, offs = make_inputs(make_case("two", (150, 140), n=200, k=104), torch.float16)
    expected = grouped_gemm_reference(a, b, offs)[:150]
    b[1] = float("nan")
    a[150:] = float("nan")
    out = cluster.prepare_cluster(a, b, offs)()
    check(out[:150], expected, torch.float16)
    assert out[150:].isnan().all()


@needs_hopper
def test_offsets_are_read_on_the_device_at_every_call(make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("three", (4000, 2400, 3600), n=512, k=640), torch.float16)
    run = cluster.prepare_cluster(a, b, offs)
    for ends in ((4000, 6400, 10000), (0, 0, 10000), (10000, 10000, 10000), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out[: ends[-1]], grouped_gemm_reference(a, b, offs)[: ends[-1]], torch.float16)
        assert (out[ends[-1] :] == 0).all()


@needs_hopper
def test_rows_past_the_groups_stay_as_they_are_if_asked(make_case, make_inputs, poisoned):
    a, b, offs = make_inputs(make_case("two", (150, 140), n=200, k=104, tail=30), torch.float16)
    with poisoned():
        out = cluster.prepare_cluster(a, b, offs, zero_rest=False)()
    assert out[290:].isnan().all()


@needs_hopper
def test_views_with_wide_rows(make_case, make_inputs, check):
    a, b, offs = make_inputs(make_case("two", (500, 700), n=512, k=640), torch.bfloat16)
    expected = grouped_gemm_reference(a, b, offs)
    wide_a = torch.full((1200, 1024), float("nan"), dtype=a.dtype, device=a.device)
    wide_b = torch.full((2, 1024, 512), float("nan"), dtype=a.dtype, device=a.device)
    wide_a[:, 64:704], wide_b[:, 64:704] = a, b
    check(cluster.prepare_cluster(wide_a[:, 64:704], wide_b[:, 64:704], offs)(), expected, torch.bfloat16)


@needs_hopper
def test_operands_that_tma_cannot_read_are_refused(make_case, make_inputs):
    a, b, offs = make_inputs(make_case("two", (21, 40), n=45, k=33), torch.float16)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        cluster.prepare_cluster(a, b, offs)


@needs_hopper
@pytest.mark.parametrize(
    "config", [cluster_tiles.LONG, replace(cluster_tiles.SHORT, lockstep=4)], ids=["long", "short"]
)
def test_every_launch_leaves_its_counters_at_zero(config, make_case, make_inputs):
    counters = cluster_tiles.launch_counters(torch.device("cuda", torch.cuda.current_device()))
    clusters = device_of(torch.device("cuda")).sms // 2
    for rows in ((9000, 0, 31), (5,), (0, 1), (0, 0), (4000,) * 8, (384 * clusters,), (384 * (clusters + 1),)):
        a, b, offs = make_inputs(make_case("case", rows, n=256, k=512), torch.bfloat16)
        cluster.prepare_cluster(a, b, offs, config)()
        assert counters.tolist() == [0, 0]


@needs_hopper
def test_launches_on_two_streams_do_not_wait_for_each_other(make_case, make_inputs):
    a, b, offs = make_inputs(make_case("case", (4000,) * 8, n=2048, k=512), torch.bfloat16)
    run = cluster.prepare_cluster(a, b, offs)
    expected = run()
    outputs: list[Tensor] = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)


@needs_hopper
def test_a_graph_replays_it(make_case, make_inputs):
    a, b, offs = make_inputs(make_case("case", (4000,) * 8, n=2048, k=512), torch.bfloat16)
    expected = cluster.prepare_cluster(a, b, offs)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cluster.prepare_cluster(a, b, offs, trusted=True)()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
