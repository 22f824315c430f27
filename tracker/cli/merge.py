"""`groupbench merge`: another database into this one."""

from __future__ import annotations

import click

from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.argument("other", metavar="FILE|URL")
@click.pass_obj
def merge(db: str, other: str) -> None:
    """Add what another database holds to this one, which is made if there is none.

    All of it is added or nothing. What both hold changes nothing; a run that they tell differently is refused.
    """
    from groupbench.tracker.store import maintenance
    from groupbench.tracker.store.engine import open_store

    with open_store(other, create=False) as theirs, open_store(db, create=True) as store:
        done = maintenance.merge(store, theirs)
        nothing = " (nothing new)" if not done.added else ""
        click.echo(
            printable(
                f"{theirs.name}: {counted(done.records, 'point')} in {counted(len(done.runs), 'run')}: "
                f"{done.added} added, {done.known} already known{nothing}, {done.new_series} series new"
            )
        )
