"""Test `groupbench selftest`: it starts the measuring program and returns its exit code."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Cli


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 3), (2, 2), (-9, 2)])
def test_the_exit_code_is_the_suites(code: int, expected: int, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **named: Any) -> Any:
        started.append(command)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    done = cli("selftest", "--integrity", "--device", "cpu", "--cheats", "memo_clone", "--format=json")
    assert done.exit_code == expected
    assert started[0][1:] == [
        *("-P", "-m", "groupbench.operators.integrity", "--device", "cpu", "--only", "memo_clone", "--json"),
    ]


def test_the_tests_must_be_named(cli: Cli) -> None:
    result = cli("selftest")
    assert result.exit_code == 2 and "--integrity" in result.stderr
