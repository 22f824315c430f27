"""`groupbench tune` and `selftest` hand their arguments to another program and return its exit code."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Cli
from click.testing import CliRunner

from groupbench.tracker.cli import main
from groupbench.tracker.cli import tune as module


@pytest.mark.parametrize(
    ("arguments", "handed_on"),
    [
        ((), []),
        (("--list",), ["--list"]),
        (("flat", "wgrad", "--suite", "moe", "--limit", "9"), ["flat", "wgrad", "--suite", "moe", "--limit", "9.0"]),
        (("--shape", "a", "--shape", "b", "--dtype", "fp16"), ["--shape", "a", "--shape", "b", "--dtype", "fp16"]),
    ],
    ids=["all", "list", "suite", "shapes"],
)
def test_arguments_are_handed_on(arguments: tuple[str, ...], handed_on: list[str], monkeypatch: Any) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(subprocess, "run", run)
    assert CliRunner().invoke(main, ["tune", *arguments]).exit_code == 2
    command = [sys.executable, "-P", "-m", module.MODULE, *handed_on]
    assert [each[-len(command) :] for each in commands] == [command]
    assert ("groupbench.operators.alone" in commands[0]) == ("--list" not in arguments)  # which measures nothing


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 3), (2, 2), (-9, 2)])
@pytest.mark.parametrize("words", [(), ("--integrity",)])
def test_the_exit_code_is_the_suites(
    code: int, expected: int, words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **named: Any) -> Any:
        started.append(command)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    done = cli("selftest", *words, "--device", "cpu", "--cheats", "memo_clone", "--format=json")
    assert done.exit_code == expected
    assert started[0][1:] == [
        *("-P", "-m", "groupbench.operators.integrity", "--device", "cpu", "--only", "memo_clone", "--json"),
    ]
