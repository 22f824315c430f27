"""`groupbench verify`: whether the database holds what it should."""

from __future__ import annotations

import click

from groupbench.tracker.cli.options import reading
from groupbench.tracker.errors import DamageError
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.option("--quick", is_flag=True, help="Leave out the hash of every result, which takes most of the time.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Problems shown.")
@click.pass_context
def verify(context: click.Context, quick: bool, limit: int) -> None:
    """Check the file, the references between tables, and every hash.

    Exit codes: 0 all is well, 1 something is not, 2 usage.
    """
    from itertools import islice

    from sqlalchemy import func, select

    from groupbench.tracker.store.schema import Point
    from groupbench.tracker.store.verify import DatabaseProblem
    from groupbench.tracker.store.verify import verify as problems_of

    problems: list[DatabaseProblem] = []
    number = 0
    try:
        with reading(context.obj) as session:
            problems = list(islice(problems_of(session, quick=quick), limit + 1))
            number = 0 if problems else session.scalar(select(func.count()).select_from(Point)) or 0
    except DamageError as error:  # so much that it cannot be opened
        problems.append(DatabaseProblem("damage", error.message))
    for problem in problems[:limit]:
        click.echo(printable(str(problem)))
    if problems:
        more = f"; only the first {limit} are shown" if len(problems) > limit else ""
        shown = counted(len(problems[:limit]), "problem")
        click.echo(f"VERIFY {shown}{more}; restore a backup, or `groupbench repair` what can be read")
        context.exit(ExitCode.FAILED)
    click.echo(f"VERIFY ok: {counted(number, 'point')}" + (", their hashes not looked at" if quick else ""))
