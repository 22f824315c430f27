"""The first tables: commit, environment, run, series, point.

No database is older, and the schema makes the tables of a new one, so nothing is left to do.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    pass
