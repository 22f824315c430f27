"""Add a copy of a run's points as arrays, and the triggers that remove it when a point changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.schema import make_triggers

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "run_columns",
        sa.Column("id", sa.Integer, sa.ForeignKey("run.id"), primary_key=True),
        sa.Column("points", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    make_triggers(op.get_bind())
