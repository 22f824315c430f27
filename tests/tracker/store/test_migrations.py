"""Older databases: opened, copied, migrated and read; or left as they were."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import Cli, rarely, refused
from sqlalchemy import text

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.facts.record import Record, decode
from groupbench.tracker.store import engine as stores
from groupbench.tracker.store import points
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import HEAD, REVISIONS, Base
from groupbench.tracker.store.verify import verify

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.sqlite


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return stored_file(tmp_path, "0001")


def stored_file(folder: Path, revision: str) -> Path:
    """Return a database as that revision wrote it."""
    path = folder / "old.db"
    path.write_bytes(gzip.decompress((DATA / f"revision_{revision}.db.gz").read_bytes()))
    return path


def recorded() -> list[Record]:
    """The records that went into it, as they come back."""
    return [as_kept(decode(line)) for line in (DATA / "revision_0001.jsonl").read_bytes().splitlines()]


def as_kept(record: Record) -> Record:
    if record.latency is None:
        return record
    bursts = tuple(tuple(float(np.float32(ms)) for ms in burst) for burst in record.latency.bursts_ms)
    return msgspec.structs.replace(record, latency=msgspec.structs.replace(record.latency, bursts_ms=bursts))


def plain(record: Record) -> Record:
    """Comparable: facts of the commit and of the series are as they were recorded last, for all."""
    commit = msgspec.structs.replace(record.run.commit, parents=(), branch=None, time=None, author=None, subject=None)
    cell = msgspec.structs.replace(record.cell, dims={}, flops=None, min_bytes=None)
    run = msgspec.structs.replace(record.run, commit=commit)
    return msgspec.structs.replace(record, run=run, cell=cell)


def by_name(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.run.id, record.cell.backend))


def test_a_database_of_revision_0001_is_migrated_and_holds_the_same(old: Path) -> None:
    with open_store(old, create=False) as store, store.read() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
        migrated = list(stored_records(session))
        assert list(verify(session)) == []
    assert list(map(plain, by_name(migrated))) == list(map(plain, by_name(recorded())))
    newest = {record.run.id: record.run.commit for record in recorded() if record.run.commit.parents}
    assert {record.run.id: record.run.commit for record in migrated if record.run.id in newest} == newest


def test_a_database_of_revision_0002_is_migrated_and_goes_on(cli: Cli, tmp_path: Path, write: Any, make: Any) -> None:
    """A database of the same records, in which alerts can be opened."""
    path = stored_file(tmp_path, "0002")
    with open_store(path, create=False) as store, store.read() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
        assert list(map(plain, by_name(list(stored_records(session))))) == list(map(plain, by_name(recorded())))
        assert list(verify(session)) == []
        assert session.scalar(text("SELECT count(*) FROM alert")) == 0
    assert path.with_name("old.db.backup-0002").exists()
    assert cli("ingest", write([make(900, status="wrong")]), db=path).exit_code == 0
    assert "1 opened (1)" in cli("gate", "--update", db=path).stderr
    assert cli("db", "verify", db=path).exit_code == 0


def test_levels_of_accuracies_lose_their_floor(tmp_path: Path) -> None:
    """Revision 0003 stored the levels with the floor of 1e-6."""
    with open_store(stored_file(tmp_path, "0003"), create=False) as store, store.read() as session:
        levels = session.execute(text('SELECT "before", "after", effect FROM alert ORDER BY series_id')).all()
    assert levels[0] == (pytest.approx(1.5e-7), pytest.approx(2e-6), pytest.approx(2.5902671654458267))
    assert levels[1] == (0.0, pytest.approx(2e-6), None)


def test_a_migrated_database_knows_the_files_that_it_was_made_of(cli: Cli, old: Path) -> None:
    result = cli("ingest", DATA / "revision_0001.jsonl", db=old)
    assert "0 points added, 12 already known" in result.stdout


def test_a_migration_leaves_a_copy(cli: Cli, old: Path) -> None:
    before = dump(old)
    assert cli("list", "runs", db=old).exit_code == 0
    copy = old.with_name("old.db.backup-0001")
    assert dump(copy) == before
    assert sorted(entry.name for entry in old.parent.iterdir()) == ["old.db", "old.db.backup-0001"]


def test_no_copy_is_overwritten(cli: Cli, old: Path) -> None:
    first = old.with_name("old.db.backup-0001")
    first.write_bytes(b"precious")
    assert cli("list", "runs", db=old).exit_code == 0
    assert first.read_bytes() == b"precious"
    assert old.with_name("old.db.backup-0001-1").exists()


@pytest.mark.parametrize("mode", ["WAL", *rarely("DELETE")])
def test_a_migration_that_is_killed_and_repeated_leaves_one_copy(old: Path, monkeypatch: Any, mode: str) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")

    before, calls, real = dump(old), [], points.point_values

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(points, "point_values", dies)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            open_store(old, create=False)
        assert dump(old) == before
    monkeypatch.undo()
    with open_store(old, create=False) as store, store.read() as session:
        assert len(list(stored_records(session))) == 12
    copies = sorted(path.name for path in old.parent.glob(f"{old.name}.*"))
    assert copies == ["old.db.backup-0001"]


def test_without_room_for_a_copy_nothing_is_migrated(cli: Cli, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, name: str) -> None:
        raise OSError(28, "No space left on device")

    before = dump(old)
    monkeypatch.setattr(stores, "copy_once", full)
    result = cli("list", "runs", db=old)
    assert (result.exit_code, "is not migrated, because copying it" in result.stderr) == (2, True)
    assert "No space left on device" in result.stderr
    assert dump(old) == before


def test_an_old_database_that_cannot_be_migrated_is_an_error(cli: Cli, old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("UPDATE point SET kernels = 'no JSON' WHERE id = 3")
    before = dump(old)
    result = cli("list", "runs", db=old)
    assert result.exit_code == 2
    assert "migration from revision 0001 failed and was undone" in result.stderr
    assert dump(old) == before


@pytest.mark.parametrize(
    ("done", "message"),
    [
        ("DROP TABLE point", "half-migrated database: table point is missing; restore a backup"),
        ("DROP TABLE kernel_set", "half-migrated database: table kernel_set is missing"),
        ("DELETE FROM alembic_version", "half-migrated database: it has tables but no revision"),
        ("ALTER TABLE point DROP COLUMN rms", "half-migrated database: table point lacks rms"),
    ],
    ids=["no point", "no kernel_set", "no revision", "no column"],
)
def test_a_half_migrated_database_is_refused(
    cli: Cli, stored: Any, make: Any, write: Any, done: str, message: str
) -> None:
    path = stored([make()])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(done)
    before = dump(path)
    for command in (["list", "runs"], ["ingest", write([make(1)], "more.jsonl")], ["db", "verify"]):
        result = cli(*command)
        if command == ["db", "verify"]:  # to which damage is a finding
            problem, summary = result.stdout.splitlines()
            assert (result.exit_code, result.stderr, summary[:17]) == (1, "", "VERIFY 1 problem;")
        else:
            (problem,) = result.stderr.splitlines()
            assert (result.exit_code, result.stdout) == (2, "")
        assert message in problem
    assert dump(path) == before


def test_tables_of_a_revision_that_is_not_finished_are_refused(cli: Cli, old: Path) -> None:
    """Leave the new tables with the old revision, like a tool without transactions."""
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("CREATE TABLE kernel_set (id INTEGER)")
    before = dump(old)
    assert "kernel_set" in refused(cli, "list", "runs", db=old)
    assert dump(old) == before


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_every_revision_gets_the_tables_of_a_new_file(tmp_path: Path, revision: str) -> None:
    path = stored_file(tmp_path, revision)
    with open_store(path, create=False) as store, store.read() as session:
        assert list(verify(session)) == []
    open_store(tmp_path / "made.db", create=True).close()
    assert layout(tmp_path / "made.db") == layout(path)


def layout(path: Path) -> dict[str, Any]:
    """Every table's columns in their order, its keys and indexes."""
    with closing(sqlite3.connect(path)) as connection:

        def ask(statement: str) -> list[Any]:
            return connection.execute(statement).fetchall()

        contents: dict[str, Any] = {"revision": ask("SELECT * FROM alembic_version")}
        for kind, name, table in ask("SELECT type, name, tbl_name FROM sqlite_master"):
            if kind == "index":
                contents[name] = (table, ask(f'PRAGMA index_xinfo("{name}")'))
                continue
            unique = [tuple(row[1:]) for row in ask(f'PRAGMA index_list("{name}")')]
            keys = [tuple(row[2:]) for row in ask(f'PRAGMA foreign_key_list("{name}")')]
            contents[name] = (ask(f'PRAGMA table_info("{name}")'), sorted(keys), sorted(unique))
        return contents


