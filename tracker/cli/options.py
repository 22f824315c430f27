"""What commands share: opening the database, filters, dates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

F = TypeVar("F", bound=Callable[..., Any])

_DURATION = re.compile(r"(\d+)\s*([mhdwy])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks", "y": "years"}


@contextmanager
def reading(location: str) -> Iterator[Session]:
    """A session on the database that `--db` names. Nothing is created."""
    from groupbench.tracker.store import open_store

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
        text = str(value).strip()
        try:
            duration = _DURATION.fullmatch(text)
            if duration:
                number, unit = int(duration[1]), duration[2]
                ago = timedelta(days=365 * number) if unit == "y" else timedelta(**{_UNITS[unit]: number})
                return datetime.now(UTC) - ago
            when = datetime.fromisoformat(text)
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
            bare = re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None
            return when + timedelta(days=1) if self.end and bare else when
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no date; give 2026-01-31, 2026-01-31T12:00 or 7d", param, ctx)


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
        ("--operator", "Only this operator."),
        ("--backend", "Only this backend."),
        ("--mode", "fwd or bwd."),
        ("--dtype", "Only this dtype."),
        ("--shape", "Only this shape; * and ? are wildcards."),
        ("--host", "builtin or tritonbench."),
        ("--protocol", "Only latencies taken this way."),
        ("--hardware", "Only this GPU or processor model; * and ? are wildcards."),
        ("--branch", "Only commits measured on this branch."),
        ("--commit", "Only this commit: start of its hash, branch, latest or previous."),
    )
    for flag, text in reversed(options):
        command = click.option(flag, multiple=True, metavar="NAME", help=text)(command)
    return command
