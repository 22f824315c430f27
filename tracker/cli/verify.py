"""`groupbench verify`: check the database for damage."""

from __future__ import annotations

import click

from groupbench.tracker.cli.options import limit_option, reading
from groupbench.tracker.facts.errors import DamageError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.option("--quick", is_flag=True, help="Skip the hashes of the results, which take most of the time.")
@limit_option("Number of problems to list.", default=20)
@click.pass_context
def verify(context: click.Context, quick: bool, limit: int) -> None:
    """Check the database file, the references between its tables, and every hash.

    Exit codes: 0 no problems, 1 problems found, 2 usage error.
    """
    from itertools import islice

    from sqlalchemy import func, select

    from groupbench.tracker.store.engine import ADVICE
    from groupbench.tracker.store.schema import Point
    from groupbench.tracker.store.verify import DatabaseProblem
    from groupbench.tracker.store.verify import verify as problems_of

    problems: list[DatabaseProblem] = []
    number = 0
    try:
        with reading(context.obj) as session:
            problems = list(islice(problems_of(session, quick=quick), limit + 1))
            number = 0 if problems else session.scalar(select(func.count()).select_from(Point)) or 0
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
