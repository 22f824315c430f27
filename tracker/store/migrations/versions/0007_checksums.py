"""Add row checksums, and store a record's amounts with its point.

Points are not rewritten: a point without `amounts` has those of its series.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.checksum import seal

revision = "0007"
down_revision = "0006"

SEALED = ("commit", "run", "series", "alert", "alert_event", "pin")


def upgrade() -> None:
    op.add_column("point", sa.Column("amounts", sa.JSON))
    for name in SEALED:
        op.add_column(name, sa.Column("checksum", sa.BigInteger))
    seal(op.get_bind(), *SEALED)
