"""`verify` on damaged databases, and the steps of docs/guide/keeping-data.md that restore one."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, rarely, refused

pytestmark = pytest.mark.sqlite

GUIDE = (Path(__file__).parents[3] / "docs" / "guide" / "keeping-data.md").read_text(encoding="utf-8")
STEPS = [line for line in GUIDE.splitlines() if line.startswith("sqlite3 damaged.db")]


def without_log(path: Path) -> Path:
    """Fold the write-ahead log into the file."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


@pytest.fixture
def path(cli: Cli, stored: Any, make: Any) -> Path:
    """Six points of two series in one file without a write-ahead log."""
    path = stored([make(night, backend=name, cell={"flops": 9}) for night in range(3) for name in ("triton", "other")])
    assert cli("pins", "add", "latest", "--max-slowdown", "3").exit_code == 0
    return without_log(path)


def overwrite(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize(
    ("text", "by"),
    [
        (b"CREATE TABLE point", b"CREATE TA\xa3LE point"),
        (b"CREATE TABLE series", b"CREATE TABLE seriez"),
        (b"error_ppm BIGINT", b"erxor_ppm"),
        (b"SQLite format 3", b"SQLite format 4"),
    ],
)
def test_damage_in_the_schema_is_reported(cli: Cli, path: Path, text: bytes, by: bytes) -> None:
    overwrite(path, path.read_bytes().index(text), by)
    for command in ("db verify", "gate", "list runs", "db backup"):
        result = cli(*command.split(), *([path.with_name("copy.db")] if command == "db backup" else []))
        assert result.exit_code in ((1, 2) if command == "db verify" else (0, 2, 3))


def test_a_damaged_value_is_reported_and_its_row_can_be_restored(cli: Cli, path: Path, make: Any, write: Any) -> None:
    before = cli("db", "export", "-").stdout
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE point SET rms = rms * 2 WHERE id = 3")
        connection.execute("UPDATE point SET median_ms = 'abc' WHERE id = 4")
    problems = cli("db", "verify").stdout
    assert "point 3 does not match its hash" in problems
    assert "point 4" in problems
    for command in (["gate"], ["history"], ["report", "-o", str(path.with_name("r.html"))]):
        result = cli(*command)
        assert (result.exit_code, "damaged database" in result.stderr) in ((2, True), (0, False), (3, False))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM point WHERE id IN (3, 4)")
    records = [make(night, backend=name, cell={"flops": 9}) for night in range(3) for name in ("triton", "other")]
    assert "2 points added, 4 already known" in cli("ingest", write(records)).stdout
    assert cli("db", "verify").exit_code == 0
    assert sorted(cli("db", "export", "-").stdout.splitlines()) == sorted(before.splitlines())


@pytest.mark.parametrize("table", ["pin", *rarely("series", "run", "commit")])
def test_every_column_of_a_row_is_covered(cli: Cli, path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        names = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    before = path.read_bytes()
    for name in set(names) - {"id", "commit_id"}:
        path.write_bytes(before)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f'UPDATE "{table}" SET "{name}" = \'7\' || coalesce("{name}", 1) WHERE id = 1')
        assert f"{table} 1 " in cli("db", "verify", "--quick").stdout, name


def run(command: str, folder: Path) -> None:
    if shutil.which("sqlite3") is None:
        pytest.skip("needs the sqlite3 shell")
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True)
    if "sql error" in done.stderr:
        pytest.skip("this sqlite3 shell was built without .recover")


@pytest.mark.parametrize("step", ["", *STEPS], ids=lambda step: "without a file" if not step else step.split()[2])
def test_the_steps_of_the_guide_restore_every_result(cli: Cli, stored: Any, make: Any, write: Any, step: str) -> None:
    records = [make(night, backend=f"b{number}") for night in range(2) for number in range(200)]
    path = without_log(stored(records))
    assert cli("pins", "add", "latest", "--max-slowdown", "3").exit_code == 0
    without_log(path)
    before, pins = cli("db", "export", "-").stdout, cli("pins", "--format=json").stdout
    content = without_log(path).read_bytes()
    leaves = [page for page in range(8192, len(content), 8192) if content[page] == 0x0D and content[page + 5] & 0x0F]
    overwrite(path, leaves[-2], random.Random(1).randbytes(8192))
    verified = cli("db", "verify")
    assert (verified.exit_code, "damage: " in verified.stdout) == (1, True)
    assert "ingest" in verified.stdout

    path.rename(path.with_name("damaged.db"))
    if step:
        run(step.replace("groupbench.db", path.name), path.parent)
    assert cli("ingest", write(records)).exit_code == 0
    verified = cli("db", "verify")
    assert verified.exit_code == 0, verified.stdout
    assert sorted(cli("db", "export", "-").stdout.splitlines()) == sorted(before.splitlines())
    if step:
        assert cli("pins", "--format=json").stdout == pins


def test_the_message_about_damage_names_the_next_step(cli: Cli, path: Path) -> None:
    content = path.read_bytes()
    for page in range(8192, len(content), 8192):
        overwrite(path, page, random.Random(page).randbytes(8192))
    assert "`groupbench ingest records/*.jsonl`" in refused(cli, "history")
