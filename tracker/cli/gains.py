"""`groupbench gains`: list the problems with the most time left to gain."""

from __future__ import annotations

from typing import Any

import click

from groupbench.tracker.cli.options import reading, series_filters
from groupbench.tracker.cli.output import Column, Format, output_formats, plain, write_json, write_table
from groupbench.tracker.completion import RunId
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import milliseconds

COLUMNS = (
    Column("operator", "operator"),
    Column("best backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True, middle=True),
    Column("dtype", "dtype"),
    Column("ms", "latency_ms", milliseconds, right=True),
    Column("speed of light ms", "floor_ms", milliseconds, right=True),
    Column("gap", "gap", lambda gap: f"{gap:.2f}", right=True),
    Column("to gain ms", "gain_ms", milliseconds, right=True),
    Column("share", "share", lambda share: f"{100 * share:.0f}%", right=True),
)


@click.command()
@click.option(
    "--run", "run_id", type=RunId(), metavar="ID", help="Use the run whose id starts with ID. Default: the newest run."
)
@series_filters
@output_formats
@click.pass_context
def gains(context: click.Context, run_id: str | None, form: Format | None, **fields: Any) -> None:
    """List the problems of a run by the time that an optimal kernel would save per call, largest first.

    The speed of light of a problem is the latency of an optimal kernel. It moves the problem's bytes and computes its
    flops at the rates that the operator `canary` reaches with a copy and a matrix product. So the same run must have
    measured `canary` on the same GPU.

    \b
    ms     the latency of the problem's fastest backend
    gap    ms divided by the speed of light
    share  part of the time that all listed problems together could save

    To see which products of a model's layer are worth the work, select them with --operator, --shape and --where.

    Exit codes: 0 ok, 2 usage error, 3 no cell has a known speed of light.
    """
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.gains import Gain
    from groupbench.tracker.query.gains import gains as find
    from groupbench.tracker.query.points import points_of_run
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.query.series import narrowed

    with reading(context.obj) as session:
        points = points_of_run(session, find_run(session, run_id))
        wanted = {row.sort_key for row in narrowed([p.series for p in points], Filter(**fields), exact=True)}
        gains_found = find(point for point in points if point.series.sort_key in wanted)
    rows = [gain.flat() for gain in gains_found]
    if form == "json":
        write_json(rows)
    else:
        write_table(plain(Gain.columns()) if form == "csv" else COLUMNS, rows, form)
    context.exit(ExitCode.OK if rows else ExitCode.INCOMPLETE)
