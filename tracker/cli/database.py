"""`groupbench db`: query, prune, back up, verify and merge the database."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.options import limit_option, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, write_table
from groupbench.tracker.facts.errors import DamageError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable
from groupbench.tracker.tools.parameters import Number

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@command()
def sql(
    db: str,
    statement: str = argument(),
    params: tuple[tuple[str, str], ...] = option(
        "-p", "--param", nargs=2, multiple=True, metavar="NAME VALUE", help="Value of :NAME in the statement."
    ),
    form: Format = output_formats,
) -> None:
    """Run one read-only SQL statement on a SQLite file. docs/reference/schema.md describes the tables."""
    from groupbench.tracker.store.sql import ask

    result = ask(db, statement, dict(params))
    rows = [{name: _value(value, form) for name, value in row.items()} for row in result.flat()]
    numbers = {n for n in result.columns if rows and all(isinstance(row[n], int | float | None) for row in rows)}
    write_table([Column(name, name, right=name in numbers, wraps=True) for name in result.columns], rows, form)


def _value(value: Any, form: Format) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode() if form in ("json", "csv") else f"<{len(value)} bytes>"
    return _for_json(value) if form == "json" else value


def _for_json(value: Any) -> Any:
    """Return a value for JSON: as text if JSON has no such value, since null would be another one."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@command()
def prune(
    db: str,
    all_days: int = option(
        "--all", type=Number(0), default=90, metavar="DAYS", help="Keep every point of the newest DAYS days."
    ),
    every_days: int = option(
        "--every",
        type=Number(1),
        default=7,
        metavar="DAYS",
        help="Of the older points, keep those of one nightly run every DAYS days.",
    ),
    really: bool = flag("--apply", help="Remove the points."),
    compact: bool = flag("--compact", help="With --apply, return the free space to the file system (SQLite only)."),
) -> None:
    """Remove some of the old points. Without --apply, only print how many.

    These points always stay: incidents' evidence, pinned commits' points, and the first and last point in each
    stretch. A stretch is a series part with one environment, status and timing. Age is counted from the
    newest run. In a backfill, --every uses commit dates. Pruned records come back if their file is ingested
    again.
    """
    from groupbench.tracker.query.lines import every_line
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.prune import Policy, Pruning, apply_pruning, plan_pruning

    def print_plan(pruning: Pruning) -> None:
        kept = pruning.points - pruning.removed
        young, periodic = counted(all_days, "day"), counted(every_days, "day")
        click.echo(
            f"{counted(pruning.points, 'point')}: {pruning.young:,} younger than {young}, {pruning.edges:,} at the "
            f"edge of a stretch, {pruning.evidence:,} evidence, {pruning.periodic:,} one in {periodic}"
        )
        verb = "removed" if really else "would be removed"
        click.echo(f"{pruning.removed:,} {verb}, {kept:,} kept" + ("" if really else "; --apply removes them"))

    def plan(session: Session) -> Pruning:
        return plan_pruning(session, Policy(all_days, every_days), order=every_line(session).runs[::-1])

    if not really:
        with reading(db) as session:
            print_plan(plan(session))
        return
    with open_store(db, create=False) as store:
        with store.write() as session:
            pruning = plan(session)
            apply_pruning(session, pruning)
        print_plan(pruning)
        if compact:
            store.compact()


@command()
def backup(db: str, file: Path = argument(type=click.Path(path_type=Path))) -> None:
    """Copy the database to FILE, even while it is in use. An existing file is never overwritten.

    The copy is a single consistent SQLite file. For PostgreSQL, use pg_dump.
    """
    from groupbench.tracker.store import maintenance
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store:
        size = maintenance.backup(store, file)
        click.echo(printable(f"{file}: {size:,} bytes, a copy of {store.name}"))


@command()
def verify(
    context: click.Context,
    quick: bool = flag("--quick", help="Skip the hashes of the results, which take most of the time."),
    limit: int = limit_option("Number of problems to list.", default=20),
) -> None:
    """Check the database file, the references between its tables, and every hash.

    Exit codes: 0 no problems, 1 problems found, 2 usage error.
    """
    from itertools import chain, islice

    from sqlalchemy import func, select

    from groupbench.tracker.store.engine import ADVICE
    from groupbench.tracker.store.schema import Point
    from groupbench.tracker.store.verify import DatabaseProblem, verify_results
    from groupbench.tracker.store.verify import verify as problems_of
    from groupbench.tracker.tools.progress import Progress

    problems: list[DatabaseProblem] = []
    number = 0
    try:
        with reading(context.obj) as session:
            number = session.scalar(select(func.count()).select_from(Point)) or 0
            with Progress(number, "points") as progress:
                results = () if quick else verify_results(context.obj, session, progress.add)
                problems = list(islice(chain(problems_of(session, quick=True), results), limit + 1))
    except DamageError as error:  # too damaged to be opened
        problems.append(DatabaseProblem("damage", error.message.removesuffix(f"; {ADVICE}")))
    for problem in problems[:limit]:
        click.echo(printable(str(problem)))
    if problems:
        more = f"; only the first {limit} are shown" if len(problems) > limit else ""
        shown = counted(len(problems[:limit]), "problem")
        click.echo(f"VERIFY {shown}{more}; restore a backup, or ingest the records into a new one")
        context.exit(ExitCode.FAILED)
    click.echo(f"VERIFY ok: {counted(number, 'point')}" + (", hashes not checked" if quick else ""))


@command()
def merge(db: str, other: str = argument(metavar="FILE|URL")) -> None:
    """Add every point of another database to this one, which is created if it does not exist.

    Either everything is added or nothing. Points in both databases are skipped. A run with two
    different descriptions is an error.
    """
    from groupbench.tracker.facts.errors import NoDatabaseError, StoreError
    from groupbench.tracker.store import maintenance
    from groupbench.tracker.store.engine import open_store

    try:
        opened = open_store(other, create=False)
    except NoDatabaseError as error:  # its advice is how to create this database, not how to find the other one
        raise StoreError(error.problem) from error
    with opened as source, open_store(db, create=True) as store:
        done = maintenance.merge(store, source)
        nothing = " (nothing new)" if not done.added else ""
        click.echo(
            printable(
                f"{source.name}: {counted(done.records, 'point')} in {counted(len(done.runs), 'run')}: "
                f"{done.added} added, {done.known} already known{nothing}, {done.new_series} series new"
            )
        )
