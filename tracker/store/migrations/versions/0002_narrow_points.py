"""Make points smaller: kernels in their own table, packed samples and telemetry, two indexes instead of four.

Every point is rewritten. Its samples stay the same as float32, and its statistics and hash are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

from groupbench.tracker.facts.environment import digest

revision = "0002"
down_revision = "0001"

REFERRED = ("run", "series", "environment")
_BATCH = 1000


def upgrade() -> None:
    op.create_table(
        "kernel_set",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("content", sa.String, nullable=False, unique=True),
        sa.Column("hash", sa.String),
        sa.Column("kernels", sa.JSON, nullable=False),
    )
    op.drop_index("ix_point_environment_id", "point")
    op.drop_index("ix_point_series_id_run_id", "point")
    if op.get_context().dialect.name != "sqlite":  # in SQLite, constraint names belong to the table
        op.drop_constraint("pk_point", "point")
        op.drop_constraint("uq_point_run_id_series_id", "point")
    op.rename_table("point", "point_0001")
    op.create_table(
        "point",
        sa.Column("id", sa.Integer, primary_key=True),
        *(sa.Column(f"{name}_id", sa.Integer, sa.ForeignKey(f"{name}.id"), nullable=False) for name in REFERRED),
        sa.Column("kernels_id", sa.Integer, sa.ForeignKey("kernel_set.id")),
        sa.Column("content", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("timing", sa.String),
        sa.Column("baseline", sa.Boolean, nullable=False),
        sa.Column("repeatable", sa.Boolean),
        sa.Column("median_ms", sa.Double),
        *(sa.Column(name, sa.BigInteger) for name in ("low_ppm", "high_ppm", "error_ppm")),
        *(sa.Column(name, sa.Double) for name in ("rms", "max_abs", "worst_block_rms", "mismatch", "unwritten")),
        *(sa.Column(name, sa.Double) for name in ("prepare_ms", "enqueue_ms", "duration_s")),
        sa.Column("samples", sa.LargeBinary),
        sa.Column("telemetry", sa.LargeBinary),
        sa.Column("first_bad", sa.JSON),
        sa.Column("message", sa.String),
        sa.UniqueConstraint("series_id", "run_id"),
    )
    _copy(op.get_bind())
    op.drop_table("point_0001")
    op.create_index("ix_point_run_id", "point", ["run_id"])


def _copy(connection: sa.Connection) -> None:
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
                content = digest(row["kernels"])
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
