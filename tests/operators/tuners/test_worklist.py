"""The worklist tuner reads configs from a file. The parts that all tuners share are tested in test_tuning.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest

from groupbench.kernels.grouped_gemm.helion_worklist import CONFIGS
from groupbench.operators.tuners import worklist


def test_configs_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps([dataclasses.asdict(CONFIGS["large"])]))
    assert worklist.read_configs(path) == [CONFIGS["large"]]
    path.write_text('[{"block_q": 1}]')
    with pytest.raises(click.BadParameter, match="block_q"):
        worklist.read_configs(path)
