"""Tests specific to PostgreSQL. Most tests of the tracker run on it too: see conftest."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, rarely
from sqlalchemy import JSON, DateTime, MetaData, create_engine, select, text

from groupbench.tracker.cli import here, main
from groupbench.tracker.night import measuring
from groupbench.tracker.store import engine as stores
from groupbench.tracker.store import queue
from groupbench.tracker.store.engine import _create_tables, open_store
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import HEAD
from groupbench.tracker.store.verify import verify
from groupbench.tracker.tools import lease
from groupbench.tracker.tools.device_lock import HANDLE, HELD, lock_file

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("revision", ["0001", "0006"])
def test_an_older_database_is_migrated_and_holds_the_same(
    cli: Cli, db: str, write: Any, make: Any, tmp_path: Path, revision: str
) -> None:
    """The rows of the old SQLite file, put into tables of that revision."""
    old = tmp_path / "old.db"
    old.write_bytes(gzip.decompress((DATA / f"revision_{revision}.db.gz").read_bytes()))
    tables = MetaData()
    source, target = create_engine(f"sqlite:///{old}"), stores._engine(stores.make_url(db), "pg")
    tables.reflect(source)
    with source.connect() as reading, target.begin() as writing:
        for column in (column for table in tables.sorted_tables for column in table.columns):
            kind = column.type.as_generic()
            column.type = DateTime(timezone=True) if isinstance(kind, DateTime) else kind  # SQLite stores no zone
            column.type = JSON(none_as_null=True) if isinstance(kind, JSON) else column.type
        tables.create_all(writing)
        for table in tables.sorted_tables:
            rows = [dict(row) for row in reading.execute(select(table)).mappings()]
            if rows:
                writing.execute(table.insert(), rows)
            if rows and table.name != "alembic_version":
                writing.execute(
                    text("SELECT setval(pg_get_serial_sequence(:name, 'id'), :newest)"),
                    {"name": f'"{table.name}"', "newest": max(row["id"] for row in rows)},
                )
    target.dispose()
    counted = text("SELECT (SELECT count(*) FROM alert), (SELECT count(*) FROM incident_event)")
    with open_store(old, create=False) as store, store.read() as session:
        expected = list(stored_records(session))
        changes = tuple(session.execute(counted).one())
    with open_store(db, create=False) as store, store.read() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
        assert list(stored_records(session)) == expected
        assert list(verify(session)) == []
        assert tuple(session.execute(counted).one()) == changes
    assert "2 points added" in cli("ingest", write([make(7), make(7, backend="new")])).stdout


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE point", "half-migrated database"),
        ("DELETE FROM alembic_version", "half-migrated database"),
        ("UPDATE alembic_version SET version_num = '9999'", "which needs a newer groupbench"),
    ],
)
def test_another_revision_is_refused(cli: Cli, stored: Any, make: Any, db: str, statement: str, message: str) -> None:
    stored([make()])
    with open_store(db, create=False) as store, store.write() as session:
        session.execute(text(statement))
    assert message in cli("list", "runs").stderr


def test_the_database_of_another_program_is_refused(cli: Cli, db: str, write: Any, make: Any) -> None:
    engine = create_engine(db)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (x integer)"))
    engine.dispose()
    assert "not a groupbench database" in cli("ingest", write([make()])).stderr


def test_reading_makes_nothing(cli: Cli, db: str) -> None:
    assert "has no groupbench tables" in cli("list", "runs").stderr
    engine = create_engine(db)
    with engine.connect() as connection:
        tables = MetaData()
        tables.reflect(connection)
    engine.dispose()
    assert not tables.tables


def test_processes_at_once_make_and_fill_one_database(
    db: str, write: Any, make: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_create_tables", _create_tables)  # not a copy, whose connection forks must not share
    files = [write([make(night, backend=f"b{i}") for i in range(50)], f"{night}.jsonl") for night in range(4)]
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=main, args=(["--db", db, "ingest", str(file), str(files[0])],)) for file in files]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 4
    assert cli("db", "verify").stdout == "VERIFY ok: 200 points\n"


def test_an_unreachable_server_is_one_line(cli: Cli) -> None:
    result = cli("list", "runs", db="postgresql+psycopg://me:secret@/x?host=/nonexistent")
    assert (result.exit_code, "secret" in result.stderr) == (2, False)


def test_a_missing_driver_is_named_with_the_command_that_installs_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    expected = "needs the Python module psycopg, which is not installed: pip install 'groupbench[postgres]'"
    result = cli("list", "runs", db="postgresql+psycopg://me:secret@/x?host=/nonexistent")
    assert (result.exit_code, "secret" in result.stderr, expected in result.stderr) == (2, False, True)


def test_sql_is_left_to_psql(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make()])
    assert cli("db", "sql", "SELECT 1").stderr.endswith("with PostgreSQL, use psql\n")


# `verify` has handlers of its own. 1 is before the first statement, 4 amid the reading.
@pytest.mark.parametrize(
    ("command", "lost_at"),
    [
        *[(["db", "verify"], 4), (["db", "export", "-"], 4)],
        *rarely(*[(name.split(), at) for name in ("list runs", "gate", "history", "db verify") for at in (1, 4)]),
    ],
)
def test_a_connection_that_is_lost_is_one_line(
    cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], lost_at: int
) -> None:
    """The server ends it before the n-th statement."""
    import psycopg

    stored([make()])
    calls, real = [], psycopg.Cursor.execute

    def execute(self: Any, query: Any, *args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == lost_at:
            backend = self.connection.info.backend_pid
            with psycopg.connect(self.connection.info.dsn) as other:
                real(other.cursor(), f"SELECT pg_terminate_backend({backend}, 5000)".encode())
        return real(self, query, *args, **named)

    monkeypatch.setattr(psycopg.Cursor, "execute", execute)
    result = cli(*command)
    assert result.exit_code in ((0, 1, 2) if command == ["db", "verify"] else (0, 2))
    assert "Traceback" not in result.stderr


# Each command that writes does it by the same kind of session.
@pytest.mark.parametrize(("command", "step"), [("ingest {more}", 9), ("db prune --all 1 --apply", 13)])
def test_a_connection_that_is_lost_while_writing_leaves_all_or_nothing(
    cli: Cli, stored: Any, write: Any, make: Any, db: str, monkeypatch: Any, command: str, step: int
) -> None:
    """The server ends it at the n-th exchange, commits among them, for larger n until the command ends before."""
    import psycopg

    stored([make(night, backend=name, status="wrong" if night == 9 else "ok") for night in range(10) for name in "ab"])
    more = write([make(night, backend=name) for night in (10, 11) for name in "ab"], "more.jsonl")
    tables = ("point", "run")
    real, exchanges, lost_at = psycopg.Connection.wait, 0, 1

    def wait(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        if exchanges == lost_at:
            with psycopg.connect(self.info.dsn) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [self.info.backend_pid])
        return real(self, *args, **named)

    def rows() -> list[int]:
        assert cli("db", "verify").exit_code == 0
        with create_engine(db).connect() as connection:
            return [connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0 for table in tables]

    states = [rows()]
    while len(states) == 1 or exchanges >= lost_at:
        lost_at += step if len(states) > 1 else 0
        exchanges = 0
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "wait", wait)
            code = cli(*command.format(more=more).split()).exit_code
        states.append(rows())
        assert code == 2 or states[-1] != states[0]
    assert len(states) > 4
    assert states == sorted(states, key=lambda each: each != states[0])  # once it is stored, it stays
    assert len(set(map(tuple, states))) == 2


FACTS = {"pid": 7, "user": "ada", "host": "there", "since": "now", "command": "groupbench night", "folder": "/"}


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "BEAT_S", 0.1)
    monkeypatch.setattr(queue, "QUEUE_POLL_S", 0.02)


@pytest.mark.usefixtures("beats")
def test_hosts_of_one_database_take_turns(stored: Any, make: Any) -> None:
    db = stored([make(0)])
    order: list[str] = []

    def measure(name: str, rank: int) -> None:
        with queue.place(db, "GPU-1", name, rank, FACTS) as wait:
            assert wait(600)
            order.append(name)

    with queue.place(db, "GPU-1", "first", 2, FACTS) as wait, queue.place(db, "GPU-2", "first", 2, FACTS) as other:
        assert wait(0) and other(0)
        with queue.place(db, "GPU-1", "second", 2, FACTS) as refused:
            assert not refused(0)
        with queue.place(db, "GPU-1", "first", 2, FACTS) as alike:
            assert alike(0), "a process with the same folder of locks waits by its files"
        threads = [threading.Thread(target=measure, args=each) for each in (("b", 2), ("a", 2), ("urgent", 0))]
        for number, thread in enumerate(threads, 3):
            thread.start()
            while len(queue.places(db)) < number:
                time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert order == ["urgent", "b", "a"]
    assert queue.places(db) == []


def test_a_killed_holder_is_passed_and_a_live_one_is_not(stored: Any, make: Any, monkeypatch: Any) -> None:
    db = stored([make(0)])
    monkeypatch.setattr(queue, "STALE_S", 2.0)
    code = f"""
