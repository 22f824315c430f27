"""Run one command at a time on a device: `python -m groupbench.operators.alone COMMAND ...`.

Two measurements on one GPU at the same time disturb each other. The file /tmp/groupbench-DEVICE.lock names the holder
of the lock. The lock itself is the operating system's (filelock's flock, which also works over NFS): it is released
when its process ends, in whatever way, and child processes inherit it. Containers share the lock if they share the
folder named by GROUPBENCH_LOCKS.
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
"""The first bytes of every lock file that is not empty."""

LONGEST = 300
"""Characters shown of each field in a lock file."""


class Busy(GroupbenchError):
    """Another process is measuring on this device. The message names the process."""

    exit_code = ExitCode.BUSY


def device_name(device: str) -> str:
    """Return the UUID of the GPU to measure on, or cpu-HOST. Raises GroupbenchError."""
    from groupbench.operators.measure.environment import resolve_device

    if resolve_device(device) == "cpu":
        return f"cpu-{platform.node() or 'here'}"
    from groupbench.operators import executor

    return str(executor.probe("cuda").environment.gpu_uuid)


def lock_file(device: str) -> Path:
    # All accounts share the folder: `_sign` writes only into its own kind of file, and the text of one is not trusted.
    folder = Path(os.environ.get("GROUPBENCH_LOCKS") or "/tmp")  # nosec B108
    return folder / f"groupbench-{device.replace('/', '_')}.lock"


_HELD: list[object] = []
"""Locks of this process. They are never released, so they last as long as the process."""


def take(device: str, command: list[str], wait_s: float = 0.0) -> Path:
    """Lock the device for this process and its children, until they end. Returns the lock file.

    Raises Busy if the device is still locked after `wait_s` seconds, UsageError if the lock file cannot be used.
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
            mode=0o666,  # the next user of this GPU may be another account
            thread_local=False,
            fallback_to_soft=False,  # a lock that outlives its holder would block the next nightly run
            preserve_lock_file=True,
            on_acquired=lambda handle: _sign(handle, path, holder),
        )
        lock.acquire()
    except filelock.Timeout:
        raise Busy(f"{device} is in use by {_holder(path)}") from None
    except OSError as error:
        raise UsageError(f"cannot lock {path}: {error.strerror}; set GROUPBENCH_LOCKS to another folder") from error
    _HELD.append(lock)
    return path


def _sign(handle: int, path: Path, holder: dict[str, object]) -> None:
    """Write the holder into the lock file. Raises UsageError, and writes nothing, if it is not a lock file."""
    kind = "not a regular file" if not stat.S_ISREG(os.fstat(handle).st_mode) else ""
    if not kind and not SIGNED.startswith(os.pread(handle, len(SIGNED), 0)):
        kind = "not a lock file"
    if kind:
        raise UsageError(f"cannot lock {path}: it is {kind}; remove it, or set GROUPBENCH_LOCKS to another folder")
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)
    os.set_inheritable(handle, True)  # the lock lasts as long as any process that has inherited it


def _holder(path: Path) -> str:
    """Return who holds the lock and how to proceed: the process that took it, or its children if that was killed.

    Anyone can write the file, so its text is shortened and stripped of terminal control characters.
    """
    later = "; try again later, or wait"
    try:
        held = json.loads(_read(path))
        pid, host = int(held["pid"]), str(held["host"])
        words = {name: printable(str(held[name]))[:LONGEST] for name in ("user", "host", "since", "command", "folder")}
        taker = f"pid {pid} " + "of {user} on {host} since {since}: {command} (in {folder})".format(**words)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"another process{later}"
    if host != platform.node():  # its processes are not visible here
        return taker + later
    holders = _holders(path)
    left = [holder for holder, parent in holders.items() if parent not in holders]
    if pid in holders:
        return taker + later
    if not left:  # another user's process, or a system without /proc
        over = not Path(f"/proc/{pid}").exists()
        return taker + (", which has ended, but left processes running" if over else "") + later
    pids = " ".join(map(str, left))
    return f"pid {pids}: {_command(left[0])}, which {taker} started and left behind; wait, or end it: kill {pids}"


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would keep a reader waiting
    try:
        return os.read(handle, 65_536)
    finally:
        os.close(handle)


def _holders(path: Path) -> dict[int, int]:
    """Return {process: its parent} of the processes here that hold the lock, as far as this user may see them.

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
                    status = (process / "stat").read_text()
                    holders[int(process.name)] = int(status.rpartition(")")[2].split()[1])
        except OSError:  # another user's process, or one that has ended
            continue
    return holders


def _command(pid: int) -> str:
    try:
        return printable(shlex.join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]))
    except OSError:
        return "a command that has ended"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


def run(device: str, wait_s: float, command: list[str]) -> NoReturn:
    """Lock the device and replace this process by the command. Raises GroupbenchError."""
    environment = dict(os.environ)  # before `device_name`, which may set up Triton's interpreter for itself
    path = take(device_name(device), command, wait_s)
    try:
        os.execvpe(command[0], command, {**environment, HELD: str(path)})
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error


def _wait(text: str) -> float:
    """Parse a duration to seconds. Raises argparse.ArgumentTypeError."""
    try:
        return durations.seconds(text, "m")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m groupbench.operators.alone",
        description="Run a command while no other groupbench process measures on the device.",
        epilog=f"Exit codes: the command's; {ExitCode.BUSY} another process holds the device, 2 usage error.",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--wait",
        type=_wait,
        default=0.0,
        metavar="DURATION",
        help="wait this long for the device, such as 20m; a plain number is in minutes",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command is given")
    if not 0 <= options.wait <= LONGEST_WAIT_S:
        parser.error("--wait must be between 0 and 10000 minutes")
    try:
        run(options.device, options.wait, command)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
