"""What commands share: opening the database, filters, dates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

F = TypeVar("F", bound=Callable[..., Any])

# This program's name of an option, and the name that `tritonbench` has of TritonBench: both programs take both.
OPERATOR = ("--operator", "--op", "operator")
BACKEND = ("--backend", "--only", "backend")
SHAPE = ("--shape", "--shapes", "shape")
DTYPE = ("--dtype", "--precision", "dtype")


@contextmanager
def reading(location: str) -> Iterator[Session]:
    """A session on the database that `--db` names. Nothing is created."""
    from groupbench.tracker.store.engine import open_store

    with open_store(location, create=False) as store, store.read() as session:
        yield session


class Percent(click.ParamType[float]):
    """`2` or `2%`: given as 0.02."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            percent = float(str(value).removesuffix("%"))
        except ValueError:
            self.fail(f"{value!r} is not a percentage", param, ctx)
        if not 0 <= percent <= 1000:
            self.fail(f"{value!r} is not between 0 and 1000 %", param, ctx)
        return percent / 100


class When(click.ParamType[datetime]):
    """A date, a date and time (UTC unless it says otherwise), or how long ago: 7d, 12h."""

    name = "date"

    def __init__(self, end: bool = False) -> None:
        self.end = end  # a bare date means the end of that day

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        from groupbench.tracker.errors import QueryError
        from groupbench.tracker.query.filters import instant

        try:
            return instant(str(value), end=self.end)
        except QueryError as error:
            self.fail(error.message, param, ctx)


def min_effect_option(command: F) -> F:
    return click.option(
        "--min-effect",
        type=Percent(),
        metavar="PCT",
        help="Changes below this are ok. Default: 1 on a GPU, 10 on a CPU.",
    )(command)


def series_filters(command: F) -> F:
    """Which series: each option may be given several times."""
    options = (
        (OPERATOR, "NAME", "Only this operator."),
        (BACKEND, "NAME", "Only this backend."),
        (("--mode",), "NAME", "fwd, bwd or fwd_bwd."),
        (DTYPE, "NAME", "Only this dtype."),
        (SHAPE, "TEXT", "Only this shape (* and ? are wildcards), its numbers, or sizes as --where takes them."),
        (("--where",), "SIZES", "Only these sizes: M>=4096, N=4096, G=8..64, joined by commas. All must hold."),
        (("--host",), "NAME", "builtin or tritonbench."),
        (("--protocol",), "NAME", "Only latencies taken this way."),
        (("--hardware",), "NAME", "Only this GPU or processor model; * and ? are wildcards."),
    )
    return _repeatable(options, command)


def commit_filters(command: F) -> F:
    """Which runs: by commit and date."""
    command = click.option("--until", type=When(end=True), metavar="DATE|AGO", help="Runs that began before its end.")(
        command
    )
    command = click.option(
        "--since", type=When(), metavar="DATE|AGO", help="Runs that began at or after it: 2026-01-31, 7d."
    )(command)
    options = (
        (("--branch",), "NAME", "Only commits measured on this branch."),
        (("--commit",), "NAME", "Only this commit: start of its hash, branch, tag, latest or previous."),
        (("--commits",), "A..B", "Only commits after A, up to and with B; either end may be left out."),
    )
    return _repeatable(options, command)


def limit_option(text: str, default: int | None = None) -> Callable[[F], F]:
    return click.option(
        "--limit", type=click.IntRange(min=1), default=default, show_default=default is not None, metavar="N", help=text
    )


def _repeatable(options: tuple[tuple[tuple[str, ...], str, str], ...], command: F) -> F:
    for flags, metavar, text in reversed(options):
        command = click.option(*flags, multiple=True, metavar=metavar, help=text)(command)
    return command
