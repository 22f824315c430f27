"""Save the readable part of a damaged SQLite file into a new database.

SQLite copies the tables that it can read. If it cannot read all of them, rows are taken from each page of the file,
which needs neither the file's first page nor the upper pages of a table: each row is recognized by its columns. Then
columns that follow from others are computed again, and `verify` checks the new database. A row whose hash still does
not match is lost, along with the rows that refer to it.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.facts import record as records
from groupbench.tracker.facts.environment import digest, environment_identity
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.facts.identity import IDENTITY, identity_of
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.engine import PAGE_BYTES, Store, migrate, open_store, sqlite_engine
from groupbench.tracker.store.pages import PAGE_SIZES, PageFile, page_bytes_of
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

_HEADER = {
    0: b"SQLite format 3\x00",
    20: b"\x00\x40\x20\x20",
    44: b"\x00\x00\x00\x04",
    52: bytes(4),
    56: b"\x00\x00\x00\x01",
    64: bytes(4),
    72: bytes(20),
}
"""Header bytes that are the same in all our files, by position: https://sqlite.org/fileformat.html"""

_ADDED_COLUMNS = 2
"""Largest number of columns that migrations have added to a table. Rows that are older do not have them."""

_DOUBTFUL = (Commit, Run, Series)
"""Tables whose rows stay despite a wrong checksum, because each of their results has its own hash."""


@dataclass
class Repaired:
    """The result of repairing a database."""

    points: int = 0
    losses: list[str] = field(default_factory=list)  # one line for each loss
    rows: Counter[str] = field(default_factory=Counter)  # number of lost rows, by table
    pages: int = 0  # number of lost pages, whose table and rows are unknown

    @property
    def lost(self) -> str:
        """The lost rows by table, as text; empty without losses."""
        parts = [f"{number} of {table}" for table, number in sorted(self.rows.items()) if number]
        if self.pages:
            parts.append(f"any rows on {counted(self.pages, 'unreadable page')}")
        return ", ".join(parts) or ("values listed above" if self.losses else "")

    def lose_rows(self, table: str, number: int) -> None:
        """Note unreadable rows of a table, if there are any."""
        if number > 0:
            self.losses.append(f"{table}: {counted(number, 'row')} cannot be read")
            self.rows[table] += number

    def lose_pages(self, pages: list[int]) -> None:
        """Note unreadable pages, if there are any."""
        if pages:
            listed = ", ".join(map(str, pages[:5]))
            self.losses.append(f"{counted(len(pages), 'page')} cannot be read: {listed}{', …' if pages[5:] else ''}")
            self.pages = len(pages)


