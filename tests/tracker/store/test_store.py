"""Opening, making and refusing databases."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused
from sqlalchemy import text, update

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.store import engine as stores
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.schema import Point, sealed_tables


def test_a_new_store_waits_for_writers_checks_keys_and_syncs(opened: Store) -> None:
    with opened.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 30_000
        assert session.scalar(text("PRAGMA synchronous")) == 2  # FULL


def test_a_broken_key_is_refused(opened: Store) -> None:
    insert = "INSERT INTO run (uuid, commit_id, dirty, started, trigger) VALUES ('r', 99, 0, '2026-01-01', 'x')"
    with pytest.raises(StoreError, match="FOREIGN KEY"), opened.write() as session:
        session.execute(text(insert))


def test_a_write_that_fails_leaves_nothing(opened: Store) -> None:
    with pytest.raises(RuntimeError), opened.write() as session:
        session.execute(text("INSERT INTO \"commit\" (hash) VALUES ('a')"))
        raise RuntimeError
    with opened.read() as session:
        assert session.scalar(text('SELECT count(*) FROM "commit"')) == 0


def test_no_update_leaves_a_checksum_behind(opened: Store) -> None:
    with opened.read() as session:
        session.execute(update(Point).values(message=None))
        for table in sealed_tables():
            with pytest.raises(TypeError, match=f"rows of {table.__name__} one by one"):
                session.execute(update(table).values(id=1))


def test_opening_again_changes_nothing(db: Path) -> None:
    open_store(db, create=True).close()
    before = db.read_bytes()
    open_store(db, create=True).close()
    open_store(f"sqlite:///{db}", create=False).close()
    assert db.read_bytes() == before


@pytest.mark.parametrize("command", [("list", "runs"), ("db", "sql", "SELECT 1")], ids=str)
def test_a_missing_database_names_the_command_that_makes_it(
    cli: Cli, db: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(db.parent)
    assert "no such database; `groupbench init` and then `night` create one" in cli(*command).stderr
    assert list(db.parent.iterdir()) == []
    (db.parent / "groupbench.toml").touch()
    assert "no such database; run `groupbench night` first" in cli(*command).stderr
    db.touch()
    if command == ("list", "runs"):
        assert "is empty, not a database; run `groupbench night` first" in cli(*command).stderr


def test_merging_a_missing_database_does_not_advise_to_make_it(cli: Cli, db: Path) -> None:
    other = db.with_name("other.db")
    result = cli("db", "merge", other)
    assert (result.exit_code, result.stderr) == (2, f"groupbench: {other}: no such database\n")
    assert not db.exists()


def left_alone(path: Path, words: str, cli: Cli, records: Path) -> None:
    """Both a reader and a writer say `words`, and the file stays as it is."""
    before = path.read_bytes() if path.is_file() else None
    for command in (["list", "runs"], ["ingest", str(records)]):
        assert words in refused(cli, *command, db=path)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_newer_database_is_refused(cli: Cli, stored: Any, make: Any, write: Any) -> None:
    path = stored([make()])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    message = "the database is at revision 9999, which needs a newer groupbench; upgrade groupbench"
    left_alone(path, message, cli, write([make(1)]))


def test_other_files_are_refused(cli: Cli, make: Any, write: Any, tmp_path: Path) -> None:
    records = write([make()])
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be one")
    left_alone(tmp_path / "notes.txt", "is not a SQLite database", cli, records)
    left_alone(tmp_path, "is a directory", cli, records)
    left_alone(tmp_path / "notes.txt" / "t.db", "notes.txt", cli, records)
    (tmp_path / "cut.db").write_bytes(b"SQLite format 3\x00" + b"\x01" * 100)
    left_alone(tmp_path / "cut.db", "cut.db", cli, records)
    os.mkfifo(tmp_path / "pipe.db")  # to open it would wait for a writer
    left_alone(tmp_path / "pipe.db", "is not a regular file", cli, records)


def test_the_database_of_another_program_is_refused(cli: Cli, make: Any, write: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    left_alone(path, "not a groupbench database", cli, write([make()]))


def test_an_empty_file_is_filled_by_ingest_alone(cli: Cli, make: Any, write: Any, db: Path) -> None:
    db.touch()
    assert "is empty" in cli("list", "runs").stderr
    assert db.read_bytes() == b""
    assert cli("ingest", write([make()])).exit_code == 0


@pytest.mark.parametrize("url", ["nosuch://me:secret@host/x", "postgresql+none://me:secret@x", "sqlite://host:port/x"])
def test_a_bad_url_is_one_line(cli: Cli, url: str) -> None:
    result = cli("list", "runs", db=url)  # type: ignore[arg-type]
    assert (result.exit_code, "secret" in result.stderr) == (2, False)


def test_tables_that_cannot_be_made_leave_no_file(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stores._create_tables

    def fails(engine: Any) -> None:
        real(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(stores, "_create_tables", fails)
    with pytest.raises(KeyboardInterrupt):
        open_store(db, create=True)
    assert list(db.parent.iterdir()) == []


def test_an_overflow_that_is_not_the_databases_stays_a_bug(opened: Store) -> None:
    with pytest.raises(OverflowError, match="math range"), opened.read():
        math.exp(1e6)


OPENED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args) if event == "open" and str(args[0]) == sys.argv[1] else None)
from click.testing import CliRunner
from groupbench.tracker.cli import main
for command in ("gate", "history", "list runs", "incidents", "report", "db verify", "db backup b.db"):
    CliRunner().invoke(main, ["--db", sys.argv[1], *command.split()])
print(opened)
"""


def test_commands_open_the_database_by_sqlite_alone(stored: Callable[..., Path], make: Any, tmp_path: Path) -> None:
    db = stored([make(0)])
    command = [sys.executable, "-c", OPENED, str(db)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout == "[]\n"
