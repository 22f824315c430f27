"""`groupbench gains`: list the problems with the most time left to gain."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import click
import msgspec

from groupbench.tracker.cli.declared import command, group, option
from groupbench.tracker.cli.here import traffic_of
from groupbench.tracker.cli.options import CELL_FILTERS, reading
from groupbench.tracker.cli.output import CELL, Column, Format, output_formats, say, write_rows
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.gains import CANARY, Gain
from groupbench.tracker.query.gains import gains as find
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.text.wording import milliseconds, no_such

MODULE = "groupbench.operators.layers"

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
    layer: str | None = option(
        "--layer",
        help="Include only the products of one layer of a public model, such as qwen3_30b_prefill or dsv3_decode.",
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

    With --layer, both shares show which product in a model's layer is worth the work. Measure the products
    with `tritonbench --op grouped_gemm --suite decode`, prefill or training. For your own model, select the products by
    --operator and --shape.

    Exit codes: 0 ok, 2 usage error, 3 no cell, or not every layer product, has a known speed of light.
    """
    from groupbench.tracker.query.points import points_of_run, points_of_state
    from groupbench.tracker.query.resolve import find_run

    products = _products(layer) if layer is not None else ()
    with reading(context.obj) as session:
        run = find_run(session, run_id)
        points = points_of_run(session, run)
        others = [point for point in points_of_state(session, run.state) if point.series.operator == CANARY]
        traffic = traffic_of(context)
        calls = traffic.resolve(session)
        number = calls.number if traffic else None
        gains_found = find(_selected(points, None if layer is None else products, where), others, number)
    rows = [gain.flat() for gain in gains_found]
    write_rows(Gain, [column for column in COLUMNS if traffic or column.key != "gain_us"], gains_found, form)
    if calls.unmatched:
        say(calls.remark)
    if not rows:
        say("no cell has a known speed of light: the run, or another one of its commit, needs `canary` on the same GPU")
    measured = {row["shape"] for row in rows}
    missing = [shape for shape in products if shape not in measured]
    for shape in missing:
        click.echo(f"groupbench gains: this run has no speed of light for {shape}", err=True)
    context.exit(ExitCode.OK if rows and not missing else ExitCode.INCOMPLETE)


def _selected(points: list[PointRow], products: tuple[str, ...] | None, where: Filter) -> list[PointRow]:
    """Return the points selected by the filters.

    With a layer's `products`, return only theirs: forward `grouped_gemm` ones, unless the filters name others.
    """
    from groupbench.tracker.compare.sides import narrowed_points

    selected = narrowed_points(points, where)
    if products is None:
        return selected
    modes, operators = where.mode or ("fwd",), where.operator or ("grouped_gemm",)
    return [
        point
        for point in selected
        if point.series.shape in products and point.series.mode in modes and point.series.operator in operators
    ]


def _products(layer: str) -> tuple[str, ...]:
    """Return a layer's product shapes. Raises BadParameter for an unknown layer."""
    done = subprocess.run(own_program(MODULE), stdout=subprocess.PIPE, check=True)
    layers = msgspec.json.decode(done.stdout, type=dict[str, tuple[str, ...]])
    if layer not in layers:
        raise click.BadParameter(no_such("no layer", layer, layers), param_hint="--layer")
    return layers[layer]
