"""Older databases: opened, copied, migrated and read; or left as they were."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from alembic.command import downgrade as run_downgrade
from cases import rarely
from click.testing import Result
from sqlalchemy import create_engine, text

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.facts.record import Record, decode
from groupbench.tracker.store import engine as stores
from groupbench.tracker.store import points
from groupbench.tracker.store.engine import migrate, open_store
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import HEAD, REVISIONS, sealed_tables
from groupbench.tracker.store.verify import verify

Cli = Callable[..., Result]

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.sqlite


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database as revision 0001 wrote it."""
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((DATA / "revision_0001.db.gz").read_bytes()))
    return path


def downgrade(path: Path, revision: str) -> None:
    """Give a database the tables of an earlier revision."""
    engine = create_engine(f"sqlite:///{path}")
    config = stores.alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        run_downgrade(config, revision)
    engine.dispose()


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
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((DATA / "revision_0002.db.gz").read_bytes()))
    with open_store(path, create=False) as store, store.read() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
        assert list(map(plain, by_name(list(stored_records(session))))) == list(map(plain, by_name(recorded())))
        assert list(verify(session)) == []
        assert session.scalar(text("SELECT count(*) FROM alert")) == 0
    assert path.with_name("old.db.backup-0002").exists()
    assert cli("ingest", write([make(900, status="wrong")]), db=path).exit_code == 0
    assert "1 opened (1)" in cli("gate", "--update", db=path).stderr
    assert cli("db", "verify", db=path).exit_code == 0


