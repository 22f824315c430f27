"""Add the files that were imported, so that a second import does not read them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "imported_file",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("content", sa.String, nullable=False, unique=True),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("runs", sa.JSON, nullable=False),
    )
