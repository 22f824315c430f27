"""Test the CUDA C++ kernel for fp8 with clusters of two SMs: which operands it takes and, on Hopper, its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_operands import FIVE, drawn

from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.grouped_gemm import cluster, cluster_fp8, cluster_tiles
from groupbench.kernels.grouped_gemm.fp8 import CONFIGS, ROWWISE_FAST, grouped_gemm_fp8_reference, prepare_fp8
from groupbench.kernels.grouped_gemm.quantize import E4M3

HOPPER = torch.cuda.is_available() and device_of(torch.device("cuda")).hopper
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the fp8 kernel with clusters. No Hopper GPU")
H100 = KNOWN["sm_90"]


def operands(sizes: tuple[int, ...], n: int, k: int, tail: int = 0) -> FIVE:
    return drawn(sizes, n, k, ROWWISE_FAST, tail, "cuda")


# --- when it runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", cluster_tiles.candidates(), ids=str)
def test_every_candidate_is_legal(config):
    assert cluster.illegal(config, E4M3, H100) is None


@pytest.mark.parametrize(
    ("M", "G", "K", "expected"),
    [
        (32768, 8, 16384, cluster_tiles.LONGEST),
        (32768, 8, 7168, cluster_tiles.SHORT),
        (64, 8, 7168, cluster_tiles.LONG),
    ],
    ids=["long", "short", "few_rows"],
)
def test_an_untuned_problem_takes_a_default(M, G, K, expected):
    assert cluster_fp8.choose_config(M, G, 4096, K, replace(H100, name="untuned")) == expected


@pytest.mark.parametrize(
    ("of", "G", "N", "text"),
    [(torch.bfloat16, 2, 64, "not torch.bfloat16"), (E4M3, 257, 64, "257 groups"), (E4M3, 2, 64, "")],
)
def test_operands_that_it_cannot_take_have_a_reason(of, G, N, text):
    a, b = torch.zeros(8, 64).to(of), torch.zeros(1, N, 64).to(of).expand(G, -1, -1)
    assert text in str(cluster_fp8.why_not_cluster_fp8(a, b))


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize(
    ("sizes", "n", "k", "tail"),
    [
        ((0, 300, 0, 129, 1, 128, 64, 193, 257, 65), 712, 1100, 5),  # tiles that end in M, N and K
        ((0, 0, 0), 304, 256, 40),
        ((5,) * 200, 264, 128, 0),
        ((30_000,), 136, 45, 0),  # many tiles of one step
        ((256 * 20,), 256, 4096, 0),
        ((256 * 33 + 140,), 512, 192, 3),  # a last wave of two tiles, cut
    ],
    ids=["ragged", "no_rows", "many_groups", "one_step", "even", "cut_wave"],
)
def test_results(sizes, n, k, tail, check_calls):
    x = operands(sizes, n, k, tail)
    expected = grouped_gemm_fp8_reference(*x)
    of_flat = prepare_fp8(*x, fast_accum=True, config=CONFIGS[ROWWISE_FAST]["plain"])()
    for config in (*cluster_tiles.TILES, replace(cluster_tiles.SHORT, lockstep=4, group_m=2)):
        run = cluster_fp8.prepare_cluster_fp8(*x, config)
        check_calls(run, expected, torch.bfloat16)
        assert torch.equal(run(), of_flat)


@needs_hopper
@pytest.mark.parametrize("config", cluster_tiles.TILES, ids=str)
def test_each_expert_has_its_own_scales_and_weights(config, check):
    """NaN in the next expert's scales must not leak through tiles that overhang in M, N and K."""
    a, scale_a, b, scale_b, offs = operands((150, 140), 200, 300)
    expected = grouped_gemm_fp8_reference(a, scale_a, b, scale_b, offs)
    scale_a[150:] = float("nan")
    scale_b[1] = float("nan")
    out = cluster_fp8.prepare_cluster_fp8(a, scale_a, b, scale_b, offs, config)()
    check(out[:150], expected[:150], torch.bfloat16)
    assert out[150:].isnan().all()


@needs_hopper
def test_offsets_are_read_on_the_device_at_every_call(poisoned, check):
    *x, offs = operands((4000, 2400, 3600), 512, 640)
    run = cluster_fp8.prepare_cluster_fp8(*x, offs)
    for ends in ((4000, 6400, 10000), (0, 0, 10000), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out, grouped_gemm_fp8_reference(*x, offs), torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("config", cluster_tiles.TILES, ids=str)
def test_groups_of_warps_without_rows_wait_for_late_warps(config):
    """Many tiles of few steps leave warps without products. If those give a stage back too early, a launch hangs."""
    x = operands((50, 300, 70, 500) * 32, 520, 768)
    run = cluster_fp8.prepare_cluster_fp8(*x, config)
    first = run()
    for _ in range(200):
        out = run()
    assert torch.equal(out, first)


@needs_hopper
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 45}, "not a multiple of 16 bytes"),
        ({"config": replace(cluster_tiles.LONG, stages=9)}, "9 stages"),
        ({"scale": "few"}, "neither rowwise"),
    ],
    ids=["odd_columns", "illegal_config", "too_few_scales"],
)
def test_refuses(change, message):
    a, scale_a, b, scale_b, offs = operands((21, 40), change.get("n", 48), 272)
    scale_a = scale_a[:-1] if "scale" in change else scale_a
    with pytest.raises(ValueError, match=message):
        cluster_fp8.prepare_cluster_fp8(a, scale_a, b, scale_b, offs, change.get("config"))
