"""Folders that are kept between commands have a size and an age, and none is removed under a process that uses it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from groupbench.operators.measure import bounded

KIB = 64
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a folder with a file, last used some hours ago, where three such folders fit."""
    monkeypatch.setattr(bounded, "MOST_BYTES", 3 * KIB * 1024 + KIB * 512)

    def made(name: str, hours: float, kib: int = KIB) -> Path:
        folder = tmp_path / name
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_bytes(b"x" * kib * 1024)
        os.utime(folder, (time.time() - 3600 * hours,) * 2)
        return folder

    return made


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_least_recently_used_are_removed_beyond_the_size(tmp_path: Path, make: Make) -> None:
    bounded.trim(tmp_path / "none yet")
    for number in range(5):
        make(f"used {number} hours ago", number)
    bounded.trim(tmp_path)
    assert names(tmp_path) == [f"used {number} hours ago" for number in range(3)]
    bounded.trim(tmp_path)
    assert len(names(tmp_path)) == 3


def test_one_folder_beyond_the_size_is_removed(tmp_path: Path, make: Make) -> None:
    make("large", 0, 4 * KIB)
    bounded.trim(tmp_path)
    assert names(tmp_path) == []


def test_what_is_unused_for_long_or_half_removed_goes_whatever_the_size(tmp_path: Path, make: Make) -> None:
    make("old", bounded.UNUSED_S / 3600 + 1)
    make(f"{bounded._REMOVED}1", 0)
    make("new", 0)
    (tmp_path / "file").touch()
    bounded.trim(tmp_path)
    assert names(tmp_path) == ["file", "new"]


def test_a_folder_that_another_process_holds_is_kept(tmp_path: Path, make: Make) -> None:
    for number in range(5):
        make(str(number), number)
    code = "import sys; from pathlib import Path; from groupbench.operators.measure.bounded import hold; "
    code += "hold(Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "4")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.utime(tmp_path / "4", (0, 0))
        bounded.trim(tmp_path)
        assert names(tmp_path) == ["0", "1", "4"]
        holder.communicate("\n")
    bounded.trim(tmp_path)
    assert names(tmp_path) == ["0", "1"]


def test_a_folder_that_is_removed_before_its_lock_is_made_again(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = make("used", 0), fcntl.flock
    moments = iter([True, False])

    def late(handle: int, how: int) -> None:
        if how == fcntl.LOCK_SH and next(moments):
            assert bounded._remove(folder)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    bounded.hold(folder)
    assert names(folder) == [] and not bounded._remove(folder)
    bounded.hold(folder)  # once for each process
