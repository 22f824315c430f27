"""Temporary folders that do not outlive their process, even if it is killed.

Each has a keeper, which is started before the folder is made: a small process that waits for the end of its parent and
of all others that hold the folder's lock, and then removes the folder. If the keeper was killed too, such as with a
container, the next process that makes a folder removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"groupbench-([a-z]+)-(\d+)-\w{8}")
_FRESH_S = 60.0  # age up to which a folder without a lock may still be getting one

_KEEPER = """
import fcntl, os, sys
folder, lock, *command = sys.argv[1:]
os.read(0, 1)
try:
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    os.stat(folder)
except OSError:
    sys.exit()
import shutil, subprocess, time
if command:
    fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_EX)
    subprocess.run(command, stdin=subprocess.DEVNULL)
for _ in range(50):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
    time.sleep(0.1)
"""
"""Waits until its input ends and no process holds a folder, runs a command under another lock, and removes the folder.

A process left behind may still write there for a moment.
"""


@dataclass(frozen=True)
class Ending:
    """A command that the keeper of a killed process runs before it removes the folder.

    Attributes:
        lock: Folder whose lock the keeper holds during the command.
        command: Program and its arguments.
        environment: The program's environment.
    """

    lock: str
    command: Sequence[str]
    environment: Mapping[str, str]


class Scratch:
    """A temporary folder under a lock. A context manager: yields a path and removes it at the end.

    path    the folder
    handle  descriptor of the lock; the folder is kept as long as any process has it open

    Raises OSError.
    """

    def __init__(self, kind: str, folder: str | None = None, ending: Callable[[Path], Ending] | None = None) -> None:
        """Make the folder, in `folder` instead of the usual one for temporary files."""
        remove_abandoned()
        name = f"groupbench-{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path = Path(folder or tempfile.gettempdir()).absolute() / name
        self._removed = False
        self._keeper = _keeper_of(self.path, ending(self.path) if ending else Ending("", (), os.environ))
        try:
            self.path.mkdir(0o700)
            self.handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except BaseException:
            if self._keeper is not None:
                self._keeper.communicate()  # it removes the folder
            raise
        with contextlib.suppress(OSError):  # without locks, the file system keeps an abandoned folder
            fcntl.flock(self.handle, fcntl.LOCK_EX)

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.communicate()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all contents. Does nothing the second time."""
        if not self._removed:
            self._removed = True
            shutil.rmtree(self.path, ignore_errors=True)
            self._end_keeper()
            os.close(self.handle)


def _keeper_of(path: Path, ending: Ending) -> subprocess.Popen[bytes] | None:
    """Start the keeper of a folder, whose input ends with this process. Returns None if it cannot be started."""
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(path), ending.lock, *ending.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=ending.environment,
        )
    except OSError:
        return None


def remove_abandoned() -> None:
    """Remove this user's scratch folders that no process holds any more."""
    for folder in Path(tempfile.gettempdir()).glob("groupbench-*-*-*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_scratch(folder: Path, kind: str) -> bool:
    """Return whether a folder has the name of a Scratch of this kind. It need not exist."""
    name = _NAME.fullmatch(folder.name)
    return name is not None and name[1] == kind


def is_abandoned(folder: Path) -> bool:
    """Return whether a folder is a Scratch whose process, and every other lock holder, has ended."""
    name = _NAME.fullmatch(folder.name)
    if name is None:
        return False
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        facts = os.fstat(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    # One made just now may not be locked yet; a number may be another process's by now.
    fresh = time.time() - facts.st_mtime < _FRESH_S and _is_running(int(name[2]))
    return facts.st_uid == os.geteuid() and not fresh


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
