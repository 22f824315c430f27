"""Row checksums: `verify` uses them to find values changed on disk.

Points and comparisons have a content hash instead, which merging and repeated ingestion need anyway. Every other row
with data of its own has a checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa

_encoder = msgspec.json.Encoder(order="deterministic")


def checksum_of(columns: Mapping[str, Any]) -> int:
    """Return a 48-bit hash of a row's values by column.

    Null columns are left out, so a new column does not change existing checksums. Values are normalised to the
    database's form: a time without a zone is UTC, an integral float is an integer, and zero has no sign.
    """
    present = {name: _canonical(value) for name, value in columns.items() if value is not None}
    return int.from_bytes(hashlib.sha256(_encoder.encode(present)).digest()[:6], "big")


def _canonical(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value


def seal(connection: sa.Connection, *names: str) -> None:
    """Set the checksum of every row of some tables, in a migration."""
    for table in reflected(connection, *names):
        rows = connection.execute(sa.select(table)).mappings().all()
        facts = ({name: value for name, value in row.items() if name not in ("id", "checksum")} for row in rows)
        sums = [{"key": row["id"], "sum": checksum_of(each)} for row, each in zip(rows, facts, strict=True)]
        if sums:
            update = table.update().where(table.c.id == sa.bindparam("key")).values(checksum=sa.bindparam("sum"))
            connection.execute(update, sums)


def reflected(connection: sa.Connection, *names: str) -> list[sa.Table]:
    """Return tables as they are in the database, whatever the schema has become."""
    tables = sa.MetaData()
    tables.reflect(connection, only=names)
    return [tables.tables[name] for name in names]
