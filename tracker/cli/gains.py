"""`groupbench gains`: list the problems with the most time left to gain."""

from __future__ import annotations

from dataclasses import replace

import click

from groupbench.tracker.cli.declared import command, group, option
from groupbench.tracker.cli.here import traffic_of
from groupbench.tracker.cli.options import CELL_FILTERS, reading
from groupbench.tracker.cli.output import CELL, Column, Format, output_formats, say, write_rows
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.gains import CANARY, Gain
from groupbench.tracker.query.gains import gains as find
from groupbench.tracker.text.wording import milliseconds

COLUMNS = (
    *(replace(column, header="best backend") if column.key == "backend" else column for column in CELL),
    Column("ms", "latency_ms", milliseconds, right=True),
    Column("speed of light ms", "floor_ms", milliseconds, right=True),
    Column("gap", "sol_gap", lambda gap: f"{gap:.2f}", right=True),
    Column("time share", "time_share", lambda share: f"{100 * share:.0f}%", right=True),
    Column("gain ms", "gain_ms", milliseconds, right=True),
    Column("gain share", "gain_share", lambda share: f"{100 * share:.0f}%", right=True),
    Column("gain µs per step", "gain_us", lambda us: "" if us is None else f"{us:.3g}", right=True),
)


@command()
def gains(
    context: click.Context,
    run_id: str | None = option(
        "--run", metavar="ID", help="Use the run whose id starts with ID. Default: the newest run."
    ),
    where: Filter = group(Filter, **CELL_FILTERS),
    form: Format = output_formats,
) -> None:
    """List the problems of a run by the possible gain per call, largest first.

    A problem's speed of light is the latency of an optimal kernel. It moves the problem's bytes and computes the
    flops at the rates of the operator `canary` for a copy and a matrix product. So this run, or
    another one of the same commit, must have measured `canary` on the same GPU.

    \b
    ms          the latency of the problem's fastest backend
    gap         ms divided by the speed of light
    time share  ms as part of all listed problems' time
    gain ms     the time saved per call at the speed of light
    gain share  gain ms as part of the sum over all listed problems
    gain µs per step  gain times the calls in [traffic] of groupbench.toml, by which the list is then sorted

    To see which product in a model's layer is worth the work, select the products by --operator and --shape.

    Exit codes: 0 ok, 2 usage error, 3 no cell has a known speed of light.
    """
    from groupbench.tracker.compare.sides import narrowed_points
    from groupbench.tracker.query.points import points_of_run, points_of_state
    from groupbench.tracker.query.resolve import find_run

    with reading(context.obj) as session:
        run = find_run(session, run_id)
        points = points_of_run(session, run)
        others = [point for point in points_of_state(session, run.state) if point.series.operator == CANARY]
        traffic = traffic_of(context)
        calls = traffic.resolve(session)
        number = calls.number if traffic else None
        gains_found = find(narrowed_points(points, where), others, number)
    rows = [gain.flat() for gain in gains_found]
    write_rows(Gain, [column for column in COLUMNS if traffic or column.key != "gain_us"], gains_found, form)
    if calls.unmatched:
        say(calls.remark)
    if not rows:
        say("no cell has a known speed of light: the run, or another one of its commit, needs `canary` on the same GPU")
    context.exit(ExitCode.OK if rows else ExitCode.INCOMPLETE)
