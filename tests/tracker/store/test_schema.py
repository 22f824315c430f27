"""The tables and the migrations that make them say the same."""

from __future__ import annotations

from pathlib import Path

from alembic.script import ScriptDirectory

from groupbench.tracker.store import migrations
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base


def test_the_known_revisions_are_those_of_the_migrations() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert scripts.get_current_head() == HEAD
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS


def test_every_column_has_a_meaning() -> None:
    silent = [str(column) for table in Base.metadata.tables.values() for column in table.columns if not column.doc]
    assert silent == []
