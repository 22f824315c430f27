"""Confine the process of a cell with Linux's means that need no root: it reaches no other process and no other file.

Landlock (Linux 5.19; see landlock(7)) puts the process and all that it starts into a domain. From there it can neither
trace other processes nor open their memory and descriptors in /proc, also as root. Since Linux 6.12 it can send no
signal out of the domain either. It changes no file but those below the folders that it is given (folders.py), in
/dev/shm, and in /proc/self: no database, record, source, module or other party's cache. Since Linux 6.2 it cannot
empty one either. Devices may be written to, but no disk.

A filter of system calls (seccomp(2)) makes all changes of priority, scheduling policy and processors succeed without an
effect: no backend runs under other conditions than its rivals, and none is accused of `nice(1)`. It refuses limits for
another process, such as of processor time, which would end a rival. A process of root loses the capabilities that
reach other processes, clocks and the kernel.

Landlock does not cover a file's mode, owner, times and attributes. With the right to mount (root, CAP_SYS_ADMIN), the
process has mounts of its own (Linux 5.12), of which all but the same folders are read-only, also without Landlock. It
refuses all mounts afterwards.

Some other folders, such as the home, then have a memory layer (overlayfs). Libraries that keep a cache there find their
files again. No other process sees them, and they go with the process.

Reading is not restricted, nor the network: a backend has the rights of its user there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_PATH_BENEATH = 1
_WRITE_FILE, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
_CHANGE = _WRITE_FILE | sum(1 << right for right in range(4, 14))
"""Write, remove, make and move files and folders of all kinds."""
_DEVICES = 1 << 6 | 1 << 11
"""Make devices: nowhere."""
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2
_LEAST_LANDLOCK, _SCOPES_SINCE, _NET_SINCE, _TRUNCATE_SINCE = 2, 6, 4, 3
"""Versions of Landlock: the first that can allow moves of files between folders, and those of further rights."""

_NEW_MOUNTS = 0x00020000
_BIND, _PRIVATE, _DETACH = 0x1000 | 0x4000, 1 << 18 | 0x4000, 2
"""Flags of mount(2): bind, and private; each with all mounts below. One for umount2(2)."""
_MOUNT_SETATTR, _RECURSIVE, _HERE, _READ_ONLY = 442, 0x8000, -100, 1
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - whose place is fixed
"""POSIX's shared memory and semaphores: files, without folders."""

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 1 << 2
"""The second flag keeps speculation as it is: kernels before 5.16 otherwise slow a filtered process down."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ENOSYS, _EPERM = 38, 1
_X32 = 0x40000000
"""The bit of x86's third kind of system calls."""

_CAPABILITIES = struct.Struct("6I")
"""Effective, permitted and inheritable ones, the first 32 and the others."""
_CAPABILITY_VERSION = 0x20080522
_DROPPED = (16, 17, 19, 21, 22, 23, 24, 25, 38, 39)
"""SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_NICE, SYS_RESOURCE, SYS_TIME, PERFMON, BPF. SYS_ADMIN or
PERFMON is enough to read the environment and the addresses of any process, and SYS_ADMIN to set the clocks of a GPU."""
_PR_CAPBSET_DROP = 24

# architecture -> (its number in a filter, seccomp(2), the calls that change how a thread is scheduled: setpriority,
# sched_setparam, sched_setscheduler, sched_setaffinity, ioprio_set, sched_setattr; prlimit64)
_ARCHITECTURES = {
    "x86_64": (0xC000003E, 317, (141, 142, 144, 203, 251, 314), 302),
    "aarch64": (0xC00000B7, 277, (140, 118, 119, 122, 30, 274), 261),
}
_FIRST_ARGUMENT = 16
"""Offset of the lower half of the first argument, on a little-endian machine."""


def confine(writable: Iterable[Path] = (), layered: Iterable[Path] = (), *, profiled: bool = False) -> tuple[str, ...]:
    """Confine this process for good, and return the means in force.

    They are `landlock VERSION`, `seccomp`, `mounts` and `capabilities`.

    A profiled process keeps its capabilities, since the GPU's performance counters may be reserved for root.

    Call it before the process starts a thread: both hold for the calling thread and its later children.

    Args:
        writable: Folders below which the process may change files.
        layered: Folders with a layer for the process's own changes, if it can mount one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    folders = [os.path.realpath(folder) for folder in writable if folder.is_dir()]
    mounts = _mount(libc, folders, [os.path.realpath(folder) for folder in layered])
    means = (*_enter_domain(libc, folders), *_filter_scheduling(libc), *mounts)
    return means if profiled else (*means, *_drop_capabilities(libc))


def _mount(libc: ctypes.CDLL, writable: list[str], layered: Iterable[str]) -> tuple[str, ...]:
    """Make all mounts read-only for this process but the writable folders', shared memory's and /proc.

    Adds the folders with a layer to `writable`.
    """
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None) != 0:
        return ()
    kept = {*writable, *(str(folder) for folder in _SHARED_MEMORY.glob("*/") if not folder.is_symlink())}
    opened = {}
    for folder in {*kept, *layered, *_mounts_below(layered)}:  # before a layer hides them
        with contextlib.suppress(OSError):
            opened[folder] = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    for folder in sorted(opened, key=len):  # the outer one first
        below = f"/proc/self/fd/{opened[folder]}"
        if folder not in kept and _lay_over(libc, folder, below):
            writable.append(folder)
        else:
            libc.mount(below.encode(), folder.encode(), None, ctypes.c_ulong(_BIND), None)
    for descriptor in opened.values():
        os.close(descriptor)
    done = _set_read_only(libc, "/", True)
    for folder in ("/proc", str(_SHARED_MEMORY), *writable):
        _set_read_only(libc, folder, False)
    with contextlib.suppress(OSError):
        os.chdir(Path.cwd())  # or it would still be below the outer mount
    return ("mounts",) if done else ()


def _mounts_below(folders: Iterable[str]) -> list[str]:
    """Return the folders below these on which something is mounted."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = [re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]
    return [point for point in points if point.startswith(tuple(f"{folder}/" for folder in folders))]


