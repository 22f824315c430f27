"""`groupbench tune` and `selftest` hand their arguments to another program."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cases import Cli
from click.testing import CliRunner

from groupbench.tracker.cli import main
from groupbench.tracker.cli import tune as module
from groupbench.tracker.night import measuring


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
    monkeypatch.setattr(measuring, "become", commands.append)
    assert CliRunner().invoke(main, ["tune", *arguments]).exit_code == 0
    command = [sys.executable, "-P", "-m", module.MODULE, *handed_on]
    assert [each[-len(command) :] for each in commands] == [command]
    assert ("groupbench.operators.alone" in commands[0]) == ("--list" not in arguments)  # which measures nothing


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 3), (2, 2), (137, 2)])
@pytest.mark.parametrize("words", [(), ("--integrity",)])
def test_the_exit_code_is_the_suites(
    code: int, expected: int, words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> int:
        started.append(command)
        return code

    monkeypatch.setattr(measuring, "run_program", run)
    done = cli("selftest", *words, "--device", "cpu", "--cheats", "memo_clone", "--format=json")
    assert done.exit_code == expected
    assert started[0][1:] == [
        *("-P", "-m", "groupbench.operators.integrity", "--device", "cpu", "--only", "memo_clone", "--json"),
    ]
