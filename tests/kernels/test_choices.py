"""Which config or kernel an untuned problem takes, by an expert's mean rows and the number of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import choose, cluster, cluster_tiles, flat, fp8, wgrad
from groupbench.kernels.grouped_gemm.support import fits
from groupbench.kernels.moe import gate_up

BF16 = torch.bfloat16
HOPPER = replace(KNOWN["sm_90"], name="untuned")


@pytest.mark.parametrize(("rows", "most"), [(16, 11), (32, 24), (64, 53), (96, 82), (128, 112)])
def test_a_tile_holds_experts_of_more_rows_than_the_mean(rows: int, most: int) -> None:
    assert fits(most, rows)
    assert not fits(most + 1, rows)


@pytest.mark.parametrize(
    ("mean_rows", "of_flat", "of_gate_up", "of_fp8"),
    [
        (8, "decode", "decode", "decode"),
        (16, "decode_32", "small", "decode"),
        (32, "small", "small", "small"),
        (64, "pair", None, "large"),
        (96, "pair", None, "large"),
        (128, "pair", None, "large"),
    ],
)
def test_no_usual_expert_takes_a_second_tile(mean_rows: int, of_flat: str, of_gate_up: str | None, of_fp8: str) -> None:
    M, G = 64 * mean_rows, 64
    chosen = flat.choose_config(M, G, 4096, 7168, BF16, HOPPER, nk=True)
    assert chosen == flat.CONFIGS[of_flat]
    fused = gate_up.CONFIGS[of_gate_up] if of_gate_up else gate_up.from_flat(flat.default_config(M, G, BF16, HOPPER))
    assert gate_up.choose_config(M, G, 2048, 7168, BF16, HOPPER) == fused
    assert fp8.choose_config(fp8.ROWWISE_FAST, M, G, 4096, 7168, HOPPER) == fp8.CONFIGS[fp8.ROWWISE_FAST][of_fp8]


@pytest.mark.parametrize(("mean_rows", "name"), [(3, "decode"), (4, "large"), (32, "large")])
def test_block_scales_take_the_specialised_kernel_early(mean_rows: int, name: str) -> None:
    chosen = fp8.choose_config(fp8.BLOCKWISE, 64 * mean_rows, 64, 4096, 7168, HOPPER)
    assert chosen == fp8.CONFIGS[fp8.BLOCKWISE][name]


@pytest.mark.parametrize(
    ("M", "G", "N", "kernel"),
    [
        (52 * 128, 128, 1536, choose.FLAT),  # 64 rows hold nearly every expert
        (64 * 128, 128, 1536, choose.FLAT),  # tiles of 128 rows waste fewer of them
        (65536, 128, 1536, choose.CLUSTER),
        (4096, 4, 512, choose.CLUSTER),  # one wave
        (4096, 4, 256, choose.FLAT),  # half of the clusters have no tile
    ],
)
def test_a_product_takes_the_kernel_with_the_shorter_predicted_time(M: int, G: int, N: int, kernel: str) -> None:
    assert choose.choose(M, G, N, 2048, BF16, True, HOPPER) == kernel
    assert choose.choose(M, G, N, 2048, BF16, True, KNOWN["sm_100"]) == choose.FLAT


@pytest.mark.parametrize(
    ("mean_rows", "N", "K", "config"),
    [
        (256, 2880, 2048, cluster_tiles.NARROW),
        (192, 2816, 2048, cluster_tiles.LONG),
        (300, 1536, 2048, cluster_tiles.SHORT),
        (320, 4096, 7168, cluster_tiles.SHORT),
        (4096, 4096, 7168, cluster_tiles.LONGEST),
    ],
)
def test_the_cluster_kernel_takes_the_tile_that_wastes_less(mean_rows: int, N: int, K: int, config: Any) -> None:
    assert cluster.choose_config(64 * mean_rows, 64, N, K, BF16, HOPPER, nk=True) == config


@pytest.mark.parametrize(
    ("mean_rows", "kernel", "name"),
    [(1, choose.FLAT, "sparse"), (8, choose.FLAT, "sparse"), (9, choose.CLUSTER, "short")],
)
def test_gradients_of_mostly_empty_groups_are_written_by_the_flat_kernel(
    mean_rows: int, kernel: str, name: str
) -> None:
    problem = (64 * mean_rows, 64, 4096, 7168)
    assert choose.choose(*problem, BF16, True, HOPPER, choose.GRADIENT) == kernel
    assert wgrad.choose_config(*problem, BF16, HOPPER, nk=True) == wgrad.CONFIGS[name]
