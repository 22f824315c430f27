"""What the README says works: its commands parse, its backend runs, its files are there."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMANDS = [line.partition("  #")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("tritonbench")])
def test_options_of_tritonbench_exist(command: str) -> None:
    """Parsed, not run: what it would measure is not for a test."""
    cli = importlib.import_module("groupbench.operators.cli").command
    arguments = shlex.split(command)[1:]
    options = cli.make_context("tritonbench", arguments).params
    assert options["rest"] == ()


def test_commands_of_groupbench_run_on_the_records(tmp_path: Path) -> None:
    for record in sorted((ROOT / "tests/data/h100").glob("*night.jsonl")):
        with (tmp_path / "night.jsonl").open("a") as night:
            night.write(record.read_text())
    commands = [c for c in COMMANDS if c.startswith("groupbench")]
    assert len(commands) >= 6
    for command in commands:
        arguments = shlex.split(command)
        if arguments[1] in ("ab", "bisect", "calibrate"):  # measures: parsed alone
            group = importlib.import_module("groupbench.tracker.cli").main
            found = group.get_command(click.Context(group), arguments[1])
            assert found is not None and found.make_context(arguments[1], arguments[2:])
            continue
        if "--since" in arguments:  # the records grow old
            arguments = arguments[: arguments.index("--since")]
        done = run(sys.executable, "-m", "groupbench.tracker", *arguments[1:], cwd=tmp_path)
        assert done.returncode in (0, 1) if "gate" in command else done.returncode == 0, (command, done.stderr)
        assert done.stdout or "report" in command or "no alert" in done.stderr, command
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_the_backend_that_is_shown_runs(tmp_path: Path) -> None:
    (python,) = [text for kind, text in BLOCKS if kind == "python"]
    (tmp_path / "my_kernels.py").write_text(python)
    command = next(c for c in COMMANDS if "my_kernels" in c)
    arguments = [
        *shlex.split(command)[1:],
        "--device",
        "cpu",
        "--host",
        "builtin",
        "--only",
        "mine",
        "--num-inputs",
        "1",
    ]
    done = run(sys.executable, "-m", "groupbench.operators", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"mine .* ok", done.stdout)
