"""What the comparison of the split-K rule with its neighbours tries. Timing needs a GPU; the choice does not."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels.split_k import choose_config, illegal
from groupbench.operators.split_k_matmul import SUITES
from groupbench.operators.tune_split_k import neighbours


@pytest.mark.parametrize("shape", SUITES["skinny"] + SUITES["ragged"], ids=str)
def test_neighbours_start_with_the_rule_and_can_run(shape):
    configs = list(neighbours(shape.M, shape.N, shape.K, torch.bfloat16, 132))
    assert configs[0] == choose_config(shape.M, shape.N, shape.K, torch.bfloat16, 132)
    assert len(set(configs)) == len(configs) > 10
    assert all(illegal(config, shape.K, torch.bfloat16) is None for config in configs)
