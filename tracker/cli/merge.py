"""`groupbench merge`: add another database to this one."""

from __future__ import annotations

import click

from groupbench.tracker.text.wording import counted, printable


@click.command()
@click.argument("other", metavar="FILE|URL")
@click.pass_obj
def merge(db: str, other: str) -> None:
    """Add every point of another database to this one, which is created if it does not exist.

    Either everything is added or nothing. Points that both databases hold are skipped. A run that the two describe
    differently is an error.
    """
    from groupbench.tracker.facts.errors import NoDatabaseError, StoreError
    from groupbench.tracker.store import maintenance
    from groupbench.tracker.store.engine import open_store

    try:
        opened = open_store(other, create=False)
    except NoDatabaseError as error:  # its advice is how to create this database, not how to find the other one
        raise StoreError(error.problem) from error
    with opened as source, open_store(db, create=True) as store:
        done = maintenance.merge(store, source)
        nothing = " (nothing new)" if not done.added else ""
        click.echo(
            printable(
                f"{source.name}: {counted(done.records, 'point')} in {counted(len(done.runs), 'run')}: "
                f"{done.added} added, {done.known} already known{nothing}, {done.new_series} series new"
            )
        )
