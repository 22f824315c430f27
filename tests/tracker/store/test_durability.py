"""Nothing is lost and nothing invented: processes that die, disks that fill, files that are cut, many at once."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from cases import Cli, rarely, refused

from groupbench.tracker.cli import main
from groupbench.tracker.facts.errors import IngestError, StoreError
from groupbench.tracker.facts.record import encode
from groupbench.tracker.store import engine as stores
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.ingest import ingest
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.sqlite_file import folder_beside
from groupbench.tracker.store.verify import verify

FORK = multiprocessing.get_context("fork")


def start(db: Path, *args: str | Path, out: int | None = None) -> Any:
    """Start a command in a process of its own: a fork, so that it works from the first moment and imports nothing."""
    process = FORK.Process(target=_command, args=(["--db", str(db), *map(str, args)], out))
    process.start()
    return process


def _command(arguments: list[str], out: int | None) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY) if out is None else out
    with os.fdopen(descriptor, "w") as sys.stdout:
        main(arguments)


def exit_codes(processes: list[Any]) -> list[int]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def whole(path: Path) -> int:
    """Return the number of points of a database, which must be sound and have whole runs of 200."""
    with open_store(path, create=False) as store, store.read() as session:
        assert list(verify(session)) == []
        runs: dict[str, int] = {}
        for record in stored_records(session):
            runs[record.run.id] = runs.get(record.run.id, 0) + 1
    assert set(runs.values()) <= {200}
    return sum(runs.values())


def night(write: Any, make: Any, number: int, name: str | None = None) -> Path:
    return write([make(number, backend=f"b{i}") for i in range(200)], name or f"{number}.jsonl")


# A new database is killed somewhere, and an existing one after the first file. More of both, and the other way round.
@pytest.mark.parametrize("seed", [1, 2, *rarely(0, 3, 4, 5, 6, 7)])
def test_a_kill_at_any_moment_leaves_all_of_a_file_or_nothing(
    seed: int, cli: Cli, db: Path, write: Any, make: Any
) -> None:
    rng = random.Random(seed)
    files = [night(write, make, number) for number in range(3)]
    if seed % 2:
        assert cli("ingest", files[0]).exit_code == 0
    before = whole(db) if db.exists() else 0
    source, sink = os.pipe()
    process = start(db, "ingest", *files, out=sink)
    os.close(sink)
    with os.fdopen(source) as lines:
        first = lines.readline() if seed % 4 < 2 else ""  # then somewhere in the second or third file
        time.sleep(rng.uniform(0, 0.1 if first else 0.3))
        process.kill()
        process.join()
        reported = (first + lines.read()).count("200 points added")
    if db.exists():
        assert whole(db) >= max(before, 200 * reported)  # every point reported as stored is there
    assert (cli("ingest", *files).exit_code, whole(db)) == (0, 600)


@pytest.mark.parametrize("kib", [60, 200, *rarely(300)])
def test_a_file_that_may_not_grow_is_one_line(
    cli: Cli, db: Path, write: Any, make: Any, full_disk: Any, kib: int
) -> None:
    """A limit on the size of files, small enough to stop the making of the database, or its filling."""
    files = [night(write, make, number) for number in range(4)]
    with full_disk(kib * 1024):
        result = cli("ingest", *files)
    assert result.exit_code == 2  # and one line, as the fixture wants it
    if db.exists():
        assert whole(db) == 200 * result.stdout.count("200 points added")
    assert [entry.name for entry in db.parent.iterdir() if entry.name.startswith(".")] == []
    assert (cli("ingest", *files).exit_code, whole(db)) == (0, 800)


def test_two_ingests_and_a_report_at_once(cli: Cli, db: Path, write: Any, make: Any, tmp_path: Path) -> None:
    files = [night(write, make, number) for number in range(4)]
    assert cli("ingest", files[0]).exit_code == 0
    running = [
        start(db, "ingest", *files[1:3]),
        start(db, "ingest", *files[2:]),  # one of them twice
        start(db, "report", "-o", tmp_path / "report.html"),
        start(db, "history", "--format=json"),
        start(db, "db", "export", tmp_path / "out.jsonl"),
    ]
    assert exit_codes(running) == [0] * 5
    assert whole(db) == 800
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") % 200 == 0  # one state, never half a file


def test_two_processes_make_one_database(db: Path, write: Any, make: Any) -> None:
    files = [night(write, make, number) for number in range(2)]
    assert exit_codes([start(db, "ingest", file) for file in files]) == [0] * 2
    assert whole(db) == 400


# A seed whose noise is reported, one whose noise hits nothing, and more of each.
@pytest.mark.parametrize("seed", [0, 7, *rarely(1, 2, 3, 4, 5, 6, 8, 9)])
def test_noise_in_a_database_is_reported_by_verify_or_hit_nothing(
    cli: Cli, db: Path, write: Any, make: Any, seed: int
) -> None:
    cli("ingest", night(write, make, 0))
    cli("db", "export", db.with_name("before.jsonl"))
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    content = bytearray(db.read_bytes())
    rng = random.Random(seed)
    place = rng.randrange(8192, len(content) - 4000)
    content[place : place + 3000] = rng.randbytes(3000)
    db.write_bytes(content)
    verified = cli("db", "verify").exit_code
    for command in (["history"], ["list", "runs"], ["gate"]):
        assert cli(*command).exit_code in (0, 2, 3)
    exported = cli("db", "export", db.with_name("after.jsonl")).exit_code
    assert (verified in (0, 1, 2), exported in (0, 2)) == (True, True)
    if verified == 0:  # it hit an unused place
        assert db.with_name("after.jsonl").read_bytes() == db.with_name("before.jsonl").read_bytes()


def test_a_read_only_database_is_read_and_not_written(
    cli: Cli, stored: Any, make: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored([make()])
    before = path.read_bytes()
    real = os.access
    monkeypatch.setattr(os, "access", lambda where, mode: real(where, mode) and not mode & os.W_OK)
    for command in (["list", "runs"], ["history"], ["db", "verify"], ["db", "prune"], ["db", "export", "-"]):
        assert cli(*command).exit_code == 0
    pin = ["pins", "add", "latest", "--max-slowdown", "3%"]
    for command in (["ingest", write([make(1)], "b.jsonl")], ["db", "prune", "--apply"], ["db", "merge", path], pin):
        assert "t.db: cannot be written; change its permissions" in refused(cli, *command)
    assert path.read_bytes() == before


def test_a_file_that_goes_on_growing_is_stored_as_it_was_when_checked(
    db: Path, write: Any, make: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write([make(), make(backend="b")])
    real = stores.open_store

    def meanwhile(*args: Any, **named: Any) -> Any:
        with file.open("ab") as more:
            more.write(encode(make(backend="c"))[:-20])
        return real(*args, **named)

    monkeypatch.setattr(stores, "open_store", meanwhile)
    assert "2 records: 2 points added" in cli("ingest", file).stdout


def test_a_failing_batch_undoes_those_before_it(opened: Any, make: Any) -> None:
    records = [(number, make(backend=f"b{number}")) for number in range(1, 1200)]
    records.append((1200, make(backend="b1", ms=2.0)))
    with pytest.raises(IngestError, match="line 1200: run run-000 is already stored with a different result"):
        ingest(opened, records, "file")
    with opened.read() as session:
        assert list(stored_records(session)) == []


def test_a_wait_for_another_writer_ends_in_one_line(
    cli: Cli, stored: Any, make: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored([make()])
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert "database is locked" in refused(cli, "ingest", write([make(1)], "b.jsonl"))
        assert cli("list", "runs").exit_code == 0  # a reader never waits
    with pytest.raises(StoreError, match="no such database"):
        open_store(path.with_name("none.db"), create=False)


def test_a_writer_waits_for_one_that_takes_longer_than_sqlite_does(
    stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored([make()])
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.05)
    with open_store(path, create=False) as slow, open_store(path, create=False) as other, ThreadPoolExecutor() as pool:
        with slow.write() as session:
            session.connection()  # begins the transaction
            second = pool.submit(ingest, other, [(1, make(1))], "file")
            wait([second], timeout=0.5)
        assert second.result().added == 1


def test_leftovers_of_a_killed_process_are_removed_by_the_next(
    cli: Cli, stored: Any, make: Any, tmp_path: Path
) -> None:
    """A folder that another process works in stays, and so does one with anything else in it."""
    stored([make()])
    abandoned, busy, foreign, later = (tmp_path / f".copy.db.{name * 8}" for name in "abcd")
    for folder, name in ((abandoned, "copy.db-journal"), (busy, "copy.db"), (foreign, "notes.txt"), (later, None)):
        folder.mkdir()
        if name:
            (folder / name).write_text("x")
    handle = os.open(busy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert cli("db", "backup", tmp_path / "copy.db").exit_code == 0
    finally:
        os.close(handle)
    assert sorted(tmp_path.glob(".*")) == [busy, foreign, later]
    os.utime(later, (0, 0))
    assert cli("db", "backup", tmp_path / "copy.db").exit_code == 2
    (tmp_path / "copy.db").unlink()
    assert cli("db", "backup", tmp_path / "copy.db").exit_code == 0
    assert sorted(tmp_path.glob(".*")) == [foreign]


def test_an_interrupt_at_any_line_leaves_no_folder(tmp_path: Path) -> None:
    interrupt_at, lines = 0, 1

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_name != "folder_beside":
            return None
        if event == "line":
            lines += 1
            if lines == interrupt_at:
                raise KeyboardInterrupt
        return trace

    while lines >= interrupt_at:
        interrupt_at += 1
        lines = 0
        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            with contextlib.suppress(KeyboardInterrupt), folder_beside(tmp_path / "new.db") as folder:
                (folder / "new.db").touch()
        finally:
            sys.settrace(tracing)
        assert list(tmp_path.iterdir()) == []
    assert interrupt_at > 10
