"""Test the kernels of the weights' gradient for Hopper: with specialised warps, and with clusters in CUDA C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from groupbench.kernels import cuda_source
from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.grouped_gemm import cluster_tiles, cluster_wgrad, wgrad
from groupbench.kernels.grouped_gemm.lockstep_counter import ARRIVALS, arrivals
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_wgrad_reference

LOCKSTEP, UNEVEN, TALLER = (wgrad.CONFIGS[f"specialized{name}"] for name in ("", "_uneven", "_192"))
HOPPER = torch.cuda.is_available() and device_of(torch.device("cuda")).hopper
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the specialized bf16 wgrad kernel. No Hopper GPU")
needs_nvrtc = pytest.mark.skipif(
    cuda_source.why_not_nvrtc() is not None, reason=f"NOT TESTED: CUDA C++. {cuda_source.why_not_nvrtc()}"
)


def prepare_with(*configs: wgrad.WgradConfig | cluster_tiles.ClusterConfig) -> list[Callable]:
    """Return a function for each config, as wgrad.prepare_wgrad without its config."""
    return [
        partial(
            wgrad.prepare_wgrad if isinstance(config, wgrad.WgradConfig) else cluster_wgrad.prepare_cluster_wgrad,
            config=config,
        )
        for config in configs
    ]


KINDS = pytest.mark.parametrize(
    "prepare",
    prepare_with(LOCKSTEP, UNEVEN, TALLER, cluster_tiles.LONGEST, cluster_tiles.NARROW),
    ids=["lockstep", "uneven", "taller", "cluster_longest", "cluster_narrow"],
)
EVERY = pytest.mark.parametrize(
    "prepare",
    prepare_with(
        LOCKSTEP,
        UNEVEN,
        replace(LOCKSTEP, lockstep=4),
        replace(LOCKSTEP, lockstep=0, dynamic=True),
        replace(UNEVEN, dynamic=False, lockstep=32),
        TALLER,
        replace(TALLER, dynamic=False, lockstep=16),
        replace(TALLER, dynamic=False),
        *cluster_tiles.TILES,
        replace(cluster_tiles.SHORT, group_m=2, lockstep=4),
        replace(cluster_tiles.NARROW, lockstep=0, stages=4, buffers=3),
        replace(cluster_tiles.LONGEST, lockstep=0),
        replace(cluster_tiles.NARROW, from_end=3),
        replace(cluster_tiles.LONG, lockstep=16, from_end=7),
    ),
    ids=[
        *("lockstep", "uneven", "close", "dynamic", "short_steps", "taller", "taller_lockstep", "taller_static"),
        *("cluster_long", "cluster_longest", "cluster_short", "cluster_narrow", "cluster_close", "cluster_alone"),
        *("cluster_apart", "cluster_mixed", "cluster_from_end"),
    ],
)


@pytest.fixture
def make_operands(make_case: Callable, make_inputs: Callable) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function that makes a [M, K], dc [M, N] and offs [G] of groups; rows of no group are NaN."""

    def make(rows: tuple[int, ...], n: int, k: int, tail: int = 0, dtype: torch.dtype = torch.bfloat16):
        a, _, offs = make_inputs(make_case("case", rows, n=16, k=k, tail=tail), dtype)
        dc = torch.randn(a.size(0), n, generator=torch.Generator().manual_seed(1)).to(a.device, dtype)
        dc[sum(rows) :] = float("nan")
        return a, dc, offs

    return make


# --- when it runs -----------------------------------------------------------------------------------------------------


def chosen(M: int, G: int, arch: str = "sm_90", of: torch.dtype = torch.bfloat16, side: int = 4096) -> list[str]:
    """Return the kind of each config of an untuned problem, the preferred one first."""
    device = replace(KNOWN[arch], name="untuned")
    kinds = {LOCKSTEP: "lockstep", UNEVEN: "uneven", TALLER: "taller"}
    return [kinds.get(config, "plain") for _, config, _ in wgrad.configs_for(M, G, side, side, of, device, nk=True)]


def test_problems_of_many_tiles_prefer_it_and_fall_back():
    assert chosen(32768, 8) == ["lockstep", "plain"]
    assert chosen(32768, 8, of=torch.float16) == ["lockstep", "plain"]
    assert chosen(8192, 8) == ["uneven", "plain"]


def test_problems_that_fill_tiles_of_192_rows_prefer_these():
    assert chosen(32768, 8, side=5760) == ["taller", "plain"]
    assert chosen(8192, 8, side=5760) == ["taller", "plain"]
    assert chosen(32768, 8, side=7168) == ["lockstep", "plain"], "38 tiles of 192 rows have 2 % more than 56 of 128"


