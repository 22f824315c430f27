"""The parts that tuners share, and each tuner from its options to its file. A simulated clock replaces the GPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.grouped_gemm import flat, fp8, helion_worklist, wgrad
from groupbench.kernels.moe import gate_up
from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.shapes import SUITES
from groupbench.operators.tuners import bias_add_permute, tuning, worklist


def test_a_file_is_read_back_and_has_a_config_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H100")
    path = tmp_path / "flat_h100.json"
    assert tuning.read_tuned(path) == {}
    configs = {"G=4": {"block_m": 64, "helion": [["num_warps", 4]]}, "G=8": {"block_m": 128}}
    tuning.write_tuned(path, "the kernel's configs", configs, "click")
    assert tuning.read_tuned(path) == configs
    text = path.read_text()
    assert '\n  "G=8": {"block_m": 128}\n' in text
    written = json.loads(text)
    assert written["about"] == "the kernel's configs"
    assert written["measured"].startswith(f"NVIDIA H100, torch {torch.__version__}, triton ")
    assert ", click " in written["measured"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H100")
    path = tmp_path / "flat_h100.json"
    tuning.write_tuned(path, "x", {"G=4": {"block_m": 64}})
    with pytest.raises(TypeError):
        tuning.write_tuned(path, "x", {"G=4": {"block_m": object()}})
    assert tuning.read_tuned(path) == {"G=4": {"block_m": 64}}


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    rows: int


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H100")


def run(*args: Any, **options: Any) -> Result:
    """`tune` as a command."""
    return CliRunner().invoke(click.Command("tune", callback=lambda: tuning.tune(*args, **options)))


def times_of(problem: int) -> tuple[str, list[tuple[float, Tile]]]:
    """Return the times of a problem; no config runs for problem 0."""
    return f"key{problem}", [(ms, Tile(int(10 * ms))) for ms in (2.0, 1.0, 3.0)][: 3 * problem]


def test_the_fastest_of_each_problem_is_written_and_the_rest_kept(tmp_path: Path, gpu: None) -> None:
    path = tmp_path / "x.json"
    tuning.write_tuned(path, "old", {"key9": {"rows": 9}, "key2": {"rows": 2}})
    done = run(path, "new", {"b": 2, "a": 1}, times_of, rate=lambda problem, ms: f" {problem / ms:g}/s")
    assert (done.exit_code, done.stdout) == (
        0,
        "b\n  1.0000 ms 2/s rows=10\n  2.0000 ms 1/s rows=20\n  3.0000 ms 0.666667/s rows=30\n"
        "a\n  1.0000 ms 1/s rows=10\n  2.0000 ms 0.5/s rows=20\n  3.0000 ms 0.333333/s rows=30\n",
    )
    assert list(tuning.read_tuned(path).items()) == [(f"key{n}", {"rows": 9 if n == 9 else 10}) for n in (9, 2, 1)]
    run(path, "new", {"c": 3}, times_of, sort=True)
    assert list(tuning.read_tuned(path)) == ["key1", "key2", "key3", "key9"]
    run(path, "new", {"c": 3}, times_of, keep=False)
    assert list(tuning.read_tuned(path)) == ["key3"]


def test_a_problem_of_which_nothing_runs_fails_after_the_others(tmp_path: Path, gpu: None) -> None:
    done = run(tmp_path / "x.json", "x", {"none": 0, "a": 1}, times_of)
    assert (done.exit_code, done.stderr) == (1, "Error: no config runs for none\n")
    assert tuning.read_tuned(tmp_path / "x.json") == {"key1": {"rows": 10}}


def test_when_the_time_is_up_no_problem_is_begun(tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0, 10.5])
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))
    done = run(tmp_path / "x.json", "x", {"a": 1, "b": 2, "c": 3, "d": 4}, times_of, limit_s=10)
    assert (done.exit_code, done.stderr) == (0, "time is up: 2 problems left\n")
    assert list(tuning.read_tuned(tmp_path / "x.json")) == ["key1", "key2"]


def test_a_config_that_does_not_run_is_printed_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "burst_of", lambda run: run)

    def prepare(config: Tile) -> Callable[[], float]:
        if config.rows == 2:
            raise RuntimeError("no\nroom")
        return lambda: 1 / config.rows

    times = tuning.time_each(map(Tile, (1, 2, 4)), prepare, prepare)
    assert times == [(2.0, Tile(1)), (0.5, Tile(4))]
    assert capsys.readouterr().err == "  Tile(rows=2) does not run: RuntimeError: no / room\n"


def test_configs_are_timed_in_turns_until_they_are_clearly_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = {1: [1.0, 1.3, 1.0, 1.0], 2: [1.2], 3: [1.05, 1.05], 4: [0.99, 1.02, 1.02, 1.02]}
    order: list[int] = []

    def burst_of(rows: int) -> Callable[[], float]:
        def burst() -> float:
            order.append(rows)
            return bursts[rows].pop(0)

        return burst

    monkeypatch.setattr(tuning, "burst_of", burst_of)
    times = tuning.time_each(map(Tile, (1, 2, 3, 4)), lambda config: config.rows)  # type: ignore[arg-type, return-value]
    assert times == [(1.0, Tile(1)), (1.2, Tile(2)), (1.05, Tile(3)), (1.02, Tile(4))]
    assert order == [1, 2, 3, 4, 1, 3, 4, 1, 4, 1, 4]


def test_problems_are_those_named_or_else_of_suites_and_each_once() -> None:
    texts = ("n1024", "G=4,M_g=1024,N=1024,K=1024,B=shared")
    assert tuning.chosen(shapes.parse, texts, SUITES["moe"].values()) == {texts[1]: SUITES["tritonbench"]["n1024"]}
    assert len(tuning.chosen(shapes.parse, (), [*SUITES["moe"].values()] * 2)) == len(SUITES["moe"])
    with pytest.raises(click.BadParameter, match="nope"):
        tuning.chosen(shapes.parse, ("nope",), ())


# --- each tuner -------------------------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OF_INPUTS = (
    *("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad", "grouped_gemm_fp8", "moe_layer"),
    "grouped_gemm_bias_add_permute",
)


@dataclass(frozen=True)
class Tuner:
    name: str
    options: tuple[str, ...]
    key: str
    candidates: list[Any]  # the second is the fastest by the simulated clock
    timed: int = 1  # number of times that each is timed


GROUPED = ("--shape", "G=3,M_g=5|0|1,N=48,K=64,W=nk", "--dtype", "fp16")
KEY = "G=3,M<=8,N=48,K=64,float16"
TUNERS = {
    "flat": Tuner("flat", GROUPED, f"{KEY},nk", flat.candidates(2)),
    "flat_dgrad": Tuner("flat", ("--dgrad", *GROUPED), "G=3,M<=8,N=64,K=48,float16,kn", flat.candidates(2)),
    # With Triton 3.9, one of them needs more shared memory than a GPU has.
    "wgrad": Tuner(
        "wgrad", GROUPED, f"{KEY},nk", [c for c in wgrad.candidates(2) if wgrad.illegal(c, torch.float16) is None]
    ),
    "worklist": Tuner("worklist", GROUPED, f"{KEY},nk", helion_worklist.candidates(2, 64)),
    "fp8": Tuner(
        "fp8",
        ("--shape", "qwen30b_decode", "--mode", "blockwise"),
        "G=3,M<=8,N=256,K=128,blockwise",
        fp8.candidates(fp8.BLOCKWISE, 2),
    ),
    "moe": Tuner(
        "moe",
        ("--shape", "T=16,k=2,G=4,H=64,F=32", "--dtype", "fp16"),
        "G=4,M<=32,N=64,K=64,float16,nk",
        gate_up.candidates(8),
        timed=2,
    ),
    "bias_add_permute": Tuner(
        "bias_add_permute",
        ("--shape", "G=3,groups=2x3x8:4x16:64", "--dtype", "fp16"),
        "G=3,M<=256,N=64,K=64,float16,mul",
        fused.candidates("mul"),
    ),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, gpu: None) -> Iterator[list[float]]:
    """Make inputs on any device, and times by which the second candidate is the fastest."""
    for name in OF_INPUTS:
        module = importlib.import_module(f"groupbench.operators.catalog.{name}")

        def here(shape: Any, dtype: str, device: str, *seed: int, make: Any = module.make_inputs, **rest: Any) -> Any:
            return make(shape, dtype, DEVICE, *seed, **rest)

        monkeypatch.setattr(module, "make_inputs", here)
    # Helion would query the GPU, which may be absent.
    monkeypatch.setattr(helion_worklist, "prepare_helion_worklist", lambda a, b, offs, config: lambda: None)
    monkeypatch.setattr(bias_add_permute, "copy_gb_per_s", lambda: 1.0)
    monkeypatch.setitem(SUITES["moe"], "qwen30b_decode", shapes.listed((5, 0, 1), 256, 128, nk=True))
    times: list[float] = []
    monkeypatch.setattr(tuning, "burst_of", lambda run: partial(float, times.pop(0)))
    yield times


@pytest.mark.parametrize("tuner", TUNERS.values(), ids=TUNERS)
def test_a_tuner_writes_its_fastest_candidate(tuner: Tuner, tmp_path: Path, clock: list[float]) -> None:
    module = importlib.import_module(f"groupbench.operators.tuners.{tuner.name}")
    clock += [ms for number in range(len(tuner.candidates)) for ms in [1.0 if number == 1 else 2.0] * tuner.timed]
    path = tmp_path / "x.json"
    done = CliRunner().invoke(module.main, ["-o", str(path), *tuner.options])
    assert (done.exit_code, done.stderr) == (0, ""), done.exception or done.output
    assert (tuning.read_tuned(path), clock) == ({tuner.key: json_of(tuner.candidates[1])}, [])
    assert json.loads(path.read_text())["about"] == module.ABOUT
    assert done.stdout.count(" ms ") == len(tuner.candidates)


def json_of(config: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def test_a_worklist_tuned_before_and_helions_find_are_candidates_too(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = TUNERS["worklist"]
    before = helion_worklist.CONFIGS["large"]
    find = dataclasses.replace(before, num_warps=16)
    searched: list[Any] = []

    def search(a: Any, b: Any, offs: Any, config: Any, seconds: float) -> Any:
        searched.append((config, seconds))
        return find

    monkeypatch.setattr(helion_worklist, "tune_helion_worklist", search)
    path = tmp_path / "x.json"
    tuning.write_tuned(path, "x", {tuner.key: dataclasses.asdict(before)})
    clock += [3.0] * len(tuner.candidates) + [2.0, 1.0]
    done = CliRunner().invoke(worklist.main, ["-o", str(path), "--autotune", "7", *tuner.options])
    assert (done.exit_code, searched) == (0, [(before, 7.0)]), done.output
    assert tuning.read_tuned(path) == {tuner.key: json_of(find)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", sorted({tuner.name for tuner in TUNERS.values()}))
def test_a_tuner_says_that_it_needs_a_gpu(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"groupbench.operators.tuners.{name}")
    done = CliRunner().invoke(module.main, ["-o", str(tmp_path / "x.json")])
    assert (done.exit_code, "needs the GPU" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
