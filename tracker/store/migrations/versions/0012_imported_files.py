"""Add the files that were imported, so that a second import does not read them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "imported_file",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("runs", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_imported_file"),
        sa.UniqueConstraint("content", name="uq_imported_file_content"),
    )


def downgrade() -> None:
    op.drop_table("imported_file")
