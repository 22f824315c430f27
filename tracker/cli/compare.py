"""`groupbench compare`: two commits side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import min_effect_option, reading
from groupbench.tracker.cli.output import (
    Column,
    Format,
    milliseconds,
    output_formats,
    say,
    write_json,
    write_table,
)

if TYPE_CHECKING:
    from groupbench.tracker.compare import Comparison, Pair

NOTHING_COMPARABLE = 4

COLUMNS = (
    Column("verdict", "verdict"),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True),
    Column("dtype", "dtype"),
    Column("hardware", "hardware", wraps=True),
    Column("A ms", "a_ms", milliseconds, right=True),
    Column("B ms", "b_ms", milliseconds, right=True),
    Column("B/A", "ratio", lambda ratio: "~" if ratio is None else f"{ratio:.3f}", right=True),
    Column("noise", "noise", lambda noise: "~" if noise is None else f"±{100 * noise:.1f}%", right=True),
    Column("runs", "runs", lambda runs: f"{runs[0]}+{runs[1]}", right=True),
    Column("note", "note", wraps=True),
)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--force", is_flag=True, help="Compare unlike environments, too.")
@min_effect_option
@output_formats
@click.pass_context
def compare(context: click.Context, a: str, b: str, force: bool, min_effect: float | None, form: Format | None) -> None:
    """Two commits side by side: B over A, above 1 is slower.

    A and B are the start of a hash, a branch, `latest` or `previous`; HASH+ is the dirty tree of a commit.
    Exits with 4 where nothing can be compared.
    """
    from groupbench.tracker.compare import compare as compare_commits

    with reading(context.obj) as session:
        found = compare_commits(session, a, b, force=force, min_effect=min_effect)
    rows = [_row(pair) for pair in found.pairs]
    head = f"A {found.a}  B {found.b}: " + ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    if form == "json":
        write_json(
            {
                "a": str(found.a),
                "b": str(found.b),
                "counts": found.counts,
                "geometric_mean": found.geometric_mean,
                "series": rows,
            }
        )
    elif form == "csv":
        say(head)
        write_table(COLUMNS, rows, form)
        say(_tail(found))
    else:
        click.echo(head + "\n")
        write_table(COLUMNS, rows, form)
        click.echo("\n" + _tail(found))
    context.exit(0 if found.comparable else NOTHING_COMPARABLE)


def _tail(found: Comparison) -> str:
    number = sum(pair.ratio is not None for pair in found.pairs)
    if found.geometric_mean is None:
        return "no latency could be compared"
    return f"geometric mean of B/A over {number} series: {found.geometric_mean:.3f}"


def _row(pair: Pair) -> dict[str, Any]:
    series = pair.series
    return {
        "verdict": pair.verdict,
        "operator": series.operator,
        "backend": series.backend,
        "mode": series.mode,
        "shape": series.shape,
        "dtype": series.dtype,
        "hardware": series.hardware,
        "a_ms": pair.a_ms,
        "b_ms": pair.b_ms,
        "ratio": pair.ratio,
        "noise": pair.noise,
        "runs": list(pair.runs),
        "note": pair.note,
    }
