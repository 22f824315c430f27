"""Add tables for A/B comparisons and alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "comparison",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("content", sa.String, nullable=False, unique=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), nullable=False, index=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("base", "head", "verdict")),
        *(sa.Column(name, sa.Double) for name in ("effect", "low", "high", "base_ms", "head_ms")),
        sa.Column("pairs", sa.Integer),
        sa.Column("seconds", sa.Double),
        sa.Column("measured", instant, nullable=False),
        sa.Column("message", sa.String),
        sa.Column("details", sa.JSON, nullable=False),
    )
    op.create_table(
        "alert",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("identity", sa.String, nullable=False, unique=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), nullable=False, index=True),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("cause", sa.String),
        sa.Column("base_run_id", sa.Integer, sa.ForeignKey("run.id")),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("comparison_id", sa.Integer, sa.ForeignKey("comparison.id")),
        *(sa.Column(name, sa.Double) for name in ("before", "after", "effect", "low", "high")),
        sa.Column("opened", instant, nullable=False),
        sa.Column("until_time", instant),
        sa.Column("until_commit", sa.String),
    )
    op.create_table(
        "alert_event",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("alert_id", sa.Integer, sa.ForeignKey("alert.id"), nullable=False, index=True),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
    )
