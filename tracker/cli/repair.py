"""`groupbench repair`: recover the readable part of a damaged database."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.cli.options import limit_option
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.argument("damaged", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@limit_option("Number of losses to list.", default=20)
@click.pass_context
def repair(context: click.Context, damaged: Path, new: Path, limit: int) -> None:
    """Recover the readable part of the SQLite file DAMAGED into the new file NEW, and list the losses.

    DAMAGED does not change. Every result in NEW matches the hash that was stored with it, so `verify` passes.

    Exit codes: 0 nothing was lost, 2 usage error or nothing could be recovered, 3 something was lost.
    """
    from groupbench.tracker.store.repair import repair as save

    done = save(damaged, new)
    for line in done.losses[:limit]:
        click.echo(printable(line))
    if len(done.losses) > limit:
        click.echo(f"… and {len(done.losses) - limit} more")
    saved = f"{new}: {counted(done.points, 'point')} recovered"
    if done.lost:
        click.echo(f"REPAIR {saved}; lost: {done.lost}")
        context.exit(ExitCode.INCOMPLETE)
    click.echo(f"REPAIR {saved}; nothing was lost")
