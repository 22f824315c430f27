"""`groupbench tune`: each kernel from its shapes to the user's file. A simulated clock replaces the GPU."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import helion
import pytest
import torch
from click.testing import CliRunner

from groupbench.kernels.device import device_of
from groupbench.kernels.grouped_gemm import flat, tuned
from groupbench.kernels.grouped_gemm.tuned import tuned_configs
from groupbench.operators.catalog.shapes import parse
from groupbench.operators.registry import get_operator
from groupbench.operators.tuners import kernels, tuning
from groupbench.operators.tuners.cli import fields_of, main, shapes_of
from groupbench.operators.tuners.kernels import KERNELS

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
    "w4": "G=3,M_g=5|0|1,N=48,K=64,fmt=mxfp4",
    "w4_hopper": "G=3,M_g=5|0|1,N=48,K=64,fmt=mxfp4",
    "worklist": GROUPED,
    "helion_jagged": GROUPED,
    "helion_persistent": GROUPED,
    "helion_wgrad": GROUPED,
    "mnk_helion": "groups=5x64x48|1x32x16",
    "cluster_mnk": "groups=5x64x48|1x32x16",
    "gate_up": "T=16,k=2,G=4,H=64,F=32",
    "bias_add_permute": "G=3,groups=2x3x8:4x16:64",
    "split_k": "16,64,512",
    "helion_barrier": "16,64,512",
}
WITHOUT_INTERPRETER = {
    "four_bit.hopper": "bind_hopper",
    "grouped_gemm.cluster": "prepare_cluster",
    "grouped_gemm.cluster_fp8": "prepare_cluster_fp8",
    "grouped_gemm.cluster_wgrad": "prepare_cluster_wgrad",
    "grouped_gemm.helion_worklist": "prepare_helion_worklist",
    "grouped_gemm.helion_jagged": "prepare_helion_jagged",
    "grouped_gemm.helion_persistent": "prepare_helion_persistent",
    "grouped_gemm.helion_wgrad": "prepare_helion_wgrad",
    "grouped_gemm.mnk_helion": "prepare_mnk_helion",
    "grouped_gemm.mnk_cluster": "prepare_mnk_cluster",
    "split_k.helion_barrier": "prepare_barrier",
}


def draw_here(operator: str, shape: Any, dtype: str) -> Any:
    drawn = get_operator(operator)
    return drawn.make_inputs(shape, dtype if dtype in drawn.dtypes else drawn.dtypes[0], DEVICE, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Simulate a GPU that takes 6, 5, 1, 1, 7, 7, ... ms: the default is not the fastest. The folder is `user`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: GPU)
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "user"))
    monkeypatch.setattr(kernels, "draw", draw_here)
    monkeypatch.setattr("groupbench.operators.tuners.cli.by_helion", lambda *arguments: None)
    for module_name, function in WITHOUT_INTERPRETER.items():  # it would query the GPU, which may be absent
        module = importlib.import_module(f"groupbench.kernels.{module_name}")
        monkeypatch.setattr(module, function, lambda *arguments: lambda: None)
    hopper = (
        "four_bit.hopper_config",
        *(f"grouped_gemm.{name}" for name in ("cluster", "cluster_fp8", "cluster_wgrad", "mnk_cluster")),
    )
    for module_name in hopper:
        module = importlib.import_module(f"groupbench.kernels.{module_name}")
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


def test_a_shipped_file_keeps_other_problems_and_lists_times(clock: list[float], tmp_path: Path) -> None:
    path = tmp_path / "flat_h100.json"
    path.write_text('{"about": "x", "configs": {"other": {"block_m": 64}}}')
    options = ["flat", "--shape", GROUPED, "--dtype", "fp16", "-o", str(path), "--dgrad", "--times"]
    done = CliRunner().invoke(main, options)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert list(tuned.read_configs(path)) == ["other", "G=3,M<=8,N=64,K=48,float16,kn"]
    assert '\n  "other": {"block_m": 64},\n' in path.read_text()
    assert done.stdout.startswith("  1.0000 ms block_m=")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_gradient_of_the_rows_is_a_product_with_the_other_layout() -> None:
    texts = ("G=2,M=8,N=48,K=64,W=nk", "G=2,M=8,N=48,K=64", "G=2,M_g=4,N=48,K=64,B=shared")
    turned = shapes_of(KERNELS["flat"], (), texts, dgrad=True).values()
    assert [(s.N, s.K, s.nk, s.shared) for s in turned] == [(64, 48, nk, False) for nk in (False, True, True)]


def test_a_shape_is_tuned_once_under_two_names() -> None:
    text = "G=4,M_g=1024,N=1024,K=1024,B=shared"
    assert shapes_of(KERNELS["flat"], (), ("n1024", text)) == {text: parse("n1024")}


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
        (("bias_add_permute", "--shape", "G=1"), "missing groups"),
        (("-o", "x.json"), "-o needs one KERNEL"),
        (("wgrad", "--dgrad"), "--dgrad needs a KERNEL of grouped_gemm"),
        ((), "tuning needs the GPU to tune for; torch does not see one"),
    ],
    ids=["kernel", "suite", "shape", "fused_shape", "output", "dgrad", "no_gpu"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_usage_errors_are_one_line(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, options)
    assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_every_kernel_that_reads_configs_can_be_tuned() -> None:
    """Each names its files in a call of one of three functions."""
    reads = re.compile(r'\b(?:configs_in_order|first_that_compiles|prepare_forward)\(\s*"(\w+)"')
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


def test_helions_own_autotuner_adds_a_config(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is asked for the kernel's default within the budget, and its config is timed with the others."""
    asked: list[tuple[Any, float]] = []
    searched = helion.Config(block_sizes=[256, 64, 32], num_warps=8, num_stages=2, l2_groupings=[4])

    def search(default: Any, prepare: Any, budget_s: float) -> Any:
        asked.append((default, budget_s))
        clock[:] = [7.0] * 42 + [1.0, 1.0, 1.0, 1.0]
        return searched

    monkeypatch.setattr("groupbench.operators.tuners.cli.by_helion", search)
    options = ["helion_jagged", "--shape", GROUPED, "--dtype", "fp16", "--helion-budget", "7s"]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    assert [budget for _, budget in asked] == [7.0]
    assert asked[0][0].block_sizes
    assert CliRunner().invoke(main, [*options[:-1], "0"]).exit_code == 0
    assert len(asked) == 1


def test_kernels_are_collected_for_the_autotuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is compiled last is searched, with the arguments that it was bound to."""
    from helion.runtime.kernel import BoundKernel

    from groupbench.kernels.attention import helion_softmax
    from groupbench.operators.tuners.autotuner import by_helion

    x = torch.ones(4, 8, dtype=torch.float16, device=DEVICE)
    default, seen = helion_softmax.default_config(8), []

    def autotune(bound: Any, arguments: Any) -> Any:
        seen.append((arguments[0] is x, bound.settings.autotune_budget_seconds, bound.settings.autotune_seed_configs))
        return default

    monkeypatch.setattr(BoundKernel, "autotune", autotune)
    assert by_helion(default, lambda config: helion_softmax.prepare_softmax_helion(x, config), 2.5) is default
    assert seen == [(True, 3, [default])]
    assert helion_softmax.softmax.settings.autotune_seed_configs is None