@pytest.mark.parametrize(
    ("M", "G", "arch", "of", "side"),
    [
        (32768, 8, "sm_80", torch.bfloat16, 4096),
        (32768, 8, "sm_100", torch.bfloat16, 4096),
        (32768, 8, "sm_90", torch.float32, 4096),
        (32768, 8, "sm_90", torch.bfloat16, 1024),  # two tiles an SM
        (512, 8, "sm_90", torch.bfloat16, 4096),  # 64 rows a group
    ],
    ids=["ampere", "blackwell", "fp32", "few_tiles", "few_rows"],
)
def test_other_problems_keep_the_plain_kernel(M, G, arch, of, side):
    assert chosen(M, G, arch, of, side) == ["plain"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(LOCKSTEP, block_p=256), "128 x 256"),
        (replace(LOCKSTEP, block_p=192), "192 x 256 in 6"),
        (replace(LOCKSTEP, num_stages=3), "4 stages of 64"),
        (replace(LOCKSTEP, num_warps=8), "groups of 4 warps"),
        (replace(UNEVEN, per_sm=2), "one program per SM"),
        (replace(UNEVEN, split_store=True), "no split_store"),
        (replace(UNEVEN, lockstep=16), "static schedule"),
        (replace(LOCKSTEP, lockstep=3), "lockstep must be 0, or at least 4"),
    ],
)
def test_illegal_configs_have_a_reason(config, text):
    reason = wgrad.illegal(config, torch.bfloat16)
    assert reason is not None
    assert text in reason


def test_only_hopper_and_16_bits_are_legal():
    assert "sm_80" in str(wgrad.illegal(LOCKSTEP, torch.bfloat16, KNOWN["sm_80"]))
    assert "float32" in str(wgrad.illegal(LOCKSTEP, torch.float32, KNOWN["sm_90"]))
    assert wgrad.illegal(LOCKSTEP, torch.float16, KNOWN["sm_90"]) is None


def test_every_candidate_is_legal_on_hopper():
    specialized = [config for config in wgrad.candidates(300) if config.specialized]
    assert specialized
    assert not any(wgrad.illegal(config, torch.bfloat16, KNOWN["sm_90"]) for config in specialized)
    assert not any(config.specialized for config in wgrad.candidates(4)), "writing the gradient takes the time"


def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    configs_for = wgrad.configs_for
    monkeypatch.setattr(wgrad, "configs_for", lambda *problem: [("first", LOCKSTEP, None), *configs_for(*problem)])


