"""The tables and the migrations that make them say the same."""

from __future__ import annotations

import gzip
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from groupbench.tracker.store import migrations
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base

OLDEST = Path(__file__).parents[1] / "data" / "revision_0001.db.gz"


def test_the_known_revisions_are_those_of_the_migrations() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert scripts.get_current_head() == HEAD
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS


def test_migrations_make_the_tables_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress(OLDEST.read_bytes()))
    with open_store(path, create=False) as store, store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        inspector = inspect(connection)
        for table in Base.metadata.tables.values():
            names = {unique["name"] for unique in inspector.get_unique_constraints(table.name)}
            assert None not in names


def test_every_column_has_a_meaning() -> None:
    silent = [str(column) for table in Base.metadata.tables.values() for column in table.columns if not column.doc]
    assert silent == []
