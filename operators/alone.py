"""One command at a time on a device: `python -m groupbench.operators.alone COMMAND ...`.

Two that measure on one GPU at the same time spoil each other's numbers. Whoever holds the lock of a device is named in
its file, /tmp/groupbench-DEVICE.lock; the lock itself is the kernel's (flock), goes with the process that holds it,
however that ends, and is inherited by what it starts. Containers share it where they share the folder that
GROUPBENCH_LOCKS names.
"""

from __future__ import annotations

import argparse
import fcntl
import getpass
import json
import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.tracker.exits import ExitCode

POLL_S = 1.0
HELD = "GROUPBENCH_ALONE"
"""Environment variable of what runs under a lock: the lock's file."""


class Busy(GroupbenchError):
    """Another process measures on this device: says which."""

    exit_code = ExitCode.BUSY


def device_name(asked: str) -> str:
    """The UUID of the GPU that would be measured on, or cpu-HOST. Raises GroupbenchError."""
    from groupbench.operators.measure.environment import resolve_device

    if resolve_device(asked) == "cpu":
        return f"cpu-{platform.node() or 'here'}"
    from groupbench.operators import executor

    return str(executor.probe("cuda").environment.gpu_uuid)


def lock_file(device: str) -> Path:
    folder = Path(os.environ.get("GROUPBENCH_LOCKS") or "/tmp")
    return folder / f"groupbench-{device.replace('/', '_')}.lock"


def take(device: str, command: list[str], wait_s: float = 0.0) -> Path:
    """Hold the device for this process and what it starts, until they end. Returns the lock's file.

    Raises Busy once `wait_s` seconds are over, UsageError where no lock can be made.
    """
    path = lock_file(device)
    handle = _open(path)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Busy(f"{device} is measured on by {_holder(handle)}") from None
            time.sleep(POLL_S)
    holder = {
        "pid": os.getpid(),
        "user": _user(),
        "host": platform.node(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "folder": str(Path.cwd()),
        "command": shlex.join(command),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)
    os.set_inheritable(handle, True)  # closed by no one: the lock lasts as long as whoever has it
    return path


def _open(path: Path) -> int:
    """The file, which stays for ever: one that is removed could be locked twice."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # without O_CREAT: in /tmp it may be another user's
        except FileNotFoundError:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            os.fchmod(handle, 0o666)  # whoever measures next on this card may be another user
            return handle
    except OSError as error:
        raise UsageError(f"cannot lock {path}: {error.strerror}; GROUPBENCH_LOCKS names another folder") from error


def _holder(handle: int) -> str:
    """Who has the lock, and what to do: whoever took it, or what is left of it where that was killed."""
    later = "; try again later, or wait"
    try:
        held = json.loads(os.pread(handle, 65_536, 0))
        taker = "pid {pid} of {user} on {host} since {since}: {command} (in {folder})".format(**held)
        pid, host = held["pid"], held["host"]
    except (ValueError, KeyError, TypeError):
        return f"another process{later}"
    if host != platform.node():  # its processes are not among ours
        return taker + later
    holders = _holders(handle)
    left = [holder for holder, parent in holders.items() if parent not in holders]
    if pid in holders:
        return taker + later
    if not left:  # another user's, or a system that does not tell
        over = not Path(f"/proc/{pid}").exists()
        return taker + (", which is over, but not all that it started" if over else "") + later
    pids = " ".join(map(str, left))
    return f"pid {pids}: {_command(left[0])}, which {taker} started and left behind; wait, or end it: kill {pids}"


def _holders(handle: int) -> dict[int, int]:
    """{process: its parent} of all here that have the lock of this file, as far as this user may look.

    Whoever waits has the file open too: the lock is told by the kernel's notes on each open file.
    """
    file = os.fstat(handle)
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for link in (process / "fd").iterdir():
                there = link.stat()
                if (there.st_dev, there.st_ino) != (file.st_dev, file.st_ino):
                    continue
                if "FLOCK" in (process / "fdinfo" / link.name).read_text():
                    status = (process / "stat").read_text()
                    found[int(process.name)] = int(status.rpartition(")")[2].split()[1])
        except OSError:  # another user's, or over
            continue
    return found


def _command(pid: int) -> str:
    try:
        return shlex.join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1])
    except OSError:
        return "a command that is over"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        return str(os.getuid())


def run(device: str, wait_s: float, command: list[str]) -> NoReturn:
    """Become the command, holding the device. Raises GroupbenchError."""
    environment = dict(os.environ)  # before `device_name`, which may set up Triton's interpreter for itself
    path = take(device_name(device), command, wait_s)
    try:
        os.execvpe(command[0], command, {**environment, HELD: str(path)})
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m groupbench.operators.alone",
        description="Run a command while nothing else of groupbench measures on the device.",
        epilog=f"Exit codes: the command's; {ExitCode.BUSY} another holds the device, 2 usage.",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--wait", type=float, default=0.0, metavar="MINUTES", help="for the one before to end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command is given")
    if not 0 <= given.wait <= 10_000:
        parser.error("--wait is 0 to 10000 minutes")
    try:
        run(given.device, 60 * given.wait, command)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
