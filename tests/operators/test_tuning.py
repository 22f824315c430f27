"""The file that tuners write. What they time needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from groupbench.operators import tuning


def test_a_file_is_read_back_and_has_a_config_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    path = tmp_path / "flat_h100.json"
    assert tuning.read_tuned(path) == {}
    configs = {"G=4": {"block_m": 64, "helion": [["num_warps", 4]]}, "G=8": {"block_m": 128}}
    tuning.write_tuned(path, "what it's of", configs, "click")
    assert tuning.read_tuned(path) == configs
    text = path.read_text()
    assert '\n  "G=8": {"block_m": 128}\n' in text
    written = json.loads(text)
    assert written["about"] == "what it's of"
    assert written["measured"].startswith(f"NVIDIA H100, torch {torch.__version__}, triton ")
    assert ", click " in written["measured"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    path = tmp_path / "flat_h100.json"
    tuning.write_tuned(path, "x", {"G=4": {"block_m": 64}})
    with pytest.raises(TypeError):
        tuning.write_tuned(path, "x", {"G=4": {"block_m": object()}})
    assert tuning.read_tuned(path) == {"G=4": {"block_m": 64}}
