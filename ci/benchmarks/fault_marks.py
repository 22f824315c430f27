"""Check that every command handles a file that is not a database, and a disk without room: in one line, never hanging.

    python ci/benchmarks/fault_marks.py

Each command of damage_marks.py runs on each file of FILES, and as root also on full file systems, which are mounted
for it. It must end within a minute, without a traceback, and with 2 and one line if it fails. `verify` must accept the
database that it leaves on a full file system. Prints each problem and the totals. The exit code is 1 if
there is a problem.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import damage_marks
from click.testing import CliRunner

from groupbench.tracker.cli import main
from groupbench.tracker.facts.exits import ExitCode

LIMIT_S = 60
COMMANDS = [*damage_marks.READING, *damage_marks.WRITING, ["repair", "{folder}/place.db", "{folder}/new.db"]]
MAY_WORK = ("no file", "an empty file", "a dangling link", "a database without its last page")
"""Files on which a command may succeed; in place of the first three, some make a new database."""
READ_ANYTHING = ("sql", "repair")
"""Commands that also read the files of other versions and programs."""


def _cut(share: float) -> Callable[[Path, Path], None]:
    def make(place: Path, sound: Path) -> None:
        content = sound.read_bytes()
        place.write_bytes(content[: int(len(content) * share)])

    return make


def _foreign(place: Path, sound: Path) -> None:
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("CREATE TABLE point (x)")
        connection.commit()


def _newer(place: Path, sound: Path) -> None:
    shutil.copyfile(sound, place)
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()


FILES: dict[str, Callable[[Path, Path], Any]] = {
    "no file": lambda place, sound: None,
    "an empty file": lambda place, sound: place.touch(),
    "100 bytes": lambda place, sound: place.write_bytes(sound.read_bytes()[:100]),
    "a third of a database": _cut(1 / 3),
    "a database without its last page": _cut(0.99),
    "zeros": lambda place, sound: place.write_bytes(bytes(sound.stat().st_size)),
    "text": lambda place, sound: place.write_text("not a database\n" * 1000),
    "a directory": lambda place, sound: place.mkdir(),
    "a pipe": lambda place, sound: os.mkfifo(place),
    "a dangling link": lambda place, sound: place.symlink_to("nowhere"),
    "a link to itself": lambda place, sound: place.symlink_to(place),
    "a device": lambda place, sound: place.symlink_to("/dev/zero"),
    "another program's database": _foreign,
    "a newer version's database": _newer,
}
"""The files in the place of the database, each with a function that makes it from an undamaged one."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError in a command that hangs."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"still running after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(command: list[str], place: Path, folder: Path, must_fail: bool = False) -> str | None:
    """Run a command. Returns a description of the problem if it did not end properly."""
    words = [word.format(folder=folder) for word in command]
    with limited():
        result = CliRunner().invoke(main, ["--db", str(place), *words])
    if isinstance(result.exception, TimeoutError):
        return str(result.exception)
    if must_fail and result.exit_code not in (ExitCode.USAGE, ExitCode.FAILED):
        return f"ended with {result.exit_code}"
    return damage_marks.wrong_end(command, result)


def file_problems(name: str, sound: Path, folder: Path, commands: Sequence[list[str]] = COMMANDS) -> Iterator[str]:
    """Put the file of a name in the place of a database, run commands on it, and yield the problems."""
    place = folder / "place.db"
    for command in commands:
        _remove(place, folder / "new.db", folder / "copy.db")
        FILES[name](place, sound)
        if wrong := check(command, place, folder, name not in MAY_WORK and command[0] not in READ_ANYTHING):
            yield f"{name}: {' '.join(command)}: {wrong}"


def full_disk_problems(sound: Path, mounted: Path, folder: Path) -> Iterator[str]:
    """Fill a small file system, run every command on a database there, and yield the problems."""
    full = mounted / "full"
    for command in [*damage_marks.READING, *damage_marks.WRITING, ["ingest", str(sound.parent / "all.jsonl")]]:
        new = command[-1].endswith("all.jsonl")
        place = mounted / "place.db"
        _remove(full, place, folder / "copy.db", *mounted.glob(".*"))
        if not new:
            shutil.copyfile(sound, place)
        _fill(full)
        if wrong := check(command, place, folder):
            yield f"full disk: {' '.join(command)}: {wrong}"
        full.unlink(missing_ok=True)
        if place.exists() and CliRunner().invoke(main, ["--db", str(place), "verify"]).exit_code != ExitCode.OK:
            yield f"full disk: {' '.join(command)}: left a damaged database"


def _fill(full: Path) -> None:
    """Take the rest of the file system: its bytes, or if none is left for a file, its inodes."""
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _remove(*places: Path) -> None:
    for place in places:
        for path in (place, Path(f"{place}-wal"), Path(f"{place}-shm"), Path(f"{place}-journal")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def file_system(place: Path, *options: str) -> Iterator[Path]:
    """Mount a small file system in memory. Only root may."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def problems(folder: Path) -> Iterator[str]:
    sound = damage_marks.build(folder)
    for name in FILES:
        yield from file_problems(name, sound, folder)
    if os.geteuid() == 0:
        size = sound.stat().st_size + (256 << 10)
        with file_system(folder / "bytes", f"size={size}") as mounted:
            yield from full_disk_problems(sound, mounted, folder)
        with file_system(folder / "inodes", "size=64m", "nr_inodes=3") as mounted:  # the folder, the file, and one
            yield from full_disk_problems(sound, mounted, folder)


def marks() -> int:
    number = 0
    with tempfile.TemporaryDirectory() as name:
        for problem in problems(Path(name)):
            print(problem, flush=True)
            number += 1
    print(f"{len(FILES)} files, {len(COMMANDS)} commands each, full file systems: {number} problems")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(marks())
