"""Types of command-line options that both programs have."""

from __future__ import annotations

import math
from typing import Any

import click

from groupbench.tracker.facts.durations import seconds


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
