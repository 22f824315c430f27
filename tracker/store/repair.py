"""Save the readable part of a damaged SQLite file into a new database.

Rows are read from a copy of the file, one range of ids at a time. If a page is damaged, the range is halved until only
unreadable rows are left out. The file header and the table definitions are known, so damage there loses nothing. Then
columns that follow from others are computed again, and `verify` checks the new database. A row whose hash still does
not match is lost, along with the rows that refer to it.
"""

from __future__ import annotations

import difflib
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Table, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker import record as records
from groupbench.tracker.environment import digest, environment_identity
from groupbench.tracker.errors import StoreError
from groupbench.tracker.identity import IDENTITY, identity_of
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.engine import Store, migrate, open_store, sqlite_engine
from groupbench.tracker.store.points import kernels_hash
from groupbench.tracker.store.schema import (
    HEAD,
    REVISIONS,
    Base,
    Commit,
    Environment,
    KernelSet,
    Point,
    Run,
    Series,
    sealed_columns,
)
from groupbench.tracker.store.sqlite_file import folder_beside, put
from groupbench.tracker.store.verify import DatabaseProblem, verify
from groupbench.tracker.text.wording import counted

_ROUNDS = 10
"""Largest number of rounds of deletions. Rows that refer to a deleted one go in the next round."""

_LEAST_ROW, _MOST_ROWS = 16, 10**8
"""Smallest size of a row in bytes, and largest number of rows to try in a damaged table."""

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_HEADER = {0: b"SQLite format 3\x00", 20: b"\x00\x40\x20\x20", 44: b"\x00\x00\x00\x04", 56: b"\x00\x00\x00\x01"}
"""Header bytes that are the same in all our files, by position: https://sqlite.org/fileformat.html"""

_PAGE_BYTES = {1 << power for power in range(9, 16)}
_DOUBTFUL = (Commit, Run, Series)
"""Tables whose rows stay despite a wrong checksum, because each of their results has its own hash."""


@dataclass
class Repaired:
    """The result of repairing a database."""

    points: int = 0
    losses: list[str] = field(default_factory=list)  # one line for each loss
    rows: Counter[str] = field(default_factory=Counter)  # number of lost rows, by table

    @property
    def lost(self) -> str:
        """The lost rows by table, as text; empty without losses."""
        parts = [f"{number} of {table}" for table, number in sorted(self.rows.items()) if number]
        return ", ".join(parts) or ("values listed above" if self.losses else "")


def repair(damaged: Path, new: Path) -> Repaired:
    """Save the readable part of `damaged` into the new database `new`. `damaged` stays unchanged.

    Raises StoreError if `damaged` does not exist, `new` exists, or nothing can be read.
    """
    if not damaged.is_file():
        raise StoreError(f"{damaged}: no such database")
    if new.exists():
        raise StoreError(f"{new}: already exists; a repair does not overwrite files")
    if not new.parent.is_dir():
        raise StoreError(f"{new}: {new.parent} is not a directory")
    try:
        with folder_beside(new) as folder:
            source = _readable_copy(damaged, folder / "damaged.db")
            done = Repaired()
            made = folder / "new.db"
            _copy_rows(source, made, done)
            with open_store(made, create=False):
                pass  # opening it migrates an earlier version's tables
            _keep_what_holds(made, done)
            with closing(sqlite3.connect(made)) as connection:
                connection.execute("VACUUM")
                connection.execute("PRAGMA journal_mode = DELETE")
                (done.points,) = connection.execute("SELECT count(*) FROM point").fetchone()
            put(made, new)
            return done
    except FileExistsError as error:
        raise StoreError(f"{new}: already exists; a repair does not overwrite files") from error
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        raise StoreError(
            f"{damaged}: cannot repair the database: {getattr(error, 'strerror', None) or error}"
        ) from error


def _readable_copy(damaged: Path, copy: Path) -> Path:
    """Copy the file with its write-ahead log, and restore the header bytes and table definitions."""
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{damaged}{suffix}", f"{copy}{suffix}")
    with copy.open("r+b") as file:
        head = bytearray(file.read(100))
        if len(head) < 100:
            raise StoreError(f"{damaged}: the file is too short for a database")
        for place, value in _HEADER.items():
            head[place : place + len(value)] = value
        if int.from_bytes(head[16:18], "big") not in _PAGE_BYTES:
            head[16:18] = (8192).to_bytes(2, "big")
        for place in (18, 19):
            head[place] = head[place] if head[place] in (1, 2) else 2
        file.seek(0)
        file.write(head)
    if not _opens(copy):
        _restore_schema(copy)
    return copy


