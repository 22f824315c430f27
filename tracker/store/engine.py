"""Open, create and migrate the database: SQLite by default, PostgreSQL by URL.

A new SQLite file is created in a temporary folder and moved into place when complete. An older file is copied before it
is migrated. Every failure is a one-line StoreError and leaves the file as it was.
"""

from __future__ import annotations

import os
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import DamageError, StoreError
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base
from groupbench.tracker.store.sqlite_file import (
    BUSY_SECONDS,
    check_file,
    copy_once,
    folder_beside,
    put,
    read_only_uri,
)
from groupbench.tracker.text.files import locked

PAGE_BYTES = 8192
"""Page size of a new SQLite file. A point takes 1/35 of a page, which wastes little space."""

LOCK = 0x67726F75
"""Key of the PostgreSQL advisory lock for migrations and changes of the queue."""


@dataclass(frozen=True)
class Store(AbstractContextManager["Store"]):
    """An open database. `read` and `write` each open a session with one transaction."""

    engine: Engine
    name: str  # for messages, without the password
    queues: bool = True  # a writer waits for those before it, however long they take

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read session on one database snapshot. Raises StoreError."""
        with self.errors_translated(), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a write session, committed at the end and rolled back on any exception. Writers queue.

        Raises StoreError.
        """
        engine = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        with self.errors_translated(), self._turn(), Session(engine) as session, session.begin():
            if engine.dialect.name == "postgresql":
                session.execute(text("LOCK TABLE series IN SHARE ROW EXCLUSIVE MODE"))
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the writers before this one: SQLite itself polls, in no order, and gives up.

        The lock is of the write-ahead log, which SQLite does not lock, and which exists while a connection is open.
        """
        if not self.queues or self.engine.dialect.name != "sqlite":
            yield
            return
        with self.engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1 FROM sqlite_master")  # opens the log; the pool keeps it open
        with locked(f"{self.engine.url.database}-wal"):
            yield

    def compact(self) -> None:
        """Return free space to the file system. Raises StoreError, for example if the disk has no room for a copy."""
        with self.errors_translated():
            if self.engine.dialect.name == "sqlite":  # bypass SQLAlchemy, which would begin a transaction
                with closing(self.engine.raw_connection()) as pooled:
                    pooled.cursor().execute("VACUUM").close()
                    pooled.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
                return
            with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                connection.exec_driver_sql("VACUUM")

    def close(self) -> None:
        self.engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Raise database errors as one-line StoreError, or as DamageError if they report damage.

        This includes the driver's own errors, since some cursors are read without SQLAlchemy.
        """
        try:
            yield
        except (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error, UnicodeDecodeError) as error:
            raise error_of(self.name, error) from error
        except OverflowError as error:
            if "SQLite" not in str(error):  # not of the driver: a bug
                raise
            raise StoreError(f"{self.name}: a number has more than the 64 bits that a database stores") from error


def open_store(location: str | os.PathLike[str], *, create: bool, read_only: bool = False) -> Store:
    """Open the store at a path or SQLAlchemy URL and migrate it to this version.

    `create` allows creating a new database. With `read_only`, no connection can write, and other database versions are
    refused. Raises StoreError.
    """
    url = _url(location)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        return _open_sqlite_file(Path(str(url.database)), create=create, read_only=read_only)
    name = url.render_as_string(hide_password=True)
    store = Store(_engine(url, name, read_only=read_only), name)
    return _prepared(store, create=create, writable=not read_only)


def revision_of(location: str | os.PathLike[str]) -> str | None:
    """Return a database's revision, or None without tables. HEAD is this version's.

    Unlike `open_store`, never migrates. Raises StoreError if the database does not exist.
    """
    url = _url(location)
    name = shown_name(location)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        check_file(Path(str(url.database)), create=False)
    with Store(_engine(url, name), name) as store, store.errors_translated():
        return _revision(store.engine)[0]


@contextmanager
def unprepared(location: str) -> Iterator[tuple[Store, bool]]:
    """Yield the store of a URL without migrating it, and whether it has groupbench's tables. Raises StoreError."""
    name = shown_name(location)
    with Store(_engine(_url(location), name), name) as store:
        with store.errors_translated():
            revision = _revision(store.engine)[0]
        yield store, revision is not None


def shown_name(location: str | os.PathLike[str]) -> str:
    """Return a database's name for messages, without the password."""
    url = _url(location)
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)


def _url(location: str | os.PathLike[str]) -> URL:
    where = os.fspath(location)
    if "://" not in where:
        if not where or "\0" in where:
            raise StoreError("the database name is empty; give --db FILE or --db URL")
        return URL.create("sqlite", database=where)
    try:
        return make_url(where)
    except (SQLAlchemyError, ValueError) as error:
        scheme = where.split("://", 1)[0]
        raise StoreError(f"--db {scheme}://… is not a database URL; give a file or dialect://host/name") from error


