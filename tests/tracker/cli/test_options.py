"""Options that both programs have: each takes the other's name of it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from cases import commands
from click import Command

from groupbench.operators import tuners
from groupbench.tracker.cli import main
from groupbench.tracker.cli.options import Percent

NAMES = {"--operator": "--op", "--backend": "--only", "--shape": "--shapes", "--dtype": "--precision"}


COMMANDS = dict(commands(main))


def flags(command: str) -> list[tuple[str, ...]]:
    return [tuple(parameter.opts) for parameter in COMMANDS[command].params]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_knows_one_name_alone(command: str) -> None:
    for opts in flags(command):
        for ours, tritonbenchs in NAMES.items():
            assert (ours in opts) == (tritonbenchs in opts), opts


def test_a_percentage_is_never_a_fraction() -> None:
    """`0.5` might be either."""
    assert [Percent().convert(text, None, None) for text in ("5", "5%", "0.5", "0.5%")] == [0.05, 0.05, 0.005, 0.005]
    options = [each for command in COMMANDS.values() for each in command.params if isinstance(each.type, Percent)]
    options = [each for each in options if each.opts != ["--confidence"]]  # no fraction is a confidence
    assert len(options) > 5
    assert all("0.5 is half a percent" in str(getattr(option, "help", None)) for option in options)


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(tuners.__path__)])
def test_no_tuner_knows_one_name_alone(name: str) -> None:
    module = importlib.import_module(f"{tuners.__name__}.{name}")
    found = [each for each in vars(module).values() if isinstance(each, Command)]
    for opts in [tuple(parameter.opts) for command in found for parameter in command.params]:
        for ours, tritonbenchs in NAMES.items():
            assert (ours in opts) == (tritonbenchs in opts), opts


@pytest.mark.parametrize("command", ["history", "compare", "ab", "bisect", "list series", "import"])
def test_commands_that_select_have_them(command: str) -> None:
    assert {"--op", "--only", "--precision"} <= {flag for opts in flags(command) for flag in opts}
