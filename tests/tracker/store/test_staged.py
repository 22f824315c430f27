"""Check a file of records in one process or several, before the database is open."""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import encode
from groupbench.tracker.store import checked as checks
from groupbench.tracker.store import processes
from groupbench.tracker.store import staged as stages
from groupbench.tracker.store.checked import Checked
from groupbench.tracker.store.staged import Staged, checking


def checked(lines: list[bytes], source: str) -> list[Checked]:
    with tempfile.TemporaryFile() as stream:
        stream.write(b"".join(lines))
        stream.seek(0)
        with checking(stream, source) as parts, Staged(parts, source) as staged:
            return list(staged)


@pytest.mark.parametrize("in_memory", [1, 1 << 20], ids=["on disk", "in memory"])
def test_staged_records_come_back_unchanged(make: Any, monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    lines = [
        encode(make(night, backend=f"b{number}", environment={"gpu_uuid": str(number % 2)}))
        for night in range(2)
        for number in range(5)
    ]
    whole = checked(lines, "file")
    monkeypatch.setattr(stages, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(stages, "_PART", len(lines[0]))
    assert checked(lines, "file") == whole
    assert len({id(row.run) for row in whole}) == len({id(row.environment) for row in whole}) == 2


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every part in one of two processes."""
    monkeypatch.setattr(stages, "_PART", 1)
    monkeypatch.setattr(stages, "_SPLIT_FROM_BYTES", 1)
    monkeypatch.setattr(processes, "processes", lambda: 2)


def forks() -> list[Any]:
    """Return the running children that were forked; other tests may have left spawned ones, which wait for work."""
    return [child for child in multiprocessing.active_children() if type(child).__name__ == "ForkProcess"]


@pytest.mark.usefixtures("in_processes")
def test_processes_report_the_first_bad_line(make: Any) -> None:
    lines = [encode(make(backend=f"b{number}")) for number in range(40)]
    contradiction = [*lines, encode(make(backend="b3", ms=2.0)), b"{\n"]
    with pytest.raises(IngestError, match="file: line 41: contradicts line 4 "):
        checked(contradiction, "file")
    with pytest.raises(IngestError, match="file: line 31: "):
        checked([*lines[:30], b"{\n", *lines[30:], *contradiction], "file")
    assert forks() == []


@pytest.mark.usefixtures("in_processes")
def test_an_interrupt_ends_the_processes(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"".join(encode(make(backend=f"b{number}")) for number in range(40)))
    with (
        (tmp_path / "file").open("rb") as stream,
        pytest.raises(KeyboardInterrupt),
        checking(stream, "file") as parts,
    ):
        next(parts)
        assert len(forks()) == 2
        raise KeyboardInterrupt
    assert forks() == []


@pytest.mark.usefixtures("in_processes")
def test_a_killed_process_is_an_error_of_one_line(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "unstorable_result", lambda _: os._exit(1))
    with pytest.raises(ChildProcessError, match="one of its processes was killed"):
        checked([encode(make())], "file")


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("__init__", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
        ("submit", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
        ("__init__", NotImplementedError("This Python build lacks multiprocessing.synchronize")),
    ],
    ids=["pool", "process", "no_semaphores"],
)
def test_where_no_process_can_be_started_this_one_checks(
    place: str, error: Exception, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [encode(make(backend=f"b{number}")) for number in range(4)]
    several = checked(lines, "file")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    class Failing(processes.ProcessPoolExecutor):
        pass

    setattr(Failing, place, fail)
    monkeypatch.setattr(processes, "ProcessPoolExecutor", Failing)
    assert several == checked(lines, "file")


@pytest.mark.usefixtures("in_processes")
def test_no_process_is_left_if_a_second_one_cannot_be_started(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = os.fork, []

    def one() -> int:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(True)
        return fork()

    monkeypatch.setattr(os, "fork", one)
    assert len(checked([encode(make(backend=f"b{number}")) for number in range(4)], "file")) == 4
    assert started and forks() == []


@pytest.mark.usefixtures("in_processes")
def test_a_bad_line_of_a_pipe_is_reported_before_its_end(make: Any) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb", 0) as writer:
        writer.write(encode(make()) + b"{\n")
        with pytest.raises(IngestError, match="pipe: line 2: "), checking(stream, "pipe") as parts:
            Staged(parts, "pipe")