def _open_sqlite_file(path: Path, *, create: bool, read_only: bool) -> Store:
    name = str(path)
    exists = check_file(path, create=create)
    writable = os.access(path if exists else path.parent, os.W_OK) and os.access(path.parent, os.W_OK)
    if create and not writable:
        raise StoreError(f"{name}: {_READ_ONLY_FILE}")
    url = URL.create("sqlite", database=name)
    if not writable:
        url = URL.create("sqlite", database=read_only_uri(path), query={"uri": "true"})
    if not exists:
        _make_sqlite_file(path)
    store = Store(_engine(url, name, read_only=read_only), name)
    try:
        return _prepared(store, create=create, writable=writable and not read_only)
    except BaseException:
        store.close()
        raise


def _make_sqlite_file(path: Path) -> None:
    """Create a database at `path` atomically, without replacing an existing one."""
    try:
        with folder_beside(path) as folder:
            made = folder / "new.db"
            store = Store(_engine(URL.create("sqlite", database=str(made)), str(path)), str(path))
            try:
                with store.errors_translated():
                    _create_tables(store.engine)
            finally:
                store.close()  # the last to close folds the write-ahead log into the file
            put(made, path)
    except FileExistsError:
        pass  # another process created it at the same time, which is just as good
    except OSError as error:
        raise StoreError(f"{path}: cannot create the database: {error.strerror or error}") from error


def _create_tables(engine: Engine) -> None:
    """Create the tables of the newest revision, unless another process was first."""
    _set_up_sqlite(engine, new=True)
    with _locked(engine) as connection:
        if _revision_of(connection)[0] is None:
            Base.metadata.create_all(connection, checkfirst=False)
            connection.exec_driver_sql(
                "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
                "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
            )
            connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


@contextmanager
def _locked(engine: Engine) -> Iterator[Connection]:
    """Yield the connection of a transaction during which no other process changes the tables."""
    with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        yield connection


def _set_up_sqlite(engine: Engine, *, new: bool) -> None:
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection, closing(connection.connection.cursor()) as cursor:
            if new:
                cursor.execute(f"PRAGMA page_size = {PAGE_BYTES:d}")
            cursor.execute("PRAGMA journal_mode = WAL")


def without_driver(error: ModuleNotFoundError) -> str:
    """Return the error message for a database whose Python driver is missing."""
    command = ": pip install 'groupbench[postgres]'" if error.name == "psycopg" else ""
    return f"needs the Python module {error.name}, which is not installed{command}"


def _engine(url: URL, name: str, *, read_only: bool = False) -> Engine:
    sqlite = url.get_backend_name() == "sqlite"
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if sqlite else {"pool_pre_ping": True}
    try:
        engine = create_engine(
            url,
            json_serializer=lambda value: msgspec.json.encode(value).decode(),
            json_deserializer=_from_json,
            **options,
        )
    except ModuleNotFoundError as error:
        raise StoreError(f"{name}: {without_driver(error)}") from error
    except (SQLAlchemyError, TypeError, ValueError) as error:
        raise StoreError(f"{name}: {error}") from error
    if sqlite:
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _on_connect_postgresql)
    if read_only and engine.dialect.name in _READ_ONLY:
        event.listen(engine, "connect", _READ_ONLY[engine.dialect.name])
    return engine


def _from_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DamageError(f"the database contains invalid JSON: {error}; {ADVICE}") from error


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # _on_begin starts transactions, for DDL too
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")  # stored data survives a power failure
    connection.execute("PRAGMA cache_size = -16384")  # KiB; a larger one only repeats the operating system's


