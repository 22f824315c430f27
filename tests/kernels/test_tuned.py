"""Test tuned configs: the file of a GPU, the key of a problem, and the search on request."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from grouped import Case, products

from groupbench.kernels.device import INTERPRETER, KNOWN
from groupbench.kernels.grouped_gemm import flat, tuned, wgrad
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes configs/NAME.json, which replaces the shipped files during a test."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "user"))
    monkeypatch.setattr(tuned, "__file__", str(tmp_path / "tuned.py"))
    tuned.tuned_configs.cache_clear()
    yield lambda name, configs: (tmp_path / f"configs/{name}.json").write_text(json.dumps({"configs": configs}))
    tuned.tuned_configs.cache_clear()


FIELDS = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}


def test_a_file_serves_gpus_of_its_family_and_its_kernel(write):
    write("flat_h100", {"k": {"block_m": 1}})
    write("fp8_h100", {"k": {"block_m": 2}})
    assert tuned.tuned_configs("flat", "NVIDIA H100 80GB HBM3") == {"k": {"block_m": 1}}
    assert tuned.tuned_configs("fp8", "NVIDIA H100 PCIe") == {"k": {"block_m": 2}}
    assert tuned.tuned_configs("wgrad", "NVIDIA H100") == {}
    assert tuned.tuned_configs("flat", "NVIDIA A100") == {}


def test_an_h200_and_an_h100_have_their_own_configs_before_the_others(write):
    write("flat_h100", {"k": {"block_m": 1}, "of_h100": {"block_m": 3}})
    assert tuned.tuned_configs("flat", "NVIDIA H200")["k"] == {"block_m": 1}
    assert tuned.tuned_configs("flat", "NVIDIA GH200 480GB")["k"] == {"block_m": 1}
    assert tuned.tuned_configs("flat", "NVIDIA B200") == {}
    write("flat_h200", {"k": {"block_m": 2}, "of_h200": {"block_m": 4}})
    tuned.tuned_configs.cache_clear()
    others = {"of_h100": {"block_m": 3}, "of_h200": {"block_m": 4}}
    assert tuned.tuned_configs("flat", "NVIDIA H200") == {"k": {"block_m": 2}, **others}
    assert tuned.tuned_configs("flat", "NVIDIA H100 PCIe") == {"k": {"block_m": 1}, **others}


@pytest.mark.parametrize(
    ("gpu", "M", "matches"),
    [("NVIDIA H100 80GB HBM3", 4000, True), ("NVIDIA H100", 5000, False), ("A100", 4000, False)],
    ids=["same_power_of_two", "more_rows", "other_gpu"],
)
def test_a_config_is_found_by_gpu_and_problem(gpu, M, matches, write):
    config = replace(wgrad.CONFIGS["large"], group_p=3)
    write("wgrad_h100", {tuned.tuning_key(3000, 8, 256, 512, torch.bfloat16, nk=True): config.__dict__})
    chosen = wgrad.choose_config(M, 8, 256, 512, torch.bfloat16, replace(KNOWN["sm_90"], name=gpu), nk=True)
    assert (chosen == config) == matches


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"rows": 128}, "TypeError: "), ({**FIELDS, "block_m": "128"}, "TypeError: ")],
    ids=["other_version", "edited"],
)
def test_a_config_that_cannot_be_read_is_passed_over(fields, reason, write):
    write("flat_h100", {"k": fields})
    default = flat.FlatConfig(**FIELDS)
    (name, config, why), last = tuned.configs_in_order(
        "flat", "k", KNOWN["sm_90"], default, lambda c: flat.illegal(c, torch.bfloat16)
    )
    assert (name, config) == ("tuned", default)
    assert why.startswith(f"its file does not fit this version: {reason}")
    assert last == ("default", default, None)


def test_keys_distinguish_problems():
    key = tuned.tuning_key(3000, 8, 256, 512, torch.bfloat16, nk=True)
    assert key == "G=8,M<=4096,N=256,K=512,bfloat16,nk"
    assert tuned.tuning_key(3000, 8, 256, 512, torch.float16, nk=False) == "G=8,M<=4096,N=256,K=512,float16,kn"
    assert tuned.problem_key(4097, 8, 256, 512, "rowwise") == "G=8,M<=8192,N=256,K=512,rowwise"


# --- tuning while a problem is prepared -------------------------------------------------------------------------------


@pytest.fixture
def searching(tmp_path, monkeypatch):
    """Search as on a GPU on which each tile width takes the milliseconds in `times`; `tried` lists the calls."""
    times = {16: 2.0, 32: 1.0, 64: 3.0}
    tried = []

    def prepare(config):
        def run():
            tried.append(config.block_n)
            if config.block_n not in times:
                raise RuntimeError("does not compile")

        run.config = config
        return run

    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setattr(tuned, "milliseconds", lambda run: times[run.config.block_n])
    candidates = [flat.FlatConfig(32, n, 32, 4, 1) for n in (16, 32, 64, 128)]
    search = partial(tuned.tune_here, "flat", device=KNOWN["sm_90"], candidates=candidates, prepare=prepare)
    return SimpleNamespace(times=times, tried=tried, search=search, folder=tmp_path / "kept")


def test_the_fastest_that_runs_is_kept(searching):
    assert searching.search(key="a").block_n == 32
    assert searching.tried == [16, 32, 64, 128]
    searching.times[64] = 0.5
    assert searching.search(key="a").block_n == 32  # from the file
    assert searching.tried == [16, 32, 64, 128]
    assert searching.search(key="b").block_n == 64
    assert searching.search(key="a").block_n == 32
    (file,) = searching.folder.iterdir()
    assert file.name == f"flat_nvidia-h100-80gb-hbm3_triton-{triton.__version__}.json"
    assert set(json.loads(file.read_text())["configs"]) == {"a", "b"}


@pytest.mark.parametrize("damage", ["{", "[]", '{"a": {"block_m": 1}}'], ids=["cut", "list", "other fields"])
def test_a_damaged_file_is_searched_again(searching, damage):
    searching.search(key="a")
    (file,) = searching.folder.iterdir()
    file.write_text(damage)
    assert searching.search(key="a").block_n == 32
    assert json.loads(file.read_text())["configs"]["a"]["block_n"] == 32


def test_returns_none_if_no_candidate_runs(searching):
    searching.times.clear()
    assert searching.search(key="a") is None
    assert not searching.folder.exists()


def test_searches_only_on_request_and_for_new_problems(write, monkeypatch, check):
    a, b, offs = products(Case((21, 40)))
    monkeypatch.setattr(flat, "device_of", lambda device: replace(INTERPRETER, name="NVIDIA H100"))
    searched = []

    def search(kernel, key, device, candidates, prepare):
        searched.append(key)
        check(prepare(flat.CONFIGS["cpu"])(), grouped_gemm_reference(a, b, offs), torch.float16)
        return flat.CONFIGS["cpu"]

    monkeypatch.setattr(flat, "tune_here", search)
    flat.prepare_flat(a, b, offs)
    assert not searched
    monkeypatch.setattr(flat, "tunes_here", lambda device: True)
    flat.prepare_flat(a, b, offs, flat.CONFIGS["cpu"])
    assert not searched
    check(flat.prepare_flat(a, b, offs)(), grouped_gemm_reference(a, b, offs), torch.float16)
    assert searched == ["G=2,M<=64,N=48,K=64,float16,kn"]
    write("flat_h100", {searched.pop(): vars(flat.CONFIGS["cpu"])})
    tuned.tuned_configs.cache_clear()
    flat.prepare_flat(a, b, offs)
    assert not searched


def test_searches_only_on_a_gpu(monkeypatch):
    monkeypatch.setenv(tuned.TUNE, "1")
    assert not tuned.tunes_here(torch.device("cpu"))
