"""`groupbench explain`: explain how the kernels of two commits, runs, toolchains or backends differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker import project
from groupbench.tracker.cli.declared import argument, command, group, option
from groupbench.tracker.cli.options import CELL_FILTERS, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_table
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.kernel_files import FOLDER, KernelFolder
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.text.wording import printable, signed_change
from groupbench.tracker.tools.parameters import Number

if TYPE_CHECKING:
    from groupbench.tracker.compare.explanation import CellGroup, Explanation, ProfilePair

MOST_GROUPS = 10
"""Most groups of cells that are printed."""
SOURCE_LINES = 2
"""Most changed lines of a kernel's source that are printed at the top."""
OPERATIONS = 8
"""Most operations listed in the summary line of a diff."""


@command()
def explain(
    context: click.Context,
    a: str = argument(),
    b: str | None = argument(required=False),
    where: Filter = group(Filter, **CELL_FILTERS),
    against: str | None = option(
        "--against", metavar="BACKEND", help="Compare with this backend in B, or in A if B is omitted."
    ),
    folder: Path | None = option(
        "--kernels",
        type=click.Path(path_type=Path),
        envvar="GROUPBENCH_KERNELS",
        show_envvar=True,
        help="Folder with the kernels' code. Default: `kernels` next to the records, or in this folder.",
    ),
    lines: int = option(
        "--lines", type=Number(0), default=30, help="Number of lines to show of each diff; 0 shows none."
    ),
    form: Format = output_formats,
) -> None:
    """Explain how the kernels of A and B differ: show configs, static facts and code next to each other.

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
    kernels = KernelFolder(folder or kernel_folder())
    if form == "json":
        write_json(_json(explanation, kernels))
    else:
        _write(explanation, kernels, lines, form)
    if explanation.reason:
        say(explanation.reason)
    comparable = explanation.groups or explanation.same or explanation.profiles or explanation.loaded_texts
    context.exit(ExitCode.OK if comparable else ExitCode.INCOMPLETE)


def kernel_folder() -> Path:
    """Return the folder with the kernels' code: next to the records, or in this folder."""
    here = project.load()
    next_to_records = Path(here.place(os.environ.get("GROUPBENCH_RECORDS") or here.settings.records)) / FOLDER
    return next_to_records if next_to_records.is_dir() else Path(FOLDER)


def _write(explanation: Explanation, kernels: KernelFolder, lines: int, form: Format) -> None:
    from groupbench.tracker.compare.explanation import source_changes

    for text in explanation.loaded_texts:
        click.echo(printable(text))
    for cells in explanation.groups[:MOST_GROUPS]:
        click.echo(printable(f"{cells.text} ({cells.effect})"))
        _write_source(source_changes(cells, kernels))
    if len(explanation.groups) > MOST_GROUPS:
        click.echo(f"and {len(explanation.groups) - MOST_GROUPS} more groups; --format json lists all")
    click.echo(printable(explanation.head))
    if explanation.environment:
        click.echo(printable(f"environment: {'; '.join(explanation.environment)}"))
    for cells in explanation.groups[:MOST_GROUPS]:
        _write_group(cells, kernels, lines, form)
    for pair in explanation.profiles[:MOST_GROUPS]:
        _write_profiles(pair, form)
    if len(explanation.profiles) > MOST_GROUPS:
        click.echo(f"and {len(explanation.profiles) - MOST_GROUPS} more profiles; --format json lists all")


def _write_source(changes: Sequence[str]) -> None:
    """Print the first changed lines of a kernel's source, which often name the cause."""
    for text in changes[:SOURCE_LINES]:
        click.echo(printable(f"source: {text}"))
    if len(changes) > SOURCE_LINES:
        click.echo(f"and {len(changes) - SOURCE_LINES} more changed lines, in the diff below")


def _write_group(group: CellGroup, kernels: KernelFolder, lines: int, form: Format) -> None:
    from groupbench.tracker.compare.explanation import diffs, side_by_side

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
        made = diffs(pair, kernels)
        if made is None:
            click.echo("no diff: the code of A or B was not kept")
        for diff in made or ():
            summary = "; ".join(diff.summary[:OPERATIONS]) or "no operation added or removed"
            click.echo(printable(f"\n{diff.language}: +{diff.added} -{diff.removed} lines: {summary}"))
            for line in diff.lines[:lines]:
                click.echo(printable(f"  {line}"))
            if lines and len(diff.lines) > lines:
                click.echo(f"  ... {len(diff.lines) - lines} more lines; --lines {len(diff.lines)} shows all")


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


def _json(explanation: Explanation, kernels: KernelFolder) -> dict[str, Any]:
    from groupbench.tracker.compare.explanation import diffs, side_by_side, source_changes

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
                "source": source_changes(group, kernels),
                "differences": group.first.differences,
                "series": [str(cell.before.series) for cell in group.cells],
                "kernels": [
                    {
                        "name": pair.name,
                        "facts": {fact: [a, b] for fact, a, b in side_by_side(pair)},
                        "diffs": [
                            {"language": diff.language, "summary": diff.summary, "lines": diff.lines}
                            for diff in diffs(pair, kernels) or ()
                        ],
                    }
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