@pytest.mark.usefixtures("two_nights_are_certain")
@pytest.mark.parametrize("before", [1.5e-7, 0.0])
def test_levels_of_accuracies_lose_their_floor(
    cli: Cli, tmp_path: Path, write: Callable[..., Path], make: Callable[..., Record], before: float
) -> None:
    """Revision 0003 stored the levels with the floor of 1e-6."""
    path = tmp_path / "old.db"
    nights = [make(night, rms=before if night < 5 else 2e-6) for night in range(7)]
    assert cli("ingest", write(nights), db=path).exit_code == 0
    assert cli("gate", "--update", db=path).exit_code == 1
    with sqlite3.connect(path) as connection:
        (new,) = connection.execute('SELECT "before", "after", effect FROM alert').fetchall()
    downgrade(path, "0007")
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE alert SET "before" = "before" + 1e-6, "after" = "after" + 1e-6, effect = 0.9')
        connection.execute("ALTER TABLE point DROP COLUMN metrics")
        connection.execute("ALTER TABLE point DROP COLUMN amounts")
        for table in ("alert", "alert_event", "commit", "pin", "run", "series"):
            connection.execute(f'ALTER TABLE "{table}" DROP COLUMN checksum')
        connection.execute("DROP TABLE pin")
        connection.execute("UPDATE alembic_version SET version_num = '0003'")
    with open_store(path, create=False) as store, store.read() as session:
        levels = session.execute(text('SELECT "before", "after", effect FROM alert')).all()
    assert list(levels[0]) == [None if value is None else pytest.approx(value) for value in new]
    assert tuple(new[:2]) == (pytest.approx(before), pytest.approx(2e-6))
    assert before or (levels[0][0], levels[0][2]) == (0.0, None)


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
def test_a_migration_that_is_killed_and_repeated_leaves_one_copy(
    old: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")

    def dies(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(points, "point_values", dies)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            open_store(old, create=False)
    monkeypatch.undo()
    with open_store(old, create=False):
        pass
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


def test_a_migration_that_dies_in_the_middle_leaves_the_old_database(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls, real = dump(old), [], points.point_values

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(points, "point_values", dies)
    with pytest.raises(KeyboardInterrupt):
        open_store(old, create=False)
    assert dump(old) == before
    monkeypatch.undo()
    with open_store(old, create=False) as store, store.read() as session:
        assert len(list(stored_records(session))) == 12


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
    result = cli("list", "runs", db=old)
    assert (result.exit_code, "kernel_set" in result.stderr) == (2, True)
    assert dump(old) == before


# From the first revision, a migration goes through all others.
@pytest.mark.parametrize("revision", [REVISIONS[0], *rarely(*REVISIONS[1:])])
def test_every_revision_can_be_migrated_from_when_empty(tmp_path: Path, revision: str) -> None:
    url = stores.URL.create("sqlite", database=str(tmp_path / "t.db"))
    engine = stores._engine(url, "t.db")
    migrate(engine, revision)
    engine.dispose()
    with open_store(tmp_path / "t.db", create=False) as store, store.read() as session:
        assert list(verify(session)) == []


def test_a_new_file_has_the_tables_that_all_migrations_make(tmp_path: Path) -> None:
    migrated, made = tmp_path / "migrated.db", tmp_path / "made.db"
    engine = stores._engine(stores.URL.create("sqlite", database=str(migrated)), "migrated.db")
    migrate(engine)
    engine.dispose()
    open_store(made, create=True).close()
    assert layout(made) == layout(migrated)


def layout(path: Path) -> dict[str, Any]:
    """Every table's columns in their order, its keys, indexes and the file's own settings."""
    with closing(sqlite3.connect(path)) as connection:

        def ask(statement: str) -> list[Any]:
            return connection.execute(statement).fetchall()

        contents: dict[str, Any] = {name: ask(f"PRAGMA {name}") for name in ("page_size", "journal_mode")}
        contents["revision"] = ask("SELECT * FROM alembic_version")
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


def test_rows_of_revision_0006_get_their_checksums(cli: Cli, tmp_path: Path, write: Any, make: Any) -> None:
    path = tmp_path / "old.db"
    records = [make(0, cell={"dims": {"M": 4}}), make(1, commit_facts={"time": "2026-01-01T00:00:00+05:00"})]
    assert cli("ingest", write(records), db=path).exit_code == 0
    assert cli("pins", "add", "latest", "--max-slowdown", "3", db=path).exit_code == 0
    made = checksums(path)
    downgrade(path, "0007")
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("alert", "alert_event", "commit", "pin", "run", "series"):
            connection.execute(f'ALTER TABLE "{table}" DROP COLUMN checksum')
        connection.execute("ALTER TABLE point DROP COLUMN amounts")
        connection.execute("UPDATE alembic_version SET version_num = '0006'")
    assert cli("db", "verify", db=path).stdout == "VERIFY ok: 2 points\n"
    assert checksums(path) == made


def checksums(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        tables = [mapped.__tablename__ for mapped in sealed_tables()]
        return [connection.execute(f'SELECT checksum FROM "{table}"').fetchall() for table in tables]


@pytest.mark.usefixtures("two_nights_are_certain")
def test_alerts_of_revision_0009_become_members_of_incidents(cli: Cli, tmp_path: Path, write: Any, make: Any) -> None:
    """Alerts of one range and state are one incident, with each event once; the downgrade gives them back."""
    path = tmp_path / "old.db"
    shapes = [f"G=4,N={n},K=64" for n in (64, 128, 256)]
    nights = [make(night, ms=1.0 if night < 6 else 1.05, shape=shape) for night in range(9) for shape in shapes]
    assert cli("ingest", write(nights), db=path).exit_code == 0
    assert "1 opened (1)" in cli("gate", "--update", db=path).stderr
    assert cli("incidents", "ack", "1", "--reason", "known", db=path).exit_code == 0
    assert (
        cli("incidents", "expect", "1", "--series", "2", "--reason", "larger", "--until", "30d", db=path).exit_code == 0
    )
    downgrade(path, "0009")
    with closing(sqlite3.connect(path)) as connection:
        states = connection.execute("SELECT state FROM alert ORDER BY series_id").fetchall()
        assert states == [("acknowledged",), ("expected",), ("acknowledged",)]
        assert connection.execute("SELECT count(*) FROM alert_event").fetchone() == (7,)
    assert cli("db", "verify", db=path).stdout == "VERIFY ok: 27 points\n"
    listed = [line for line in cli("incidents", db=path).stdout.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0].split()[1] for line in listed] == ["acknowledged", "expected"]
    assert "in 2 series" in listed[0]
    with open_store(path, create=False) as store, store.read() as session:
        numbers = session.execute(text("SELECT count(*) FROM incident_event GROUP BY incident_id")).scalars().all()
        assert sorted(numbers) == [2, 3]
