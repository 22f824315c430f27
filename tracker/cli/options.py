"""Shared options as data classes; dates and percentages; opening the database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import group, option
from groupbench.tracker.facts import durations
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.vocabulary import (
    BACKEND,
    DEVICE_HELP,
    DEVICES,
    DTYPE,
    DTYPE_DEFAULT,
    MODE_HELP,
    OPERATOR,
    PLUGIN_HELP,
    SHAPE,
)
from groupbench.tracker.query.filters import instant
from groupbench.tracker.tools.parameters import Duration, Number, Real

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@contextmanager
def reading(location: str) -> Iterator[Session]:
    """Open a read-only session on the database of `--db`. Raises StoreError if it does not exist."""
    from groupbench.tracker.store.engine import open_store

    with open_store(location, create=False) as store, store.read() as session:
        yield session


@contextmanager
def writing(location: str) -> Iterator[Session]:
    """Open a session on an existing database, committed at the end. Raises StoreError."""
    from groupbench.tracker.store.engine import open_store

    with open_store(location, create=False) as store, store.write() as session:
        yield session


class Percent(click.ParamType[float]):
    """A percentage: `2` and `2%` both become 0.02, and `0.5` becomes 0.005."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            percent = float(str(value).removesuffix("%"))
        except ValueError:
            self.fail(f"{value!r} is not a percentage; give for example 3 or 3%", param, ctx)
        if not 0 <= percent <= 1000:
            self.fail(f"{value!r} is not between 0 and 1000 %", param, ctx)
        return percent / 100

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "PERCENT"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "Give a percentage, such as 3 or 3%."


class When(click.ParamType[datetime]):
    """A date, a date and time (UTC unless it has an offset), or an age: 7d, 12h.

    Args:
        end: A bare date is the end of its day.
        ahead: A duration counts from now on instead of being an age.
    """

    name = "date"

    def __init__(self, end: bool = False, ahead: bool = False) -> None:
        self.end, self.ahead = end, ahead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value

        if self.ahead and str(value)[-1:].isalpha():
            with contextlib.suppress(ValueError):
                return datetime.now(UTC) + timedelta(seconds=durations.seconds(str(value)))
        try:
            return instant(str(value), end=self.end)
        except QueryError as error:
            self.fail(error.message, param, ctx)


# Help texts that several commands share.
IN_PERCENT = "in percent: 2 or 2%; 0.5 is half a percent."
MIN_EFFECT = f"Ignore changes below this size, {IN_PERCENT}"
MIN_EFFECT_SAME = f'Report "same" once the change is certainly below this size, {IN_PERCENT}'
MIN_EFFECT_DEFAULT = "Default: 10 on a CPU; on a GPU 0.3, or 1 for latencies below 90 us and 2 below 40 us."
CELL_BUDGET = "Stop measuring a cell after this time, without its preparation: imports, compiling and a first burst."

# Options that several commands share.
device_option = option("--device", type=click.Choice(DEVICES), default="auto", help=DEVICE_HELP)
plan_device_option = option(
    "--device",
    "-d",
    type=click.Choice(DEVICES),
    help="Device to measure on. Default: `device` of groupbench.toml, or auto.",
)
toolchain_option = option(
    "--toolchain",
    help="Measure with this toolchain of groupbench.toml. Default: this interpreter.",
)
plugins_option = option("--plugin", multiple=True, metavar="MODULE|FILE.py", help=PLUGIN_HELP)
setup_option = option(
    "--setup", metavar="COMMAND", help="Run this command, such as a build, in each checkout before measuring."
)
cell_budget_option = option("--budget", type=Duration(least=1, most=86_400), default="60s", help=CELL_BUDGET)
min_effect_same_option = option("--min-effect", type=Percent(), help=f"{MIN_EFFECT_SAME} {MIN_EFFECT_DEFAULT}")
min_effect_option = option("--min-effect", type=Percent(), help=f"{MIN_EFFECT} {MIN_EFFECT_DEFAULT}")
alpha_option = option("--alpha", type=Real(1e-6, 0.2), default=0.001, help="False-positive rate per comparison (A/A).")
comparisons_option = option(
    "--records",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each comparison, with its bursts, to this file (JSON lines).",
)
mode_option = option("--mode", default="fwd", help=MODE_HELP)