def _opens(path: Path) -> bool:
    """Whether SQLite can use the definitions of our tables."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT version_num FROM alembic_version LIMIT 0")
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            our_tables = [table for table in Base.metadata.sorted_tables if table.name in names]
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
            if revision not in REVISIONS:
                return False
            if revision == HEAD:
                for table in Base.metadata.sorted_tables:
                    connection.execute(f"SELECT {_quoted(*table.columns.keys())} FROM {_quoted(table.name)} LIMIT 0")
            return bool(our_tables)
    except (sqlite3.Error, UnicodeDecodeError, TypeError):
        return False


def _restore_schema(path: Path) -> None:
    """Rewrite the table definitions, without constraints and indexes, which reading does not need.

    The order of columns is the same in every version, and a column that a version lacks reads as null.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        query = "SELECT CAST(name AS BLOB), CAST(sql AS BLOB), rootpage FROM sqlite_master WHERE rootpage > 0"
        definitions = [
            (str(bytes(name or b""), "latin-1"), str(bytes(sql), "latin-1"), root)
            for name, sql, root in connection.execute(query)
            if sql
        ]
        texts = {table.name: _create(table) for table in Base.metadata.sorted_tables}
        texts["alembic_version"] = "CREATE TABLE alembic_version (version_num)"
        roots = {name: root for name, _, root in definitions if name in texts}
        for name, sql, root in definitions:
            missing = [each for each in texts if each not in roots]
            like = difflib.get_close_matches(name, missing, 1, 0.6)
            if root not in roots.values() and like and "TABLE" in sql[:20].upper():
                roots[like[0]] = root
        connection.execute("DELETE FROM sqlite_master")
        rows = [(name, name, root, texts[name]) for name, root in roots.items()]
        connection.executemany("INSERT INTO sqlite_master VALUES ('table', ?, ?, ?, ?)", rows)
        connection.execute("PRAGMA writable_schema = RESET")


def _create(table: Table) -> str:
    key, *others = (column.name for column in table.columns)
    return f"CREATE TABLE {_quoted(table.name)} ({_quoted(key)} INTEGER PRIMARY KEY, {_quoted(*others)})"


def _quoted(*names: str) -> str:
    """Quote names of tables, columns or indexes, possibly from a damaged file, for a statement.

    Uses backticks, because SQLite takes an unknown name in double quotes as a string.
    """
    return ", ".join("`" + name.replace("`", "``") + "`" for name in names)


def _copy_rows(source: Path, made: Path, done: Repaired) -> None:
    """Copy every readable row into a new database of the same revision, without checking it."""
    with closing(sqlite3.connect(source)) as connection:
        try:
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        except (sqlite3.Error, TypeError, UnicodeDecodeError):
            revision = HEAD
    if revision in REVISIONS[:-1]:
        engine = sqlite_engine(made)
        try:
            migrate(engine, revision, name=str(made))
        finally:
            engine.dispose()
    else:
        open_store(made, create=True).close()
    with closing(sqlite3.connect(made, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("ATTACH ? AS damaged", (str(source),))
        for table in Base.metadata.sorted_tables:
            names = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table.name,))]
            if not names:
                continue  # a table of a later version
            there = {
                name
                for (name,) in connection.execute("SELECT name FROM pragma_table_info(?, 'damaged')", (table.name,))
            }
            expected = _count(connection, "damaged", table.name)
            kept = _copy_table(connection, table.name, [name for name in names if name in there])
            missing = max((expected or 0) - kept, 0)
            if missing or expected is None:
                rows = counted(missing, "row") if expected is not None else "an unknown number of rows"
                done.losses.append(f"{table.name}: {rows} cannot be read")
                done.rows[table.name] += missing or 1


def _count(connection: sqlite3.Connection, database: str, table: str) -> int | None:
    """Return the number of rows of a table, or None if they cannot be counted."""
    try:
        query = f"SELECT count(*) FROM {_quoted(database)}.{_quoted(table)}"
        return int(connection.execute(query).fetchone()[0])
    except sqlite3.Error:
        return None


def _largest_id(connection: sqlite3.Connection, table: str) -> int:
    """Return the largest id of a table, or the number of rows that fit in the file if it cannot be read."""
    query = f"SELECT max(id) FROM damaged.{_quoted(table)}"
    for index in ("", *(f" INDEXED BY {_quoted(name)}" for (name,) in _indexes(connection, table))):
        with suppress(sqlite3.Error, TypeError):
            (largest,) = connection.execute(query + index).fetchone()
            if largest is None or 0 < largest < _MOST_ROWS:
                return largest or 0
    (pages,), (size,) = (connection.execute(f"PRAGMA damaged.page_{what}").fetchone() for what in ("count", "size"))
    return min(int(pages * size / _LEAST_ROW), _MOST_ROWS)


