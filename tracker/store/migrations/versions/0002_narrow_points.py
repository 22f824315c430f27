"""Make points smaller: kernels in their own table, packed samples and telemetry, two indexes instead of four.

Every point is rewritten. Its samples stay the same as float32, and its statistics and hash are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BATCH = 1000


def upgrade() -> None:
    op.create_table(
        "kernel_set",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content", sa.String, nullable=False),
        sa.Column("hash", sa.String),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kernel_set"),
        sa.UniqueConstraint("content", name="uq_kernel_set_content"),
    )
    op.drop_index("ix_point_environment_id", "point")
    op.drop_index("ix_point_series_id_run_id", "point")
    if op.get_context().dialect.name != "sqlite":  # in SQLite, constraint names belong to the table
        op.drop_constraint("pk_point", "point")
        op.drop_constraint("uq_point_run_id_series_id", "point")
    op.rename_table("point", "point_0001")
    op.create_table(
        "point",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("series_id", sa.Integer, nullable=False),
        sa.Column("environment_id", sa.Integer, nullable=False),
        sa.Column("kernels_id", sa.Integer),
        sa.Column("content", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("timing", sa.String),
        sa.Column("baseline", sa.Boolean, nullable=False),
        sa.Column("repeatable", sa.Boolean),
        sa.Column("median_ms", sa.Double),
        sa.Column("low_ppm", sa.BigInteger),
        sa.Column("high_ppm", sa.BigInteger),
        sa.Column("error_ppm", sa.BigInteger),
        sa.Column("rms", sa.Double),
        sa.Column("max_abs", sa.Double),
        sa.Column("worst_block_rms", sa.Double),
        sa.Column("mismatch", sa.Double),
        sa.Column("unwritten", sa.Double),
        sa.Column("prepare_ms", sa.Double),
        sa.Column("enqueue_ms", sa.Double),
        sa.Column("duration_s", sa.Double),
        sa.Column("samples", sa.LargeBinary),
        sa.Column("telemetry", sa.LargeBinary),
        sa.Column("first_bad", sa.JSON),
        sa.Column("message", sa.String),
        sa.PrimaryKeyConstraint("id", name="pk_point"),
        sa.UniqueConstraint("series_id", "run_id", name="uq_point_series_id_run_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_point_run_id_run"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_point_series_id_series"),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_point_environment_id_environment"),
        sa.ForeignKeyConstraint(["kernels_id"], ["kernel_set.id"], name="fk_point_kernels_id_kernel_set"),
    )
    _copy(op.get_bind())
    op.drop_table("point_0001")
    op.create_index("ix_point_run_id", "point", ["run_id"])


def _copy(connection: sa.Connection) -> None:
    if connection.execute(sa.text("SELECT id FROM point_0001 LIMIT 1")).first() is None:
        return  # a new database is empty
    tables = sa.MetaData()
    tables.reflect(connection, only=("point_0001", "point", "kernel_set", "environment", "series"))
    old, new = tables.tables["point_0001"], tables.tables["point"]
    old.c.first_bad.type = new.c.first_bad.type = sa.JSON(none_as_null=True)
    kernels = tables.tables["kernel_set"]
    kernel_keys: dict[str, int] = {}
    environment, series = tables.tables["environment"], tables.tables["series"]
    environments = _column(connection, environment.c.id, environment.c.content)
    identities = _column(connection, series.c.id, series.c.identity)
    for batch in _batches(connection, old):
        values = []
        for row in batch:
            kernels_id = None
            if row["kernels"]:
                content = _digest(row["kernels"])
                if content not in kernel_keys:
                    fields = {"content": content, "hash": row["kernel_hash"], "kernels": row["kernels"]}
                    made = connection.execute(kernels.insert().values(fields)).inserted_primary_key
                    assert made is not None
                    kernel_keys[content] = made[0]
                kernels_id = kernel_keys[content]
            keys = {name: row[name] for name in ("id", "run_id", "series_id", "environment_id")}
            hashes = environments[row["environment_id"]], identities[row["series_id"]]
            values.append({**keys, "kernels_id": kernels_id, **_values(row, *hashes)})
        connection.execute(new.insert(), values)
    if connection.dialect.name == "postgresql":  # rows inserted with keys did not advance the sequence
        newest = sa.select(sa.func.max(new.c.id)).scalar_subquery()
        connection.execute(sa.select(sa.func.setval(sa.func.pg_get_serial_sequence("point", "id"), newest)))


def _column(connection: sa.Connection, key: Any, value: Any) -> dict[int, str]:
    return dict(connection.execute(sa.select(key, value)).all())


def _batches(connection: sa.Connection, old: sa.Table) -> Iterator[list[dict[str, Any]]]:
    last = -1
    while True:
        query = sa.select(old).where(old.c.id > last).order_by(old.c.id).limit(_BATCH)
        rows = [dict(row) for row in connection.execute(query).mappings()]
        if not rows:
            return
        last = rows[-1]["id"]
        yield rows


def _values(row: dict[str, Any], environment: str, series: str) -> dict[str, Any]:
    import zlib

    import numpy as np

    from groupbench.tracker.facts import record as records
    from groupbench.tracker.store.points import point_values

    latency = None
    if row["samples"] is not None:
        flat = np.frombuffer(zlib.decompress(row["samples"]), dtype="<f4")
        bursts = [part.tolist() for part in np.split(flat, np.cumsum(row["burst_lengths"])[:-1])]
        named = {name: row[name] for name in ("timing", "prepare_ms", "enqueue_ms")}
        latency = {**named, "bursts_ms": bursts, "telemetry": row["telemetry"] or ()}
    accuracy = {name: row[name] for name in records.Accuracy.__struct_fields__}
    result = records.Record(
        schema=records.SCHEMA,
        run=None,  # type: ignore[arg-type]
        environment=None,  # type: ignore[arg-type]
        cell=records.Cell(operator="-", backend="-", shape="-", dtype="-"),  # the hash of this revision has no sizes
        status=row["status"],
        message=row["message"],
        baseline=bool(row["baseline"]),
        latency=None if latency is None else msgspec.convert(latency, records.Latency),
        accuracy=msgspec.convert(accuracy, records.Accuracy),
        kernels=msgspec.convert(row["kernels"], tuple[records.Kernel, ...]),
        duration_s=row["duration_s"],
    )
    return point_values(result, environment, series)


def _digest(value: object) -> str:
    from groupbench.tracker.facts.environment import digest

    return digest(value)


def downgrade() -> None:
    raise NotImplementedError("open the backup that was made before the migration")