def _filter(flags: tuple[str, ...], text: str, metavar: str = "NAME") -> Any:
    return option(*flags, multiple=True, metavar=metavar, help=text)


HARDWARE_FILTER = {"hardware": _filter(("--hardware",), "Include only this GPU or CPU model; * and ? are wildcards.")}
CELL_FILTERS = {
    "operator": _filter(OPERATOR, "Include only this operator."),
    "backend": _filter(BACKEND, "Include only this backend."),
    "mode": _filter(("--mode",), "Include only this mode: fwd, bwd or fwd_bwd."),
    "dtype": _filter(DTYPE, "Include only this dtype."),
    "shape": _filter(
        SHAPE,
        "Include only this shape: its name (* and ? are wildcards), its numbers, or sizes: M>=4096,N==64,G=8..64.",
        "TEXT",
    ),
    "host": _filter(("--host",), "Include only results of this host: builtin, tritonbench or an imported benchmark."),
    "protocol": _filter(("--protocol",), "Include only results of this timing protocol, as `list series` prints it."),
    **HARDWARE_FILTER,
}
"""Options that select series."""

RUN_FILTERS = {
    "branch": _filter(("--branch",), "Include only commits measured on this branch."),
    "commit": _filter(
        ("--commit",),
        "Include only this commit: a hash prefix, branch, tag, latest or previous. A..B: commits after A up to and "
        "including B; either end may be omitted.",
        "NAME|A..B",
    ),
    "since": option(
        "--since",
        type=When(),
        metavar="DATE|AGO",
        help="Include only runs started on or after this date, such as 2026-01-31, or within this time, such as 7d.",
    ),
    "until": option(
        "--until", type=When(end=True), metavar="DATE|AGO", help="Include only runs started on or before this date."
    ),
}
"""Options that select runs by commit and date."""


@dataclass(frozen=True)
class CellChoice:
    """The cells to measure, for commands with several."""

    operator: str
    backends: tuple[str, ...]
    shapes: tuple[str, ...]
    suites: tuple[str, ...]
    dtypes: tuple[str, ...]
    mode: str
    device: str
    plugins: tuple[str, ...]

    @property
    def cells(self) -> dict[str, Any]:
        """The fields to choose cells, by name."""
        return {name: value for name, value in vars(self).items() if name != "device"}


def cell_choice(verb: str, of: str, required: bool) -> Any:
    """Declare the options to choose cells.

    Args:
        verb: The command's verb for a cell, for the help.
        of: The choice without --shape and --suite.
        required: Whether --operator is required.
    """

    def several(flags: tuple[str, ...], noun: str, default: str, metavar: str = "NAME", **more: Any) -> Any:
        text = f"{verb} this {noun}; may be repeated.{default}"
        return option(*flags, multiple=True, metavar=metavar, help=text, **more)

    def apart(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for text in texts for name in text.split(",") if name)

    return group(
        CellChoice,
        operator=option(*OPERATOR, required=required, help=f"{verb} this operator."),
        backends=several(BACKEND, "backend", " Default: all."),
        shapes=several(SHAPE, "shape", f" Default: {of}.", metavar="TEXT"),
        suites=several(("--suite",), "suite of shapes", " Commas separate several.", "NAME,...", callback=apart),
        dtypes=several(DTYPE, "dtype", f" {DTYPE_DEFAULT}"),
        mode=mode_option,
        device=device_option,
        plugins=plugins_option,
    )


def reason_option(text: str, required: bool = True) -> Any:
    """Declare an option for a reason, which must not be blank."""

    def not_blank(context: click.Context, parameter: click.Parameter, reason: str | None) -> str | None:
        if reason is not None and not reason.strip():
            raise click.BadParameter("it must not be blank, since it is recorded")
        return None if reason is None else reason.strip()

    return option("--reason", required=required, metavar="TEXT", callback=not_blank, help=text)


def limit_option(text: str, default: int | None = None) -> Any:
    return option("--limit", type=Number(1), default=default, help=text)