def _on_connect_postgresql(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")  # a time zone must not move a time out of the years 1 to 9999
    connection.commit()


def _read_only_sqlite(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA query_only = ON")


def _read_only_postgresql(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()


_READ_ONLY = {"sqlite": _read_only_sqlite, "postgresql": _read_only_postgresql}


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _prepared(store: Store, *, create: bool, writable: bool) -> Store:
    """Check and migrate the tables, and return the store."""
    with store.errors_translated():
        with store.engine.connect() as connection:
            revision, tables = _revision_of(connection)
            lacking = _lacking_columns(connection) if revision == HEAD else None
        if revision is None:
            if tables & OUR_TABLES and "alembic_version" in tables:
                raise DamageError(f"{store.name}: half-migrated database: it has tables but no revision; {_RESTORE}")
            if tables:
                raise StoreError(f"{store.name}: not a groupbench database")
            if not create:
                raise StoreError(
                    f"{store.name}: the database has no groupbench tables; `groupbench ingest FILE` creates them"
                )
            _create_tables(store.engine)
        elif not re.fullmatch(r"\d{4}", revision, re.ASCII):
            raise DamageError(f"{store.name}: damaged database: {revision!r} is not a revision; {ADVICE}")
        elif revision not in REVISIONS:
            raise StoreError(
                f"{store.name}: the database is at revision {revision}, which needs a newer groupbench; "
                "upgrade groupbench"
            )
        elif revision == HEAD:
            missing = sorted(OUR_TABLES - tables)
            if missing:
                raise DamageError(f"{store.name}: half-migrated database: table {missing[0]} is missing; {_RESTORE}")
            if lacking:
                raise DamageError(f"{store.name}: half-migrated database: {lacking}; {_RESTORE}")
            return store
        elif not writable:
            raise StoreError(f"{store.name}: must be migrated from revision {revision}, but cannot be written")
        else:
            migrate(store.engine, name=store.name)
    return store


OUR_TABLES = frozenset(Base.metadata.tables)
ADVICE = "`groupbench db verify` lists the damage; move the file away, then run `groupbench ingest records/*.jsonl`"
"""The steps of docs/guide/keeping-data.md in short, at the end of a message about damage."""

_RESTORE = "restore a backup (from `groupbench db backup`, or FILE.backup-REVISION from a migration)"


_READ_ONLY_FILE = "cannot be written; change its permissions, or name another: groupbench --db FILE ..."


def _lacking_columns(connection: Connection) -> str | None:
    """Return which columns are missing, or None. Only SQLite is checked, with a single query."""
    if connection.dialect.name != "sqlite":
        return None
    query = "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
    existing = set(_driver_rows(connection, query))
    for table, columns in _COLUMNS.items():
        lacking = [column for column in columns if (table, column) not in existing]
        if lacking:
            return f"table {table} lacks {', '.join(lacking)}"
    return None


_COLUMNS = {table.name: table.columns.keys() for table in Base.metadata.sorted_tables}


def _revision(engine: Engine) -> tuple[str | None, set[str]]:
    """Return (revision, table names)."""
    with engine.connect() as connection:
        return _revision_of(connection)


def _revision_of(connection: Connection) -> tuple[str | None, set[str]]:
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 7) != 'sqlite_'"
        tables = {name for (name,) in _driver_rows(connection, query)}
    else:
        tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        return None, tables
    query = "SELECT version_num FROM alembic_version"
    rows = _driver_rows(connection, query) if sqlite else connection.execute(text(query)).all()
    return next((revision for (revision,) in rows), None), tables


def _driver_rows(connection: Connection, query: str) -> list[tuple[str, ...]]:
    """Return a query's rows without SQLAlchemy, whose import every command would wait for."""
    with closing(connection.connection.cursor()) as cursor:
        return list(cursor.execute(query))


def migrate(engine: Engine, *, name: str = "the database") -> None:
    """Migrate the tables to HEAD in one transaction. A SQLite file with data is copied first.

    Raises StoreError and leaves the tables as they were.
    """
    from groupbench.tracker.store.upgrade import upgrade

    before, _ = _revision(engine)
    _set_up_sqlite(engine, new=False)
    try:
        with _locked(engine) as connection:
            before, _ = _revision_of(connection)  # another process may have been first
            if before == HEAD:
                return
            if engine.dialect.name == "sqlite":
                copy_before_migration(Path(str(engine.url.database)), str(before))
            upgrade(connection, str(before))
    except (SQLAlchemyError, StoreError, ValueError, LookupError, zlib.error) as error:
        if "is not migrated" in str(error):
            raise
        why = cause(error) if isinstance(error, SQLAlchemyError) else error
        raise StoreError(f"{name}: migration from revision {before} failed and was undone: {why}") from error


def copy_before_migration(path: Path, revision: str) -> Path:
    """Copy the committed data to a file next to the database, never over an existing one. Raises StoreError."""
    name = f"{path.name}.backup-{revision}"
    try:
        return copy_once(path, name)
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        copy = path.with_name(name)
        raise StoreError(f"{path}: is not migrated, because copying it to {copy} failed: {reason}") from error


def error_of(name: str, error: Exception) -> StoreError:
    """Return an exception from the driver or SQLAlchemy as an error with the database's name."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    # For a malformed file, sqlite3 raises its root exception; for everything else a subclass.
    if type(origin) is sqlite3.DatabaseError or isinstance(origin, UnicodeDecodeError) or "UTF-8" in str(origin):
        return DamageError(f"{name}: damaged database: {cause(error)}; {ADVICE}")
    if getattr(origin, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
        return StoreError(f"{name}: {_READ_ONLY_FILE}")
    return StoreError(f"{name}: {cause(error)}")


def cause(error: Exception) -> str:
    """Return the driver's message in one line, without the statement and values."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return str(error.orig).strip() or type(error.orig).__name__
    return str(error).split("\n")[0]
