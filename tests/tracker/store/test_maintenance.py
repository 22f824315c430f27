"""`groupbench db backup`, `verify` and `merge`."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, rarely, refused
from sqlalchemy import text

from groupbench.tracker.store import verify as verifying
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.verify import verify


def held(db: Any) -> list[Any]:
    with open_store(db, create=False) as store, store.read() as session:
        assert list(verify(session)) == []
        return list(stored_records(session))


@pytest.mark.sqlite
def test_a_backup_is_one_file_with_the_same(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    path = stored([make(), make(1)])
    result = cli("db", "backup", tmp_path / "copy.db")
    assert result.exit_code == 0
    assert "a copy of" in result.stdout
    assert held(tmp_path / "copy.db") == held(path)


@pytest.mark.sqlite
@pytest.mark.parametrize("target", ["t.db", "there.txt", "x" * 300, *rarely("none/copy.db", ".")])
def test_a_backup_overwrites_nothing(cli: Cli, stored: Any, make: Any, tmp_path: Path, target: str) -> None:
    stored([make()])
    (tmp_path / "there.txt").write_text("precious")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert cli("db", "backup", tmp_path / target).exit_code == 2
    assert (tmp_path / "there.txt").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


@pytest.mark.sqlite
def test_a_backup_of_a_database_in_use_has_one_state(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    path = stored([make(0, backend=f"b{i}") for i in range(50)])
    stop = threading.Event()

    def write() -> None:
        night = 1
        with open_store(path, create=False) as store:
            while not stop.is_set():
                ingest(store, enumerate((make(night, backend=f"b{i}") for i in range(50)), 1), "file")
                night += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(3):
            assert cli("db", "backup", tmp_path / f"copy{number}.db").exit_code == 0
    finally:
        stop.set()
        writer.join()
    for number in range(3):
        assert len(held(tmp_path / f"copy{number}.db")) % 50 == 0


def test_postgresql_is_left_to_its_own_backup(cli: Cli, stored: Any, make: Any, tmp_path: Path, backend: str) -> None:
    stored([make()])
    result = cli("db", "backup", tmp_path / "copy.db")
    assert (result.exit_code == 2 and "pg_dump" in result.stderr) == (backend == "postgresql")


def test_verify_of_a_sound_database(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(), make(1, status="oom"), make(2, ms=None)])
    assert cli("db", "verify").stdout == "VERIFY ok: 3 points\n"
    assert "hashes not checked" in cli("db", "verify", "--quick").stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE point SET status = 'wrong' WHERE id = 1", "hash: point 1 does not match its hash"),
        ("UPDATE point SET low_ppm = low_ppm + 5 WHERE id = 2", "hash: point 2 has statistics"),
        ("UPDATE point SET series_id = 2 WHERE id = 2", "hash: point 2 does not match its hash"),
        ("UPDATE point SET metrics = '{\"spills\": 9.0}' WHERE id = 1", "hash: point 1 does not match its hash"),
        ("DELETE FROM point WHERE id = 2", "orphan: 1 run without a point (id 2)"),
        ("UPDATE series SET shape = 'x' WHERE id = 1", "hash: series 1 does not match its hash"),
        ("UPDATE series SET identity = 'x' WHERE id = 1", "hash: series 1 does not match its hash"),
        ("UPDATE series SET checksum = 1 WHERE id = 2", "hash: series 2 does not match its checksum"),
        ("UPDATE run SET command = 'x' WHERE id = 2", "hash: run 2 does not match its checksum"),
        ("UPDATE \"commit\" SET subject = 'x' WHERE id = 2", "hash: commit 2 does not match its checksum"),
        ("UPDATE environment SET identity = 'x'", "hash: environment 1 does not match its hash"),
        ("UPDATE environment SET content = 'x'", "hash: environment 1 does not match its hash"),
        ("UPDATE environment SET torch = '0'", "hash: environment 1 has a torch that differs from its facts"),
        ("UPDATE kernel_set SET kernels = '[]'", "hash: kernel_set 1 does not match its hash"),
    ],
)
def test_verify_reports_altered_values(cli: Cli, stored: Any, make: Any, db: Any, change: str, message: str) -> None:
    stored([make(0, kernels=[{"name": "k"}]), make(1), make(0, backend="b", ms=2.0)])
    with open_store(db, create=False) as store, store.write() as session:
        session.execute(text(change))
    result = cli("db", "verify")
    assert (result.exit_code, result.stderr) == (1, "")
    assert message in result.stdout
    assert "VERIFY" in result.stdout.splitlines()[-1]


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM run WHERE id = 1", "reference: 1 point with a run_id that does not exist (id 1)"),
        ("UPDATE point SET samples = x'00' WHERE id = 2", "samples are damaged"),
        ('UPDATE environment SET facts = \'{"device":"cpu"}\'', "environment 1 does not match its hash"),
    ],
)
def test_verify_reports_what_postgresql_refuses(cli: Cli, stored: Any, make: Any, change: str, message: str) -> None:
    path = stored([make(), make(1)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    assert message in cli("db", "verify").stdout


def test_several_processes_verify_the_results_of_a_larger_database(
    cli: Cli, stored: Any, make: Any, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make(0, backend=f"b{i}") for i in range(7)])
    monkeypatch.setattr(verifying, "_CHECKED_AT_ONCE", 3)
    assert cli("db", "verify").stdout == "VERIFY ok: 7 points\n"
    with open_store(db, create=False) as store, store.engine.begin() as connection:
        ids = list(connection.execute(text("select id from point order by id")).scalars())
        connection.execute(text("update point set rms = 1 where id in (:a, :b)"), {"a": ids[1], "b": ids[-1]})
    result = cli("db", "verify")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("hash: point")] == [
        f"hash: point {ids[1]} does not match its hash", f"hash: point {ids[-1]} does not match its hash",
    ]  # fmt: skip


def test_verify_shows_no_more_than_it_should(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night) for night in range(30)])
    with open_store(db, create=False) as store, store.write() as session:
        session.execute(text("UPDATE point SET baseline = NOT baseline"))
    result = cli("db", "verify", "--limit", "3")
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 4)
    assert "only the first 3" in result.stdout


@pytest.mark.both
def test_merge_adds_missing_points_and_is_idempotent(
    cli: Cli, stored: Any, make: Any, write: Any, tmp_path: Path
) -> None:
    stored([make(0), make(1)])
    other = tmp_path / "other.db"
    cli("ingest", write([make(1), make(2, commit_facts={"subject": "S"}), make(1, backend="b")], "b.jsonl"), db=other)
    before = other.read_bytes()
    result = cli("db", "merge", other)
    assert result.exit_code == 0
    assert "3 points in 2 runs: 2 added, 1 already known, 1 series new" in result.stdout
    assert "0 added, 3 already known (nothing new)" in cli("db", "merge", other).stdout
    assert other.read_bytes() == before
    cli("db", "export", tmp_path / "all.jsonl")
    assert (tmp_path / "all.jsonl").read_bytes().count(b"\n") == 4
    assert cli("db", "verify").exit_code == 0


def test_merge_refuses_a_contradiction_and_adds_nothing(
    cli: Cli, stored: Any, make: Any, write: Any, tmp_path: Path
) -> None:
    stored([make(0), make(1)])
    other = tmp_path / "other.db"
    cli("ingest", write([make(2), make(1, ms=3.0)], "b.jsonl"), db=other)
    before = cli("db", "export", "-").stdout_bytes
    assert "is already stored with a different result" in refused(cli, "db", "merge", other)
    assert cli("db", "export", "-").stdout_bytes == before


def test_merge_makes_the_database_that_it_fills(cli: Cli, stored: Any, make: Any, tmp_path: Path, db: Any) -> None:
    stored([make(metrics={"spills": 8.0})])
    new = tmp_path / "new.db"
    result = cli("db", "merge", db, db=new)
    assert result.exit_code == 0, result.stderr
    assert held(new) == held(db)


def test_merge_of_a_database_into_itself_adds_nothing(cli: Cli, stored: Any, make: Any, db: Any, opened: Store) -> None:
    stored([make(), make(1)])
    assert "0 added, 2 already known" in cli("db", "merge", db).stdout
