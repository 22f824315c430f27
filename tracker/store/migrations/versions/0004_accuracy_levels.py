"""Store the levels of accuracy alerts as errors, without the floor added for judging."""

from __future__ import annotations

import math

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

FLOOR = 1e-6


def upgrade() -> None:
    connection = op.get_bind()
    alert = sa.table("alert", *map(sa.column, ("id", "metric", "before", "after", "effect")))
    for row in connection.execute(sa.select(alert).where(alert.c.metric == "accuracy")).all():
        before, after = map(_without_floor, (row.before, row.after))
        effect = math.log(after / before) if before and after else None
        connection.execute(
            sa.update(alert).where(alert.c.id == row.id).values(before=before, after=after, effect=effect)
        )


def _without_floor(level: float | None) -> float | None:
    """Return a level with the floor and the rounding residue removed."""
    return None if level is None else level - FLOOR if level - FLOOR > 1e-9 * FLOOR else 0.0
