"""Add decisions about runs and series: rejected, muted, removed from the plan, and limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "decision",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("run_id", sa.Integer),
        sa.Column("series_id", sa.Integer),
        sa.Column("value", sa.Double),
        sa.Column("until", instant),
        sa.Column("at", instant, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("ended", instant),
        sa.Column("checksum", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_decision"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_decision_run_id_run"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_decision_series_id_series"),
    )


def downgrade() -> None:
    op.drop_table("decision")
