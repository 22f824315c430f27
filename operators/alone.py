"""One command at a time on a device: `python -m groupbench.operators.alone COMMAND ...`.

Two that measure on one GPU at the same time spoil each other's numbers. Whoever holds the lock of a device is named in
its file, /tmp/groupbench-DEVICE.lock; the lock itself is the kernel's (filelock's flock, which works over NFS too),
goes with the process that holds it, however that ends, and is inherited by what it starts. Containers share it where
they share the folder that GROUPBENCH_LOCKS names.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import shlex
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.tracker import durations
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.night.measuring import HELD
from groupbench.tracker.text.wording import printable

POLL_S = 1.0
LONGEST_WAIT_S = 600_000.0
SIGNED = b'{"pid": '
"""With what each file of a lock begins, unless it is empty."""

LONGEST = 300
"""Characters of each word that a lock's file says of its holder."""


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


_HELD: list[object] = []
"""Locks of this process. Each lasts as long as the process, since nothing releases it."""


def take(device: str, command: list[str], wait_s: float = 0.0) -> Path:
    """Hold the device for this process and what it starts, until they end. Returns the lock's file.

    Raises Busy once `wait_s` seconds are over, UsageError where no lock can be made.
    """
    import filelock

    path = lock_file(device)
    holder = {
        "pid": os.getpid(),
        "user": _user(),
        "host": platform.node(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "folder": str(Path.cwd()),
        "command": shlex.join(command),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(
            path,
            timeout=wait_s,
            poll_interval=POLL_S,
            mode=0o666,  # whoever measures next on this card may be another user
            thread_local=False,
            fallback_to_soft=False,  # a lock that outlives its holder would stop the next night
            preserve_lock_file=True,
            on_acquired=lambda handle: _sign(handle, path, holder),
        )
        lock.acquire()
    except filelock.Timeout:
        raise Busy(f"{device} is measured on by {_holder(path)}") from None
    except OSError as error:
        raise UsageError(f"cannot lock {path}: {error.strerror}; GROUPBENCH_LOCKS names another folder") from error
    _HELD.append(lock)
    return path


def _sign(handle: int, path: Path, holder: dict[str, object]) -> None:
    """Write who holds the lock into its file. Raises UsageError, and changes nothing, where the file is another's."""
    kind = "a pipe, a device or the like" if not stat.S_ISREG(os.fstat(handle).st_mode) else ""
    if not kind and not SIGNED.startswith(os.pread(handle, len(SIGNED), 0)):
        kind = "a file of something else"
    if kind:
        raise UsageError(f"cannot lock {path}: it is {kind}; remove it, or name another folder by GROUPBENCH_LOCKS")
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)
    os.set_inheritable(handle, True)  # the lock lasts as long as any process that has inherited it


def _holder(path: Path) -> str:
    """Who has the lock, and what to do: its taker, or what is left of it where that was killed.

    The file's text may be anybody's: it is shortened, and what steers a terminal is taken out.
    """
    later = "; try again later, or wait"
    try:
        held = json.loads(_read(path))
        pid, host = int(held["pid"]), str(held["host"])
        words = {name: printable(str(held[name]))[:LONGEST] for name in ("user", "host", "since", "command", "folder")}
        taker = f"pid {pid} " + "of {user} on {host} since {since}: {command} (in {folder})".format(**words)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"another process{later}"
    if host != platform.node():  # its processes are not among ours
        return taker + later
    holders = _holders(path)
    left = [holder for holder, parent in holders.items() if parent not in holders]
    if pid in holders:
        return taker + later
    if not left:  # another user's, or a system that does not tell
        over = not Path(f"/proc/{pid}").exists()
        return taker + (", which is over, but not all that it started" if over else "") + later
    pids = " ".join(map(str, left))
    return f"pid {pids}: {_command(left[0])}, which {taker} started and left behind; wait, or end it: kill {pids}"


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would keep a reader waiting
    try:
        return os.read(handle, 65_536)
    finally:
        os.close(handle)


def _holders(path: Path) -> dict[int, int]:
    """{process: its parent} of all here that have the lock of this file, as far as this user may look.

    A process that waits has the file open too: the kernel's notes on each open file name the lock.
    """
    file = path.lstat()
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
        return printable(shlex.join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]))
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


def _wait(text: str) -> float:
    """Seconds of a duration. Raises argparse.ArgumentTypeError."""
    try:
        return durations.seconds(text, "m")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m groupbench.operators.alone",
        description="Run a command while nothing else of groupbench measures on the device.",
        epilog=f"Exit codes: the command's; {ExitCode.BUSY} another holds the device, 2 usage.",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--wait",
        type=_wait,
        default=0.0,
        metavar="DURATION",
        help="for the one before to end, such as 20m; a plain number is minutes",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command is given")
    if not 0 <= given.wait <= LONGEST_WAIT_S:
        parser.error("--wait is 0 to 10000 minutes")
    try:
        run(given.device, given.wait, command)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
