"""The tuner's own: which problems, which configs, and a refusal without a GPU. What it times needs one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from groupbench.kernels.grouped_gemm.helion_worklist import CONFIGS
from groupbench.operators import tune_worklist
from groupbench.operators.shapes import SUITES


def test_problems_are_those_named_or_else_of_suites_and_each_once() -> None:
    named = tune_worklist.chosen_shapes(("moe",), ("n1024", "G=4,M_g=1024,N=1024,K=1024,B=shared"))
    assert named == [SUITES["tritonbench"]["n1024"]]
    assert len(tune_worklist.chosen_shapes(("tritonbench", "moe"), ())) == 27
    with pytest.raises(click.BadParameter, match="nope"):
        tune_worklist.chosen_shapes((), ("nope",))


def test_configs_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps([dataclasses.asdict(CONFIGS["large"])]))
    assert tune_worklist.read_configs(path) == [CONFIGS["large"]]
    path.write_text('[{"block_q": 1}]')
    with pytest.raises(click.BadParameter, match="block_q"):
        tune_worklist.read_configs(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    done = CliRunner().invoke(tune_worklist.main, ["-o", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert "GPU" in done.output
    assert not (tmp_path / "x.json").exists()
