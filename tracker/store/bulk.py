"""Insert many rows of one table at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Dialect, Table, insert
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
    statement, processes = _compiled(table, tuple(rows[0]), dialect)
    columns = []
    for name, process in processes.items():
        values = [row[name] for row in rows]
        if process is not None:
            values = [process(None)] * len(rows) if values.count(None) == len(rows) else list(map(process, values))
        columns.append(values)
    connection.exec_driver_sql(statement, list(zip(*columns, strict=True)))


@lru_cache(maxsize=32)
def _compiled(table: Table, names: tuple[str, ...], dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """Return an insert and what prepares the values of each column: the session would compile it for each row."""
    compiled = insert(table).inline().compile(dialect=dialect, column_keys=names)
    types = {name: table.columns[name].type.dialect_impl(dialect) for name in compiled.positiontup or names}
    return str(compiled), {name: each.bind_processor(dialect) for name, each in types.items()}
