"""`groupbench compare`: two commits, runs or files side by side."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import min_effect_option, reading, series_filters
from groupbench.tracker.cli.output import (
    HOST,
    PROTOCOL,
    SEED,
    Column,
    Format,
    output_formats,
    plain,
    say,
    write_json,
    write_table,
)
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import interval, milliseconds, p_value, printable, ratio
from groupbench.tracker.verdicts import Verdict

if TYPE_CHECKING:
    from groupbench.tracker.compare.comparison import Comparison
    from groupbench.tracker.stats.ratios import GeometricMean


COLUMNS = (
    Column("verdict", "verdict"),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True, middle=True),
    Column("dtype", "dtype"),
    Column("hardware", "hardware", wraps=True),
    HOST,
    PROTOCOL,
    SEED,
    Column("A ms", "a_ms", milliseconds, right=True),
    Column("B ms", "b_ms", milliseconds, right=True),
    Column("B/A", "ratio", lambda value: ratio(value) or "~", right=True),
    Column("95 %", "interval", lambda bounds: interval(*bounds) or "~", right=True),
    Column("p", "p", lambda p: p_value(p) or "~", right=True),
    Column("noise", "noise", lambda noise: "~" if noise is None else f"±{100 * noise:.1f}%", right=True),
    Column("runs", "runs", lambda runs: f"{runs[0]}+{runs[1]}", right=True),
    Column("note", "note", wraps=True),
)


WORSE = (Verdict.WRONG, Verdict.REGRESSED)
CHANGED = (*WORSE, Verdict.IMPROVED)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--force", is_flag=True, help="Compare unlike environments, too.")
@click.option("--only-changed", is_flag=True, help="List only series that are wrong, regressed or improved.")
@click.option(
    "--fail-on",
    type=click.Choice([str(Verdict.REGRESSED.value)]),
    help="Exit with 1 where a series regressed or is wrong.",
)
@series_filters
@min_effect_option
@output_formats
@click.pass_context
def compare(
    context: click.Context,
    a: str,
    b: str,
    force: bool,
    only_changed: bool,
    fail_on: str | None,
    min_effect: float | None,
    form: Format | None,
    **fields: Any,
) -> None:
    """Two commits, runs or files side by side: B over A, above 1 is slower, with its 95 % interval and p value.

    A and B are the start of a hash, a branch, a tag, `latest` or `previous`; HASH+ is the dirty tree of a commit;
    run:ID is one run; a date (2026-01-31, 7d, @7d) is the newest run that had begun by its end; and a file of records
    needs no database. Rows come by severity, the largest change first. Series whose environments differ are not
    compared. Exits with 4 where nothing can be, and with 1 where --fail-on says so.
    """
    from groupbench.tracker.compare import sides
    from groupbench.tracker.compare.comparison import compare as compare_sides
    from groupbench.tracker.query.filters import Filter

    files = sides.is_file(a) and sides.is_file(b)
    with nullcontext(None) if files else reading(context.obj) as session:
        found = compare_sides(session, a, b, force=force, min_effect=min_effect, where=Filter(**fields))
    rows = [pair.flat() for pair in found.pairs if not only_changed or pair.verdict in CHANGED]
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    head = f"A {printable(str(found.a))}  B {printable(str(found.b))}: {counts}"
    if form == "json":
        write_json(
            {
                "a": str(found.a),
                "b": str(found.b),
                "counts": found.counts,
                "geometric_mean": found.geometric_mean,
                "geometric_mean_interval": None if found.overall is None else [found.overall.low, found.overall.high],
                "geometric_means": found.means(),
                "differences": found.differences,
                "series": rows,
            }
        )
    elif form == "csv":
        say(head)
        write_table(plain(_columns()), rows, form)
        say(_tail(found))
    else:
        click.echo(head + "\n")
        write_table(COLUMNS, [{**row, "interval": (row["low"], row["high"])} for row in rows], form)
        click.echo("\n" + _tail(found))
    if found.differences:
        say(f"not compared, environments differ: {' | '.join(found.differences[:3])}; --force compares all the same")
    if fail_on and any(pair.verdict in WORSE for pair in found.pairs):
        context.exit(ExitCode.FAILED)
    context.exit(ExitCode.OK if found.comparable else ExitCode.INCOMPARABLE)


def _columns() -> tuple[str, ...]:
    from groupbench.tracker.compare.comparison import SeriesPair

    return SeriesPair.columns()


def _tail(found: Comparison) -> str:
    """Return a line for each backend, where there are several, and one for all."""
    if found.overall is None:
        return "no latency could be compared"
    means = found.by_backend
    lines = [_mean(f"geometric mean of {printable(name)}", mean) for name, mean in means.items() if len(means) > 1]
    return "\n".join([*lines, _mean("geometric mean of B/A", found.overall)])


def _mean(name: str, mean: GeometricMean) -> str:
    bounds = interval(mean.low, mean.high)
    return f"{name} over {mean.series} series: {ratio(mean.ratio)}" + (f", 95 % {bounds}" if bounds else "")
