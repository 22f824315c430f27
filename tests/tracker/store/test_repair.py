"""`groupbench repair`, and `verify` on damaged databases."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import rarely
from click.testing import Result

from groupbench.tracker.store.engine import migrate, sqlite_engine
from groupbench.tracker.store.repair import Repaired, _copy_rows, _readable_copy
from groupbench.tracker.store.schema import REVISIONS

Cli = Callable[..., Result]
pytestmark = pytest.mark.sqlite


@pytest.fixture
def path(cli: Cli, stored: Any, make: Any) -> Path:
    """Six points of two series in one file without a write-ahead log."""
    path = stored([make(night, backend=name, cell={"flops": 9}) for night in range(3) for name in ("triton", "other")])
    assert cli("pin", "latest", "--max-slowdown", "3").exit_code == 0
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def flip(path: Path, text: bytes, by: bytes, *, last: bool = False) -> None:
    content = bytearray(path.read_bytes())
    place = content.rfind(text) if last else content.find(text)
    assert place >= 0
    content[place : place + len(by)] = by
    path.write_bytes(content)


def saved(cli: Cli, path: Path) -> tuple[str, int]:
    """Return the output of repair, and the number of points of the new database, which must be sound."""
    before, new = path.read_bytes(), path.with_name("new.db")
    result = cli("repair", path, new)
    assert path.read_bytes() == before
    assert result.exit_code in (0, 3), result.stderr
    verified = cli("verify", db=new)
    assert verified.exit_code == 0, verified.stdout
    assert sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")) == []
    with closing(sqlite3.connect(new)) as connection:
        return result.stdout, connection.execute("SELECT count(*) FROM point").fetchone()[0]


def test_a_sound_database_loses_nothing(cli: Cli, path: Path) -> None:
    output, points = saved(cli, path)
    assert (points, "nothing was lost" in output) == (6, True)
    exported = cli("export", "-").stdout
    assert cli("export", "-", db=path.with_name("new.db")).stdout == exported


@pytest.mark.parametrize(
    ("text", "by"),
    [
        (b"CREATE TABLE point", b"CREATE TA\xa3LE point"),
        (b"CREATE TABLE series", b"CREATE TABLE seriez"),
        (b"error_ppm BIGINT", b"erxor_ppm"),
        (b"SQLite format 3", b"SQLite format 4"),
    ],
)
def test_damage_in_the_schema_loses_nothing(cli: Cli, path: Path, text: bytes, by: bytes) -> None:
    flip(path, text, by)
    for command in ("verify", "gate", "runs", "backup"):
        result = cli(command, *([path.with_name("copy.db")] if command == "backup" else []))
        assert result.exit_code in ((1, 2) if command == "verify" else (0, 2, 3))
    output, points = saved(cli, path)
    assert (points, "nothing was lost" in output) == (6, True), output


def test_a_damaged_value_loses_its_row_alone(cli: Cli, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE point SET rms = rms * 2 WHERE id = 3")
        connection.execute("UPDATE point SET median_ms = 'abc' WHERE id = 4")
    problems = cli("verify").stdout
    assert "point 3 does not match its hash" in problems
    assert "point 4" in problems
    for command in (["gate"], ["history"], ["report", "-o", str(path.with_name("r.html"))]):
        result = cli(*command)
        assert (result.exit_code, "damaged database" in result.stderr) in ((2, True), (0, False), (3, False))
    output, points = saved(cli, path)
    assert points == 4
    assert "lost: 2 of point" in output
    assert "run run-001" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE series SET identity = 'x' || identity WHERE id = 1", "series 1"),
        ("UPDATE environment SET torch = '0'", "environment 1"),
        ("UPDATE environment SET content = 'x'", "environment 1"),
        ("UPDATE run SET command = 'x' WHERE id = 2", "run 2"),
        ("UPDATE \"commit\" SET subject = 'x' WHERE id = 2", "commit 2"),
        ("UPDATE series SET checksum = 1 WHERE id = 2", "series 2"),
    ],
)
def test_derived_values_are_computed_again(cli: Cli, path: Path, change: str, message: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    assert message in cli("verify").stdout
    assert saved(cli, path)[1] == 6


@pytest.mark.parametrize("table", ["pin", *rarely("series", "run", "commit")])
def test_every_column_of_a_row_is_covered(cli: Cli, path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        names = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    before = path.read_bytes()
    for name in set(names) - {"id", "commit_id"}:
        path.write_bytes(before)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f'UPDATE "{table}" SET "{name}" = \'7\' || coalesce("{name}", 1) WHERE id = 1')
        assert f"{table} 1 " in cli("verify", "--quick").stdout, name


def test_a_damaged_page_loses_the_rows_on_it(cli: Cli, stored: Any, make: Any) -> None:
    path = stored([make(night, backend=f"b{number}") for night in range(2) for number in range(200)])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    content = bytearray(path.read_bytes())
    place = content.find(b"\x0d", 0)
    leaves = [page for page in range(8192, len(content), 8192) if content[page] == 0x0D and content[page + 5] & 0x0F]
    assert place >= 0
    page = leaves[-2]
    content[page : page + 8192] = random.Random(1).randbytes(8192)
    path.write_bytes(content)
    assert cli("verify").exit_code == 1
    output, points = saved(cli, path)
    assert 200 <= points <= 400, output


def page_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:18], "big")


def overwrite(path: Path, place: int, length: int, seed: int | None = 1) -> None:
    """Fill a stretch of a file with random bytes, or with zeros without a seed."""
    content = bytearray(path.read_bytes())
    content[place : place + length] = bytes(length) if seed is None else random.Random(seed).randbytes(length)
    path.write_bytes(content)


def exported(cli: Cli, path: Path) -> list[str]:
    """Return the records and pins of a database, which are all that a user stored."""
    return [*sorted(cli("export", "-", db=path).stdout.splitlines()), cli("pins", "--json", db=path).stdout]


# 16 bytes hide the page size, 100 the header, 2000 the schema. Of zeros, a page may be taken for an unused one.
@pytest.mark.parametrize(
    ("seed", "length"),
    [
        *[(1, 16), (1, 2000), (None, 8192)],
        *rarely(*[(seed, length) for seed in (1, 2) for length in (100, 8192)], (2, 16), (2, 2000)),
        *rarely((None, 16), (None, 100), (None, 2000)),
    ],
)
def test_a_damaged_first_page_loses_nothing(cli: Cli, path: Path, length: int, seed: int | None) -> None:
    before = exported(cli, path)
    overwrite(path, 0, length, seed)
    output, points = saved(cli, path)
    assert (points, "nothing was lost" in output) == (6, True), output
    assert exported(cli, path.with_name("new.db")) == before


@pytest.mark.parametrize("size", [512, 65536, *rarely(1024, 4096, 32768)])
def test_the_page_size_is_found(cli: Cli, path: Path, size: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {size}")
        connection.execute("VACUUM")
    before = exported(cli, path)
    overwrite(path, 0, min(size, 8192))
    output, points = saved(cli, path)
    assert points == 6, output
    assert exported(cli, path.with_name("new.db")) == before


@pytest.mark.parametrize("revision", [REVISIONS[0], REVISIONS[-1], *rarely(*REVISIONS[1:-1])])
def test_every_revision_is_recognized_without_its_first_page(cli: Cli, tmp_path: Path, revision: str) -> None:
    path = tmp_path / f"{revision}.db"
    engine = sqlite_engine(path)
    migrate(engine, revision)
    engine.dispose()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO `commit` (hash, parents, branch) VALUES ('1', '[]', 'main')")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        layout = connection.execute("PRAGMA table_info(point)").fetchall()
    overwrite(path, 0, page_bytes(path))
    made = tmp_path / "made.db"
    done = Repaired()
    assert _copy_rows(_readable_copy(path, tmp_path / "copy.db"), made, done)
    assert not done.rows  # a zeroed page may be the end of the list of free pages, which page 1 would tell
    with closing(sqlite3.connect(made)) as connection:
        assert connection.execute("PRAGMA table_info(point)").fetchall() == layout
        assert connection.execute("SELECT hash, parents, branch FROM `commit`").fetchall() == [("1", "[]", "main")]


@pytest.mark.parametrize("page_1_in_log", [False, True])
def test_results_of_the_write_ahead_log_survive_a_damaged_first_page(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, page_1_in_log: bool
) -> None:
    live = stored([make(night) for night in range(3)])
    with closing(sqlite3.connect(live)) as connection:  # a reader keeps the log
        connection.execute("SELECT count(*) FROM point").fetchone()
        with closing(sqlite3.connect(live)) as writer, writer:
            writer.execute("UPDATE run SET command = 'from the log'")
            if page_1_in_log:
                writer.execute("CREATE TABLE more AS SELECT * FROM point")
        path = tmp_path / "killed.db"
        for suffix in ("", "-wal"):
            Path(f"{path}{suffix}").write_bytes(Path(f"{live}{suffix}").read_bytes())
    assert Path(f"{path}-wal").stat().st_size
    overwrite(path, 0, 8192)
    assert saved(cli, path)[1] == 3
    with closing(sqlite3.connect(path.with_name("new.db"))) as connection:
        assert connection.execute("SELECT DISTINCT command FROM run").fetchall() == [("from the log",)]


@pytest.fixture
def large(cli: Cli, stored: Any, make: Any) -> Path:
    """400 points on many pages, one with a message that takes further pages, and free pages with deleted points."""
    records = [make(night, backend=f"b{number}") for night in range(2) for number in range(200)]
    records[7] = make(0, backend="b7", status="error", message="x" * 20_000)
    path = stored(records)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("CREATE TABLE more AS SELECT * FROM point")
        connection.execute("DELETE FROM point WHERE id BETWEEN 100 AND 250")
        connection.commit()
        connection.execute("DROP TABLE more")
        connection.execute("PRAGMA journal_mode = DELETE")
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] > 3
    return path


def root_of(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]


@pytest.mark.parametrize("length", [24, *rarely(8192)])
def test_deleted_points_do_not_come_back(cli: Cli, large: Path, length: int) -> None:
    before = exported(cli, large)
    overwrite(large, 0, length)
    flip(large, b"CREATE TABLE", b"XREATE TABLE") if length < 8192 else None
    output, points = saved(cli, large)
    assert (points, "nothing was lost" in output) == (249, True), output
    assert exported(cli, large.with_name("new.db")) == before


@pytest.mark.parametrize("first_page", [True, *rarely(False)])
def test_a_damaged_root_page_loses_no_row(cli: Cli, large: Path, first_page: bool) -> None:
    before = exported(cli, large)
    overwrite(large, 8192 * (root_of(large, "point") - 1), 8192, seed=3)
    if first_page:
        overwrite(large, 0, 8192)
    output, points = saved(cli, large)
    assert points == 249
    assert exported(cli, large.with_name("new.db")) == before
    assert ("any rows on 1 unreadable page" in output) == first_page, output  # else an index has as many rows


def test_a_damaged_row_next_to_a_damaged_first_page_is_listed(cli: Cli, path: Path) -> None:
    place = 8192 * root_of(path, "point") - 60  # within the row that was written first
    overwrite(path, 0, 8192)
    overwrite(path, place, 30, seed=5)
    output, points = saved(cli, path)
    assert points == 5
    assert "lost: 1 of point" in output


def test_a_file_that_was_cut_off_says_so(cli: Cli, large: Path) -> None:
    content = large.read_bytes()
    large.write_bytes(content[: len(content) * 2 // 3 - 100])
    output, points = saved(cli, large)
    assert points < 249
    assert "lost: " in output


@pytest.mark.parametrize(("damaged", "new"), [("none.db", "new.db"), ("t.db", "t.db"), ("t.db", "no/new.db")])
def test_it_overwrites_nothing(cli: Cli, path: Path, damaged: str, new: str) -> None:
    before = path.read_bytes()
    assert cli("repair", path.with_name(damaged), path.parent / new).exit_code == 2
    assert path.read_bytes() == before


def test_a_name_that_is_too_long_is_one_line(cli: Cli, path: Path) -> None:
    result = cli("repair", path.with_name("x" * 300), path.with_name("new.db"))
    assert (result.exit_code, "File name too long" in result.stderr) == (2, True)
    result = cli("repair", path, path.with_name("x" * 300))
    assert (result.exit_code, "File name too long" in result.stderr) == (2, True)


def test_a_file_that_is_not_a_database_cannot_be_repaired(cli: Cli, path: Path) -> None:
    text = path.with_name("text")
    text.write_text("hello " * 2000)
    result = cli("repair", text, path.with_name("new.db"))
    assert result.exit_code == 2
    assert result.stderr == f"groupbench: {text}: no row of a groupbench database can be read\n"
    assert not list(path.parent.glob(".*"))
