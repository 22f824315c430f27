"""`groupbench calibrate`: measure the smallest detectable change on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.here import wait_option
from groupbench.tracker.cli.options import CELL_BUDGET, alpha_option, comparisons_option, device_option
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_notes, write_table
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted, milliseconds, percent
from groupbench.tracker.tools.parameters import Duration

if TYPE_CHECKING:
    from groupbench.tracker.ab.bench import AbResult

COLUMNS = (
    Column("up to ms", "upto_ms", lambda ms: "longer" if ms is None else f"{ms:g}", right=True),
    Column("ms", "latency_ms", milliseconds, right=True),
    Column("A/A", "comparisons", right=True),
    Column("different", "different", right=True),
    Column("unknown", "unknown", right=True),
    Column("failed", "failed", right=True),
    Column("blocks", "blocks", right=True),
    Column("s/block", "block_s", lambda s: "" if s is None else f"{s:.2f}", right=True),
    Column("placement sd", "placement_sd", percent, right=True),
    Column("burst sd", "burst_sd", percent, right=True),
    Column("block sd", "block_sd", percent, right=True),
    Column("smallest change", "smallest_change", percent, right=True),
)


@click.command()
@device_option
@click.option(
    "--minutes",
    "--for",
    "duration_s",
    type=Duration("m", most=86_400, above=True),
    default="5m",
    show_default=True,
    help="Measure for at least this long.",
)
@click.option(
    "--budget",
    type=Duration(least=1, most=3600),
    default="60s",
    show_default=True,
    help=CELL_BUDGET,
)
@alpha_option
@comparisons_option
@wait_option()
@output_formats
@click.pass_context
def calibrate(
    context: click.Context,
    device: str,
    duration_s: float,
    budget: float,
    alpha: float,
    records: Path | None,
    form: Format,
) -> None:
    """Measure this machine's noise floor with A/A comparisons.

    Compares the installed groupbench with itself, so every difference is noise. It measures a few cells of each latency
    class: up to 0.03 ms, up to 0.2 ms, up to 0.8 ms, and longer. For each class, the table shows the smallest change
    that `ab` detects in nine of ten comparisons within its budget, and the standard deviations behind it:

    \b
    burst sd      between bursts, each of several timed calls in a row
    placement sd  between blocks of one side, each at new memory addresses
    block sd      between both sides' differences in a block

    \b
    Exit codes:
    0   no A/A comparison was called different
    1   an A/A comparison was called different (a false positive)
    2   usage error
    3   nothing could be timed, or a cell failed
    75  another command uses this device
    """
    from groupbench.tracker.ab import calibrate as calibration
    from groupbench.tracker.ab.bench import AbSettings, AbSide, Bench
    from groupbench.tracker.cli.ab import check_records, progress_line

    check_records(records)
    same = AbSide("this groupbench")
    settings = AbSettings(budget_s=budget, alpha=alpha, times_same_code=True)
    with Bench(same, same, settings, records=records, progress=progress_line()) as bench:
        running_on = bench.start(device)
        cells = calibration.cells(running_on)
        say(f"{counted(len(cells), 'cell')} on {running_on}, at least {duration_s / 60:g} min")
        results = list(calibration.measure(bench, cells, duration_s / 60))
    context.exit(_report(results, budget, alpha, running_on, form))


def _report(results: list[AbResult], budget_s: float, alpha: float, device: str, form: Format) -> int:
    """Print the noise of each latency class, and return the exit code."""
    import msgspec

    from groupbench.tracker.ab import calibrate as calibration
    from groupbench.tracker.ab.result import footnotes

    reports = calibration.summarise(results, budget_s, alpha)
    for result in results:
        if result.verdict in ("different", "failed"):
            say(f"{result.cell}: {result.conclusion}: {result.message or ''}")
    rows: list[dict[str, Any]] = [msgspec.to_builtins(report) for report in reports]
    for row in rows:
        row["latency_ms"] = None if math.isnan(row["latency_ms"]) else row["latency_ms"]
    if form == "json":
        facts = {"alpha": alpha, "power": calibration.POWER, "budget_s": budget_s, "device": device}
        write_json({**facts, "classes": rows, "notes": footnotes(results)})
    else:
        write_table(COLUMNS, rows, form)
        write_notes(footnotes(results), form)
    if any(report.different for report in reports):
        return ExitCode.FAILED
    incomplete = not any(report.blocks for report in reports) or any(report.failed for report in reports)
    return ExitCode.INCOMPLETE if incomplete else ExitCode.OK
