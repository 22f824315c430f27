"""Shared options as data classes; dates and percentages; opening the database."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from groupbench.tracker.facts import durations, vocabulary
from groupbench.tracker.facts.vocabulary import DEVICE_HELP, DEVICES, DTYPE_DEFAULT, MODE_HELP, PLUGIN_HELP
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.tools.parameters import Duration, Number, Real

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR = (*vocabulary.OPERATOR, "operator")
BACKEND = (*vocabulary.BACKEND, "backend")
SHAPE = (*vocabulary.SHAPE, "shape")
DTYPE = (*vocabulary.DTYPE, "dtype")


@contextmanager
def reading(location: str) -> Iterator[Session]:
    """Open a read-only session on the database of `--db`. Raises StoreError if it does not exist."""
    from groupbench.tracker.store.engine import open_store

    with open_store(location, create=False) as store, store.read() as session:
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
        from groupbench.tracker.facts.errors import QueryError
        from groupbench.tracker.query.filters import instant

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
device_option = click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help=DEVICE_HELP,
)
plan_device_option = click.option(
    "--device",
    "-d",
    type=click.Choice(DEVICES),
    help="Device to measure on. Default: `device` of groupbench.toml, or auto.",
)
toolchain_option = click.option(
    "--toolchain",
    metavar="NAME",
    help="Measure with this toolchain of groupbench.toml. Default: this interpreter.",
)
plugins_option = click.option("--plugin", "plugins", multiple=True, metavar="MODULE|FILE.py", help=PLUGIN_HELP)
setup_option = click.option(
    "--setup", metavar="COMMAND", help="Run this command, such as a build, in each checkout before measuring."
)
cell_budget_option = click.option(
    "--budget", type=Duration(least=1, most=86_400), default="60s", show_default=True, help=CELL_BUDGET
)
min_effect_same_option = click.option(
    "--min-effect", type=Percent(), metavar="PERCENT", help=f"{MIN_EFFECT_SAME} {MIN_EFFECT_DEFAULT}"
)
min_effect_option = click.option(
    "--min-effect", type=Percent(), metavar="PERCENT", help=f"{MIN_EFFECT} {MIN_EFFECT_DEFAULT}"
)

alpha_option = click.option(
    "--alpha",
    type=Real(1e-6, 0.2),
    default=0.001,
    show_default=True,
    help="False-positive rate per comparison (A/A).",
)
comparisons_option = click.option(
    "--records",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each comparison, with its bursts, to this file (JSON lines).",
)
mode_option = click.option("--mode", default="fwd", show_default=True, help=MODE_HELP)


def collected(kind: type[Any], name: str, *options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator to add options to a command, and pass their values as one argument.

    Args:
        kind: The argument's data class. Each option is named like a field; the other fields keep their defaults.
        name: Name of the argument.
        options: The options, in the order of the help.
    """
    field_names = {field.name for field in fields(kind)}

    def add(command: F) -> F:
        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            arguments = {key: values.pop(key) for key in field_names & names}
            return command(*args, **values, **{name: kind(**arguments)})

        function: Any = wrapped
        earlier = len(getattr(function, "__click_params__", ()))
        for option in reversed(options):
            function = option(function)
        names = {param.name for param in function.__click_params__[earlier:]}
        decorated: F = function
        return decorated

    return add


def _filter(flags: tuple[str, ...], text: str, metavar: str = "NAME") -> Any:
    return click.option(*flags, multiple=True, metavar=metavar, help=text)


HARDWARE_FILTER = _filter(("--hardware",), "Include only this GPU or CPU model; * and ? are wildcards.")
CELL_FILTERS = (
    _filter(OPERATOR, "Include only this operator."),
    _filter(BACKEND, "Include only this backend."),
    _filter(("--mode",), "Include only this mode: fwd, bwd or fwd_bwd."),
    _filter(DTYPE, "Include only this dtype."),
    _filter(
        SHAPE,
        "Include only this shape: its name (* and ? are wildcards), its numbers, or sizes: M>=4096,N==64,G=8..64.",
        "TEXT",
    ),
    _filter(("--host",), "Include only results of this host: builtin, tritonbench or an imported benchmark."),
    _filter(("--protocol",), "Include only results of this timing protocol, as `list series` prints it."),
    HARDWARE_FILTER,
)
"""Options that select series."""

RUN_FILTERS = (
    _filter(("--branch",), "Include only commits measured on this branch."),
    _filter(
        ("--commit",),
        "Include only this commit: a hash prefix, branch, tag, latest or previous. A..B: commits after A up to and "
        "including B; either end may be omitted.",
        "NAME|A..B",
    ),
    click.option(
        "--since",
        type=When(),
        metavar="DATE|AGO",
        help="Include only runs started on or after this date, such as 2026-01-31, or within this time, such as 7d.",
    ),
    click.option(
        "--until", type=When(end=True), metavar="DATE|AGO", help="Include only runs started on or before this date."
    ),
)
"""Options that select runs by commit and date."""


def filters(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Add filter options to a command, and pass them as the argument `where`, a Filter."""
    return collected(Filter, "where", *options)


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


def cell_choice(verb: str, of: str, required: bool) -> Callable[[F], F]:
    """Add the options to choose cells, and pass them as the argument `choice`, a CellChoice.

    Args:
        verb: The command's verb for a cell, for the help.
        of: The choice without --shape and --suite.
        required: Whether --operator is required.
    """

    def several(flags: tuple[str, ...], noun: str, default: str, **settings: Any) -> Any:
        text = f"{verb} this {noun}; may be repeated.{default}"
        return click.option(*flags, multiple=True, help=text, **({"metavar": "NAME"} | settings))

    return collected(
        CellChoice,
        "choice",
        click.option(*OPERATOR, required=required, metavar="NAME", help=f"{verb} this operator."),
        several((*BACKEND[:2], "backends"), "backend", " Default: all."),
        several((*SHAPE[:2], "shapes"), "shape", f" Default: {of}.", metavar="TEXT"),
        several(("--suite", "suites"), "suite of shapes", " `evaluate` takes several, separated by commas."),
        several((*DTYPE[:2], "dtypes"), "dtype", f" {DTYPE_DEFAULT}"),
        mode_option,
        device_option,
        plugins_option,
    )


def reason_option(text: str, required: bool = True) -> Callable[[F], F]:
    """Return an option for a reason, which must not be blank."""

    def not_blank(context: click.Context, parameter: click.Parameter, reason: str | None) -> str | None:
        if reason is not None and not reason.strip():
            raise click.BadParameter("it must not be blank, since it is recorded")
        return None if reason is None else reason.strip()

    return click.option("--reason", required=required, metavar="TEXT", callback=not_blank, help=text)


def limit_option(text: str, default: int | None = None) -> Callable[[F], F]:
    return click.option(
        "--limit", type=Number(1), default=default, show_default=default is not None, metavar="N", help=text
    )
