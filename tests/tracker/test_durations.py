"""Durations on the command line."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from groupbench.tracker.facts.durations import seconds
from groupbench.tracker.tools.parameters import Duration

GOOD = {
    "90s": 90.0,
    "20m": 1200.0,
    "20min": 1200.0,
    "1h": 3600.0,
    "1h30m": 5400.0,
    "1h 30m": 5400.0,
    "1.5h": 5400.0,
    ".5s": 0.5,
    "300ms": 0.3,
    "2d": 172_800.0,
    "7": 7.0,
    "1e3": 1000.0,
    "-3": -3.0,
}


@pytest.mark.parametrize(("text", "expected"), GOOD.items())
def test_a_duration_is_read(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


def test_a_plain_number_is_of_the_options_unit() -> None:
    assert (seconds("2", "m"), seconds("2s", "m"), seconds("2", "s")) == (120.0, 2.0, 2.0)


@pytest.mark.parametrize("text", ["", "m", "1x", "1h30", "h1", "nan", "inf", "1 2", "-5m", "0x1s", "1_0m", "１h30"])
def test_texts_that_are_not_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; give for example 90s, 20m or 1h30m"):
        seconds(text)


@click.command()
@click.option("--budget", type=Duration(most=3600, above=True), default="30m", show_default=True)
def command(budget: float) -> None:
    click.echo(f"{budget:g}")


@pytest.mark.parametrize(
    ("args", "shown"),
    [([], "1800"), (["--budget", "2"], "2"), (["--budget", "90s"], "90"), (["--budget", "1h"], "3600")],
    ids=["default", "a number", "seconds", "the most"],
)
def test_an_option_takes_a_duration(args: list[str], shown: str) -> None:
    assert CliRunner().invoke(command, args).stdout == f"{shown}\n"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0", "0 is out of range: above 0 s to 3600 s"),
        ("2h", "2h is out of range"),
        ("soon", "'soon' is not a duration"),
        ("nan", "'nan' is not a duration"),
    ],
)
def test_an_option_refuses_others(value: str, says: str) -> None:
    result = CliRunner().invoke(command, ["--budget", value])
    assert result.exit_code == 2
    assert says in result.output


def test_an_option_refuses_less_than_its_least() -> None:
    with pytest.raises(click.BadParameter, match="500ms is out of range: from 1 s"):
        Duration(least=1).convert("500ms", None, None)


def test_the_help_shows_the_default_with_its_unit() -> None:
    assert "SECONDS|5m" in (out := CliRunner().invoke(command, ["--help"]).output)
    assert "[default: 30m]" in out
