"""Options that commands share: filters, dates and percentages; and how a command opens the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from groupbench.tracker.facts import vocabulary
from groupbench.tracker.facts.vocabulary import DEVICE_HELP, DEVICES, MODE_HELP, PLUGIN_HELP
from groupbench.tracker.tools.completion import BackendName, CommitName, OperatorName
from groupbench.tracker.tools.parameters import Duration

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR = (*vocabulary.OPERATOR, "operator")
BACKEND = (*vocabulary.BACKEND, "backend")
SHAPE = (*vocabulary.SHAPE, "shape")
DTYPE = (*vocabulary.DTYPE, "dtype")

_COMPLETED: dict[tuple[str, ...], click.ParamType] = {
    OPERATOR: OperatorName(),
    BACKEND: BackendName(),
    ("--commit",): CommitName(),
    ("--commits",): CommitName(span=True),
}
"""Filters whose values the shell completes, by their flags."""


@contextmanager
def reading(location: str) -> Iterator[Session]:
    """Open a read-only session on the database that `--db` names. Raises StoreError if it does not exist."""
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
    """A date, a date and time (UTC unless it has an offset), or an age: 7d, 12h."""

    name = "date"

    def __init__(self, end: bool = False) -> None:
        self.end = end  # a bare date means the end of that day

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        from groupbench.tracker.facts.errors import QueryError
        from groupbench.tracker.query.filters import instant

        try:
            return instant(str(value), end=self.end)
        except QueryError as error:
            self.fail(error.message, param, ctx)


# Help texts that several commands share.
IN_PERCENT = "in percent: 2 or 2%; 0.5 is half a percent."
MIN_EFFECT = f"Ignore changes below this size, {IN_PERCENT}"
MIN_EFFECT_SAME = f'Report "same" once the change is certainly below this size, {IN_PERCENT}'
MIN_EFFECT_DEFAULT = "Default: 10 on a CPU; on a GPU 0.3, or 1 for latencies below 90 us and 2 below 40 us."
CELL_BUDGET = (
    "Stop measuring a cell after this time, without its preparation: imports, compiling and a first burst. "
    "A number without a unit is in seconds."
)
WAIT = "Wait up to this long for another run on this device to end. A number without a unit is in seconds."

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
plugins_option = click.option("--plugin", "plugins", multiple=True, metavar="MODULE.NAME", help=PLUGIN_HELP)
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
    type=click.FloatRange(1e-6, 0.2),
    default=0.001,
    show_default=True,
    help="False-positive rate per comparison (A/A).",
)
burst_seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="Seed for the order of the bursts."
)
comparisons_option = click.option(
    "--records",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each comparison, with its bursts, to this file (JSON lines).",
)
mode_option = click.option("--mode", default="fwd", show_default=True, help=MODE_HELP)


def series_filters(command: F) -> F:
    """Add the options that select series. Each may be repeated."""
    options = (
        (OPERATOR, "NAME", "Include only this operator."),
        (BACKEND, "NAME", "Include only this backend."),
        (("--mode",), "NAME", "Include only this mode: fwd, bwd or fwd_bwd."),
        (DTYPE, "NAME", "Include only this dtype."),
        (
            SHAPE,
            "TEXT",
            "Include only this shape: its name (* and ? are wildcards), its numbers, or sizes as in --where.",
        ),
        (("--where",), "SIZES", "Include only shapes that match all these sizes, such as M>=4096,N=4096,G=8..64."),
        (("--host",), "NAME", "Include only results of this host: builtin, tritonbench or an imported benchmark."),
        (("--protocol",), "NAME", "Include only results of this timing protocol, as `series` lists it."),
        (("--hardware",), "NAME", "Include only this GPU or CPU model; * and ? are wildcards."),
    )
    return _repeatable(options, command)


def commit_filters(command: F) -> F:
    """Add the options that select runs by commit and date."""
    command = click.option(
        "--until", type=When(end=True), metavar="DATE|AGO", help="Include only runs started on or before this date."
    )(command)
    command = click.option(
        "--since",
        type=When(),
        metavar="DATE|AGO",
        help="Include only runs started on or after this date, such as 2026-01-31, or within this time, such as 7d.",
    )(command)
    options = (
        (("--branch",), "NAME", "Include only commits measured on this branch."),
        (("--commit",), "NAME", "Include only this commit: a hash prefix, branch, tag, latest or previous."),
        (("--commits",), "A..B", "Include only commits after A up to and including B; either end may be omitted."),
    )
    return _repeatable(options, command)


def limit_option(text: str, default: int | None = None) -> Callable[[F], F]:
    return click.option(
        "--limit", type=click.IntRange(min=1), default=default, show_default=default is not None, metavar="N", help=text
    )


def _repeatable(options: tuple[tuple[tuple[str, ...], str, str], ...], command: F) -> F:
    for flags, metavar, text in reversed(options):
        command = click.option(*flags, type=_COMPLETED.get(flags), multiple=True, metavar=metavar, help=text)(command)
    return command
