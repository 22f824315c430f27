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
    # Alembic would copy the whole table on SQLite, which can add such a column at once.
    op.execute("ALTER TABLE point ADD COLUMN code_id INTEGER CONSTRAINT fk_point_code_id_loaded_list "
               "REFERENCES loaded_list (id)")  # fmt: skip
    op.execute("ALTER TABLE point ADD COLUMN packages_id INTEGER CONSTRAINT fk_point_packages_id_loaded_list "
               "REFERENCES loaded_list (id)")  # fmt: skip
