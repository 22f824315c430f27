"""Parse durations such as `90s`, `20m` and `1h30m`, for options of both programs."""

from __future__ import annotations

import math
import re
from typing import Any

import click

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|min|m|h|d)")


def seconds(text: str, unit: str = "s") -> float:
    """Return the seconds of a duration such as `1h30m`, or of a plain number in `unit`. Raises ValueError."""
    parts = list(_PART.finditer(text))
    if parts and "".join(part.group() for part in parts) == text.replace(" ", ""):
        return sum(float(part[1]) * SECONDS[part[2]] for part in parts)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a duration; give for example 90s, 20m or 1h30m")
    return number * SECONDS[unit]


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
        return "DURATION"

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