import time
from groupbench.tracker.store import queue
queue.BEAT_S = 0.1
with queue.place({db!r}, "GPU-1", "there", 2, {FACTS!r}) as wait:
    assert wait(0)
    print("holds", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    with queue.place(db, "GPU-1", "here", 2, FACTS) as wait:
        assert not wait(3), "it is renewed"
        holder.kill()
        holder.wait()
        assert wait(60)
        assert [place for _, place, _, _ in queue.places(db)] == ["here"]


def test_a_process_that_stood_still_loses_the_device(stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    db = stored([make(0)])
    warnings: list[str] = []
    monkeypatch.setattr(queue.logger, "warning", lambda text, *words: warnings.append(text % words))
    monkeypatch.setattr(queue, "BEAT_S", 600)
    with monkeypatch.context() as stale, queue.place(db, "GPU-1", "there", 2, FACTS) as wait:
        assert wait(0)
        stale.setattr(queue, "STALE_S", 0.0)
        with queue.place(db, "GPU-1", "here", 2, FACTS) as another:
            assert another(0)
            stale.undo()
            assert not wait(0) and warnings == ["lost GPU-1 to another process, as this one did not run"]


@pytest.mark.usefixtures("beats")
def test_the_queue_of_all_hosts_is_listed_and_waited_for(
    cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    db = stored([make(0)])
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    monkeypatch.setattr(lease, "WAITING", lease.Waiting())
    monkeypatch.setattr(here, "WAITING", lease.WAITING)
    monkeypatch.setattr(measuring, "become", lambda command: None)
    assert cli("tune").exit_code == 0  # sets how long to wait, and where

    def listed() -> list[tuple[str, str, int, str]]:
        rows = json.loads(cli("queue", "--format=json").stdout)
        return [(row["device"], row["state"], row["place"], row["command"][:10]) for row in rows]

    with queue.place(db, "GPU-1", "there", 2, FACTS) as wait:
        assert wait(0)
        assert listed() == [("GPU-1", "holds", 0, "groupbench")]
        busy = pytest.raises(lease.Busy, match="in use by another host, see `groupbench queue`")
        with busy, lease.lease("cuda", "GPU-1"):
            pytest.fail("it measured")
        with lease.lease("cuda", "GPU-2"):
            assert [row[:3] for row in listed()] == [("GPU-2", "holds", 0), ("GPU-1", "holds", 0)]
    with lease.lease("cuda", "GPU-1"):
        assert [row[:3] for row in listed()] == [("GPU-1", "holds", 0)]


@pytest.mark.usefixtures("beats")
def test_a_night_gives_way_to_an_urgent_command_on_another_host(
    cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    db = stored([make(0)])
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    monkeypatch.setattr(lease, "WAITING", lease.Waiting(places=partial(queue.place, db)))
    handle = lease.take("GPU-1", ["night"])
    monkeypatch.setenv(HELD, str(lock_file("GPU-1")))
    monkeypatch.setenv(HANDLE, str(handle))
    over, gave = threading.Event(), list[float]()

    def problems() -> None:
        while not over.wait(0.02):
            gave.append(lease.give_way())

    def held_by() -> list[str]:
        return [place for _, place, holds, _ in queue.places(db) if holds]

    night = threading.Thread(target=problems)
    with lease.elsewhere("GPU-1", gives_way=True) as turn:
        turn(60)
        night.start()
        with queue.place(db, "GPU-1", "a usual one", 2, FACTS) as usual:
            assert not usual(0.5)
            for _ in range(2):
                with queue.place(db, "GPU-1", "there", 0, FACTS) as urgent:
                    assert urgent(60)
                    measured = len(gave)
                    rows = json.loads(cli("queue", "--format=json").stdout)
                    assert [(row["state"], row["command"]) for row in rows if row["host"] == "there"] == [
                        ("holds", "groupbench night"), ("waits", "groupbench night"),
                    ]  # fmt: skip
                    assert held_by() == ["there"] and len(gave) == measured, "the night waits"
                while held_by() != [lease.here()]:
                    time.sleep(0.02)
        while sum(seconds > 0 for seconds in gave) < 2:
            time.sleep(0.02)
        over.set()
        night.join()
    assert sum(seconds > 0 for seconds in gave) == 2
    assert queue.places(db) == [] and lease.queue()[0].state == "holds"
    os.close(handle)


def test_a_database_without_tables_has_no_queue(db: str) -> None:
    with queue.place(db, "GPU-1", "here", 2, FACTS) as wait:
        assert wait(0)
    assert queue.places(db) == []
    open_store(db, create=True).close()
