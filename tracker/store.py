"""The database: opening, making and migrating it. SQLite by default, any SQLAlchemy URL for fleets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.errors import StoreError, TrackerError
from groupbench.tracker.schema import HEAD, REVISIONS

BUSY_SECONDS = 30
"""How long one process waits for another's transaction."""

_SQLITE_MAGIC = b"SQLite format 3\x00"


@dataclass(frozen=True)
class Store:
    """An open database. `read` and `write` each give a session of one transaction."""

    engine: Engine
    name: str  # for messages: never holds a password

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session to ask with; sees one state of the database."""
        with self._told(), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose transaction is committed at the end, or undone by any exception. Writers queue."""
        engine = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        with self._told(), Session(engine) as session, session.begin():
            if engine.dialect.name == "postgresql":
                session.execute(text("LOCK TABLE series IN SHARE ROW EXCLUSIVE MODE"))
            yield session

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise StoreError(f"{self.name}: {cause(error)}") from error


def open_store(location: str | os.PathLike[str], *, create: bool) -> Store:
    """The store at a path or SQLAlchemy URL, migrated to this version.

    With `create` a database that does not exist is made; without, nothing is ever created. Raises StoreError.
    """
    url = _url(location)
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        return _open_sqlite_file(Path(str(url.database)), create=create)
    name = url.render_as_string(hide_password=True)
    store = Store(_engine(url, name), name)
    return _prepared(store, create=create, writable=True)


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


def _open_sqlite_file(path: Path, *, create: bool) -> Store:
    name = str(path)
    exists = _check_file(path, create=create)
    writable = os.access(path if exists else path.parent, os.W_OK) and os.access(path.parent, os.W_OK)
    if create and not writable:
        raise StoreError(f"{name}: cannot be written; change its permissions or give another --db")
    url = URL.create("sqlite", database=name)
    if not writable:  # a database in WAL mode can only be read there if told that nobody writes
        mode = "mode=ro" if Path(f"{name}-wal").exists() else "immutable=1"
        quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        url = URL.create("sqlite", database=f"file:{quoted}", query={"uri": "true", **dict([mode.split("=")])})
    store = Store(_engine(url, name), name)
    try:
        return _prepared(store, create=create, writable=writable)
    except BaseException:
        store.close()
        if not exists:
            for leftover in (path, Path(f"{name}-wal"), Path(f"{name}-shm"), Path(f"{name}-journal")):
                with suppress(OSError):
                    leftover.unlink()
        raise


def _check_file(path: Path, *, create: bool) -> bool:
    """Whether the file exists. Raises StoreError when it is, or would be, no database."""
    try:
        if path.is_dir():
            raise StoreError(f"{path}: is a directory, not a database")
        if not path.exists():
            if not create:
                raise StoreError(f"{path}: no such database; `groupbench ingest FILE` makes one")
            if not path.parent.is_dir():
                raise StoreError(f"{path}: {path.parent} is not a directory")
            return False
        with path.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if head and head != _SQLITE_MAGIC:
        raise StoreError(f"{path}: is not a SQLite database")
    if not head and not create:
        raise StoreError(f"{path}: is empty, not a database; `groupbench ingest FILE` fills one")
    return True


def _engine(url: URL, name: str) -> Engine:
    sqlite = url.get_backend_name() == "sqlite"
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if sqlite else {"pool_pre_ping": True}
    try:
        engine = create_engine(
            url,
            json_serializer=lambda value: msgspec.json.encode(value).decode(),
            json_deserializer=msgspec.json.decode,
            **options,
        )
    except ModuleNotFoundError as error:
        raise StoreError(f"{name}: needs the Python module {error.name}, which is not installed") from error
    except (SQLAlchemyError, TypeError, ValueError) as error:
        raise StoreError(f"{name}: {error}") from error
    if sqlite:
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where _on_begin says, tables included
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _prepared(store: Store, *, create: bool, writable: bool) -> Store:
    """The store, once its tables are those of HEAD."""
    try:
        revision, tables = _revision(store.engine)
        if revision == HEAD:
            return store
        if revision is None:
            if tables:
                raise StoreError(f"{store.name}: is a database of something else, not of groupbench")
            if not create:
                raise StoreError(f"{store.name}: holds no groupbench tables; `groupbench ingest FILE` makes them")
        elif revision not in REVISIONS:
            raise StoreError(
                f"{store.name}: database is at revision {revision}, newer than this groupbench knows; "
                "upgrade groupbench"
            )
        elif not writable:
            raise StoreError(f"{store.name}: must be migrated from revision {revision}, but cannot be written")
        migrate(store.engine)
    except SQLAlchemyError as error:
        raise StoreError(f"{store.name}: {cause(error)}") from error
    return store


def _revision(engine: Engine) -> tuple[str | None, bool]:
    """(alembic's revision, whether there are any tables)."""
    with engine.connect() as connection:
        inspector = inspect(connection)
        if inspector.has_table("alembic_version"):
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar(), True
        return None, bool(inspector.get_table_names())


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring the tables to a revision, in one transaction."""
    from alembic import command
    from alembic.util import CommandError

    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.connection.cursor().execute("PRAGMA journal_mode = WAL")
    config = alembic_config()
    try:
        with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    except CommandError as error:
        raise TrackerError(f"migration failed: {error}") from error


def alembic_config() -> Any:
    """Alembic's configuration: where the migrations lie, and nothing else."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def cause(error: SQLAlchemyError) -> str:
    """The driver's own words, in one line without the statement and its values."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return str(error.orig).strip() or type(error.orig).__name__
    return str(error).split("\n")[0]
