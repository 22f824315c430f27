"""`groupbench explain`: what happened to the kernels between two commits, runs, toolchains or backends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import reading, series_filters
from groupbench.tracker.cli.output import Column, Format, output_formats, write_json, write_table
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import printable

if TYPE_CHECKING:
    from groupbench.tracker.compare.explanation import CellGroup, Explanation
    from groupbench.tracker.kernel_files import KernelFolder

GROUPS = 10
OPERATIONS = 8
"""Of a diff's summary, in its line."""


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@series_filters
@click.option("--against", metavar="BACKEND", help="Compare each problem in A with this backend's in B, or in A.")
@click.option(
    "--kernels", "folder", type=click.Path(path_type=Path), envvar="GROUPBENCH_KERNELS", show_envvar=True,
    help="Folder with the code of kernels. [kernels next to the records, or here]",
)  # fmt: skip
@click.option("--lines", type=click.IntRange(min=0), default=30, show_default=True, metavar="N",
              help="Show N lines of each diff; 0 shows none.")  # fmt: skip
@output_formats
@click.pass_context
def explain(
    context: click.Context,
    a: str,
    b: str | None,
    against: str | None,
    folder: Path | None,
    lines: int,
    form: Format | None,
    **fields: Any,
) -> None:
    """Say what happened to the kernels between A and B: configs, static facts and code, side by side.

    A and B are what `compare` takes: commits, branches, `latest`, `previous`, run:ID, dates. Two runs of one commit
    with other versions of Triton explain a toolchain; --against explains one backend by another.

    \b
    groupbench explain previous latest
    groupbench explain run:3f2a run:91bc --backend triton_flat
    groupbench explain latest --backend triton_flat --against helion_worklist

    The first lines are the cause. Exits with 3 where both sides have no cell with known kernels in common.
    """
    from groupbench.tracker.compare import sides
    from groupbench.tracker.compare.explanation import explain as explain_sides
    from groupbench.tracker.compare.sides import ComparedSide
    from groupbench.tracker.kernel_files import KernelFolder
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.series import narrowed

    if b is None and against is None:
        raise click.UsageError("name B as well, or a backend by --against")
    where = Filter(**fields)
    with reading(context.obj) as session:
        found: list[ComparedSide] = []
        for word in (a, b or a):
            side = sides.find_side(session, word)
            keep = where if against is None or len(found) == 0 else Filter(**{**fields, "backend": (against,)})
            wanted = {row.sort_key for row in narrowed([p.series for p in side.points], keep, exact=True)}
            kept = tuple(point for point in side.points if point.series.sort_key in wanted)
            found.append(ComparedSide(side.title, kept, side.state))
        explanation = explain_sides(session, found[0], found[1], against)
    kernels = KernelFolder(folder or _folder())
    if form == "json":
        write_json(_json(explanation, kernels))
    else:
        _write(explanation, kernels, lines, form)
    known = explanation.groups or explanation.same
    context.exit(ExitCode.OK if known else ExitCode.INCOMPLETE)


def _folder() -> Path:
    from groupbench.tracker import project
    from groupbench.tracker.kernel_files import FOLDER

    here = project.load()
    beside = Path(here.place(os.environ.get("GROUPBENCH_RECORDS") or here.settings.records)) / FOLDER
    return beside if beside.is_dir() else Path(FOLDER)


def _write(found: Explanation, kernels: KernelFolder, lines: int, form: Format | None) -> None:
    for group in found.groups[:GROUPS]:
        click.echo(printable(f"{group.text} ({group.effect})"))
    if len(found.groups) > GROUPS:
        click.echo(f"and {len(found.groups) - GROUPS} more groups; --json has all")
    click.echo(printable(found.head))
    if found.environment:
        click.echo(printable(f"environment: {'; '.join(found.environment)}"))
    for group in found.groups[:GROUPS]:
        _write_group(group, kernels, lines, form)


def _write_group(group: CellGroup, kernels: KernelFolder, lines: int, form: Format | None) -> None:
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
            click.echo("its code is not kept on both sides")
        for diff in made or ():
            told = "; ".join(diff.summary[:OPERATIONS]) or "no operation more or less"
            click.echo(printable(f"\n{diff.language}: +{diff.added} -{diff.removed} lines: {told}"))
            for line in diff.lines[:lines]:
                click.echo(printable(f"  {line}"))
            if lines and len(diff.lines) > lines:
                click.echo(f"  ... {len(diff.lines) - lines} more lines; --lines {len(diff.lines)} shows all")


def _shown(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _json(found: Explanation, kernels: KernelFolder) -> dict[str, Any]:
    from groupbench.tracker.compare.explanation import diffs, side_by_side

    return {
        "a": found.a,
        "b": found.b,
        "same": found.same,
        "unknown": found.unknown,
        "environment": found.environment,
        "groups": [
            {
                "summary": group.text,
                "effect": group.effect,
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
            for group in found.groups
        ],
    }
