"""`groupbench ab`: compare two commits, folders or interpreters, measured alternately on one device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.named_sides import open_sides
from groupbench.tracker.ab.result import AbCell, AbResult, AbSettings, RecordsError, as_json, exit_code, footnotes
from groupbench.tracker.cli.declared import argument, command, flag, option, options
from groupbench.tracker.cli.here import recipe_of, this_project, wait_option
from groupbench.tracker.cli.options import (
    CellChoice,
    alpha_option,
    cell_budget_option,
    cell_choice,
    comparisons_option,
    min_effect_same_option,
    setup_option,
)
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_notes, write_table
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.vocabulary import SEED_HELP
from groupbench.tracker.text.wording import counted, duration, milliseconds, printable, signed_percent
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration, Number

EXPECTED_S = {"cuda": 10, "cpu": 15}
"""Seconds that an A/A comparison takes, for the first estimate of the total time."""


_percent = partial(signed_percent, digits=2)


def _rms(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


COLUMNS = (
    Column("verdict", "verdict"),
    Column("conclusion", "conclusion", wraps=True),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("shape", "shape", wraps=True),
    Column("dtype", "dtype"),
    Column("base ms", "base_ms", milliseconds, right=True),
    Column("head ms", "head_ms", milliseconds, right=True),
    Column("effect", "change", _percent, right=True),
    Column("effect from", "change_low", _percent, right=True),
    Column("effect to", "change_high", _percent, right=True),
    Column("base rms", "base_rms", _rms, right=True),
    Column("head rms", "head_rms", _rms, right=True),
    Column("blocks", "blocks", right=True),
    Column("s", "seconds", lambda s: f"{s:.1f}", right=True),
    Column("note", "message", wraps=True),
)


@dataclass(frozen=True)
class AbOptions:
    """Options for the sides, the decision and the timing."""

    setup: str | None = setup_option
    base_python: str | None = option("--base-python", metavar="FILE", help="Measure base with this interpreter.")
    head_python: str | None = option("--head-python", metavar="FILE", help="Measure head with this interpreter.")
    budget: float = cell_budget_option
    min_effect: float | None = min_effect_same_option
    alpha: float = alpha_option
    only_changed: bool = flag("--only-changed", help="Do not time cells whose compiled kernels did not change.")
    cudagraph: bool = flag("--cudagraph", help="Time replays of a captured CUDA graph.")
    idle: float | None = option(
        "--idle", type=Duration(most=60), help="Rest this long before a burst. Default: 0.3s on a GPU, 0 on a CPU."
    )
    input_seed: int = option("--input-seed", type=Number(0, 2**63 - 1), default=0, help=SEED_HELP)
    timeout: float = option(
        "--timeout",
        type=Duration(least=1, most=1e6),
        default="300s",
        help="Fail a side that does not answer within this time.",
    )
    records: Path | None = comparisons_option

    @property
    def settings(self) -> AbSettings:
        return AbSettings(self.budget, self.min_effect, self.alpha, self.timeout, self.only_changed)


@command()
@wait_option()
def ab(
    context: click.Context,
    base: str = argument(),
    head: str = argument(),
    choice: CellChoice = cell_choice("Compare", "the operator's default suite", required=True),
    how: AbOptions = options(AbOptions),
    form: Format = output_formats,
) -> None:
    """Measure BASE and HEAD alternately on one device until it is clear whether they differ.

    BASE and HEAD are commits or folders. A commit is checked out into a temporary folder; a folder is measured as it
    is, so `ab HEAD~1 .` includes uncommitted changes. A cell whose sides run the same files
    with the same packages is not timed. Name the same commit twice to compare two interpreters.

    \b
    Exit codes:
    0   every cell is the same, faster or more accurate
    1   head is slower, less accurate, or wrong where base is right
    2   usage error
    3   a cell failed or was not resolved within the budget
    75  another command uses this device
    """
    project = this_project(context)
    choice = replace(choice, plugins=project.plugins(choice.plugins))
    check_records(how.records)
    cells: list[AbCell] = []
    results: list[AbResult] = []
    with (
        signals.keeping(lambda: so_far(cells, results, how.records)),
        open_sides(
            base,
            head,
            repo=project.folder,
            recipe=recipe_of(context, how.setup),
            base_python=how.base_python,
            head_python=how.head_python,
        ) as (first, second),
        Bench(first, second, how.settings, records=how.records, progress=progress_line()) as bench,
    ):
        results = bench.results
        try:
            cells += _cells(bench, choice, how)
            for cell in cells:
                bench.compare(cell)
        except (KeyboardInterrupt, RecordsError) as stop:
            if not isinstance(stop, KeyboardInterrupt):
                say(f"stopped; {so_far(cells, results, None)}")
            _show(results, form)
            raise
    _show(results, form)
    context.exit(exit_code(results))


def _cells(bench: Bench, choice: CellChoice, how: AbOptions) -> list[AbCell]:
    """Return the cells to compare, after announcing how many there are and how long they may take."""
    cells, notes = bench.cells(choice.device, **choice.cells)
    for line in left_out(notes):
        say(line)
    if not cells:
        return []
    say(announced(len(cells), bench.device, how.budget))
    return [replace(cell, seed=how.input_seed, idle_s=how.idle, cudagraph=how.cudagraph) for cell in cells]


def so_far(cells: Sequence[AbCell], results: Sequence[AbResult], records: Path | None) -> str:
    """Return how many cells are compared, and where they are kept."""
    if not cells:
        return "nothing was compared"
    where = f", kept in {records}" if results and records is not None else ""
    return f"{len(results)} of {counted(len(cells), 'cell')} compared{where}"


def announced(cells: int, device: str | None, budget_s: float) -> str:
    """Return a line with the cell count, the expected time if it is below the limit, and the limit."""
    expected_s, most_s = EXPECTED_S[device or "cpu"] * cells, budget_s * cells
    estimate = f"about {duration(expected_s)}, " if expected_s < most_s else ""
    return f"{counted(cells, 'cell')} on {device}, {estimate}at most {duration(most_s)} of measuring"


def left_out(notes: list[str]) -> list[str]:
    """Return one line per reason in notes like `operator/backend shape dtype: reason`.

    One reason often leaves out many cells of a suite.
    """
    lines = []
    for reason, left in grouped([note.partition(": ") for note in notes], itemgetter(2)).items():
        cells = [cell for cell, _, _ in left]
        backends = ", ".join(dict.fromkeys(cell.partition(" ")[0] for cell in cells))
        lines.append(f"left out: {cells[0] if len(cells) == 1 else f'{len(cells)} cells of {backends}'}: {reason}")
    return lines


def check_records(path: Path | None) -> None:
    if path is not None:
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}") from error


def _show(results: list[AbResult], form: Format) -> None:
    if form == "json":
        write_json([as_json(result) for result in results])
        return
    write_table(COLUMNS, [as_row(result) for result in results], form)
    write_notes(footnotes(results), form)


def as_row(result: AbResult) -> dict[str, Any]:
    """Return a comparison as a row for COLUMNS."""
    body, sides = as_json(result), {"base": result.base_accuracy, "head": result.head_accuracy}
    rms = {f"{side}_rms": accuracy and accuracy.rms for side, accuracy in sides.items()}
    return {**body, **body["cell"], **rms, "head_ms": result.head_level_ms, "message": result.note}


def progress_line() -> Callable[[str], None]:
    """Return a progress reporter: one overwritten line on a terminal, else a line per cell."""
    if sys.stderr.isatty():
        return lambda text: click.echo(f"\r\x1b[2K{printable(text)[:100]}", err=True, nl=False)
    return lambda text: say(text.removesuffix(": preparing")) if text.endswith(": preparing") else None
