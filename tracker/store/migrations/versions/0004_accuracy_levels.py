"""Store the levels of accuracy alerts as errors, without the floor added for judging."""

from __future__ import annotations

import math

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

FLOOR = 1e-6

alert = sa.table(
    "alert",
    *(sa.column(name) for name in ("id", "metric", "before", "after", "effect")),
)


def upgrade() -> None:
    _move(-FLOOR)


def downgrade() -> None:
    _move(FLOOR)


def _move(by: float) -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(alert).where(alert.c.metric == "accuracy")).all():
        before, after = (_moved(level, by) for level in (row.before, row.after))
        effect = math.log(after / before) if before and after else None
        connection.execute(
            sa.update(alert).where(alert.c.id == row.id).values(before=before, after=after, effect=effect)
        )


def _moved(level: float | None, by: float) -> float | None:
    """Return a level shifted by a distance, with rounding residue of the floor removed."""
    return None if level is None else level + by if level + by > 1e-9 * FLOOR else 0.0
