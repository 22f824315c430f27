"""The predicted time of a product and of a gradient, by which an untuned problem takes its config.

h200_tiles.jsonl.gz has the times of every config, in us, for 117 random products and 176 random gradients in bf16 on an
H200 (2026-12-01, driver 580.159.04, torch 2.11.0, Triton 3.6.0): the median of seven calls in turns, L2 flushed.
"""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import choose, cluster, cluster_wgrad, flat, wgrad
from groupbench.kernels.grouped_gemm.cluster_tiles import LONG, LONGEST, NARROW, SHORT
from groupbench.kernels.grouped_gemm.predict import Tile, gradient_us, product_us, tiles_of_rows

H200 = replace(KNOWN["sm_90"], name="NVIDIA H200 without tuned configs", gb_per_s=4800)
BF16 = torch.bfloat16
CLUSTERS = {LONG: "cluster_long", LONGEST: "cluster_longest", SHORT: "cluster_short", NARROW: "cluster_narrow"}
TILES = Path(__file__).parents[1] / "data/h200_tiles.jsonl.gz"
MEASURED = [json.loads(line) for line in gzip.decompress(TILES.read_bytes()).splitlines()]
sizes = st.integers(1, 1 << 14)
tiles = st.builds(
    Tile,
    rows=st.sampled_from([64, 128, 256]),
    columns=st.sampled_from([64, 128, 256]),
    per_sm=st.sampled_from([0.5, 1.0, 2.0]),
    start_us=st.just(7.0),
    rest_us=st.just(1.0),
)


@given(tiles, sizes, st.integers(1, 64), sizes, sizes)
def test_a_larger_problem_never_takes_less_time(tile: Tile, M: int, G: int, N: int, K: int) -> None:
    for us, sizes in ((product_us, (N, K)), (gradient_us, (N, K))):
        time = us(tile, M, G, *sizes, H200)
        assert time > tile.start_us
        assert us(tile, M, G, 2 * N, K, H200) >= time
        assert us(tile, M, G, N, 2 * K, H200) >= time
        assert us(tile, 4 * M, G, N, K, H200) >= time


@given(sizes, st.integers(1, 64), st.sampled_from([16, 64, 128, 256]))
def test_groups_have_at_least_as_many_tiles_as_their_rows_fill(M: int, G: int, rows: int) -> None:
    assert tiles_of_rows(M, G, rows) >= max(G, M / rows * (1 - 1e-9))


def test_a_faster_memory_helps_what_it_limits() -> None:
    few_rows = [product_us(Tile(64, 128, 1, 6.4, 2.2), 64, 8, 4096, 7168, gpu) for gpu in (KNOWN["sm_90"], H200)]
    many_rows = [product_us(Tile(128, 256, 1, 6.4, 1.5), 65536, 8, 4096, 7168, gpu) for gpu in (KNOWN["sm_90"], H200)]
    assert few_rows[0] > 1.3 * few_rows[1]
    assert many_rows[0] < 1.1 * many_rows[1]


@pytest.mark.parametrize(
    ("kernel", "table", "of_flat", "of_cluster", "mean"),
    [("product", choose.PRODUCT, flat, cluster, 1.035), ("gradient", choose.GRADIENT, wgrad, cluster_wgrad, 1.025)],
)
def test_the_config_taken_is_nearly_the_fastest_measured(
    kernel: str, table: str, of_flat: Any, of_cluster: Any, mean: float
) -> None:
    ratios = []
    for row in MEASURED:
        problem = (row["M"], row["G"], row["N"], row["K"])
        module = of_flat if choose.choose(*problem, BF16, row["nk"], H200, table) == choose.FLAT else of_cluster
        config = module.choose_config(*problem, BF16, H200, nk=row["nk"])
        names = {config: name for name, config in flat.CONFIGS.items()} | CLUSTERS
        names |= {config: name for name, config in wgrad.CONFIGS.items()}
        if row["kernel"] == kernel and names[config] in row["us"]:
            ratios.append(row["us"][names[config]] / min(row["us"].values()))
    assert len(ratios) >= 110
    assert statistics.geometric_mean(ratios) < mean
    assert max(ratios) < 1.35
