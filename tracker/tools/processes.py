"""Facts about processes from /proc. A process may end at any moment, also while they are read."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """Return the fields in /proc/PID/stat (proc(5)) after the name, which may contain spaces and brackets.

    Raises OSError if the process has ended, or another user's is not shown.
    """
    _, bracket, fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    if not bracket or not fields.strip():
        raise ProcessLookupError(pid)  # it ended while it was read
    return fields.split()


def parent_of(pid: int) -> int:
    """Return a process's parent. Raises OSError if the process has ended."""
    return int(stat_of(pid)[1])
