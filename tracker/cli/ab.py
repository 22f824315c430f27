"""`groupbench ab`: two commits, folders or interpreters, in turns on one device."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.here import recipe_of, this_project
from groupbench.tracker.cli.options import BACKEND, DTYPE, OPERATOR, SHAPE, Percent
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_table
from groupbench.tracker.durations import Duration
from groupbench.tracker.text.wording import counted, milliseconds

if TYPE_CHECKING:
    from groupbench.tracker.ab.bench import AbCell, AbResult

EXPECTED_S = {"cuda": 10, "cpu": 15}
"""Seconds that a comparison of like sides takes, for a first guess at how long all will."""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.2f}%"


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
    Column("from", "change_low", _percent, right=True),
    Column("to", "change_high", _percent, right=True),
    Column("base rms", "base_rms", _rms, right=True),
    Column("head rms", "head_rms", _rms, right=True),
    Column("blocks", "pairs", right=True),
    Column("s", "seconds", lambda s: f"{s:.1f}", right=True),
    Column("note", "message", wraps=True),
)


def cell_options(command: Any) -> Any:
    """Which cells, and how long each may take: `ab` and whatever else compares sides."""
    for option in reversed(
        (
            click.option(*OPERATOR, required=True, metavar="NAME", help="Which operator."),
            click.option(*BACKEND[:2], "backends", multiple=True, metavar="NAME", help="Only this; may be repeated."),
            click.option(*SHAPE[:2], "shapes", multiple=True, metavar="TEXT", help="This shape; may be repeated."),
            click.option("--suite", "suites", multiple=True, metavar="NAME", help="This suite; may be repeated."),
            click.option(*DTYPE[:2], "dtypes", multiple=True, metavar="NAME", help="This precision; may be repeated."),
            click.option(
                "--mode", default="fwd", show_default=True, help="fwd; bwd, fwd_bwd where the operator has them."
            ),
            click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True),
            click.option("--plugin", "plugins", multiple=True, metavar="MODULE.NAME", help="Further backends."),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("base")
@click.argument("head")
@cell_options
@click.option("--setup", metavar="COMMAND", help="Run in each commit's folder before it is measured, to build it.")
@click.option("--base-python", metavar="FILE", help="Interpreter of base, with another torch, say.")
@click.option("--head-python", metavar="FILE", help="Interpreter of head.")
@click.option("--budget", type=Duration(least=1, most=86_400), default="60s", show_default=True, help="For each cell.")
@click.option(
    "--min-effect",
    type=Percent(),
    metavar="PCT",
    help="Less is the same. [0.3 on a GPU, 1 below 90 us and 2 below 40 us there; 10 on a CPU]",
)
@click.option(
    "--alpha",
    type=click.FloatRange(1e-6, 0.2),
    default=0.001,
    show_default=True,
    help="Share of like sides that may be called different.",
)
@click.option("--only-changed", is_flag=True, help="Do not time cells whose compiled kernels are equal.")
@click.option("--cudagraph", is_flag=True, help="Time replays of a captured CUDA graph.")
@click.option("--idle", type=Duration(most=60), help="Rest before bursts. [0.3s on a GPU]")
@click.option("--samples", type=click.IntRange(1, 1000), help="Runs a burst. [10; 30 below 50 us on a GPU]")
@click.option(
    "--rest",
    type=click.Choice(["auto", "burst", "block"]),
    default="auto",
    show_default=True,
    help="Rest before each burst, or once a block.",
)
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="Of the order of bursts.")
@click.option(
    "--timeout",
    type=Duration(least=1, most=1e6),
    default="300s",
    show_default=True,
    help="How long a cell may stay silent.",
)
@click.option(
    "--records", type=click.Path(path_type=Path, dir_okay=False), help="Append each comparison with its bursts."
)
@output_formats
@click.pass_context
def ab(context: click.Context, base: str, head: str, form: Format | None, **given: Any) -> None:
    """Measure BASE and HEAD in turns on one device, until it is clear whether they differ.

    Each is a commit, which is checked out meanwhile, or a folder, taken as it is: `ab HEAD~1 .` is about what is
    not committed yet. Both may be the same where the interpreters differ.

    \b
    0  all the same, faster or more accurate
    1  something is slower, less accurate or wrong
    2  usage
    3  something failed or was not resolved within its budget
    """
    from groupbench.tracker.ab.bench import Bench, RecordsError, exit_code, open_sides

    signal.signal(signal.SIGTERM, _interrupt)  # so that worktrees are removed
    project = this_project(context)
    given["plugins"] = project.plugins(given["plugins"])
    _check_records(given["records"])
    with (
        open_sides(
            base,
            head,
            repo=project.folder,
            recipe=recipe_of(context, given["setup"]),
            base_python=given["base_python"],
            head_python=given["head_python"],
        ) as (first, second),
        Bench(
            first,
            second,
            budget_s=given["budget"],
            min_effect=given["min_effect"],
            alpha=given["alpha"],
            timeout_s=given["timeout"],
            seed=given["seed"],
            only_changed=given["only_changed"],
            rest=given["rest"],
            records=given["records"],
            progress=progress_line(),
        ) as bench,
    ):
        cells = _cells(bench, given)
        try:
            for cell in cells:
                bench.compare(cell)
        except (KeyboardInterrupt, RecordsError) as stop:
            why = "interrupted" if isinstance(stop, KeyboardInterrupt) else "stopped"
            say(f"{why}: {len(bench.results)} of {counted(len(cells), 'cell')} compared")
            _show(bench.results, form)
            raise
    _show(bench.results, form)
    context.exit(exit_code(bench.results))


def _cells(bench: Any, given: dict[str, Any]) -> list[AbCell]:
    """What to compare; how much it is, is said first."""
    from dataclasses import replace

    names = ("operator", "backends", "shapes", "suites", "dtypes", "mode", "plugins")
    cells, notes = bench.cells(given["device"], **{name: given[name] for name in names})
    for line in left_out(notes):
        say(line)
    if not cells:
        return []
    say(announced(len(cells), bench.device, given["budget"]))
    return [
        replace(cell, samples=given["samples"], idle_s=given["idle"], cudagraph=given["cudagraph"]) for cell in cells
    ]


def announced(cells: int, device: str, budget_s: float) -> str:
    """How much there is to compare, and how long that takes: a guess, where it is less than what it may take."""
    about, most = EXPECTED_S[device] * cells, budget_s * cells
    guess = f"about {_duration(about)}, " if about < most else ""
    return f"{counted(cells, 'cell')} on {device}, {guess}{_duration(most)} at most"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def left_out(notes: list[str]) -> list[str]:
    """A line for each reason of notes `operator/backend shape dtype: reason`: a suite leaves out many cells for one."""
    reasons: dict[str, list[str]] = {}
    for note in notes:
        cell, _, reason = note.partition(": ")
        reasons.setdefault(reason, []).append(cell)
    lines = []
    for reason, cells in reasons.items():
        backends = ", ".join(dict.fromkeys(cell.partition(" ")[0] for cell in cells))
        lines.append(f"left out: {cells[0] if len(cells) == 1 else f'{len(cells)} cells of {backends}'}: {reason}")
    return lines


def _check_records(path: Path | None) -> None:
    if path is not None:
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}") from error


def _show(results: list[AbResult], form: Format | None) -> None:
    from groupbench.tracker.ab.bench import as_json

    if form == "json":
        write_json([as_json(result) for result in results])
        return
    write_table(COLUMNS, [as_row(result) for result in results], form)


def as_row(result: AbResult) -> dict[str, Any]:
    """Return a comparison as COLUMNS show it."""
    from math import expm1

    cell = result.cell
    return {
        "verdict": result.verdict,
        "conclusion": result.conclusion,
        "operator": cell.operator,
        "backend": cell.backend,
        "shape": cell.shape,
        "dtype": cell.dtype,
        "base_ms": result.base_ms,
        "head_ms": result.head_level_ms,
        "change": result.change,
        "change_low": None if result.low is None else expm1(result.low),
        "change_high": None if result.high is None else expm1(result.high),
        "base_rms": result.base_accuracy and result.base_accuracy.rms,
        "head_rms": result.head_accuracy and result.head_accuracy.rms,
        "pairs": result.pairs,
        "seconds": result.seconds,
        "message": result.message,
    }


def progress_line() -> Callable[[str], None]:
    """Says where it stands: on a terminal in one line that is overwritten, elsewhere once a cell."""
    import sys

    from groupbench.tracker.text.wording import printable

    if sys.stderr.isatty():
        return lambda text: click.echo(f"\r\x1b[2K{printable(text)[:100]}", err=True, nl=False)
    return lambda text: say(text.removesuffix(": preparing")) if text.endswith(": preparing") else None


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
