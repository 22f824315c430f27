"""The configs that the comparison of the split-K rule with its neighbours tries. Only timing needs a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.split_k.stream import choose_stream, illegal_stream
from groupbench.kernels.split_k.tiled import choose_config, illegal
from groupbench.operators.catalog.split_k_matmul import SUITES
from groupbench.operators.tuners.split_k import evenly, main, neighbours, stream_neighbours


@pytest.mark.parametrize("shape", SUITES["skinny"] + SUITES["ragged"], ids=str)
def test_neighbours_start_with_the_rule_and_can_run(shape):
    configs = list(neighbours(shape.M, shape.N, shape.K, torch.bfloat16, 132))
    assert configs[0] == choose_config(shape.M, shape.N, shape.K, torch.bfloat16, 132)
    assert len(set(configs)) == len(configs) > 10
    assert all(illegal(config, shape.K, torch.bfloat16) is None for config in configs)


@pytest.mark.parametrize("shape", [shape for shape in SUITES["skinny"] if shape.M <= 16], ids=str)
def test_stream_neighbours_start_with_the_rule_and_can_run(shape):
    configs = list(stream_neighbours(shape.M, shape.N, shape.K, 132))
    assert configs[0] == choose_stream(shape.M, shape.N, shape.K, 132)
    assert len(set(configs)) == len(configs) > 10
    assert all(illegal_stream(config, shape.K) is None for config in configs)


@given(st.integers(1, 500), st.integers(1, 500))
def test_no_more_configs_than_asked_for_and_the_rule_first(number: int, most: int) -> None:
    chosen = evenly(list(range(number)), most)
    assert chosen[0] == 0
    assert len(chosen) <= most
    assert len(chosen) == number or 2 * len(chosen) > min(most, number)
    assert len({b - a for a, b in itertools.pairwise(chosen)}) <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "tuning needs the GPU to tune for"),
        (("--configs", "3", "--suite", "smoke", "--dtype", "fp32"), "tuning needs the GPU to tune for"),
        (("--dtype", "foo"), "'foo' is not one of 'bf16', 'fp16', 'fp32'"),
        (("--suite", "foo"), "'foo' is not one of 'skinny'"),
        (("--shape", "16,16,0"), "K=0 is out of range: 1 to"),
        (("--limit", "60"), "No such option"),  # an option of the other tuners, in seconds
    ],
)
def test_usage_errors(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, options)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
