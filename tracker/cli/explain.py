"""`groupbench explain`: explain how the kernels of two commits, runs, toolchains or backends differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, group, option
from groupbench.tracker.cli.options import CELL_FILTERS, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_table
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.text.wording import printable, signed_change

if TYPE_CHECKING:
    from groupbench.tracker.compare.explanation import CellGroup, Explanation, ProfilePair

MOST_GROUPS = 10
"""Most groups of cells that are printed."""


@command()
def explain(
    context: click.Context,
    a: str = argument(),
    b: str | None = argument(required=False),
    where: Filter = group(Filter, **CELL_FILTERS),
    against: str | None = option(
        "--against", metavar="BACKEND", help="Compare with this backend in B, or in A if B is omitted."
    ),
    form: Format = output_formats,
) -> None:
    """Explain how the kernels of A and B differ: show configs and static facts next to each other.

    A and B are as in `compare`: a commit, branch, `latest`, `previous`, run:ID or date. To see the effect of a
    toolchain, compare two runs at one commit with different Triton versions. To compare two backends, use --against.

    \b
    groupbench explain previous latest
    groupbench explain run:3f2a run:91bc --backend triton_flat
    groupbench explain latest --backend triton_flat --against helion_worklist

    The first lines name the files of the repository and the packages that differ between the measured processes, and
    then the cause. If `groupbench profile` has profiled a cell in both A and B, the counters come last.

    Exit codes: 0 ok, 2 usage error, 3 A and B share no cell with known files, kernels or profiles.
    """
    from groupbench.tracker.compare.explanation import explain as explain_sides
    from groupbench.tracker.compare.sides import find_side, find_sides, is_file, narrowed_side

    if b is None and against is None:
        raise click.UsageError("give B, or a backend with --against")
    for word in (a, b or a):
        if is_file(word):
            raise click.UsageError(f"{word} is a file, but kernels are read from the database: ingest it first")
    after = where if against is None else replace(where, backend=(against,))
    with reading(context.obj) as session:
        if b is None or against is not None:
            old, new = find_side(session, a), find_side(session, b or a)
        else:
            old, new = find_sides(session, a, b)
        sides = narrowed_side(old, where), narrowed_side(new, after)
        explanation = explain_sides(session, *sides, against)
    if form == "json":
        write_json(_json(explanation))
    else:
        _write(explanation, form)
    if explanation.reason:
        say(explanation.reason)
    comparable = explanation.groups or explanation.same or explanation.profiles or explanation.loaded_texts
    context.exit(ExitCode.OK if comparable else ExitCode.INCOMPLETE)


def _write(explanation: Explanation, form: Format) -> None:
    for text in explanation.loaded_texts:
        click.echo(printable(text))
    for cells in explanation.groups[:MOST_GROUPS]:
        click.echo(printable(f"{cells.text} ({cells.effect})"))
    if len(explanation.groups) > MOST_GROUPS:
        click.echo(f"and {len(explanation.groups) - MOST_GROUPS} more groups; --format json lists all")
    click.echo(printable(explanation.head))
    if explanation.environment:
        click.echo(printable(f"environment: {'; '.join(explanation.environment)}"))
    for cells in explanation.groups[:MOST_GROUPS]:
        _write_group(cells, form)
    for pair in explanation.profiles[:MOST_GROUPS]:
        _write_profiles(pair, form)
    if len(explanation.profiles) > MOST_GROUPS:
        click.echo(f"and {len(explanation.profiles) - MOST_GROUPS} more profiles; --format json lists all")


def _write_group(group: CellGroup, form: Format) -> None:
    from groupbench.tracker.compare.explanation import side_by_side

    columns = [
        Column("fact", "fact"),
        Column("A", "a", wraps=True),
        Column("B", "b", wraps=True),
        Column("", "differs"),
    ]
    for pair in group.pairs():
        series = group.first.before.series
        click.echo(printable(f"\n{pair.name} of {series}"))
        rows = [
            {"fact": fact, "a": _shown(a), "b": _shown(b), "differs": "" if a == b else "←"}
            for fact, a, b in side_by_side(pair)
        ]
        write_table(columns, rows, form)


def _write_profiles(pair: ProfilePair, form: Format) -> None:
    click.echo(printable(f"\n{pair.text}"))
    columns = [
        Column("metric", "metric"),
        Column("A", "a", right=True),
        Column("B", "b", right=True),
        Column("change", "change", right=True),
        Column("", "meaning", wraps=True),
    ]
    rows = [
        {
            "metric": metric.name,
            "a": metric.text(a),
            "b": metric.text(b),
            "change": signed_change(b / a - 1) if a else "",
            "meaning": metric.meaning,
        }
        for metric, a, b in pair.metrics
    ]
    write_table(columns, rows, form)


def _shown(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _json(explanation: Explanation) -> dict[str, Any]:
    from groupbench.tracker.compare.explanation import side_by_side

    return {
        "a": explanation.a,
        "b": explanation.b,
        "same": explanation.same,
        "unknown": explanation.unknown,
        "environment": explanation.environment,
        "loaded": explanation.loaded,
        "groups": [
            {
                "summary": group.text,
                "effect": group.effect,
                "differences": group.first.differences,
                "series": [str(cell.before.series) for cell in group.cells],
                "kernels": [
                    {"name": pair.name, "facts": {fact: [a, b] for fact, a, b in side_by_side(pair)}}
                    for pair in group.pairs()
                ],
            }
            for group in explanation.groups
        ],
        "profiles": [
            {
                "series": [str(pair.before.series), str(pair.after.series)],
                "metrics": {metric.name: [a, b] for metric, a, b in pair.metrics},
            }
            for pair in explanation.profiles
        ],
    }
