"""Types of command-line options that both programs have."""

from __future__ import annotations

import math
from typing import Any

import click

from groupbench.tracker.facts.durations import seconds


class Number(click.IntRange):
    """A whole number within limits.

    Args:
        least: Least number.
        most: Largest number.
        of: The words for a number with a meaning, such as "the number of a series", and how to list them.
    """

    name = "number"

    def __init__(self, least: int | None = None, most: int | None = None, of: str = "") -> None:
        super().__init__(least, most)
        self.of = of

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return "N" if isinstance(param, click.Option) else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter as error:
            if not self.of:
                raise
            raise click.BadParameter(f"{value!r} is not {self.of}", ctx, param) from error


class Real(click.FloatRange):
    """A finite number within limits, since float() also accepts nan and inf."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number", param, ctx)


SERIES = Number(1, of="the number of a series, such as 3; `groupbench list series` lists them")
INCIDENT = Number(1, of="the number of an incident, such as 3; `groupbench incidents` lists them")


class Duration(click.ParamType[float]):
    """A click parameter for durations, converted to seconds.

    least, most  limits in seconds, both inclusive; `above` excludes `least`
    """

    name = "duration"

    def __init__(self, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> None:
        self.least, self.most, self.above = least, most, above

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "SECONDS|5m"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            duration_s = seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self.least <= duration_s <= self.most or (self.above and duration_s == self.least):
            least = f"{'above' if self.above else 'from'} {self.least:g} s"
            most = f" to {self.most:g} s" if math.isfinite(self.most) else ""
            self.fail(f"{value} is out of range: {least}{most}", param, ctx)
        return duration_s
