"""Insert many rows of one table at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from groupbench.tracker.store.schema import Base, table_of


def insert_rows(session: Session, mapped: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows into the table of `mapped`. All rows must have the same columns."""
    if not rows:
        return
    table, connection = table_of(mapped), session.connection()
    dialect = connection.dialect
    if dialect.name != "sqlite":
        session.execute(insert(table), list(rows))
        return
    # Compile once: the session would compile for each row, which takes as long as the insert itself.
    names = list(rows[0])
    compiled = insert(table).inline().compile(dialect=dialect, column_keys=names)
    columns: list[Iterable[Any]] = []
    for name in compiled.positiontup or names:
        values = [row[name] for row in rows]
        process = table.columns[name].type.dialect_impl(dialect).bind_processor(dialect)
        columns.append(values if process is None else map(process, values))
    connection.exec_driver_sql(str(compiled), list(zip(*columns, strict=True)))
