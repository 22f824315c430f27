"""`groupbench league`: rank the backends by problem: which is fastest, and by how much."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import click

from groupbench.tracker.cli.options import CELL_FILTERS, filters, reading
from groupbench.tracker.cli.output import Format, output_format, say, write_json
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.query.filters import Filter


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="WHAT...")
@output_format("md", "json")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page to this file. Default: stdout.",
)
@filters(*CELL_FILTERS)
@click.pass_context
def league(context: click.Context, words: tuple[str, ...], form: Format, output: Path | None, where: Filter) -> None:
    """Rank the backends in a Markdown page, with their accuracy, memory, routing and versions.

    The page lists every problem, so it also shows where a backend is slower than others.
    WHAT is as in `compare`: a commit, run:ID, `latest`, a date, or a file of records, which needs no database.
    Backends are compared on the same problem, GPU, toolchain and commit.

    Exit codes: 0 ok, 2 usage error, 4 nothing can be compared.
    """
    from groupbench.tracker.compare import sides
    from groupbench.tracker.compare.league import league as tables_of
    from groupbench.tracker.facts.errors import OutputError
    from groupbench.tracker.outputs.league_page import page
    from groupbench.tracker.query.lines import every_line
    from groupbench.tracker.text.files import whole_file

    files = all(map(sides.is_file, words))
    with nullcontext(None) if files else reading(context.obj) as session:
        given = [sides.find_side(session, word) for word in words]
        # The runs of a file have no place in the database.
        stored = session is not None and all(side.state is not None for side in given)
        line = every_line(session) if session is not None and stored else None
    tables = tables_of([point for side in given for point in side.points], where, line)
    if form == "json":
        rows = [(table.title, len(table.matches), [*map(asdict, table.standings)]) for table in tables]
        write_json([dict(zip(("title", "problems", "standings"), row, strict=True)) for row in rows])
    elif output is None:
        click.echo(page(tables), nl=False)
    else:
        with whole_file(output, OutputError) as file:
            file.write(page(tables).encode())
        say(f"wrote {output}")
    if not tables:
        say("nothing to compare: no problem has two backends on one GPU at one commit")
        context.exit(ExitCode.INCOMPARABLE)
