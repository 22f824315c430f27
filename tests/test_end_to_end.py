"""Run the steps of nightly runs as commands: measure, store, judge."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

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


def test_a_night_passes_and_the_next_fails_by_a_wrong_backend(tmp_path: Path, forked: Run) -> None:
    worker.call(os.getpid)  # starts the cells' fork server, which the commands share
    (tmp_path / "a_plugin_for_a_night.py").write_text(PLUGIN)
    (tmp_path / "plan.toml").write_text(PLAN)
    env = {name: value for name, value in os.environ.items() if name not in REMOVED}

    def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
        done = forked(MAIN[name], *args, cwd=tmp_path, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    for number, (plugin, code) in enumerate((("right", 0), ("wrong", 1)), 1):
        measured = run(
            *("tritonbench", "--plan", "plan.toml", "--device", "cpu", "--trigger", "nightly", "--quiet"),
            *("--plugin", f"a_plugin_for_a_night.{plugin}", "--records", "night.jsonl", "--commit", f"{number:08x}"),
        )
        for _ in range(2):
            stored = run("groupbench", "ingest", "night.jsonl")
            assert stored.returncode == 0, stored.stderr
        judged = run("groupbench", "gate")
        if plugin == "right":
            skip_if_busy(judged.stdout + judged.stderr)
        assert (measured.returncode, judged.returncode) == (code, code), (measured.stderr, judged.stdout)
    assert "mine" in judged.stdout and "wrong" in judged.stdout
