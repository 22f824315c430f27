"""Add pinned commits with which later runs are compared."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "pin",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("commit", sa.String, nullable=False),
        sa.Column("max_slowdown", sa.Double, nullable=False),
        sa.Column("created", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("ended", instant),
    )
