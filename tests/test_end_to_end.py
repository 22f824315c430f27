"""Run the steps of a nightly run as commands: measure, store, judge, list the history, report."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from busy import skip_if_busy

from groupbench.operators.measure import worker

PLUGIN = """
from groupbench.operators.catalog.grouped_gemm import prepare_torch_loop
from groupbench.operators.operator import Backend

def wrong(inputs):
    right = prepare_torch_loop(inputs)
    return lambda: right() * 1.01

wrong = Backend("mine", wrong, "a test", operator="grouped_gemm")
right = Backend("mine", prepare_torch_loop, "a test", operator="grouped_gemm")
"""

PLAN = """
name = "night"
[[measure]]
operator = "grouped_gemm"
shapes = ["single", "4,16,16,16"]
dtypes = ["fp16"]
only = ["torch_loop", "mine"]
bursts = 2
samples = 2
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


REMOVED = ("TRITON_INTERPRET", "GROUPBENCH_DB", "FORCE_COLOR")
MAIN = {"groupbench": "groupbench.tracker.cli:main", "tritonbench": "groupbench.operators.cli:main"}


def command_in(folder: Path, forked: Run) -> Run:
    """Return a function that runs `groupbench` or `tritonbench` in a folder."""
    env = {name: value for name, value in os.environ.items() if name not in REMOVED}

    def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
        done = forked(MAIN[name], *args, cwd=folder, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def measure_night(command: Run, number: int, plugin: str) -> tuple[int, int, str]:
    """Measure the plan with a plugin at a commit, store and judge it.

    Returns (exit code of measuring, exit code of the gate, output of the gate).
    """
    records = f"night-{number}.jsonl"
    measured = command(
        *("tritonbench", "--plan", "plan.toml", "--device", "cpu", "--trigger", "nightly", "--quiet"),
        *("--plugin", f"a_plugin_for_a_night.{plugin}", "--records", records, "--commit", f"{number:08x}"),
    )
    assert measured.returncode != 2, measured.stderr
    stored = command("groupbench", "ingest", records)
    assert stored.returncode == 0, stored.stderr
    judged = command("groupbench", "gate")
    return measured.returncode, judged.returncode, judged.stdout + judged.stderr


@pytest.fixture(scope="module")
def first_night(tmp_path_factory: pytest.TempPathFactory, forked: Run) -> Path:
    """Return a folder in which a night was measured, stored and passed."""
    worker.call(os.getpid)  # starts the cells' fork server, which the commands share
    folder = tmp_path_factory.mktemp("first_night")
    (folder / "a_plugin_for_a_night.py").write_text(PLUGIN)
    (folder / "plan.toml").write_text(PLAN)
    measured, judged, output = measure_night(command_in(folder, forked), 1, "right")
    skip_if_busy(output)
    assert (measured, judged) == (0, 0), output
    return folder


@pytest.fixture
def command(tmp_path: Path, forked: Run) -> Run:
    return command_in(tmp_path, forked)


@pytest.fixture
def second_night(command: Run, first_night: Path, tmp_path: Path) -> Callable[..., tuple[int, int, str]]:
    """Return a function that measures another night after the first."""
    shutil.copytree(first_night, tmp_path, dirs_exist_ok=True)
    return lambda plugin: measure_night(command, 2, plugin)


def test_two_nights_of_the_same_code(
    second_night: Callable[..., tuple[int, int, str]], command: Run, tmp_path: Path
) -> None:
    measured, judged, output = second_night("right")
    skip_if_busy(output)
    assert (measured, judged) == (0, 0), output
    assert "regress" not in output.lower().replace("0 regressed", "")

    history = command("groupbench", "history")
    assert history.returncode == 0, history.stderr
    assert "torch_loop" in history.stdout
    assert "mine" in history.stdout

    report = command("groupbench", "report", "-o", "report.html")
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<html" in page
    assert "torch_loop" in page

    again = command("groupbench", "ingest", "night-2.jsonl")
    assert again.returncode == 0, again.stderr


def test_a_wrong_backend_fails_the_gate(second_night: Callable[..., tuple[int, int, str]]) -> None:
    measured, judged, output = second_night("wrong")
    assert (measured, judged) == (1, 1)
    assert "mine" in output
    assert "wrong" in output


def test_nothing_measured_is_never_a_pass(command: Run) -> None:
    assert command("groupbench", "gate").returncode != 0
