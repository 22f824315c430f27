"""Add the values of further metrics, by name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("point", sa.Column("metrics", sa.JSON))


def downgrade() -> None:
    with op.batch_alter_table("point") as batch:
        batch.drop_column("metrics")
