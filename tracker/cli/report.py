"""`groupbench report`: write a report as one HTML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from groupbench.tracker.cli.declared import command, option
from groupbench.tracker.cli.here import traffic_of, without_collections
from groupbench.tracker.cli.options import min_effect_option, reading
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import ReportPackageError
from groupbench.tracker.tools import git
from groupbench.tracker.tools.parameters import Number


@command()
def report(
    db: str,
    output: str = option(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE|DIR",
        help="File to write; in a directory, report.html. `-` writes to stdout.",
    ),
    run: str | None = option(
        "--run", metavar="ID", help="Report on the run whose id starts with ID. Default: the newest run."
    ),
    limit: int = option("--runs", type=Number(1), default=200, help="Number of the newest runs to plot."),
    min_effect: float | None = min_effect_option,
) -> None:
    """Write a report as one offline HTML file.

    It begins with the verdict on the run and the changes, with their first commits. A page for each operator follows:
    speed-up by shape and backend over a selectable baseline, roofline, and every series' history.
    """
    if not output.strip():
        raise click.UsageError("-o names no file")
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("-o - writes a page of megabytes; redirect it to a file or another program")
    without_collections(click.get_current_context())
    from groupbench.tracker.judge.gate import judge_run
    from groupbench.tracker.query.resolve import find_run

    try:
        from groupbench.tracker.report import page
    except ModuleNotFoundError as error:
        raise ReportPackageError(f"the report needs {error.name}: pip install -e '.[report]'") from error
    with reading(db) as session:
        judged = judge_run(
            session,
            find_run(session, run),
            min_effect=min_effect,
            first_parents=git.first_parents,
            between=git.between,
        )
        text = page.build(session, judged, limit=limit, traffic=traffic_of(click.get_current_context()))
    if output == "-":
        click.echo(text)
        return
    path = Path(output)
    if path.is_dir() or output.endswith(("/", os.sep)):
        path /= "report.html"
    page.write(path, text)
    say(f"wrote {path}")
