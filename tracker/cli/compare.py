"""`groupbench compare`: compare two commits, runs or files, series by series."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, flag, group, option
from groupbench.tracker.cli.options import CELL_FILTERS, min_effect_option, reading
from groupbench.tracker.cli.output import (
    CELL,
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
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.text.wording import interval, milliseconds, p_value, printable, ratio

if TYPE_CHECKING:
    from groupbench.tracker.compare.comparison import Comparison
    from groupbench.tracker.compare.ratios import GeometricMean


COLUMNS = (
    Column("verdict", "verdict"),
    *CELL,
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


@command()
def compare(
    context: click.Context,
    a: str = argument(),
    b: str = argument(),
    force: bool = flag("--force", help="Also compare series whose environments differ."),
    only_changed: bool = flag("--only-changed", help="List only series that are wrong, regressed or improved."),
    fail_on: str | None = option(
        "--fail-on",
        type=click.Choice([str(Verdict.REGRESSED.value)]),
        help="Exit with code 1 if a series regressed or is wrong.",
    ),
    where: Filter = group(Filter, **CELL_FILTERS),
    min_effect: float | None = min_effect_option,
    form: Format = output_formats,
) -> None:
    """Compare two commits, runs or files, series by series.

    The ratio is B/A: above 1, B is slower. The 95 % interval and p value are next to it. They include the noise
    between runs, so they need two runs of a side or other stored runs of the series. Rows are sorted by severity, then
    by the size of the change. Series whose environments differ are not compared.

    A and B each name one of:

    \b
    a commit       start of its hash, a branch, a tag, `latest` or `previous`
    HASH+          the commit with uncommitted changes
    run:ID         one run
    a date or age  (2026-01-31, 7d, @7d) the newest run started by the end of the day
    a file         records as JSON lines; needs no database

    Exit codes: 0 ok, 1 a regression under --fail-on, 2 usage error, 4 nothing can be compared.
    """
    from groupbench.tracker.compare import sides
    from groupbench.tracker.compare.comparison import SeriesPair
    from groupbench.tracker.compare.comparison import compare as compare_sides

    files = sides.is_file(a) and sides.is_file(b)
    with nullcontext(None) if files else reading(context.obj) as session:
        result = compare_sides(session, a, b, force=force, min_effect=min_effect, where=where)
    rows = [pair.flat() for pair in result.pairs if not only_changed or pair.verdict in CHANGED]
    counts = ", ".join(f"{n} {verdict}" for verdict, n in result.counts.items())
    head = f"A {printable(str(result.a))}  B {printable(str(result.b))}: {counts}"
    if form == "json":
        write_json(_facts(result) | {"series": rows})
    elif form == "csv":
        say(head)
        write_table(plain(SeriesPair.columns()), rows, form)
        say(_tail(result))
    else:
        click.echo(head + "\n")
        write_table(COLUMNS, [{**row, "interval": (row["low"], row["high"])} for row in rows], form)
        click.echo("\n" + _tail(result))
    if result.differences:
        say(f"not compared, environments differ: {' | '.join(result.differences[:3])}; --force compares them anyway")
    if fail_on and any(pair.verdict in WORSE for pair in result.pairs):
        context.exit(ExitCode.FAILED)
    context.exit(ExitCode.OK if result.comparable else ExitCode.INCOMPARABLE)


def _facts(result: Comparison) -> dict[str, Any]:
    """Return a comparison's JSON without the series."""
    overall = result.overall
    bounds = None if overall is None else [overall.low, overall.high]
    return {"a": str(result.a), "b": str(result.b), **result.facts(), "geometric_mean_interval": bounds}


def _tail(result: Comparison) -> str:
    """Return the geometric means: a line for each backend if there are several, and one for all."""
    if result.overall is None:
        return "no latency could be compared"
    means = result.by_backend
    lines = [_mean(f"geometric mean of {printable(name)}", mean) for name, mean in means.items() if len(means) > 1]
    return "\n".join([*lines, _mean("geometric mean of B/A", result.overall)])


def _mean(name: str, mean: GeometricMean) -> str:
    what, bounds = f"{name} over {mean.series} series: ", interval(mean.low, mean.high)
    if mean.is_resolved:
        return what + ratio(mean.ratio) + (f", 95 % {bounds}" if bounds else "")
    return f"{what}not resolved, since their ratios differ too much"
