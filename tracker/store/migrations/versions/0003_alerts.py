"""Add tables for A/B comparisons and alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "comparison",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("series_id", sa.Integer, nullable=False),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("head", sa.String, nullable=False),
        sa.Column("verdict", sa.String, nullable=False),
        sa.Column("effect", sa.Double),
        sa.Column("low", sa.Double),
        sa.Column("high", sa.Double),
        sa.Column("base_ms", sa.Double),
        sa.Column("head_ms", sa.Double),
        sa.Column("pairs", sa.Integer),
        sa.Column("seconds", sa.Double),
        sa.Column("measured", instant, nullable=False),
        sa.Column("message", sa.String),
        sa.Column("details", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_comparison"),
        sa.UniqueConstraint("content", name="uq_comparison_content"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_comparison_series_id_series"),
    )
    op.create_index("ix_comparison_series_id", "comparison", ["series_id"])
    op.create_table(
        "alert",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("series_id", sa.Integer, nullable=False),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("cause", sa.String),
        sa.Column("base_run_id", sa.Integer),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("comparison_id", sa.Integer),
        sa.Column("before", sa.Double),
        sa.Column("after", sa.Double),
        sa.Column("effect", sa.Double),
        sa.Column("low", sa.Double),
        sa.Column("high", sa.Double),
        sa.Column("opened", instant, nullable=False),
        sa.Column("until_time", instant),
        sa.Column("until_commit", sa.String),
        sa.PrimaryKeyConstraint("id", name="pk_alert"),
        sa.UniqueConstraint("identity", name="uq_alert_identity"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_alert_series_id_series"),
        sa.ForeignKeyConstraint(["base_run_id"], ["run.id"], name="fk_alert_base_run_id_run"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_alert_run_id_run"),
        sa.ForeignKeyConstraint(["comparison_id"], ["comparison.id"], name="fk_alert_comparison_id_comparison"),
    )
    op.create_index("ix_alert_series_id", "alert", ["series_id"])
    op.create_table(
        "alert_event",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("alert_id", sa.Integer, nullable=False),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.PrimaryKeyConstraint("id", name="pk_alert_event"),
        sa.ForeignKeyConstraint(["alert_id"], ["alert.id"], name="fk_alert_event_alert_id_alert"),
    )
    op.create_index("ix_alert_event_alert_id", "alert_event", ["alert_id"])


def downgrade() -> None:
    for table in ("alert_event", "alert", "comparison"):
        op.drop_table(table)
