"""The lease of a device, for every measuring command: one holder at a time, first come, first served.

An urgent command measures before the others, also between two problems of a night, which gives way to it. For one on
another host, a thread of the night waits here in its stead.

The lease is the operating system's lock (flock, which also works over NFS) of the device's lock file. It ends with the
processes with the open file, in whatever way. A waiting process has a ticket: a file next to the lock file, named by
the time, which the process keeps locked too. The ticket of an ended process is not locked, so it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import itertools
import json
import logging
import os
import platform
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools import device_lock
from groupbench.tracker.tools.device_lock import (
    HANDLE,
    HELD,
    LOCK,
    device_name,
    facts_of,
    holder,
    is_locked,
    lock_file,
    read_facts,
)

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks at a lock
LOOK_S = 0.2
"""Try for at least this long: another command may be holding the lock for the moment in which it looks at it."""
LONGEST_WAIT_S = 6e5  # a week
URGENT_WAIT_S = 3600.0
"""Longest wait of an urgent command without --wait: a problem of a night takes minutes."""
URGENT, RETURNS, USUAL = range(3)
"""Ranks in the queue: an urgent command, a night after giving way to it, and any other."""
TICKET = ".wait"
SIGNED = b'{"pid": '
"""The first bytes of every lock file that is not empty."""


class Busy(TrackerError):
    """Another process is measuring on this device. The message names the process."""

    exit_code = ExitCode.BUSY


class LockError(TrackerError):
    """The lock file cannot be used."""


StandIn = Callable[[Mapping[str, Any], threading.Event], AbstractContextManager[bool]]
"""Takes a device in the stead of a command with these facts, until an event, and yields whether it has it."""


@dataclass
class Waiting:
    """The time to wait for a device.

    Attributes:
        first_s: Longest wait of the first measurement in s: the option --wait.
        begun: The process has measured. It then waits for each turn without a limit.
        urgent: Measure before other waiting commands: the option --urgent.
        places: Holds a place in the database's queue, if there is one; see `elsewhere`.
    """

    first_s: float = 0.0
    begun: bool = False
    urgent: bool = False
    places: Callable[..., AbstractContextManager[Callable[[float], bool]]] | None = None


WAITING = Waiting()
"""Set by the option --wait of a command."""


@contextlib.contextmanager
def lease(device: str, gpu_uuid: str | None) -> Iterator[None]:
    """Hold a device for a measurement. Does nothing if this process already runs under the device's lease.

    Args:
        device: cuda or cpu.
        gpu_uuid: UUID of the GPU.

    Raises Busy if another process still holds the device after the time of --wait.
    """
    name = device_name(device, gpu_uuid)
    if runs_under(name):
        yield
        return
    wait_s = LONGEST_WAIT_S if WAITING.begun else WAITING.first_s
    with elsewhere(name) as turn:
        handle = take(name, _command(), wait_s)
        try:
            turn(wait_s)
            WAITING.begun = True
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked during this time has the file open too
            os.close(handle)


def here() -> str:
    """Return this host and its lock folder."""
    return f"{platform.node()}:{lock_file('x').parent.resolve()}"


@contextlib.contextmanager
def elsewhere(name: str, gives_way: bool = False) -> Iterator[Callable[[float], None]]:
    """Hold a place in the database's queue, and yield a function to wait for the turn.

    It waits for a time in s, and raises Busy if another host still holds the device then. Processes with this lock
    folder do not wait for each other by it.

    Args:
        name: The device, by `device_name`.
        gives_way: Whether urgent commands on other hosts measure in between, as soon as a child gives way.
    """
    if WAITING.places is None:
        yield lambda wait_s: None
        return
    stand_in = partial(_stand_in, name) if gives_way else None
    with WAITING.places(name, here(), URGENT if WAITING.urgent else USUAL, _facts(_command()), stand_in) as wait:

        def turn(wait_s: float) -> None:
            if not wait(max(wait_s, LOOK_S)):
                raise Busy(f"{name} is in use by another host, see `groupbench queue`; {device_lock.REMEDY}")

        yield turn


def require_free(device: str, gpu_uuid: str | None) -> None:
    """Raise Busy if this process could not wait for the device. Called before a long preparation."""
    name = device_name(device, gpu_uuid)
    if not WAITING.begun and WAITING.first_s <= LOOK_S and not runs_under(name):
        os.close(take(name, _command()))


def runs_under(name: str) -> bool:
    """Return whether this process runs under the lease of a device, which another process took for it."""
    return os.environ.get(HELD) == str(lock_file(name))


def take(name: str, command: Sequence[str], wait_s: float = 0.0) -> int:
    """Take a device, and return a descriptor, whose closing frees it.

    Args:
        name: The device, by `device_name`.
        command: Command to show to others.
        wait_s: Time in s to wait.

    Raises Busy if the device is still held after this time, LockError if the lock file cannot be used.
    """
    path = lock_file(name)
    end = time.monotonic() + max(wait_s, LOOK_S)
    tell = time.monotonic() + LOOK_S
    with contextlib.ExitStack() as stack:
        try:
            ticket = stack.enter_context(_ticket(path, command, URGENT if WAITING.urgent else USUAL))
            handle = _open(path)
            failed = stack.enter_context(contextlib.ExitStack())
            failed.callback(os.close, handle)
            while (ahead := _ahead(ticket)) or not _lock(handle):
                now = time.monotonic()
                if now >= end:
                    raise Busy(_busy(name, path, ahead))
                if now >= tell and wait_s > LOOK_S:
                    tell = float("inf")
                    _say_waiting(name, path, ahead)
                time.sleep(POLL_S if wait_s > LOOK_S else POLL_S / 5)
            _check(handle, path)
            _write(handle, _facts(command))
        except OSError as error:
            advice = "set GROUPBENCH_LOCKS to another folder"
            raise LockError(f"cannot lock {path}: {error.strerror}; {advice}") from error
        failed.pop_all()
    logger.info("hold %s", name)
    return handle


def give_way() -> float:
    """Let the urgent commands measure first, if this process runs under a lease. Returns the waiting time in s.

    Called between two problems. Releases the lease during this time, by the holder's descriptor.
    """
    handles = held_handles()
    if not handles:
        return 0.0
    (handle,), path = handles, Path(os.environ[HELD])
    if not any(_rank(ticket) == URGENT for ticket in _tickets(path)):
        return 0.0
    began = time.monotonic()
    try:
        facts = json.loads(os.pread(handle, 65_536, 0))
    except ValueError:  # anyone can write the file
        facts = _facts(_command())
    with _ticket(path, (), RETURNS, facts) as ticket:
        fcntl.flock(handle, fcntl.LOCK_UN)
        while _ahead(ticket) or not _lock(handle):
            time.sleep(POLL_S)
        _write(handle, facts)
    return time.monotonic() - began


@contextlib.contextmanager
def _stand_in(name: str, facts: Mapping[str, Any], over: threading.Event) -> Iterator[bool]:
    """Take a device for a command on another host, as a `StandIn`."""
    path = lock_file(name)
    with contextlib.ExitStack() as stack:
        handle = _open(path)
        stack.callback(os.close, handle)
        with _ticket(path, (), URGENT, dict(facts)) as ticket:
            while not (has := not _ahead(ticket) and _lock(handle)) and not over.wait(POLL_S):
                pass
        if has:
            _write(handle, {"pid": None, **facts})  # SIGNED begins with it
        yield has


def held_handles(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the descriptor by which this process's holder passed on its lease, if it is open here."""
    path, handle = environment.get(HELD), environment.get(HANDLE, "")
    return [int(handle)] if path is not None and handle.isdigit() and _is_open(int(handle), Path(path)) else []


