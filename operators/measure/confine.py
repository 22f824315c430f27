"""Confine the process of a cell with Linux's means that need no root, so that it reaches no other process.

Landlock (Linux 5.19; see landlock(7)) puts the process and all that it starts into a domain. From there it can neither
trace other processes nor open their memory and descriptors in /proc, also as root. Since Linux 6.12 it can send no
signal out of its domain either. A filter of system calls (seccomp(2)) makes all changes of priority, scheduling policy
and processors succeed without an effect: no backend runs under other conditions than its rivals, and none is accused of
`nice(1)`.

Neither restricts files or the network: a backend has the rights of its user there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_PATH_BENEATH = 1
_REFER = 1 << 13
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2
_LEAST_LANDLOCK, _SCOPES_SINCE, _NET_SINCE = 2, 6, 4
"""Versions of Landlock: the first that can allow moves of files between folders, and those with larger structures."""

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 1 << 2
"""The second flag keeps speculation as it is: kernels before 5.16 otherwise slow a filtered process down."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ENOSYS = 38
_X32 = 0x40000000
"""The bit of x86's third kind of system calls."""

# architecture -> (its number in a filter, seccomp(2), the calls that change how a thread is scheduled: setpriority,
# sched_setparam, sched_setscheduler, sched_setaffinity, ioprio_set, sched_setattr)
_ARCHITECTURES = {
    "x86_64": (0xC000003E, 317, (141, 142, 144, 203, 251, 314)),
    "aarch64": (0xC00000B7, 277, (140, 118, 119, 122, 30, 274)),
}


def confine() -> tuple[str, ...]:
    """Confine this process for good, and return the means in force: `landlock VERSION`, `seccomp`.

    Call it before the process starts a thread: both hold for the calling thread and its later children.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return (*_enter_domain(libc), *_filter_scheduling(libc))


def _enter_domain(libc: ctypes.CDLL) -> tuple[str, ...]:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < _LEAST_LANDLOCK:
        return ()
    fields = [_REFER]
    if version >= _NET_SINCE:
        fields.append(0)
    if version >= _SCOPES_SINCE:
        fields.append(_SCOPE_ABSTRACT_SOCKET | _SCOPE_SIGNAL)
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return ()
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = struct.pack("=Qi", _REFER, root)
        done = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, allowed, 0) == 0
        done = done and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(root)
        os.close(rules)
    return (f"landlock {version}",) if done else ()


def _filter_scheduling(libc: ctypes.CDLL) -> tuple[str, ...]:
    if platform.machine() not in _ARCHITECTURES:
        return ()
    architecture, seccomp, calls = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # of classic BPF
    ignored, refused = (give, 0, 0, _ERRNO), (give, 0, 0, _ERRNO | _ENOSYS)
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refused, (load, 0, 0, 0), (at_least, 0, 1, _X32), refused]
    for call in calls:
        program += [(equal, 0, 1, call), ignored]
    program.append((give, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    whole = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    done = libc.syscall(seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, whole) == 0
    return ("seccomp",) if done else ()
