"""`groupbench repair`: what can be read of a damaged database, in a new one."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.argument("damaged", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Losses listed.")
@click.pass_context
def repair(context: click.Context, damaged: Path, new: Path, limit: int) -> None:
    """Save what can be read of the SQLite file DAMAGED into the new file NEW, and list what was lost.

    DAMAGED stays as it is. Every result in NEW has the hash that was stored with it: `verify` finds nothing there.
    Exit codes: 0 nothing was lost, 2 usage or nothing could be saved, 3 something was lost.
    """
    from groupbench.tracker.store.repair import repair as save

    done = save(damaged, new)
    for line in done.losses[:limit]:
        click.echo(printable(line))
    if len(done.losses) > limit:
        click.echo(f"… and {len(done.losses) - limit} more")
    saved = f"{new}: {counted(done.points, 'point')} saved"
    if done.lost:
        click.echo(f"REPAIR {saved}; lost: {done.lost}")
        context.exit(ExitCode.INCOMPLETE)
    click.echo(f"REPAIR {saved}; nothing was lost")
