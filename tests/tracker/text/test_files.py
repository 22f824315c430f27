"""Files that commands write: completely or not at all, and never in place of a pipe or device."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Cli

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.text.files import append_whole, whole_file

pytestmark = pytest.mark.sqlite


def test_it_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    with whole_file(path, StoreError) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    with pytest.raises(StoreError, match="cannot be written: No space left"), whole_file(path, StoreError):
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyError), whole_file(path, StoreError) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("target", [".", "none/f", "x" * 300])
def test_places_that_are_none(tmp_path: Path, target: str) -> None:
    with pytest.raises(StoreError), whole_file(tmp_path / target, StoreError) as file:
        file.write(b"")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "starts"), [(("report", "-o"), b"<!doctype"), (("db", "export", "--format", "jsonl"), b"{")]
)
def test_a_pipe_is_written_to_and_stays_one(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, command: tuple[str, ...], starts: bytes
) -> None:
    stored([make()])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert cli(*command, pipe).exit_code == 0
    reader.join(20)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert read[0].lower().startswith(starts)


@pytest.mark.parametrize("command", [("report", "-o"), ("db", "export", "--format", "jsonl")])
def test_a_reader_that_goes_away_is_one_line(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    stored([make(night, backend=f"b{i}") for night in range(3) for i in range(100)])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_RDONLY)), daemon=True)
    reader.start()
    result = cli(*command, pipe)
    reader.join(20)
    assert (result.exit_code, "cannot be written: Broken pipe" in result.stderr) == (2, True)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_is_added_is_added_whole_or_not_at_all(tmp_path: Path, full_disk: Callable[[int], Any]) -> None:
    path = tmp_path / "f"
    append_whole(path, b"one\n", StoreError)
    append_whole(path, b"two\n", StoreError)
    with full_disk(10), pytest.raises(StoreError, match="cannot be written: File too large"):
        append_whole(path, b"three\n", StoreError)
    assert path.read_bytes() == b"one\ntwo\n"
    append_whole(Path(os.devnull), b"x", StoreError)  # no file to be made whole
    with pytest.raises(StoreError, match="cannot be written"):
        append_whole(tmp_path / "no" / "f", b"x", StoreError)
