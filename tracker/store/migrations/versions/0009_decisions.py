"""Add decisions about runs and series: rejected, muted, removed from the plan, and limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "decision",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id")),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id")),
        sa.Column("value", sa.Double),
        sa.Column("until", instant),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("ended", instant),
        sa.Column("checksum", sa.BigInteger),
    )
