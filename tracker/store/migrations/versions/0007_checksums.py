"""Add row checksums, and store a record's amounts with its point.

Points are not rewritten: a point without `amounts` has those of its series.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import sqlalchemy as sa
from alembic import op

from groupbench.tracker.store.checksum import checksum_of

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

instant = sa.DateTime(timezone=True)

SEALED = (
    sa.table(
        "commit",
        *(sa.column(name) for name in ("id", "hash", "branch", "author", "subject")),
        *(sa.column("parents", sa.JSON), sa.column("time", instant)),
    ),
    sa.table(
        "run",
        *(sa.column(name) for name in ("id", "uuid", "commit_id", "trigger", "plan", "command")),
        *(sa.column("dirty", sa.Boolean), sa.column("started", instant)),
    ),
    sa.table(
        "series",
        *(sa.column(name) for name in ("id", "identity", "operator", "backend", "mode", "dtype", "shape", "host")),
        *(sa.column(name) for name in ("protocol", "hardware", "seed", "flops", "min_bytes")),
        sa.column("dims", sa.JSON),
    ),
    sa.table(
        "alert",
        *(sa.column(name) for name in ("id", "identity", "series_id", "metric", "state", "cause", "base_run_id")),
        *(sa.column(name) for name in ("run_id", "comparison_id", "before", "after", "effect", "low", "high")),
        *(sa.column("opened", instant), sa.column("until_time", instant), sa.column("until_commit")),
    ),
    sa.table(
        "alert_event",
        *(sa.column(name) for name in ("id", "alert_id", "who", "state", "reason")),
        sa.column("at", instant),
    ),
    sa.table(
        "pin",
        *(sa.column(name) for name in ("id", "name", "commit", "max_slowdown", "who")),
        *(sa.column("created", instant), sa.column("ended", instant)),
    ),
)

_BATCH = 2000


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("point", sa.Column("amounts", sa.JSON))
    for table in SEALED:
        op.add_column(table.name, sa.Column("checksum", sa.BigInteger))
        sealed = sa.table(table.name, sa.column("id"), sa.column("checksum"))
        statement = sealed.update().where(sealed.c.id == sa.bindparam("key")).values(checksum=sa.bindparam("value"))
        checksums = _checksums(connection, table)
        while batch := list(islice(checksums, _BATCH)):
            connection.execute(statement, [{"key": key, "value": value} for key, value in batch])


def _checksums(connection: sa.Connection, table: sa.TableClause) -> Iterator[tuple[int, int]]:
    """Yield (key, checksum) of each row."""
    for row in connection.execute(sa.select(table)).mappings().all():
        yield row["id"], checksum_of({name: value for name, value in row.items() if name != "id"})


def downgrade() -> None:
    for table in (*(table.name for table in SEALED), "point"):
        with op.batch_alter_table(table) as batch:
            batch.drop_column("amounts" if table == "point" else "checksum")
