"""Add the values of further metrics, by name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("point", sa.Column("metrics", sa.JSON))
