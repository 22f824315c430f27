"""`groupbench repair`, and `verify` on damaged databases."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

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


@pytest.mark.parametrize("table", ["series", "run", "commit", "pin"])
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


@pytest.mark.parametrize(("damaged", "new"), [("none.db", "new.db"), ("t.db", "t.db"), ("t.db", "no/new.db")])
def test_it_overwrites_nothing(cli: Cli, path: Path, damaged: str, new: str) -> None:
    before = path.read_bytes()
    assert cli("repair", path.with_name(damaged), path.parent / new).exit_code == 2
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_cannot_be_repaired(cli: Cli, path: Path) -> None:
    text = path.with_name("text")
    text.write_text("hello " * 2000)
    assert cli("repair", text, path.with_name("new.db")).exit_code in (2, 3)
    assert not list(path.parent.glob(".*"))
