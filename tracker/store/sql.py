"""Run a user's SQL statement, which can only read.

The file is opened with `mode=ro` and `query_only`, and an authorizer permits only reads. So a statement cannot attach
another file, load an extension or reset the pragma. The database is never migrated. PostgreSQL has psql.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.store.sqlite_file import BUSY_SECONDS, no_database, read_only_uri

MOST_ROWS = 2_000_000
"""Maximum number of rows of a result, which takes a few GB of memory."""

RESULT_BYTES = 1 << 30
"""Maximum size of the texts and blobs of a result. A value may have a quarter of it, with SQLite."""

_LONGEST_PATTERN = 1_000
"""Maximum length of a pattern of LIKE and GLOB: one step of SQLite may compare it by backtracking for hours."""

_STEPS = 100_000
"""Number of steps of SQLite between two looks for a signal, about a millisecond."""

NO_ROWS = "the statement returns no rows"
REFUSED = "`groupbench db sql` only reads; this statement would do more"

_PRAGMAS = {
    *("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"),
    *("database_list", "compile_options", "user_version", "schema_version", "page_count", "page_size", "encoding"),
    *("freelist_count", "function_list", "collation_list"),
}
_TAKE_A_NAME = {name for name in _PRAGMAS if name.startswith(("table", "index", "foreign"))}


@dataclass(frozen=True)
class SqlResult:
    """A statement's columns and rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def flat(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask(location: str | os.PathLike[str], statement: str, params: Mapping[str, str] | None = None) -> SqlResult:
    """Run one statement and return the rows; `params` gives the `:name` parameters.

    Raises QueryError for a failing or writing statement, StoreError for a database problem.
    """
    if not statement.strip(" \t\r\n;"):
        raise QueryError("the statement is empty")
    where = os.fspath(location)
    if "://" in where and not where.startswith("sqlite"):
        raise StoreError("`groupbench db sql` reads SQLite files; with PostgreSQL, use psql")
    return _sqlite(_path(where), statement, params or {})


def _path(where: str) -> Path:
    if "://" not in where:
        return Path(where)
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return Path(make_url(where).database or "")
    except (SQLAlchemyError, ValueError) as error:
        raise StoreError(f"--db {where.split('://', 1)[0]}://… is not a database URL") from error


def _sqlite(path: Path, statement: str, params: Mapping[str, str]) -> SqlResult:
    try:
        if not path.is_file():
            raise no_database(path)
        connection = sqlite3.connect(read_only_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.Error as error:  # such as a transaction of a killed process, which a reader cannot undo
        connection.close()
        raise StoreError(f"{path}: {error}") from error
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, RESULT_BYTES // 4)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _LONGEST_PATTERN)
        connection.set_authorizer(_may)
        connection.set_progress_handler(lambda: 0, _STEPS)  # Python raises the KeyboardInterrupt of Ctrl-C in it
        cursor = connection.execute(statement, dict(params))
        if cursor.description is None:
            raise QueryError(NO_ROWS)
        return SqlResult(_unique([column[0] for column in cursor.description]), _all_of(cursor))
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error
        refused = any(
            phrase in str(error) for phrase in ("not authorized", "authorization denied", "prohibited", "readonly")
        )
        raise QueryError(REFUSED if refused else f"sql: {error}") from error
    finally:
        connection.close()


def _may(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second != "load_extension":
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS and (second is None or first in _TAKE_A_NAME):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _all_of(rows: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return all rows. Raises QueryError for more than fit into memory, such as an endless recursion."""
    all_rows: list[tuple[Any, ...]] = []
    held = 0
    for row in rows:
        all_rows.append(tuple(row))
        held += sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(all_rows) > MOST_ROWS:
            raise QueryError(f"the statement returns more than {MOST_ROWS:,} rows; add a LIMIT")
        if held > RESULT_BYTES:
            raise QueryError(f"the statement returns more than {RESULT_BYTES >> 20:,} MiB; add a LIMIT")
    return tuple(all_rows)


def _unique(names: list[str]) -> tuple[str, ...]:
    """Return unique column names: a second `n` becomes `n:2`, or `n:3` if `n:2` exists."""
    unique: dict[str, None] = {}
    for name in names:
        numbers = itertools.count(2)
        other = name
        while other in unique or (other != name and other in names):
            other = f"{name}:{next(numbers)}"
        unique[other] = None
    return tuple(unique)