def _is_open(handle: int, path: Path) -> bool:
    """Return whether a file has this descriptor."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _rank(ticket: Path) -> int:
    return int(ticket.name.removesuffix(TICKET).rpartition(".")[2][0])


def _busy(name: str, path: Path, ahead: Sequence[Path]) -> str:
    if not is_locked(path) and ahead:  # free, but promised to the first waiting process
        return f"{name} is next used by {holder(ahead[0]).text}; {device_lock.REMEDY}"
    holding = holder(path)
    return f"{name} is in use by {holding.text}; {holding.remedy}"


def _say_waiting(name: str, path: Path, ahead: Sequence[Path]) -> None:
    before = f"; {len(ahead)} waiting before this command" if ahead else ""
    print(f"groupbench: waiting for {name}, in use by {holder(path).text}{before}", file=sys.stderr, flush=True)


def _command() -> list[str]:
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    return ["groupbench" if name == "tracker" else name, *sys.argv[1:]]


def _facts(command: Sequence[str]) -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "user": _user(),
        "host": platform.node(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "folder": str(Path.cwd()),
        "command": shlex.join(command),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


def _open(path: Path) -> int:
    """Open a lock file, or create it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:  # Linux may forbid O_CREAT for another account's file in a folder like /tmp
        handle = os.open(path, flags)
    except FileNotFoundError:
        handle = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):
            os.fchmod(handle, 0o666)  # the next user of this GPU may be another account
    return handle


