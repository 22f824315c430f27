"""`groupbench backup`: copy the database."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.text.wording import printable


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def backup(db: str, file: Path) -> None:
    """Copy the database to FILE, even while it is in use. An existing file is never overwritten.

    The copy is a single consistent SQLite file. For PostgreSQL, use pg_dump.
    """
    from groupbench.tracker.store import maintenance
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store:
        size = maintenance.backup(store, file)
        click.echo(printable(f"{file}: {size:,} bytes, a copy of {store.name}"))
