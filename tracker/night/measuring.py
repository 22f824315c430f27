"""Run `tritonbench`, a separate program sharing only records with the tracker."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NoReturn

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.device_lock import HELD
from groupbench.tracker.tools.lease import WAITING, held_handles

PROGRAM = tuple(own_program("groupbench.operators"))
"""The command of `tritonbench` in this environment."""

_PR_SET_PDEATHSIG = 1


class MeasuringError(TrackerError):
    """A package that measuring needs is not installed."""


class Unmeasured(TrackerError):
    """`tritonbench` ended before it measured anything, and has printed the reason."""


def measure(
    arguments: Iterable[str],
    folder: Path,
    environment: dict[str, str],
    listen: Callable[[str], None] | None = None,
    python: str | None = None,
    stdout: int | None = None,
) -> int:
    """Run `tritonbench` in a folder and return the exit code, as `run_program` does.

    Args:
        python: Interpreter that runs it; None for this one.
    """
    command = [python or PROGRAM[0], *PROGRAM[1:], *arguments]
    return run_program(command, folder, environment, listen=listen, stdout=stdout)


def run_program(
    command: Sequence[str],
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    *,
    listen: Callable[[str], None] | None = None,
    stdout: int | None = None,
) -> int:
    """Run another program of this package and return its exit code. It does not outlive this process.

    Args:
        listen: Called with each line of its standard error, which is also printed.
        stdout: Descriptor for its standard output; None for this process's.

    An interrupt here ends the program, which keeps the results so far. Then KeyboardInterrupt is raised.
    """
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        with contextlib.suppress(OSError, AttributeError):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a softer signal may get lost

    # A terminal's Ctrl-C and hangup reach every process there. This one passes them on once: the child ignores its own.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            preexec_fn=end_with_parent,
            pass_fds=held_handles(environment or os.environ),  # so that it can give way between two problems
            stdout=stdout,
            stderr=None if listen is None else subprocess.PIPE,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        if listen is not None and process.stderr is not None:
            _pass_on(process.stderr, listen)
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.communicate()
        except KeyboardInterrupt:  # a second interrupt: stop waiting
            process.kill()
            process.wait()
        raise
    return code if code >= 0 else 128 - code


def _pass_on(stream: IO[bytes], listen: Callable[[str], None]) -> None:
    """Print each line as it arrives, and pass it to `listen`."""
    for line in stream:
        text = line.decode("utf-8", "replace").rstrip()
        print(text, file=sys.stderr, flush=True)
        if text:
            listen(text)


def ensure_alone(device: str, arguments: list[str]) -> Path:
    """Return the lock file of the device. If this process does not hold the lease, replace it by a holder.

    Args:
        device: auto, cuda or cpu.
        arguments: Arguments of `groupbench` for the new process.

    Raises MeasuringError if a package that measuring needs is not installed.
    """
    held = os.environ.get(HELD)
    if held is not None:
        return Path(held)
    return become(under_lease(device, own_program("groupbench.tracker", *arguments)))


def under_lease(device: str, command: list[str]) -> list[str]:
    """Return a command to take the lease of a device, wait for it at most for the time of --wait, and become `command`.

    Raises MeasuringError if a package that measuring needs is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MeasuringError("measuring requires torch, which is not installed: pip install 'groupbench[measure]'")
    urgent = ["--urgent"] if WAITING.urgent else []
    options = ["--device", device, "--wait", f"{WAITING.first_s}s", *urgent]
    return own_program("groupbench.operators.alone", *options, "--", *command)


def become(command: list[str]) -> NoReturn:
    """Replace this process by another program of this package."""
    sys.stdout.flush()
    sys.stderr.flush()
    signals.become(command, os.environ)


def interrupted(code: int) -> bool:
    """Return whether an exit code means that the program was interrupted."""
    return code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, 128 + signal.SIGINT)
