"""The database: opening, making and migrating it. SQLite by default, PostgreSQL by URL for fleets.

A new SQLite file is made beside its place and appears there whole; an older one is copied before it is migrated.
Whatever goes wrong is one line of StoreError, and leaves the file as it was.
"""

from __future__ import annotations

import os
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.errors import DamageError, StoreError
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base
from groupbench.tracker.store.sqlite_file import (
    BUSY_SECONDS,
    check_file,
    copy_sqlite,
    folder_beside,
    put,
    read_only_uri,
)

PAGE_BYTES = 8192
"""Of a new SQLite file: a point takes a thirty-fifth of a page, so that little is left over at its end."""

_LOCK = 0x67726F75  # of PostgreSQL's advisory locks, that of migrations


@dataclass(frozen=True)
class Store:
    """An open database. `read` and `write` each give a session of one transaction."""

    engine: Engine
    name: str  # for messages: never holds a password

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session to ask with; sees one state of the database."""
        with self.errors_translated(), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose transaction is committed at the end, or undone by any exception. Writers queue."""
        engine = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        with self.errors_translated(), Session(engine) as session, session.begin():
            if engine.dialect.name == "postgresql":
                session.execute(text("LOCK TABLE series IN SHARE ROW EXCLUSIVE MODE"))
            yield session

    def compact(self) -> None:
        """Give free space back to the file system. Raises StoreError, as where the disk has no room for a copy."""
        with self.errors_translated():
            if self.engine.dialect.name == "sqlite":  # beneath SQLAlchemy, which would begin a transaction
                with closing(self.engine.raw_connection()) as pooled:
                    pooled.cursor().execute("VACUUM").close()
                    pooled.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
                return
            with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                connection.exec_driver_sql("VACUUM")

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Errors of the database as StoreError, in one line; DamageError where they say that it is damaged.

        The driver's own errors count too: some cursors are read without SQLAlchemy in between.
        """
        try:
            yield
        except (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error, UnicodeDecodeError) as error:
            raise error_of(self.name, error) from error


def open_store(location: str | os.PathLike[str], *, create: bool, read_only: bool = False) -> Store:
    """Open the store at a path or SQLAlchemy URL, migrated to this version.

    With `create` a database that does not exist is made; without, nothing is ever created. With `read_only` no
    connection can write, and a database of another version is refused. Raises StoreError.
    """
    url = _url(location)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        return _open_sqlite_file(Path(str(url.database)), create=create, read_only=read_only)
    name = url.render_as_string(hide_password=True)
    store = Store(_engine(url, name, read_only=read_only), name)
    return _prepared(store, create=create, writable=not read_only)


def revision_of(location: str | os.PathLike[str]) -> str | None:
    """The revision of a database as it lies there, None where it has no tables; HEAD is this version's.

    Changes nothing, where `open_store` migrates. Raises StoreError where there is no database.
    """
    url = _url(location)
    name = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        name = str(url.database)
        check_file(Path(name), create=False)
    with Store(_engine(url, name), name) as store, store.errors_translated():
        return _revision(store.engine)[0]


def sqlite_engine(path: Path) -> Engine:
    """Return an engine on a SQLite file, whatever the file holds."""
    return _engine(URL.create("sqlite", database=str(path)), str(path))


def shown_name(location: str | os.PathLike[str]) -> str:
    """Return the name of a database for messages, which never holds a password."""
    url = _url(location)
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)


def _url(location: str | os.PathLike[str]) -> URL:
    where = os.fspath(location)
    if "://" not in where:
        if not where or "\0" in where:
            raise StoreError("the database has no name; give --db FILE or URL")
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
        raise StoreError(f"{name}: cannot be written; change its permissions or give another --db")
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
    """A new database at `path`, whole at once: nobody ever sees half of it, nor loses theirs to it."""
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
        pass  # somebody else made it meanwhile: theirs is as good
    except OSError as error:
        raise StoreError(f"{path}: cannot be made: {error.strerror or error}") from error


def _create_tables(engine: Engine) -> None:
    """Make the tables of HEAD in a new SQLite file, as all migrations would: a test compares the two."""
    _set_up_sqlite(engine, new=True)
    with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
        Base.metadata.create_all(connection, checkfirst=False)
        connection.exec_driver_sql(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (HEAD,))


def _set_up_sqlite(engine: Engine, *, new: bool) -> None:
    with engine.connect() as connection, closing(connection.connection.cursor()) as cursor:
        if new:
            cursor.execute(f"PRAGMA page_size = {PAGE_BYTES:d}")
        cursor.execute("PRAGMA journal_mode = WAL")


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
        raise StoreError(f"{name}: needs the Python module {error.name}, which is not installed") from error
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
        raise DamageError(f"the database holds invalid JSON: {error}; {ADVICE}") from error


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where _on_begin says, tables included
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")  # what was reported as stored outlives a power cut
    connection.execute("PRAGMA cache_size = -65536")  # KiB


def _on_connect_postgresql(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")  # an instant of the year 1 or 9999 must not leave it
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
    """The store, once its tables are those of HEAD."""
    with store.errors_translated():
        revision, tables = _revision(store.engine)
        if revision is None:
            if tables & OUR_TABLES and "alembic_version" in tables:
                raise DamageError(f"{store.name}: is half migrated: it has tables but no revision; {_RESTORE}")
            if tables:
                raise StoreError(f"{store.name}: is a database of something else, not of groupbench")
            if not create:
                raise StoreError(f"{store.name}: holds no groupbench tables; `groupbench ingest FILE` makes them")
        elif not re.fullmatch(r"\d{4}", revision, re.ASCII):
            raise DamageError(f"{store.name}: is damaged: {revision!r} is not a revision; {ADVICE}")
        elif revision not in REVISIONS:
            raise StoreError(
                f"{store.name}: database is at revision {revision}, newer than this groupbench knows; "
                "upgrade groupbench"
            )
        elif revision == HEAD:
            missing = sorted(OUR_TABLES - tables)
            if missing:
                raise DamageError(f"{store.name}: is half migrated: table {missing[0]} is missing; {_RESTORE}")
            lacking = _lacking_columns(store.engine)
            if lacking:
                raise DamageError(f"{store.name}: is half migrated: {lacking}; {_RESTORE}")
            return store
        elif not writable:
            raise StoreError(f"{store.name}: must be migrated from revision {revision}, but cannot be written")
        migrate(store.engine, name=store.name)
    return store


OUR_TABLES = frozenset(Base.metadata.tables)
ADVICE = "`groupbench verify` lists what is damaged, `groupbench repair` saves the rest"
_RESTORE = "restore a backup (`groupbench backup` makes them, a migration leaves FILE.backup-REVISION)"


def _lacking_columns(engine: Engine) -> str | None:
    """What the tables lack: looked at where it costs a query, not a walk over catalogues."""
    if engine.dialect.name != "sqlite":
        return None
    query = text("SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'")
    with engine.connect() as connection:
        there = {(table, column) for table, column in connection.execute(query)}
    for table in Base.metadata.sorted_tables:
        lacking = [column.name for column in table.columns if (table.name, column.name) not in there]
        if lacking:
            return f"table {table.name} lacks {', '.join(lacking)}"
    return None


def _revision(engine: Engine) -> tuple[str | None, set[str]]:
    """(alembic's revision, the tables that there are)."""
    with engine.connect() as connection:
        return _revision_of(connection)


def _revision_of(connection: Connection) -> tuple[str | None, set[str]]:
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        return None, tables
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar(), tables


def migrate(engine: Engine, revision: str = "head", *, name: str = "the database") -> None:
    """Bring the tables to a revision, in one transaction. A SQLite file that holds data is copied first.

    Raises StoreError, and leaves the tables as they were.
    """
    from alembic import command
    from alembic.util import CommandError

    sqlite = engine.dialect.name == "sqlite"
    before, _ = _revision(engine)
    if sqlite:
        _set_up_sqlite(engine, new=before is None)
    config = alembic_config()
    try:
        with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            before, _ = _revision_of(connection)  # another process may have been first
            if sqlite and before is not None and before != HEAD and engine.url.database:
                copy_before_migration(Path(engine.url.database), before)
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    except CommandError as error:
        raise StoreError(f"{name}: migration failed: {error}") from error
    except (SQLAlchemyError, StoreError, ValueError, LookupError, zlib.error) as error:
        if before is None or "is not migrated" in str(error):
            raise
        why = cause(error) if isinstance(error, SQLAlchemyError) else error
        said = f"cannot be migrated from revision {before}, and is as it was: {why}"
        raise StoreError(f"{name}: {said}") from error


def copy_before_migration(path: Path, revision: str) -> Path:
    """A copy beside the file, of what is committed; never over another one. Raises StoreError."""
    number = 0
    while True:
        copy = path.with_name(f"{path.name}.backup-{revision}" + (f"-{number}" if number else ""))
        try:
            copy_sqlite(path, copy)
            return copy
        except FileExistsError:
            number += 1
        except (OSError, sqlite3.Error) as error:
            said = getattr(error, "strerror", None) or error
            raise StoreError(f"{path}: is not migrated, since no copy can be made at {copy}: {said}") from error


def alembic_config() -> Any:
    """Alembic's configuration: where the migrations lie, and nothing else."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def error_of(name: str, error: Exception) -> StoreError:
    """Return what the driver or SQLAlchemy raised as an error of the database of that name."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    # sqlite3 raises the root of its tree where the file is malformed, and subclasses for everything else.
    if type(origin) is sqlite3.DatabaseError or isinstance(origin, UnicodeDecodeError) or "UTF-8" in str(origin):
        return DamageError(f"{name}: is damaged: {cause(error)}; {ADVICE}")
    return StoreError(f"{name}: {cause(error)}")


def cause(error: Exception) -> str:
    """The driver's own words, in one line without the statement and its values."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return str(error.orig).strip() or type(error.orig).__name__
    return str(error).split("\n")[0]