@pytest.mark.skipif(HOPPER, reason="it runs")
def test_the_plain_kernel_runs_without_a_hopper(make_operands, check, monkeypatch):
    a, dc, offs = make_operands((21, 40), 48, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"Hopper|interpreter"):
        wgrad.prepare_wgrad(a, dc, offs, config=LOCKSTEP)
    preferred(monkeypatch)
    check(wgrad.prepare_wgrad(a, dc, offs)(), grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


def test_another_triton_without_this_gluon_takes_the_plain_kernel(make_operands, check, monkeypatch):
    a, dc, offs = make_operands((21, 40), 48, 64, dtype=torch.float16)
    monkeypatch.delattr("groupbench.kernels.grouped_gemm.wgrad_specialized", raising=False)
    monkeypatch.delitem(sys.modules, "groupbench.kernels.grouped_gemm.wgrad_specialized", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    with pytest.raises(ValueError, match="Gluon differs"):
        wgrad.prepare_wgrad(a, dc, offs, config=LOCKSTEP)
    preferred(monkeypatch)
    check(wgrad.prepare_wgrad(a, dc, offs)(), grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


def test_operands_that_tma_cannot_read_have_a_reason(make_operands):
    a, dc, offs = make_operands((21, 40), 45, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="cannot run"):
        wgrad.prepare_wgrad(a, dc, offs, config=LOCKSTEP)


@pytest.mark.parametrize(
    ("M", "G", "expected"),
    [
        (65536, 8, cluster_tiles.LONGEST),
        (65536, 128, cluster_tiles.NARROW),
    ],
    ids=["many_rows", "few_rows"],
)
def test_an_untuned_problem_takes_a_default_cluster(M, G, expected):
    untuned = replace(KNOWN["sm_90"], name="untuned")
    assert cluster_wgrad.choose_config(M, G, 4096, 7168, torch.bfloat16, untuned, nk=True) == expected


@pytest.mark.parametrize("config", cluster_wgrad.candidates(), ids=str)
def test_every_candidate_of_clusters_is_legal(config):
    assert cluster_wgrad.illegal(config, torch.bfloat16, KNOWN["sm_90"]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_clusters_need_a_gpu(make_operands):
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        cluster_wgrad.prepare_cluster_wgrad(*make_operands((21, 40), 48, 64, dtype=torch.float16))


COMPILED = [*cluster_tiles.TILES, replace(cluster_tiles.NARROW, from_end=1)]


@needs_nvrtc
@pytest.mark.parametrize("of", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize(
    "config",
    # test_cluster.py compiles the tiles of the others.
    [pytest.param(c, marks=() if c == cluster_tiles.LONG else pytest.mark.exhaustive) for c in COMPILED],
    ids=str,
)
def test_clusters_compile_without_spills(of, config):
    named = cluster_tiles.constants(config, of, False, False, torch.int32)
    _, log = cuda_source.compile_with_log(cluster_tiles.source("cluster_wgrad.cu", config.columns), named, "sm_90a")
    assert " 0 bytes spill stores" in log
    assert "wgmma" not in log  # ptxas warns if it serialises them


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


@needs_hopper
@EVERY
@pytest.mark.parametrize("nk", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "tail"),
    [
        ((0, 300, 0, 129, 1, 128, 64, 193), 704, 1096, 5),  # tiles that end in P, Q and the rows; empty groups
        ((0, 0, 0), 304, 256, 40),
        ((5,) * 200, 264, 136, 0),
        ((9000,), 64, 72, 0),  # one tile; the second group of warps has no rows or a few
        ((2048, 1024), 4096, 4096, 0),  # many waves
        ((1,), 2048, 2048, 3),
    ],
    ids=["ragged", "no_rows", "many_groups", "one_tile", "waves", "one_row"],
)
def test_results(prepare, nk, rows, n, k, tail, make_operands, check_calls):
    a, dc, offs = make_operands(rows, n, k, tail)
    expected = grouped_gemm_wgrad_reference(a, dc, offs)
    check_calls(prepare(a, dc, offs, nk), expected, torch.bfloat16)


@needs_hopper
@KINDS
@pytest.mark.parametrize("where", ["a", "dc"])
def test_nan_stays_in_its_group(prepare, where, make_operands, check):
    a, dc, offs = make_operands((150, 140, 70), 200, 104, dtype=torch.float16)
    expected = grouped_gemm_wgrad_reference(a, dc, offs)
    (a if where == "a" else dc)[150:290] = float("nan")
    out = prepare(a, dc, offs)()
    check(out[[0, 2]], expected[[0, 2]], torch.float16)
    assert out[1].isnan().all()


@needs_hopper
@KINDS
def test_offsets_are_read_on_the_device_at_every_call(prepare, make_operands, poisoned, check):
    a, dc, offs = make_operands((4000, 2400, 3600), 512, 640)
    run = prepare(a, dc, offs)
    for ends in ((4000, 6400, 10000), (0, 0, 10000), (10000, 10000, 10000), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.bfloat16)


@needs_hopper
@KINDS
def test_views_with_wide_rows(prepare, make_operands, check):
    a, dc, offs = make_operands((500, 700), 512, 640)
    wide = torch.full((1200, 1024), float("nan"), dtype=a.dtype, device=a.device)
    wide[:, 64:704] = a
    out = prepare(wide[:, 64:704], dc, offs)()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.bfloat16)


@needs_hopper
def test_every_launch_adds_the_same_to_the_counter(make_operands):
    """Later launches, of the forward kernel too, find their start in the sum of the earlier ones."""
    programs = device_of(torch.device("cuda")).sms
    of_a_launch = ARRIVALS * programs
    counter = arrivals(torch.device("cuda"), programs)
    before = int(counter)
    assert before % of_a_launch == 0
    for count, rows in enumerate(((9000, 0, 31), (5,), (0, 1), (4000,) * 8), 1):
        a, dc, offs = make_operands(rows, 2048, 1024)
        wgrad.prepare_wgrad(a, dc, offs, config=LOCKSTEP)()
        assert int(counter) == before + count * of_a_launch


@needs_hopper
@pytest.mark.parametrize("from_end", [0, 3, 7])
def test_every_launch_of_clusters_leaves_its_counters_at_zero(from_end, make_operands):
    counters = cluster_tiles.launch_counters(torch.device("cuda", torch.cuda.current_device()))
    config = replace(cluster_tiles.NARROW, lockstep=4, from_end=from_end)
    for rows in ((9000, 0, 31), (5,), (0, 0), (100,) * 66, (100,) * 67, (4000,) * 8):
        a, dc, offs = make_operands(rows, 256, 192)
        cluster_wgrad.prepare_cluster_wgrad(a, dc, offs, config=config)()
        assert counters.tolist() == [0, 0]


@needs_hopper
def test_a_graph_follows_later_offsets(make_operands, check):
    a, dc, offs = make_operands((4000, 2400, 3600), 512, 640)
    wgrad.wgrad_launcher(a, dc, offs, config=UNEVEN)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [wgrad.wgrad_launcher(a, dc, offs, config=config)() for config in (LOCKSTEP, UNEVEN, TALLER)]
    for ends in ((4000, 6400, 10000), (0, 9000, 10000)):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        for out in outputs:
            check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.bfloat16)
