"""`groupbench gate`: the verdict on a run, as an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import min_effect_option, reading
from groupbench.tracker.cli.output import (
    Column,
    Format,
    milliseconds,
    output_formats,
    printable,
    say,
    signed_percent,
    write_json,
    write_table,
)

if TYPE_CHECKING:
    from groupbench.tracker.gate import Judged

COLUMNS = (
    Column("verdict", "verdict"),
    Column("cause", "cause"),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True),
    Column("dtype", "dtype"),
    Column("before ms", "before_ms", milliseconds, right=True),
    Column("now ms", "latency_ms", milliseconds, right=True),
    Column("change", "change", signed_percent, right=True),
    Column("threshold", "threshold", lambda t: "" if t is None else f"±{100 * t:.1f}%", right=True),
    Column("n", "n", right=True),
    Column("note", "note", wraps=True),
)


@click.command()
@click.option("--run", "run_id", metavar="ID", help="Judge this run, not the newest: start of its id.")
@min_effect_option
@click.option("--strict", is_flag=True, help="Series too young to judge make the run incomplete.")
@click.option(
    "--window",
    type=click.IntRange(min=3),
    default=20,
    show_default=True,
    metavar="N",
    help="How many earlier results a series is judged by.",
)
@output_formats
@click.pass_context
def gate(
    context: click.Context,
    run_id: str | None,
    min_effect: float | None,
    strict: bool,
    window: int,
    form: Format | None,
) -> None:
    """Judge the newest run; the exit code is the verdict.

    The first line says what was found, and counts every verdict; below it stands only what changed or could
    not be judged.

    \b
    0  ok: nothing changed, or the better
    1  a latency, an accuracy or a repeatability regressed, or a result is wrong
    2  usage
    3  incomplete: a cell failed, is missing, or nothing was measured
    4  a series has results only from unlike environments
    """
    from groupbench.tracker import gate as gates
    from groupbench.tracker import query

    with reading(context.obj) as session:
        run = query.find_run(session, run_id)
        found = gates.judge_run(session, run, window=window, min_effect=min_effect, strict=strict)
    if form == "json":
        write_json(
            {
                "verdict": found.word,
                "exit_code": found.exit_code,
                "summary": found.summary,
                "run": run.id,
                "commit": run.commit,
                "dirty": run.dirty,
                "counts": found.counts,
                "series": [_row(row) for row in found.rows],
            }
        )
    else:
        if form == "csv":
            say(found.summary)
        else:
            click.echo(printable(found.summary))
            if found.told:
                click.echo()
        if found.told or form == "csv":
            write_table(COLUMNS, [_row(row) for row in found.told], form)
    context.exit(found.exit_code)


def _row(row: Judged) -> dict[str, Any]:
    series = row.series
    return {
        "verdict": row.verdict,
        "cause": row.cause,
        "operator": series.operator,
        "backend": series.backend,
        "mode": series.mode,
        "shape": series.shape,
        "dtype": series.dtype,
        "before_ms": row.before_ms,
        "latency_ms": None if row.point is None else row.point.median_ms,
        "change": row.change,
        "threshold": row.threshold,
        "n": row.n,
        "note": row.note,
    }
