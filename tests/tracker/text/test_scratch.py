"""Scratch folders: removed by the process that made them, by their keeper, or by the next process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from groupbench.tracker.text.scratch import Ending, Scratch

MAKER = """
import os, subprocess, sys
from groupbench.tracker.text.scratch import Scratch
scratch = Scratch("test")
if "KEPT" not in os.environ:
    scratch._keeper.kill()
child = subprocess.Popen(sys.argv[1:] or ["true"], pass_fds=[scratch.handle])
(scratch.path / "file").write_text(str(child.pid))
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def start(*command: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_its_maker_removes_it(folder: Path) -> None:
    with Scratch("test") as path:
        (path / "file").touch()
        assert path.parent == folder
    assert not list(folder.iterdir())


def test_its_keeper_removes_that_of_a_killed_process_and_first_runs_a_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "")
    killed, left = start()
    end(killed)
    while left.exists():
        time.sleep(0.01)
    made = Scratch("test", None, lambda path: Ending(str(folder), ["cp", "-r", str(path), str(folder / "copy")], {}))
    (made.path / "file").touch()
    assert made._keeper is not None
    os.close(made.handle)  # as its process's end does
    made._keeper.communicate()
    assert (folder / "copy" / "file").exists()


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from groupbench.tracker.text.scratch import Scratch

def killed(path, *arguments, **options):
    if sys.argv[1] == "mkdir":
        made(path, *arguments, **options)
    print(path, path.exists(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

where = {"mkdir": Path, "rmtree": shutil}[sys.argv[1]]
made = getattr(where, sys.argv[1])
setattr(where, sys.argv[1], killed)
Scratch("test").remove()
"""


@pytest.mark.parametrize("moment", ["mkdir", "rmtree"])
def test_its_keeper_is_there_before_it_and_after_it(folder: Path, moment: str) -> None:
    command = [sys.executable, "-c", KILLED, moment]
    left, _, existed = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.rstrip().rpartition(" ")
    assert existed == "True"
    while Path(left).exists():
        time.sleep(0.01)


def test_the_next_one_removes_that_of_a_killed_process_alone(folder: Path) -> None:
    (folder / "groupbench-root").mkdir()
    (folder / "groupbench-test-1-x").mkdir()
    killed, left = start()
    living, kept = start()
    end(killed)
    assert left.exists()
    with Scratch("test") as path:
        assert not left.exists() and kept.exists()
        assert {entry.name for entry in folder.iterdir()} == {
            *("groupbench-root", "groupbench-test-1-x", kept.name, path.name)
        }
    end(living)


def test_it_is_kept_while_another_process_has_its_lock() -> None:
    killed, left = start("sleep", "1000")
    sleeper = Path("/proc", (left / "file").read_text())
    end(killed)
    with Scratch("test"):
        assert left.exists()
    os.kill(int(sleeper.name), signal.SIGKILL)
    while sleeper.exists():
        time.sleep(0.01)
    with Scratch("test"):
        assert not left.exists()
