"""Add a copy of a run's points as arrays, and the triggers that remove it when a point changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.schema import TRIGGERS, make_triggers

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "run_columns",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("points", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_run_columns"),
        sa.ForeignKeyConstraint(["id"], ["run.id"], name="fk_run_columns_id_run"),
    )
    make_triggers(op.get_bind())


def downgrade() -> None:
    drop = "DROP TRIGGER %(name)s" if op.get_bind().dialect.name == "sqlite" else "DROP FUNCTION %(name)s CASCADE"
    for name in TRIGGERS:
        op.execute(sa.DDL(drop, context={"name": name}))  # type: ignore[no-untyped-call]
    op.drop_table("run_columns")
