"""Tuned configs: which file serves which GPU, which problem its key names, and who asks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from groupbench.kernels.grouped_gemm import tuned, wgrad


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes configs/NAME.json for the length of a test, in place of what ships."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(tuned, "__file__", str(tmp_path / "tuned.py"))
    tuned.tuned_configs.cache_clear()
    yield lambda name, configs: (tmp_path / f"configs/{name}.json").write_text(json.dumps({"configs": configs}))
    tuned.tuned_configs.cache_clear()


def test_a_file_serves_gpus_of_its_family_and_its_kernel(write):
    write("flat_h100", {"k": {"block_m": 1}})
    write("fp8_h100", {"k": {"block_m": 2}})
    assert tuned.tuned_configs("flat", "NVIDIA H100 80GB HBM3") == {"k": {"block_m": 1}}
    assert tuned.tuned_configs("fp8", "NVIDIA H100 PCIe") == {"k": {"block_m": 2}}
    assert tuned.tuned_configs("wgrad", "NVIDIA H100") == {}
    assert tuned.tuned_configs("flat", "NVIDIA A100") == {}


def test_an_h200_takes_what_was_tuned_on_an_h100_until_it_has_its_own(write):
    write("flat_h100", {"k": {"block_m": 1}})
    assert tuned.tuned_configs("flat", "NVIDIA H200") == {"k": {"block_m": 1}}
    assert tuned.tuned_configs("flat", "NVIDIA GH200 480GB") == {"k": {"block_m": 1}}
    assert tuned.tuned_configs("flat", "NVIDIA B200") == {}
    write("flat_h200", {"k": {"block_m": 2}})
    tuned.tuned_configs.cache_clear()
    assert tuned.tuned_configs("flat", "NVIDIA H200") == {"k": {"block_m": 2}}
    assert tuned.tuned_configs("flat", "NVIDIA H100 PCIe") == {"k": {"block_m": 1}}


@pytest.mark.parametrize(
    ("gpu", "M", "found"),
    [("NVIDIA H100 80GB HBM3", 4000, True), ("NVIDIA H100", 5000, False), ("A100", 4000, False)],
    ids=["same_power_of_two", "more_rows", "other_gpu"],
)
def test_a_config_is_found_by_gpu_and_problem(gpu, M, found, write, monkeypatch):
    config = replace(wgrad.CONFIGS["large"], group_p=3)
    write("wgrad_h100", {tuned.tuning_key(3000, 8, 256, 512, torch.bfloat16, nk=True): config.__dict__})
    monkeypatch.setattr(wgrad, "worker_count", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    chosen = wgrad.choose_config(M, 8, 256, 512, torch.bfloat16, torch.device("cuda"), nk=True)
    assert (chosen == config) == found


def test_what_tells_problems_apart():
    key = tuned.tuning_key(3000, 8, 256, 512, torch.bfloat16, nk=True)
    assert key == "G=8,M<=4096,N=256,K=512,bfloat16,nk"
    assert tuned.tuning_key(3000, 8, 256, 512, torch.float16, nk=False) == "G=8,M<=4096,N=256,K=512,float16,kn"
    assert tuned.problem_key(4097, 8, 256, 512, "rowwise") == "G=8,M<=8192,N=256,K=512,rowwise"