def test_a_store_of_memory_is_migrated_without_a_copy() -> None:
    with open_store("sqlite://", create=True) as store, store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM point")) == 0
    with pytest.raises(StoreError, match="has no groupbench tables"):
        open_store("sqlite://", create=False)


def dump(path: Path) -> str:
    """Return the contents of a database as SQL."""
    with closing(sqlite3.connect(path)) as connection:
        return digest(list(connection.iterdump()))


def test_rows_of_revision_0006_get_their_checksums(cli: Cli, tmp_path: Path) -> None:
    path = stored_file(tmp_path, "0006")
    assert cli("db", "verify", db=path).stdout == "VERIFY ok: 27 points\n"
    with closing(sqlite3.connect(path)) as connection:
        for table in ("commit", "run", "series", "alert", "incident", "incident_event", "pin"):
            rows, sums = connection.execute(f'SELECT count(*), count(checksum) FROM "{table}"').fetchone()
            assert rows == sums > 0, table


def test_alerts_of_revision_0009_become_members_of_incidents(cli: Cli, tmp_path: Path) -> None:
    """Alerts of one range and state are one incident, with each event once."""
    path = stored_file(tmp_path, "0006")
    listed = [line for line in cli("incidents", db=path).stdout.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0].split()[1] for line in listed] == ["acknowledged", "expected"]
    assert "in 2 series" in listed[0]
    with open_store(path, create=False) as store, store.read() as session:
        numbers = session.execute(text("SELECT count(*) FROM incident_event GROUP BY incident_id")).scalars().all()
        assert sorted(numbers) == [2, 3]


def test_every_column_has_a_meaning() -> None:
    silent = [str(column) for table in Base.metadata.tables.values() for column in table.columns if not column.doc]
    assert silent == []