def repair(damaged: Path, new: Path) -> Repaired:
    """Save the readable part of `damaged` into the new database `new`. `damaged` stays unchanged.

    Raises StoreError if `damaged` does not exist, `new` exists, or nothing can be read.
    """
    try:
        if not damaged.is_file():
            raise StoreError(f"{damaged}: no such database")
        if new.exists():
            raise StoreError(f"{new}: already exists; a repair does not overwrite files")
        if not new.parent.is_dir():
            raise StoreError(f"{new}: {new.parent} is not a directory")
        with folder_beside(new) as folder:
            source = _readable_copy(damaged, folder / "damaged.db")
            done = Repaired()
            made = folder / "new.db"
            if not _copy_rows(source, made, done):
                raise StoreError(f"{damaged}: no row of a groupbench database can be read")
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
    """Copy the file with its write-ahead log, and restore the header."""
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{damaged}{suffix}", f"{copy}{suffix}")
    with copy.open("r+b") as file:
        head = bytearray(file.read(100))
        if len(head) < 100:
            raise StoreError(f"{damaged}: the file is too short for a database")
        for place, value in _HEADER.items():
            head[place : place + len(value)] = value
        page_bytes = page_bytes_of(copy) or _page_bytes(head)
        head[16:18] = (page_bytes if page_bytes < 1 << 16 else 1).to_bytes(2, "big")
        for place in (18, 19):
            head[place] = head[place] if head[place] in (1, 2) else 2
        head[28:32] = (copy.stat().st_size // page_bytes).to_bytes(4, "big")
        head[92:96] = head[24:28]  # the number of pages counts only with this
        file.seek(0)
        file.write(head)
    return copy


def _page_bytes(head: bytes | bytearray) -> int:
    """Return the page size in a header, or that of new databases if the header has no valid one."""
    size = int.from_bytes(head[16:18], "big")
    size = 1 << 16 if size == 1 else size
    return size if size in PAGE_SIZES else PAGE_BYTES


def _opens(path: Path) -> bool:
    """Return whether SQLite can use the definitions of our tables."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT version_num FROM alembic_version LIMIT 0")
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            our_tables = [table for table in Base.metadata.sorted_tables if table.name in tables]
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
            if revision not in REVISIONS:
                return False
            if revision == HEAD:
                for table in Base.metadata.sorted_tables:
                    names = table.columns.keys()
                    connection.execute(f"SELECT {_quoted(*names)} FROM {_quoted(table.name)} LIMIT 0")  # noqa: S608
            return bool(our_tables)
    except (sqlite3.Error, UnicodeDecodeError, TypeError):
        return False


def _quoted(*names: str) -> str:
    """Quote names of tables, columns or indexes, possibly from a damaged file, for a statement.

    Uses backticks, because SQLite takes an unknown name in double quotes as a string.
    """
    return ", ".join("`" + name.replace("`", "``") + "`" for name in names)


@dataclass(frozen=True)
class _Layout:
    """The columns of a table, by which its rows are recognized."""

    names: list[str]
    kinds: list[tuple[type, ...]]  # Python types of the values
    required: list[bool]

    def fits(self, values: list[Any]) -> bool:
        """Return whether a row can belong to this table. SQLite stores null for the id, which is the row's number."""
        if not len(self.names) - _ADDED_COLUMNS <= len(values) <= len(self.names) or values[0] is not None:
            return False
        return not any(
            required if value is None else not isinstance(value, kinds)
            for value, kinds, required in zip(values[1:], self.kinds[1:], self.required[1:], strict=False)
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "INTEGER": (int,),
    "BIGINT": (int,),
    "BOOLEAN": (int,),
    "DOUBLE": (int, float),
    "BLOB": (bytes,),
    **dict.fromkeys(("VARCHAR", "JSON", "DATETIME"), (str,)),
}
"""Types of the values in a file, by the declared type of their column."""


def _copy_rows(source: Path, made: Path, done: Repaired) -> bool:
    """Copy every readable row into a new database of the same revision, without checking it.

    Returns False if nothing shows that the file is a database of ours.
    """
    opens = _opens(source)
    _create(made, _revision(source, opens))
    with closing(sqlite3.connect(made, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        layouts = {
            table.name: layout for table in Base.metadata.sorted_tables if (layout := _layout(connection, table.name))
        }
        expected: dict[str, int | None] = dict.fromkeys(layouts)
        if opens:
            connection.execute("ATTACH ? AS damaged", (str(source),))
            expected = {name: _copy_table(connection, name, layout.names) for name, layout in layouts.items()}
            connection.execute("DETACH damaged")
        kept = {name: _count(connection, "main", name) for name in layouts}
        if kept == expected:
            return True
        unreadable, pages = _copy_leaves(connection, source, layouts)
        kept = {name: _count(connection, "main", name) for name in layouts}
        for name, number in expected.items():
            done.lose_rows(name, unreadable[name] if number is None else number - (kept[name] or 0))
        if None in expected.values():
            done.lose_pages(pages)
        return opens or any(kept.values())


def _revision(source: Path, opens: bool) -> str:
    """Return the revision of a database; this version's if it cannot be read."""
    if opens:
        with closing(sqlite3.connect(source)) as connection:
            return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])
    rows = (values for leaf in _page_file(source).leaves() for _, values in leaf.rows)
    return next((values[0] for values in rows if len(values) == 1 and values[0] in REVISIONS), HEAD)


def _page_file(source: Path) -> PageFile:
    with source.open("rb") as file:
        return PageFile(source, _page_bytes(file.read(100)))


def _create(made: Path, revision: str) -> None:
    """Create an empty database of a revision."""
    if revision == HEAD:
        open_store(made, create=True).close()
        return
    engine = sqlite_engine(made)
    try:
        migrate(engine, revision, name=str(made))
    finally:
        engine.dispose()


def _layout(connection: sqlite3.Connection, table: str) -> _Layout | None:
    """Return a table's columns; None if this revision does not have the table."""
    query = 'SELECT name, type, "notnull" FROM pragma_table_info(?)'
    columns = connection.execute(query, (table,)).fetchall()
    if not columns:
        return None
    names, types, required = zip(*columns, strict=True)
    return _Layout([*names], [_KINDS[declared.split("(")[0]] for declared in types], [bool(each) for each in required])


def _count(connection: sqlite3.Connection, database: str, table: str) -> int | None:
    """Return the number of rows of a table, or None if they cannot be counted."""
    try:
        query = f"SELECT count(*) FROM {_quoted(database)}.{_quoted(table)}"  # noqa: S608 # quoted
        return int(connection.execute(query).fetchone()[0])
    except sqlite3.Error:
        return None


def _copy_table(connection: sqlite3.Connection, table: str, names: list[str]) -> int | None:
    """Copy a table unless a page of it is damaged. Return the number of rows that it should have, None if unknown."""
    insert = f"INSERT OR IGNORE INTO main.{_quoted(table)} ({_quoted(*names)})"
    select = f"SELECT {_quoted(*names)} FROM damaged.{_quoted(table)} NOT INDEXED"  # noqa: S608 # quoted
    with suppress(sqlite3.Error):
        connection.execute(f"{insert} {select}")
    return _count(connection, "damaged", table)


def _copy_leaves(
    connection: sqlite3.Connection, source: Path, layouts: dict[str, _Layout]
) -> tuple[Counter[str], list[int]]:
    """Add the rows of every readable page that are not there yet.

    Returns (number of unreadable rows by table, numbers of the unreadable pages).
    """
    unreadable: Counter[str] = Counter()
    file = _page_file(source)
    lost = []
    connection.execute("BEGIN")
    for leaf in file.leaves():
        ours = [row for row in leaf.rows if not row[1] or row[1][0] is None]  # other tables have text there
        fitting = {name: [row for row in ours if layout.fits(row[1])] for name, layout in layouts.items()}
        name = max(fitting, key=lambda name: len(fitting[name]))
        rows = fitting[name]
        if not rows:
            lost += [leaf.number] if ours else []
            continue
        unreadable[name] += leaf.unreadable + len(leaf.rows) - len(rows)
        columns = layouts[name].names
        for length in {len(values) for _, values in rows}:
            insert = f"INSERT OR IGNORE INTO main.{_quoted(name)} ({_quoted(*columns[:length])}) "
            connection.executemany(
                f"{insert} VALUES {_places(length)}",
                [(rowid, *values[1:]) for rowid, values in rows if len(values) == length],
            )
    connection.execute("COMMIT")
    return unreadable, sorted([*file.damaged, *lost])


def _places(count: int) -> str:
    """Return the places of values in a statement: (?, ?)."""
    return f"({', '.join('?' * count)})"


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
            statement = f"DELETE FROM {_quoted(str(problem.table))} WHERE id = ?"  # noqa: S608 # quoted
            number = connection.executemany(statement, rows).rowcount
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
