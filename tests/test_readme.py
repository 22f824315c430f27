"""Run the commands and the backend of the README and the first guide."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from groupbench.operators.measure import worker

Run = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FIRST = (ROOT / "docs" / "guide" / "first-benchmark.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
(STORY,) = (text for kind, text in BLOCKS if "examples/slower" in text)
(OWN,) = (text for kind, text in BLOCKS if "groupbench init" in text)
"""Blocks of shell that run in other repositories."""
COMMANDS = [
    line.partition("  #")[0].strip()
    for kind, text in BLOCKS
    if kind == "bash" and text not in (STORY, OWN)
    for line in text.splitlines()
]


def test_commands_of_groupbench_run_on_the_records(tmp_path: Path, forked: Run) -> None:
    for record in sorted((ROOT / "tests/data/h100").glob("*night.jsonl")):
        with (tmp_path / "night.jsonl").open("a") as night:
            night.write(record.read_text())
    commands = [c for c in COMMANDS if c.startswith("groupbench")]
    assert len(commands) >= 6
    for command in commands:
        arguments = shlex.split(command)
        if arguments[1] in ("ab", "bisect"):  # they measure; tests/test_docs.py parses every example
            continue
        if "--since" in arguments:  # the records become too old
            arguments = arguments[: arguments.index("--since")]
        done = forked("groupbench.tracker.cli:main", *arguments[1:], cwd=tmp_path)
        codes = (0, 1, 3) if "gate" in command else (0,)  # the short history has suspects: its tiles were changed
        assert done.returncode in codes, (command, done.stderr)
        assert done.stdout or "report" in command or "no incident" in done.stderr, command
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_the_backend_that_is_shown_runs(tmp_path: Path, forked: Run) -> None:
    worker.call(os.getpid)  # starts the fork server of the cells
    (python,) = re.findall(r"```python\n(.*?)```", FIRST, re.S)
    (tmp_path / "my_kernels.py").write_text(python)
    command = next(line for line in FIRST.splitlines() if line.startswith("tritonbench") and "my_kernels" in line)
    further = shlex.split("--device cpu --host builtin --only mine --num-inputs 1")
    done = forked("groupbench.operators.cli:main", *shlex.split(command)[1:], *further, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"mine .* ok", done.stdout)


@pytest.mark.exhaustive  # tests of each command take the steps
def test_the_story_ends_with_the_culprit(tmp_path: Path, warm_imports: dict[str, str]) -> None:
    """Run the five commands as they are written, in a temporary home folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GROUPBENCH_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"GROUPBENCH_LOCKS": str(tmp_path / "locks"), "CUDA_VISIBLE_DEVICES": ""}
    environment |= warm_imports
    done = subprocess.run(["bash", "-c", STORY], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "BACKFILL 3 commits: 3 measured" in done.stdout
    listed = [line for line in done.stdout.splitlines() if re.match(r"\d{4}-\d\d-\d\d .* rms_norm ", line)]
    log = ["git", "log", "--reverse", "--format=%h", "--abbrev=10"]
    commits = subprocess.check_output(log, cwd=tmp_path / "slower", text=True).split()
    assert [line.split()[2] for line in listed] == commits[1:]
    assert " made norm rms_norm " in done.stdout, done.stdout + done.stderr
    culprit = next(line for line in done.stdout.splitlines() if " made norm rms_norm " in line)
    assert "slower" in culprit and "Normalise one row at a time (Ada)" in done.stdout, done.stdout
    assert (tmp_path / "slower" / "report.html").stat().st_size > 50_000


def test_your_own_repository_takes_few_commands_and_lines() -> None:
    commands = [line.partition("  #")[0].strip() for line in OWN.splitlines() if not line.startswith("#")]
    assert len(commands) <= 5
    names = ("bench_norm.py", "groupbench.toml")
    lines = [line for name in names for line in (ROOT / "examples" / "slower" / name).read_text().splitlines()]
    assert sum(bool(line.strip()) and not line.startswith('"""') for line in lines) <= 15
