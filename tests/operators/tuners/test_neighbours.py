"""Configs that tuning tries around a default. Only timing needs a GPU."""

from __future__ import annotations

import helion
import pytest
import torch

from groupbench.kernels.device import KNOWN
from groupbench.kernels.split_k.tiled import choose_config, illegal
from groupbench.operators.catalog.split_k_matmul import SUITES
from groupbench.operators.tuners.neighbours import MOST_TRIED, around_rule, helion_grid, helion_splits, split_k


@pytest.mark.parametrize("shape", SUITES["skinny"] + SUITES["ragged"], ids=str)
def test_neighbours_start_with_the_rule_and_can_run(shape):
    configs = list(around_rule(shape.M, shape.N, shape.K, torch.bfloat16, 132))
    assert configs[0] == choose_config(shape.M, shape.N, shape.K, torch.bfloat16, 132)
    assert len(set(configs)) == len(configs) > 10
    assert all(illegal(config, shape.K, torch.bfloat16) is None for config in configs)
    tried = split_k(shape.M, shape.N, shape.K, torch.bfloat16, KNOWN["sm_90"])
    assert 1 <= len(tried) <= MOST_TRIED
    assert set(tried) <= set(configs)


def test_helions_grid_keeps_the_other_settings():
    default = helion.Config(block_sizes=[8, 8, 8], l2_groupings=[4], num_warps=1, num_stages=1)
    grid = list(helion_grid(default, (1, 0, 2)))
    assert len(grid) == 42
    assert {tuple(config.config["l2_groupings"]) for config in grid} == {(4,)}
    assert grid[0].block_sizes == [256, 128, 32]
    assert {config.num_warps for config in grid if config.block_sizes[:2] == [256, 128]} == {8}


def test_helions_splits_end_where_k_does():
    default = helion.Config(block_sizes=[16, 64, 128, 1, 1], split_k=2)
    assert [config.config["split_k"] for config in helion_splits(default, 1000)] == [1, 2, 4]
