"""Bring the tables of an earlier revision to this one's.

New tables and columns come from the schema. Only tables whose rows change are set aside, and copied into new ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.store.checksum import reflected, seal
from groupbench.tracker.store.schema import HEAD, Base, make_triggers

MOVED = ("state", "until_time", "until_commit")
"""Columns of alerts that incidents have since revision 0010."""

FLOOR = 1e-6
"""Floor of errors, which revision 0003 added to the levels of alerts about accuracy."""

_BATCH = 1000
_ASIDE = "_before"  # end of the name of a table that is set aside


def upgrade(connection: sa.Connection, revision: str) -> None:
    """Change the tables of an earlier revision to HEAD's. Raises StoreError if they are not that revision's."""
    events: list[sa.RowMapping] = []
    points, alerts = revision < "0002", "0003" <= revision < "0010"
    if points:
        _set_aside(connection, "point")
    if alerts:
        (table,) = reflected(connection, "alert_event")
        events = list(connection.execute(sa.select(table).order_by(table.c.at, table.c.id)).mappings())
        table.drop(connection)
        _set_aside(connection, "alert")
    unsealed = _complete(connection)
    if points:
        _copy_points(connection)
    if alerts:
        _group_alerts(connection, events, floor=FLOOR if revision < "0004" else 0.0)
        unsealed += ["incident", "incident_event", "alert"]
    if revision < "0011":
        make_triggers(connection)
    seal(connection, *dict.fromkeys(unsealed))
    connection.execute(sa.text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})


def _set_aside(connection: sa.Connection, name: str) -> None:
    """Rename a table, without indexes and constraints whose names the new one takes."""
    inspector = sa.inspect(connection)
    for index in inspector.get_indexes(name):
        if not index.get("duplicates_constraint"):
            connection.execute(sa.text(f"DROP INDEX {_quoted(index['name'])}"))
    if connection.dialect.name != "sqlite":  # in SQLite, constraint names belong to the table
        for constraint in (inspector.get_pk_constraint(name), *inspector.get_unique_constraints(name)):
            connection.execute(sa.text(f"ALTER TABLE {_quoted(name)} DROP CONSTRAINT {_quoted(constraint['name'])}"))
    connection.execute(sa.text(f"ALTER TABLE {_quoted(name)} RENAME TO {_quoted(name + _ASIDE)}"))


def _complete(connection: sa.Connection) -> list[str]:
    """Add the tables and columns that the schema has, and return the tables that had no checksums."""
    inspector = sa.inspect(connection)
    existing = set(inspector.get_table_names())
    unsealed = []
    for table in Base.metadata.sorted_tables:
        if table.name not in existing:
            table.create(connection)
            continue
        present = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                _add(connection, table, column)
                unsealed += [table.name] if column.name == "checksum" else []
    return unsealed


def _add(connection: sa.Connection, table: sa.Table, column: sa.Column[Any]) -> None:
    if not column.nullable:
        raise StoreError(f"table {table.name} lacks {column.name}")
    declared = str(CreateColumn(column).compile(dialect=connection.dialect)).strip()
    for key in column.foreign_keys:
        target = key.column.table.name
        declared += f" CONSTRAINT fk_{table.name}_{column.name}_{target} REFERENCES {target} ({key.column.name})"
    connection.execute(sa.text("ALTER TABLE " + _quoted(table.name) + " ADD COLUMN " + declared))


def _quoted(name: str | None) -> str:
    return '"' + str(name).replace('"', '""') + '"'


def _finish(connection: sa.Connection, old: sa.Table, new: sa.Table) -> None:
    """Drop a table that was set aside, once its rows are copied."""
    old.drop(connection)
    if connection.dialect.name == "postgresql":  # rows inserted with keys did not advance the sequence
        newest = sa.select(sa.func.max(new.c.id)).scalar_subquery()
        connection.execute(sa.select(sa.func.setval(sa.func.pg_get_serial_sequence(new.name, "id"), newest)))


def _copy_points(connection: sa.Connection) -> None:
    """Copy points of revision 0001: kernels into their own table, samples and telemetry packed."""
    names = f"point{_ASIDE}", "point", "kernel_set", "environment", "series"
    old, new, kernels, environment, series = reflected(connection, *names)
    for column in (old.c.first_bad, new.c.first_bad, new.c.metrics, new.c.amounts):
        column.type = sa.JSON(none_as_null=True)
    kernel_keys: dict[str, int] = {}
    environments = dict(connection.execute(sa.select(environment.c.id, environment.c.content)).all())
    identities = dict(connection.execute(sa.select(series.c.id, series.c.identity)).all())
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
    _finish(connection, old, new)


def _batches(connection: sa.Connection, old: sa.Table) -> Iterator[list[sa.RowMapping]]:
    last = -1
    while rows := list(
        connection.execute(sa.select(old).where(old.c.id > last).order_by(old.c.id).limit(_BATCH)).mappings()
    ):
        last = rows[-1]["id"]
        yield rows


def _values(row: sa.RowMapping, environment: str, series: str) -> dict[str, Any]:
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


def _group_alerts(connection: sa.Connection, events: list[sa.RowMapping], floor: float) -> None:
    """Make incidents of alerts with one range of runs, cause, direction and state, with each event once."""
    names = f"alert{_ASIDE}", "alert", "incident", "incident_event"
    old, alert, incident, incident_event = reflected(connection, *names)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for found in connection.execute(sa.select(old).order_by(old.c.id)).mappings().all():
        row = dict(found)
        if floor and row["metric"] == "accuracy":
            before, after = (_without(floor, row[name]) for name in ("before", "after"))
            row |= {"before": before, "after": after, "effect": math.log(after / before) if before and after else None}
        worse = None if row["effect"] is None else row["effect"] > 0
        key = row["metric"] == "result", row["base_run_id"], row["run_id"], row["cause"], worse
        groups.setdefault((*key, *(row[name] for name in MOVED)), []).append(row)
    for rows in groups.values():
        first, members = rows[0], {row["id"] for row in rows}
        facts = {name: first[name] for name in ("identity", *MOVED)} | {"opened": min(row["opened"] for row in rows)}
        made = connection.execute(incident.insert().values(**facts)).inserted_primary_key
        assert made is not None
        merged = {
            tuple(event[name] for name in ("at", "who", "state", "reason")): None
            for event in events
            if event["alert_id"] in members
        }
        for at, who, state, reason in sorted(merged, key=lambda each: each[0]):
            values = {"incident_id": made[0], "at": at, "who": who, "state": state, "reason": reason}
            connection.execute(incident_event.insert().values(**values))
        ended = max((event[0] for event in merged), default=facts["opened"]) if first["state"] == "fixed" else None
        for row in rows:
            kept = {name: value for name, value in row.items() if name in alert.c}
            connection.execute(alert.insert().values(**kept, incident_id=made[0], ended=ended))
    _finish(connection, old, alert)


def _without(floor: float, level: float | None) -> float | None:
    """Return a level with the floor and the rounding residue removed."""
    return None if level is None else level - floor if level - floor > 1e-9 * floor else 0.0
