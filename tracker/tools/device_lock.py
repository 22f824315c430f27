"""A device's lock: the file's place, the holder, and a warning if another command holds it.

`lease.py` takes the lock. `tritonbench` on its own only warns.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupbench.tracker.text.wording import printable
from groupbench.tracker.tools.processes import parent_of

HELD = "GROUPBENCH_ALONE"
"""Environment variable with the lock file, set for processes under a device's lock."""

HANDLE = "GROUPBENCH_ALONE_HANDLE"
"""Environment variable with the number of the holder's open descriptor of that file."""

LOCK = ".lock"
REMEDY = "try again later, or wait for it with `--wait 1h`"

LONGEST_WORD = 300
"""Characters shown of each field in a lock file."""

WORDS = ("user", "host", "since", "command", "folder")

_WARNED: set[str] = set()
"""Warnings that this process has printed."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, as text, and how to get past it."""

    text: str
    remedy: str = REMEDY


def device_name(device: str, gpu_uuid: str | None) -> str:
    """Return the name of a device for its lock: the UUID of the GPU, or cpu-HOST."""
    return f"cpu-{platform.node() or 'here'}" if device == "cpu" else str(gpu_uuid)


def lock_file(device: str) -> Path:
    """Return a device's lock file, by `device_name`."""
    # All accounts share the folder: only its own kind of file is written to, and the text of one is not trusted.
    folder = Path(os.environ.get("GROUPBENCH_LOCKS") or "/tmp")  # noqa: S108
    return folder / f"groupbench-{device.replace('/', '_')}{LOCK}"


def warn_if_shared(program: str, device: str, gpu_uuid: str | None) -> None:
    """Print one line on standard error if another command holds the device's lock.

    Does nothing if this process runs under the lock itself, and prints each holder once.
    """
    name = device_name(device, gpu_uuid)
    path = lock_file(name)
    if os.environ.get(HELD) == str(path) or not is_locked(path):
        return
    warning = (
        f"{program}: {name} is also in use by {holder(path).text}: both measurements will be noisy; to wait for it, "
        "run `python -m groupbench.operators.alone --wait 1h COMMAND`"
    )
    if warning not in _WARNED:
        _WARNED.add(warning)
        print(warning, file=sys.stderr, flush=True)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock. To find out, this holds it for a moment, shared with others that ask."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # no such file, or another user's private one
        return False
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def holder(path: Path) -> Holder:
    """Return the lock's holder: the process named in the file, or the children if it was killed."""
    facts = read_facts(path)
    if facts is None:
        return Holder("another process")
    pid, words = facts
    taker = f"pid {pid} " + "of {user} on {host} since {since}: {command} (in {folder})".format(**words)
    if words["host"] != printable(platform.node()):  # its processes are not visible here
        return Holder(taker)
    holders = _holders(path)
    left = [process for process, parent in holders.items() if parent not in holders]
    if pid in holders:
        return Holder(taker)
    if not left:  # another user's process, or a system without /proc
        over = not Path(f"/proc/{pid}").exists()
        return Holder(taker + (", which has ended, but left processes running" if over else ""))
    pids = " ".join(map(str, left))
    text = f"pid {pids}: {_command(left[0])}, which {taker} started and left behind"
    return Holder(text, f"wait for it with `--wait 1h`, or end it: kill {pids}")


def read_facts(path: Path) -> tuple[int, dict[str, str]] | None:
    """Return the process id, and the user, host, time, command and folder, in a lock file or a ticket, if any.

    Anyone can write the file, so the text is shortened and stripped of terminal control characters.
    """
    try:
        return facts_of(json.loads(_read(path)))
    except (OSError, ValueError, RecursionError):
        return None


def facts_of(held: Any) -> tuple[int, dict[str, str]] | None:
    """Return the process id, and the words to show, of a lock's decoded content, if it has these."""
    try:
        return int(held["pid"]), {name: printable(str(held[name]))[:LONGEST_WORD] for name in WORDS}
    except (ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would keep a reader waiting
    try:
        return os.read(handle, 65_536)
    finally:
        os.close(handle)


def _holders(path: Path) -> dict[int, int]:
    """Return {process: parent} for the processes here holding the lock, as far as this user may see them.

    A waiting process has the file open too, so /proc/PID/fdinfo is searched for the lock.
    """
    file = path.lstat()
    holders = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for link in (process / "fd").iterdir():
                there = link.stat()
                if (there.st_dev, there.st_ino) != (file.st_dev, file.st_ino):
                    continue
                if "FLOCK" in (process / "fdinfo" / link.name).read_text():
                    holders[int(process.name)] = parent_of(int(process.name))
        except OSError:  # another user's process, or one that has ended
            continue
    return holders


def _command(pid: int) -> str:
    try:
        return printable(shlex.join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]))
    except OSError:
        return "a command that has ended"