def _lay_over(libc: ctypes.CDLL, folder: str, below: str) -> bool:
    """Mount a memory layer over a folder, for changes there. Returns whether it could."""
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=700") != 0:
        return False
    done, upper, work = False, Path(folder, "upper"), Path(folder, "work")
    with contextlib.suppress(OSError):
        upper.mkdir()
        work.mkdir()
        before = Path(below).stat()
        os.chown(upper, before.st_uid, before.st_gid)
        upper.chmod(stat.S_IMODE(before.st_mode))
        options = f"lowerdir={below},upperdir={upper},workdir={work},redirect_dir=on".encode()
        done = libc.mount(b"overlay", folder.encode(), b"overlay", ctypes.c_ulong(0), options) == 0
    if not done:
        libc.umount2(folder.encode(), _DETACH)
    return done


def _set_read_only(libc: ctypes.CDLL, folder: str, value: bool) -> bool:
    """Set whether a mount, and with `value` those below it, are read-only."""
    change = struct.pack("4Q", *((_READ_ONLY, 0) if value else (0, _READ_ONLY)), 0, 0)
    flags = _RECURSIVE if value else 0
    size = ctypes.c_size_t(len(change))
    return bool(libc.syscall(_MOUNT_SETATTR, _HERE, folder.encode(), flags, change, size) == 0)


def _enter_domain(libc: ctypes.CDLL, writable: list[str]) -> tuple[str, ...]:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < _LEAST_LANDLOCK:
        return ()
    truncate = _TRUNCATE if version >= _TRUNCATE_SINCE else 0
    fields = [_CHANGE | truncate]
    if version >= _NET_SINCE:
        fields.append(0)
    if version >= _SCOPES_SINCE:
        fields.append(_SCOPE_ABSTRACT_SOCKET | _SCOPE_SIGNAL)
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return ()
    devices = (str(path) for path in Path("/dev").iterdir() if path != _SHARED_MEMORY and not path.is_block_device())
    allowed = itertools.chain(
        ((path, _WRITE_FILE | truncate) for path in (*devices, f"/proc/{os.getpid()}")),
        [(str(_SHARED_MEMORY), _WRITE_FILE | _MAKE_FILE | _REMOVE_FILE | truncate)],
        ((path, _CHANGE & ~_DEVICES | truncate) for path in writable),
    )
    try:
        for path, access in allowed:
            _allow(libc, rules, path, access)
        done = libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)
    return (f"landlock {version}",) if done else ()


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    """Allow a kind of access below a path, if it exists."""
    with contextlib.suppress(OSError):
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", access, below), 0)
        os.close(below)


def _filter_scheduling(libc: ctypes.CDLL) -> tuple[str, ...]:
    if platform.machine() not in _ARCHITECTURES:
        return ()
    architecture, seccomp, calls, prlimit = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # of classic BPF
    ignored, refused, forbidden = ((give, 0, 0, _ERRNO | error) for error in (0, _ENOSYS, _EPERM))
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refused, (load, 0, 0, 0), (at_least, 0, 1, _X32), refused]
    for call in calls:
        program += [(equal, 0, 1, call), ignored]
    program += [(equal, 0, 3, prlimit), (load, 0, 0, _FIRST_ARGUMENT), (equal, 1, 0, 0), forbidden]
    program.append((give, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    whole = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    done = libc.syscall(seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, whole) == 0
    return ("seccomp",) if done else ()


def _drop_capabilities(libc: ctypes.CDLL) -> tuple[str, ...]:
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(_CAPABILITIES.size)
    if libc.capget(header, held) != 0:
        return ()
    kept = ~sum(1 << number for number in _DROPPED)
    words = _CAPABILITIES.unpack(held.raw)
    left = (word & (kept >> 32 * (place // 3)) & 0xFFFFFFFF for place, word in enumerate(words))
    for number in _DROPPED:
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    return ("capabilities",) if libc.capset(header, _CAPABILITIES.pack(*left)) == 0 else ()


if __name__ == "__main__":
    print(", ".join(confine()))
