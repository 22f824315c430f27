"""Add the files and the packages that measured processes loaded. Those of earlier points are unknown."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "loaded_list",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("content", sa.String, nullable=False, unique=True),
        sa.Column("items", sa.JSON),
    )
    for name in ("code_id", "packages_id"):
        # Alembic would copy the whole table on SQLite, which can add such a column at once.
        key = f"CONSTRAINT fk_point_{name}_loaded_list REFERENCES loaded_list (id)"
        op.execute(f"ALTER TABLE point ADD COLUMN {name} INTEGER {key}")
