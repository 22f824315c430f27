"""The tables and the migrations that make them say the same."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from groupbench.tracker.store.engine import Store, alembic_config
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base


def test_the_known_revisions_are_those_of_the_migrations() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert scripts.get_current_head() == HEAD
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS


def test_migrations_make_the_tables_of_the_schema(opened: Store) -> None:
    with opened.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        inspector = inspect(connection)
        for table in Base.metadata.tables.values():
            names = {unique["name"] for unique in inspector.get_unique_constraints(table.name)}
            assert None not in names


def test_every_column_has_a_meaning() -> None:
    silent = [str(column) for table in Base.metadata.tables.values() for column in table.columns if not column.doc]
    assert silent == []