def _indexes(connection: sqlite3.Connection, table: str) -> list[tuple[str]]:
    with suppress(sqlite3.Error, UnicodeDecodeError):
        query = "SELECT name FROM pragma_index_list(?, 'damaged') WHERE name NOT LIKE 'sqlite_%'"
        return connection.execute(query, (table,)).fetchall()
    return []


def _copy_table(connection: sqlite3.Connection, table: str, names: list[str]) -> int:
    """Copy the readable rows of a table and return their number. A range of ids that fails is halved.

    Only up to the largest possible id: if the root page of a table is damaged, every range fails.
    """
    statement = (
        f"INSERT OR IGNORE INTO main.{_quoted(table)} ({_quoted(*names)}) SELECT {_quoted(*names)} "
        f"FROM damaged.{_quoted(table)} NOT INDEXED WHERE id BETWEEN ? AND ?"
    )
    largest = _largest_id(connection, table)
    stretches = [(_SMALLEST, 0), (largest + 1, _LARGEST), (1, largest)] if names else []
    while stretches:
        first, last = stretches.pop()
        try:
            connection.execute(statement, (first, last))
        except sqlite3.Error:
            if 0 < first < last <= largest:
                middle = (first + last) // 2
                stretches += [(middle + 1, last), (first, middle)]
    return _count(connection, "main", table) or 0


def _keep_what_holds(made: Path, done: Repaired) -> None:
    """Compute derived columns, and delete damaged rows until `verify` finds none."""
    with open_store(made, create=False) as store:
        _derive(store, done)
        for _ in range(_ROUNDS):
            with store.read() as session:
                problems = list(verify(session))
                lines = [line for problem in problems for line in _losses(session, problem)]
            if not problems:
                return
            done.losses += lines
            rows = [problem for problem in problems if problem.table is not None]
            if not rows:
                break
            _delete(made, rows, done)
    raise StoreError(f"{made.name}: cannot repair the database: {problems[0]}")


def _losses(session: Session, problem: DatabaseProblem) -> Iterator[str]:
    """Yield a line for each loss, with run and series for a point."""
    if problem.table == "point":
        query = (
            select(Run.uuid, Series.operator, Series.backend, Series.shape)
            .join(Point, Point.run_id == Run.id)
            .join(Series, Point.series_id == Series.id)
        )
        for key in problem.keys[:1]:
            with suppress(Exception):  # its run or series may be damaged
                run, *series = session.execute(query.where(Point.id == key)).one()
                yield f"{problem}; run {run}, {' '.join(series)}"
                return
    if problem.kind != "orphan":
        yield str(problem)


def _delete(made: Path, problems: list[DatabaseProblem], done: Repaired) -> None:
    with closing(sqlite3.connect(made)) as connection, connection:  # does not enforce foreign keys
        for problem in problems:
            rows = [(key,) for key in problem.keys]
            number = connection.executemany(f"DELETE FROM {_quoted(str(problem.table))} WHERE id = ?", rows).rowcount
            if problem.kind != "orphan" and problem.table is not None:
                done.rows[problem.table] += number


def _derive(store: Store, done: Repaired) -> None:
    """Compute the derived columns of each row again. The hashes of points decide whether they are correct."""
    with store.write() as session:
        for mapped in (Environment, KernelSet, Series, Commit, Run):
            for key in list(session.scalars(select(mapped.id))):
                with suppress(Exception), session.begin_nested():  # `verify` finds unreadable rows
                    row = session.get_one(mapped, key)
                    _derive_row(row)
                    if isinstance(row, _DOUBTFUL):
                        made = checksum_of({name: getattr(row, name) for name in sealed_columns(mapped)})
                        if row.checksum not in (None, made):
                            done.losses.append(f"{mapped.__tablename__} {key}: one of its values has changed")
                        row.checksum = made


def _derive_row(row: Any) -> None:
    if isinstance(row, Environment):
        facts = msgspec.convert(row.facts, records.Environment)
        row.content, row.identity = digest(facts), environment_identity(facts)
        for name in facts.__struct_fields__:
            if hasattr(Environment, name):
                setattr(row, name, getattr(facts, name))
    elif isinstance(row, KernelSet):
        row.content = digest(row.kernels)
        row.hash = kernels_hash(msgspec.convert(row.kernels, tuple[records.Kernel, ...]))
    elif isinstance(row, Series):
        row.identity = identity_of({name: getattr(row, name) for name in IDENTITY})
