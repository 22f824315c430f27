"""The host memory that the processes of a cell may use together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from groupbench.operators.errors import UsageError

SETTING = "GROUPBENCH_MEMORY_GIB"
MEMORY_SHARE = 0.8
"""Default limit, as a share of the memory: the machine's, or the control group's if that has less."""

_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def limit() -> int:
    """Return the bytes that the processes of one cell may use. Raises UsageError for an invalid setting."""
    setting = os.environ.get(SETTING)
    if not setting:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(MEMORY_SHARE * min([machine, *(most for most, _ in _control_groups())]))
    try:
        chosen = int(float(setting) * 2**30)
    except (ValueError, OverflowError):
        chosen = 0
    if chosen <= 0:
        raise UsageError(f"{SETTING}={setting!r} is not a positive number of GiB")
    return chosen


def killed() -> int | None:
    """Return how many processes Linux has killed on this machine for lack of memory; None if it does not say."""
    return _facts(Path("/proc/vmstat")).get("oom_kill")


def may_exceed(most: int) -> bool:
    """Return whether the processes of a cell can use more than `most` bytes: not while the whole machine uses less."""
    facts = _facts(Path("/proc/meminfo"))
    used_here = facts.get("MemTotal", most) - facts.get("MemAvailable", 0)
    return used_here > 0.9 * most and all(used > 0.9 * most for _, used in _control_groups())


def used_by(processes: Collection[int], most: int) -> int:
    """Return the bytes that belong to processes. If they are resident in no more than `most`, that is an upper bound.

    A page that several processes share counts once, and mapped files, such as libraries, do not count.
    """
    resident = sum(_resident(process) for process in processes)
    if resident <= most:  # takes microseconds; the exact sum has the kernel read the entry of every page
        return resident
    return sum(_owned(process) for process in processes)


def _resident(process: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _owned(process: int) -> int:
    """Return the bytes of a process that are not mapped files; a page counts for each of n processes as 1/n."""
    facts = _facts(Path(f"/proc/{process}/smaps_rollup"))
    return facts.get("Pss_Anon", 0) + facts.get("Pss_Shmem", 0) if facts else _resident(process)


def _facts(file: Path) -> dict[str, int]:
    """Read lines such as "MemTotal: 512 kB" as bytes, and "oom_kill 3" as numbers; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) << 10 * (words[2:] == ["kB"]) for words in lines if len(words) < 4}
    return {}


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes of each control group of this process that has a limit. Files' pages are not use."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                root, most, use = _CONTROL_GROUPS, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                root, most, use = _CONTROL_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            place = root / group.lstrip("/")
            for folder in (place, *(parent for parent in place.parents if parent.is_relative_to(root))):
                with contextlib.suppress(OSError, ValueError):  # not visible here, or "max"
                    # The kernel gives up the pages of files before it kills anyone.
                    stat = _facts(folder / "memory.stat")
                    files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                    yield int((folder / most).read_text()), int((folder / use).read_text()) - files
