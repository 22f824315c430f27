"""`groupbench report`: one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.cli.options import min_effect_option, reading
from groupbench.tracker.cli.output import say


@click.command()
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help="Where to write it.")
@click.option(
    "--runs",
    "limit",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    metavar="N",
    help="How many of the newest runs the plots hold.",
)
@min_effect_option
@click.pass_obj
def report(db: str, output: str, limit: int, min_effect: float | None) -> None:
    """Write one HTML page that works offline: the newest run's verdict, and each series' history."""
    from groupbench.tracker.report import page

    with reading(db) as session:
        text = page.build(session, limit=limit, min_effect=min_effect)
    if output == "-":
        click.echo(text)
        return
    page.write(Path(output), text)
    say(f"wrote {output}")
