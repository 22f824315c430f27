"""`groupbench tune`: each kernel from its shapes to the user's file. A simulated clock replaces the GPU."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helion
import pytest
import torch
from click.testing import CliRunner

from groupbench.kernels.device import device_of
from groupbench.kernels.grouped_gemm import flat, tuned
from groupbench.kernels.grouped_gemm.tuned import tuned_configs
from groupbench.operators.tuners import tuning
from groupbench.operators.tuners.__main__ import KERNELS, fields_of, main

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = "NVIDIA H100 80GB HBM3"
GROUPED = "G=3,M_g=5|0|1,N=48,K=64,W=nk"
SHAPES = {
    "flat": GROUPED,
    "cluster": GROUPED,
    "cluster_wgrad": GROUPED,
    "wgrad": GROUPED,
    "fp8": GROUPED,
    "cluster_fp8": GROUPED,
    "worklist": GROUPED,
    "helion_jagged": GROUPED,
    "helion_persistent": GROUPED,
    "helion_wgrad": GROUPED,
    "gate_up": "T=16,k=2,G=4,H=64,F=32",
    "bias_add_permute": "G=3,groups=2x3x8:4x16:64",
    "split_k": "16,64,512",
    "helion_barrier": "16,64,512",
}
INPUTS = (
    *("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad", "grouped_gemm_fp8", "moe_layer", "gemm_shapes"),
    "grouped_gemm_bias_add_permute",
)
WITHOUT_INTERPRETER = {
    "grouped_gemm.cluster": "prepare_cluster",
    "grouped_gemm.cluster_fp8": "prepare_cluster_fp8",
    "grouped_gemm.cluster_wgrad": "prepare_cluster_wgrad",
    "grouped_gemm.helion_worklist": "prepare_helion_worklist",
    "grouped_gemm.helion_jagged": "prepare_helion_jagged",
    "grouped_gemm.helion_persistent": "prepare_helion_persistent",
    "grouped_gemm.helion_wgrad": "prepare_helion_wgrad",
    "split_k.helion_barrier": "prepare_barrier",
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Simulate a GPU that takes 6, 5, 1, 1, 7, 7, ... ms: the default is not the fastest. The folder is `user`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: GPU)
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "user"))
    for name in INPUTS:
        module = importlib.import_module(f"groupbench.operators.catalog.{name}")

        def here(shape: Any, dtype: str, device: str, *seed: int, make: Any = module.make_inputs, **rest: Any) -> Any:
            return make(shape, dtype, DEVICE, *seed, **rest)

        monkeypatch.setattr(module, "make_inputs", here)
    from groupbench.operators.catalog.split_k_matmul import SPLIT_K_MATMUL

    make = SPLIT_K_MATMUL.make_inputs
    on_this_device = SimpleNamespace(make_inputs=lambda shape, dtype, device, seed: make(shape, dtype, DEVICE, seed))
    monkeypatch.setattr("groupbench.operators.tuners.split_k.SPLIT_K_MATMUL", on_this_device)
    for module_name, function in WITHOUT_INTERPRETER.items():  # it would query the GPU, which may be absent
        module = importlib.import_module(f"groupbench.kernels.{module_name}")
        monkeypatch.setattr(module, function, lambda *arguments: lambda: None)
    for module_name in ("cluster", "cluster_wgrad"):
        module = importlib.import_module(f"groupbench.kernels.grouped_gemm.{module_name}")
        monkeypatch.setattr(module, "illegal", lambda *arguments: None)
    times = [6.0, 5.0, 1.0, 1.0]
    monkeypatch.setattr(tuning, "burst_of", lambda run: partial(float, times.pop(0) if times else 7.0))
    return times


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_fastest_config_goes_into_the_users_file(kernel: str, clock: list[float], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [kernel, "--shape", SHAPES[kernel], "--dtype", "fp16"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    (path,) = (tmp_path / "user").iterdir()
    assert path == tuned.user_file(kernel, GPU)
    content = json.loads(path.read_text())
    assert content["gpu"] == GPU
    assert content["measured"].startswith(f"{GPU}, torch {torch.__version__}, triton ")
    key = next(iter(content["configs"]))
    margin = content["margins"][key]
    assert margin["ms"] < margin["default_ms"]
    assert f"{kernel} {key}: " in done.stdout
    assert "faster than the default" in done.stdout
    tuned_configs.cache_clear()
    assert tuned_configs(kernel, GPU)[key] == content["configs"][key]


def test_a_config_that_is_slower_than_the_default_is_not_kept(clock: list[float], tmp_path: Path) -> None:
    clock[:] = [1.0]
    folder = tmp_path / "team"
    done = CliRunner().invoke(main, ["flat", "--shape", GROUPED, "--dtype", "fp16", "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    (path,) = folder.iterdir()
    (config,) = json.loads(path.read_text())["configs"].values()
    default = flat.default_config(6, 3, torch.float16, device_of(torch.device(DEVICE)))
    assert flat.FlatConfig(**config) == default
    assert "0.0% faster" in done.stdout


def test_a_shape_that_fails_does_not_stop_the_others(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: object) -> float:
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(tuning, "burst_of", fail)
    done = CliRunner().invoke(main, ["flat", "--shape", GROUPED, "--shape", "G=1,M_g=9,N=16,K=32", "--dtype", "fp16"])
    assert done.exit_code == 0
    assert done.stderr.count("no config runs") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nope",), "no kernel 'nope'; known: flat, cluster"),
        (("flat", "--suite", "nope"), "no suite 'nope'; known: "),
        (("flat", "--shape", "nope"), "nope"),
        ((), "tuning needs the GPU to tune for; torch does not see one"),
    ],
    ids=["kernel", "suite", "shape", "no_gpu"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_usage_errors_are_one_line(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, options)
    assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_every_kernel_that_reads_configs_can_be_tuned() -> None:
    """Each names its files in a call of one of two functions."""
    reads = re.compile(r'\b(?:configs_in_order|first_that_compiles)\(\s*"(\w+)"')
    folder = Path(tuned.__file__).parents[1]
    names = {name for path in folder.rglob("*.py") for name in reads.findall(path.read_text())}
    assert names == set(KERNELS)


def test_the_list_needs_no_gpu() -> None:
    done = CliRunner().invoke(main, ["--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(KERNELS)


def test_a_helion_config_comes_back_from_json() -> None:
    config = helion.Config(block_sizes=[128, 256, 64], loop_orders=[[1, 0]], num_warps=8, num_stages=3)
    assert helion.Config(**json.loads(json.dumps(fields_of(config)))) == config
