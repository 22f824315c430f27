"""Types of command-line options that both programs have."""

from __future__ import annotations

import math
from typing import Any

import click

from groupbench.tracker.facts.durations import SECONDS, seconds


class Duration(click.ParamType[float]):
    """A click parameter for durations, converted to seconds.

    unit         unit of a plain number
    least, most  limits in seconds, both inclusive; `above` excludes `least`
    was_minutes  plain numbers used to be minutes, so they are accepted with a note on standard error
    """

    name = "duration"

    def __init__(
        self,
        unit: str = "s",
        *,
        least: float = 0.0,
        most: float = math.inf,
        above: bool = False,
        was_minutes: bool = False,
    ) -> None:
        self.unit, self.least, self.most, self.above, self.was_minutes = unit, least, most, above, was_minutes

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "SECONDS|5m" if self.unit == "s" else "MINUTES|90s"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            duration_s = seconds(str(value), self.unit)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self.least <= duration_s <= self.most or (self.above and duration_s == self.least):
            least = f"{'above' if self.above else 'from'} {self.least:g} s"
            most = f" to {self.most:g} s" if math.isfinite(self.most) else ""
            self.fail(f"{value} is out of range: {least}{most}", param, ctx)
        if self.was_minutes and duration_s and not str(value).endswith(tuple(SECONDS)):
            name = "" if param is None else f"{param.opts[0]} "
            click.echo(f"{name}{value} is in seconds; for minutes, give {value}m", err=True)
        return duration_s
