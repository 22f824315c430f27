"""Run one command at a time on a device: `python -m groupbench.operators.alone COMMAND ...`.

Two measurements on one GPU at the same time disturb each other. The file /tmp/groupbench-DEVICE.lock names the lock's
holder. The lock itself is the operating system's (filelock's flock, which also works over NFS): it is released when the
process ends, in whatever way, and child processes inherit it. Containers share the lock if they share the folder named
by GROUPBENCH_LOCKS.
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
from groupbench.tracker.facts import durations
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools import device_lock
from groupbench.tracker.tools.device_lock import HELD, lock_file

POLL_S = 1.0
LOOK_S = 0.2
"""Try for at least this long: another command may be holding the lock for the moment in which it looks at it."""
LONGEST_WAIT_S = 600_000.0
SIGNED = b'{"pid": '
"""The first bytes of every lock file that is not empty."""


class Busy(GroupbenchError):
    """Another process is measuring on this device. The message names the process."""

    exit_code = ExitCode.BUSY


def device_name(device: str) -> str:
    """Return the measured GPU's UUID, or cpu-HOST. Raises GroupbenchError."""
    from groupbench.operators.measure.environment import resolve_device

    if resolve_device(device) == "cpu":
        return device_lock.device_name("cpu", None)
    from groupbench.operators import executor

    return device_lock.device_name("cuda", executor.probe("cuda").environment.gpu_uuid)


_HELD: list[object] = []
"""Locks of this process. They are never released, so they last as long as the process."""


def take(device: str, command: list[str], wait_s: float = 0.0) -> Path:
    """Lock the device for this process and all children, until they end. Returns the lock file.

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
            timeout=max(wait_s, LOOK_S),
            poll_interval=POLL_S if wait_s > LOOK_S else 0.05,
            mode=0o666,  # the next user of this GPU may be another account
            thread_local=False,
            fallback_to_soft=False,  # a lock that outlives its holder would block the next nightly run
            preserve_lock_file=True,
            on_acquired=lambda handle: _sign(handle, path, holder),
        )
        lock.acquire()
    except filelock.Timeout:
        holding = device_lock.holder(path)
        raise Busy(f"{device} is in use by {holding.text}; {holding.remedy}") from None
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
        return durations.seconds(text)
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
        help="wait this long for the device, such as 20m; a number without a unit is in seconds",
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
