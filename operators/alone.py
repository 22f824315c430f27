"""Run one command at a time on a device: `python -m groupbench.operators.alone COMMAND ...`.

Two measurements on one GPU at the same time disturb each other. The command and its child processes hold the lease of
the device until they end: see `groupbench.tracker.tools.lease`. Containers share the lease if they share the folder
named by GROUPBENCH_LOCKS.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.tracker.facts import durations
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools import device_lock, lease, signals
from groupbench.tracker.tools.device_lock import HANDLE, HELD


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


_HELD: list[int] = []
"""Descriptors of this process's leases, which are closed by its end."""


def take(device: str, command: list[str], wait_s: float = 0.0) -> Path:
    """Take the lease of a device for this process and all children, until they end. Returns the lock file.

    Does nothing if this process already runs under it. Raises Busy if the device is still held after `wait_s` seconds,
    UsageError if the lock file cannot be used.
    """
    if lease.runs_under(device):
        return device_lock.lock_file(device)
    try:
        handle = lease.take(device, command, wait_s)
    except lease.Busy as busy:
        raise Busy(busy.message) from None
    except lease.LockError as error:
        raise UsageError(error.message) from error
    os.set_inheritable(handle, True)  # the lease lasts as long as any process that has inherited it
    _HELD.append(handle)
    return device_lock.lock_file(device)


def run(device: str, wait_s: float, command: list[str]) -> NoReturn:
    """Lock the device and replace this process by the command. Raises GroupbenchError."""
    environment = dict(os.environ)  # before `device_name`, which may set up Triton's interpreter for itself
    path = take(device_name(device), command, wait_s)
    try:
        handles = {HANDLE: str(_HELD[-1])} if _HELD else {}
        signals.become(command, {**environment, HELD: str(path), **handles})
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
    parser.add_argument("--urgent", action="store_true", help="take the device before the commands that are not urgent")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command is given")
    if not 0 <= options.wait <= lease.LONGEST_WAIT_S:
        parser.error("--wait must be between 0 and 10000 minutes")
    lease.WAITING.urgent = options.urgent
    try:
        with signals.keeping(lambda: "nothing was measured yet"):
            signals.interrupt()  # so that a waiting command that is ended leaves no ticket; `exec` ends it
            run(options.device, options.wait, command)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
