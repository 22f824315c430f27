"""Which run is not ended, and which ended last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.night.files import NightFiles, run_of


def test_a_run_from_its_beginning_to_its_end(tmp_path: Path, make: Callable[..., Record]) -> None:
    files = NightFiles(tmp_path / "records", "cpu")
    assert (files.unfinished, files.newest) == (None, None)
    files.claim()
    file = files.begin()
    assert NightFiles(tmp_path / "records", "cpu").unfinished == file
    assert NightFiles(tmp_path / "records", "gpu").unfinished is None  # each device has its own
    assert NightFiles(tmp_path / "records", "cpu", "stable").unfinished is None  # and each toolchain
    file.write_bytes(encode(make(1)))
    assert run_of(file) == "run-001"
    files.end()
    assert (files.unfinished, files.newest) == (None, file)
    file.unlink()  # by a person who tidied up
    assert files.newest is None


def test_a_run_that_measured_nothing_is_forgotten(tmp_path: Path) -> None:
    files = NightFiles(tmp_path, "cpu")
    files.claim()
    files.begin()
    files.forget()
    assert files.unfinished is None and files.newest is None


def test_what_nobody_can_read_is_set_aside(tmp_path: Path, make: Callable[..., Record]) -> None:
    files = NightFiles(tmp_path, "cpu")
    file = files.begin()
    file.write_bytes(encode(make(1)) + b'{"half": ')  # as a process leaves it that was killed
    assert files.set_aside_unreadable() == []
    file.write_bytes(b"no record\n")
    (moved,) = files.set_aside_unreadable()
    assert moved.read_bytes() == b"no record\n" and not file.exists()
    assert files.unfinished is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IngestError, match=r"cannot write .*(Not a directory|File exists)"):
        NightFiles(tmp_path / "file", "cpu").claim()


def test_only_one_process_writes_a_devices_files(tmp_path: Path) -> None:
    """Two containers may share the folder, but not the device's lock."""
    first = NightFiles(tmp_path, "cpu")
    first.claim()
    with pytest.raises(IngestError, match="another night writes"):
        NightFiles(tmp_path, "cpu").claim()
    NightFiles(tmp_path, "gpu").claim()
    del first  # as when its process ends
    NightFiles(tmp_path, "cpu").claim()