def _check(handle: int, path: Path) -> None:
    """Raise LockError if a locked file is not a lock file, which is then left alone."""
    kind = "not a regular file" if not stat.S_ISREG(os.fstat(handle).st_mode) else ""
    if not kind and not SIGNED.startswith(os.pread(handle, len(SIGNED), 0)):
        kind = "not a lock file"
    if kind:
        raise LockError(f"cannot lock {path}: it is {kind}; remove it, or set GROUPBENCH_LOCKS to another folder")


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(handle: int, facts: dict[str, object]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(facts).encode() + b"\n", 0)


_NUMBERS = itertools.count()


@contextlib.contextmanager
def _ticket(
    path: Path, command: Sequence[str], rank: int = USUAL, facts: dict[str, object] | None = None
) -> Iterator[Path]:
    """Write the ticket of this process for a lock file, and remove it at the end."""
    name = f"{path.stem}.{rank}{time.time_ns():020d}-{os.getpid()}-{next(_NUMBERS)}{TICKET}"
    hidden = path.parent / f".{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    ticket = path.parent / name
    try:
        os.fchmod(handle, 0o644)
        _lock(handle)
        _write(handle, facts or _facts(command))
        hidden.rename(ticket)  # so no other process sees a ticket that is not locked yet
        yield ticket
    finally:
        for file in (hidden, ticket):
            file.unlink(missing_ok=True)
        os.close(handle)


def _tickets(path: Path) -> list[Path]:
    """Return the tickets of a lock file's waiting processes, the earliest first. Removes those of ended processes."""
    tickets = []
    for entry in os.scandir(path.parent):
        if entry.name.endswith(TICKET) and _lock_of(entry.name) == path.stem:
            ticket = Path(entry.path)
            if is_locked(ticket):
                tickets.append(ticket)
            else:
                with contextlib.suppress(OSError):  # of another account
                    ticket.unlink()
    return sorted(tickets)


def _lock_of(name: str) -> str:
    """Return the name of a ticket's lock file without the suffix."""
    return name.removesuffix(TICKET).rpartition(".")[0]


def _ahead(ticket: Path) -> list[Path]:
    path = ticket.with_name(_lock_of(ticket.name) + LOCK)
    return [other for other in _tickets(path) if other.name < ticket.name]


@dataclass(frozen=True)
class Place:
    """A process with a device, or in the queue for it.

    Attributes:
        device: UUID of the GPU, or cpu-HOST.
        state: holds or waits.
        place: Number in the queue; 0 for the holder.
        pid: Process id on `host`; None if it is unknown.
        since: When the process took the device, or began to wait.
    """

    device: str
    state: str
    place: int
    pid: int | None = None
    user: str = ""
    host: str = ""
    since: str = ""
    command: str = "another process"
    folder: str = ""


def device_of(path: Path) -> str:
    """Return the name of a lock file's device."""
    return path.stem.removeprefix(lock_file("").stem)


def shared_place(device: str, number: int, facts: Mapping[str, Any]) -> Place:
    """Return the place of a process on another host with the database; the holder's number is 0."""
    return _place(device, number, facts_of(facts))


def _place(device: str, number: int, facts: tuple[int, dict[str, str]] | None) -> Place:
    pid, words = facts or (None, {})
    return Place(device, "waits" if number else "holds", number, pid, **words)


def queue() -> list[Place]:
    """Return the holder and the waiting processes of every device, in their order."""
    places: list[Place] = []
    folder = lock_file("x").parent
    if not folder.is_dir():
        return places
    for path in sorted(folder.glob(f"{lock_file('').stem}*{LOCK}")):
        device = device_of(path)
        if is_locked(path):
            places.append(_place(device, 0, read_facts(path)))
        places += [_place(device, number, read_facts(ticket)) for number, ticket in enumerate(_tickets(path), 1)]
    return places
