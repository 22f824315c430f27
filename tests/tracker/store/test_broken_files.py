"""Commands on damaged databases, and on other files: they print one line, never a traceback, and fail."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, rarely

from groupbench.tracker.facts.exits import ExitCode

pytestmark = pytest.mark.sqlite

COMMANDS = [
    *(["history", "--format=json"], ["gate"], ["list", "runs"], ["list", "series"], ["show", "1.1"]),
    *(["incidents", "--all"], ["db", "verify"], ["compare", "previous", "latest"], ["db", "export", "-"]),
    *(["report", "-o", "{folder}/report.html"], ["ingest", "{folder}/more.jsonl"], ["gate", "--update"]),
    *(["incidents", "ack", "1", "--reason", "known"], ["db", "prune", "--all", "1", "--apply"]),
    *(["db", "backup", "{folder}/copy.db"], ["pins", "add", "latest", "--max-slowdown", "2"]),
]
FAILS = (["gate"], ["gate", "--update"], ["compare", "previous", "latest"], ["db", "verify"])
"""Commands that may end with 1, because damage can look like a regression."""
TABLES = ("point", "series", "run", "commit", "environment", "kernel_set", "alert", "incident_event")


@pytest.fixture
def sound(cli: Cli, stored: Any, make: Any, write: Any) -> Path:
    """Return a database of two series that became slower, with alerts and without a write-ahead log."""
    nights = [make(n, ms=2.0 if n > 5 else 1.0, backend=b) for n in range(9) for b in ("triton", "torch")]
    path: Path = stored(nights[:-2])
    write(nights[-2:], "more.jsonl")
    assert cli("gate", "--update").exit_code in (ExitCode.FAILED, ExitCode.INCOMPLETE)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def damage(path: Path, rng: random.Random) -> str:
    """Change a byte of the file, of its schema or of a stored value, or overwrite a page."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["anywhere", "schema", "value", "value", "page"])
    place = rng.randrange(0, 8192 if kind == "schema" else len(content))
    if kind == "page":
        place -= place % 8192
        content[place : place + 8192] = rng.randbytes(8192)
    elif kind == "value":
        with closing(sqlite3.connect(path)) as connection:
            row = connection.execute(f'SELECT * FROM "{rng.choice(TABLES)}" ORDER BY random()').fetchone() or ("",)
        texts = [value.encode() if isinstance(value, str) else value for value in row if isinstance(value, str | bytes)]
        place = max(0, content.find(rng.choice([*texts, b"SQLite"])) + rng.randrange(-40, 40))
    if kind != "page":
        content[place] = rng.choice([0xA3, content[place] ^ 1 << rng.randrange(8), rng.randrange(256)])
    path.write_bytes(content)
    return f"{kind} at {place}"


@pytest.mark.parametrize("seed", [0, *rarely(*range(1, 40))])
def test_no_damage_is_a_traceback(cli: Cli, sound: Path, seed: int, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    shutil.copyfile(sound, damaged)
    where = damage(damaged, random.Random(seed))
    for command in COMMANDS:
        shutil.copyfile(damaged, one := tmp_path / "one.db")
        (tmp_path / "copy.db").unlink(missing_ok=True)
        result = cli(*(word.format(folder=sound.parent) for word in command), db=one)
        assert result.exit_code != ExitCode.BUG, (where, command, result.stderr)
        assert result.exit_code != ExitCode.FAILED or command in FAILS, (where, command, result.stderr)
        if result.exit_code == ExitCode.USAGE:
            assert result.stderr.startswith("groupbench: ") and result.stderr.count("\n") == 1, (where, command, result)


FILES: dict[str, Callable[[Path, Path], object]] = {
    "100 bytes": lambda place, sound: place.write_bytes(sound.read_bytes()[:100]),
    "a third": lambda place, sound: place.write_bytes(sound.read_bytes()[: sound.stat().st_size // 3]),
    "zeros": lambda place, sound: place.write_bytes(bytes(8192)),
    "a folder": lambda place, sound: place.mkdir(),
    "a link to itself": lambda place, sound: place.symlink_to(place),
    "a device": lambda place, sound: place.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_database_is_one_line(cli: Cli, sound: Path, name: str, tmp_path: Path) -> None:
    FILES[name](place := tmp_path / "place.db", sound)
    for command in COMMANDS:
        result = cli(*(word.format(folder=sound.parent) for word in command), db=place)
        assert result.exit_code in (ExitCode.USAGE, ExitCode.FAILED), (command, result.output)
        assert result.stderr.count("\n") <= 1, (command, result.stderr)
