"""Mark the further cases of a test, and run commands that are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import pytest
from click.testing import Result

Cli = Callable[..., Result]
"""The fixture `cli`, which runs a command of the tracker."""

TRITONBENCH = [
    pytest.mark.tritonbench,
    pytest.mark.skipif(
        importlib.util.find_spec("tritonbench") is None,
        reason="NOT TESTED: TritonBench as the host. It is not importable; put its checkout on PYTHONPATH",
    ),
]
"""Marks of a file whose tests need TritonBench."""


def refused(cli: Cli, *args: Any, **named: Any) -> str:
    """Return the line of a command that is refused and prints nothing else."""
    result = cli(*args, **named)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


def rarely(*cases: Any) -> list[Any]:
    """Return cases for `parametrize` that only run with --exhaustive. A tuple is a case of several arguments."""
    marked = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in marked]


def named(cases: Mapping[str, tuple[Any, ...]], *rare: str) -> list[Any]:
    """Return cases by name for `parametrize`. Those of the names `rare` only run with --exhaustive."""
    assert cases.keys() >= {*rare}
    return [
        pytest.param(*case, id=name, marks=pytest.mark.exhaustive if name in rare else ())
        for name, case in cases.items()
    ]


def commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield (name, command) of every command of a program that is not a group, such as `alerts ack`."""
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name}{each} ")
        else:
            yield f"{name}{each}", command
