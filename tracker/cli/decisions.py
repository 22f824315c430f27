"""`groupbench incidents mute` and `unmute`, `groupbench db reject` and `rename`: decisions about history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.here import person
from groupbench.tracker.cli.options import When, reason_option, writing
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.text.wording import counted, date, printable
from groupbench.tracker.tools.parameters import SERIES

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


_series = argument(type=SERIES, nargs=-1, required=True, metavar="SERIES...")


@command()
def mute(
    db: str,
    series: tuple[int, ...] = _series,
    until: datetime = option(
        "--until",
        type=When(end=True, ahead=True),
        required=True,
        metavar="DATE",
        help="Last day of the mute: 2026-01-31 or 30d.",
    ),
    reason: str = reason_option("Why the series is muted."),
) -> None:
    """Let the gate pass series until a date. SERIES is a number in `groupbench list series`.

    A muted series is `ok` and gets no A/B and no incident. A wrong result still fails.
    """
    from groupbench.tracker.store import decisions

    now = datetime.now(UTC)
    if until <= now:
        raise click.UsageError("--until is in the past; give a future date")
    with writing(db) as session:
        rows = _rows(session, series)
        for row in rows:
            decisions.decide(session, "muted", now, series=row.pk, who=person(), reason=reason, until=until)
    for row in rows:
        click.echo(printable(f"muted until {date(until)} UTC: {row}"))


@command()
def unmute(db: str, series: tuple[int, ...] = _series) -> None:
    """Judge muted series again. SERIES is a number in `groupbench list series`."""
    from groupbench.tracker.store import decisions

    with writing(db) as session:
        rows = _rows(session, series)
        muted = [decisions.withdraw(session, "muted", datetime.now(UTC), series=row.pk) for row in rows]
    for row, was in zip(rows, muted, strict=True):
        click.echo(printable(f"{'judged again' if was else 'was not muted'}: {row}"))


def _rows(session: Session, keys: tuple[int, ...]) -> list[SeriesRow]:
    """Return the series with these numbers. Raises UsageError for an unknown one."""
    from groupbench.tracker.query.series import series_rows

    rows = series_rows(session, list(keys))
    for key in keys:
        if key not in rows:
            raise click.UsageError(f"no series {key}; `groupbench list series` lists them")
    return [rows[key] for key in dict.fromkeys(keys)]


@command()
def reject(
    db: str,
    run: str = argument(),
    undo: bool = flag("--undo", help="Let the run count again."),
    reason: str = reason_option("Why the run does not count, or counts again."),
) -> None:
    """Reject RUN, such as a night on a disturbed machine: no run is compared with it any more.

    RUN is the start of a run's id, or `latest`. Its results stay in the database.
    """
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.store import decisions

    now = datetime.now(UTC)
    with writing(db) as session:
        row = find_run(session, run)
        if undo:
            was = decisions.withdraw(session, "rejected", now, run=row.pk)
        else:
            decisions.decide(session, "rejected", now, run=row.pk, who=person(), reason=reason)
            was = True
    word = "rejected" if not undo else "counts again" if was else "was not rejected"
    click.echo(printable(f"{word}: run {row.id} of {row.started:%Y-%m-%d %H:%M} at {row.state}"))


@command()
def rename(
    db: str,
    field: Any = argument(type=click.Choice(("operator", "backend", "shape"))),
    old: str = argument(),
    new: str = argument(),
    operator: str | None = option("--operator", "--op", help="Rename only in the series of this operator."),
) -> None:
    """Rename an operator, a backend or a shape from OLD to NEW: its series continue under the new name.

    Records on disk keep the old name: if they are ingested again, the old series comes back.
    """
    from groupbench.tracker.store import rename as renaming

    with writing(db) as session:
        number = renaming.rename(session, field, old, new, operator)
    click.echo(printable(f"renamed {field} {old} to {new} in {counted(number, 'series', 'series')}"))
