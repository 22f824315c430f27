"""The warden, a process between the fork server and a cell: it ends every process that the cell has started.

A backend may start processes that leave their process group and session and outlive their parents. Linux gives such
orphans to the nearest ancestor that requested them (PR_SET_CHILD_SUBREAPER, Linux 3.4): the cell's warden, which only
waits. A cell has no descriptors but its own, and its orphans do not keep another process's output open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

from groupbench.operators.measure import host_memory
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools.processes import parent_of, stat_of

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CPUCLOCK_SCHED = 2


@dataclass(frozen=True)
class Bounds:
    """The tuned numbers of this module. Those without a reason are choices."""

    look_s: float = 0.1  # between two checks of the memory in use
    look_share: float = 0.02  # of one core for these: each is slow on a machine with many processes, so they are rarer
    processes: int = 4096  # of a cell. Its compiler may start one for each core, several times
    log: int = 256 << 20  # bytes of a cell's output
    log_end: int = 1 << 20  # the part at its end that is kept if there is more: worker.py reads no more
    rounds: int = 5  # of looking for threads that are not on their processors yet
    kill_s: float = 0.0005  # between two rounds of killing; a fork of a process with torch takes longer


BOUNDS = Bounds()
OUT_OF_MEMORY = "out of memory:"
"""The beginning of the line in the log of a cell that used too much memory."""


def guard(serve: Callable[[], None], keep: Collection[int], log: int, memory: int) -> NoReturn:
    """Run `serve` in a child and end with its status, after all processes started by it have ended.

    Args:
        keep: Descriptors that stay open in the child.
        log: Descriptor of the file for its standard output and error.
        memory: Bytes that these processes may use together; if they use more, all are killed, which the log reports.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    adopt_orphans()
    above = os.getppid()
    os.setsid()  # a signal to the group of the cell's parent reaches only this process
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the signal is raised again below; one core dump is enough
    close_all_but({0, 1, 2, *keep})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            serve()
            code = 0
        finally:
            os._exit(code)
    for descriptor in keep:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _give_up)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the fork server ends when its client does, even if that is killed
    if os.getppid() != above:  # it had ended before
        _give_up(signal.SIGTERM, None)
    status = _wait_for(child, memory)
    _end_children()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if os.WIFEXITED(status) else ExitCode.FAILED)


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM, by which the parent ends a cell."""
    _end_children()
    os._exit(ExitCode.TERMINATED)


def _wait_for(child: int, memory: int) -> int:
    """Reap processes until `child` ends, and return its exit status. Kill all of them if they exceed `memory` bytes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not inherited: the child exists already
    next_look = time.monotonic() + BOUNDS.look_s
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        now = time.monotonic()
        if now >= next_look:
            began = time.process_time()
            if host_memory.may_exceed(memory) or _threads_of_machine() > BOUNDS.processes:
                _enforce_limits(memory)
            _shorten_log()
            next_look = time.monotonic() + max(BOUNDS.look_s, (time.process_time() - began) / BOUNDS.look_share)
        elif pid == 0:
            signal.sigtimedwait({signal.SIGCHLD}, next_look - now)


def _enforce_limits(memory: int) -> None:
    """Kill all processes of the cell if they use more than `memory` bytes, or are too many for the machine."""
    processes = below(os.getpid())
    used, number = host_memory.used_by(processes, memory), len(processes)
    if used > memory:
        used_gib, limit_gib = used / 2**30, memory / 2**30
        reason = f"{OUT_OF_MEMORY} its processes used {used_gib:.1f} GiB of {limit_gib:.1f} ({host_memory.SETTING})"
    elif number > BOUNDS.processes:
        reason = f"it had {number:,} processes; at most {BOUNDS.processes:,} are allowed"
    else:
        return
    signal_below(os.getpid(), processes, signal.SIGKILL)
    os.write(1, f"\n{reason}\n".encode())


def _threads_of_machine() -> int:
    """Return the number of threads of all processes on this machine, which is read in a few microseconds."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def signal_below(ancestor: int, processes: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that are below `ancestor`, which must not have been reaped.

    A listed process may have ended, and the number may belong to a foreign one. So each is looked at after it was
    opened, and the signal goes to the opened one.
    """
    for pid in processes:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if _is_below(pid, ancestor):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def _is_below(process: int, ancestor: int) -> bool:
    """Return whether a process is below `ancestor`. Raises OSError if it has ended."""
    while process not in (0, ancestor):
        process = parent_of(process)
    return process == ancestor


def _shorten_log() -> None:
    """Remove all but the end of the log if it is too large. It is open for appending, so writers go on at its end."""
    size = os.fstat(1).st_size
    if size > BOUNDS.log:
        end = os.pread(1, BOUNDS.log_end, size - BOUNDS.log_end)
        os.ftruncate(1, 0)
        os.write(1, end)


def die_with_parent() -> None:
    """Let the system kill this process when its parent has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let Linux make this process the parent of descendants whose parents have ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_children() -> None:
    """Kill the processes below this one until there are no more: the children of a killed process become ours.

    A process that forks and ends at once, again and again, is killed too. So this lists only our own descendants,
    which takes less time than a fork, and reaps all that have ended before it lists them again.
    """
    while _reap_ended():
        signal_below(os.getpid(), below(os.getpid()), signal.SIGKILL)
        time.sleep(BOUNDS.kill_s)


def _reap_ended() -> bool:
    """Reap all children that have ended. Returns whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def below(ancestor: int) -> list[int]:
    """Return the processes below `ancestor`, each before its children."""
    children_of = _listed if _has_lists() else _by_parent()
    processes = [*children_of(ancestor)]
    for process in processes:  # grows
        processes += children_of(process)
    return processes


def children(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`."""
    return _listed(parent) if _has_lists() else _by_parent()(parent)


@cache
def _has_lists() -> bool:
    """Return whether this kernel lists the children of a thread (CONFIG_PROC_CHILDREN), which takes much less time."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").exists()


def _listed(parent: int) -> list[int]:
    listed: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                listed += map(int, (thread / "children").read_text().split())
    return listed


def processor_s(ancestor: int) -> float:
    """Return the processor time in s of a process, of those below it, and of their children that have ended."""
    return sum(map(_processor_s, (ancestor, *below(ancestor))))


def thread_s(process: int) -> tuple[float, float]:
    """Return the times in s that the first thread of a process has run, and waited for a free processor.

    If this kernel does not list them, it has waited all the time, so that only processor times are checked.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        run, queued = Path(f"/proc/{process}/schedstat").read_text().split()[:2]
        return int(run) / 1e9, int(queued) / 1e9
    return 0.0, time.monotonic()


def last_processor(process: int) -> int | None:
    """Return the number of the processor on which the first thread of a process ran last; None if it has ended."""
    with contextlib.suppress(OSError):
        return int(stat_of(process)[36])
    return None


def keep_on(processors: Collection[int], ancestor: int) -> None:
    """Let all threads below `ancestor` run on these processors alone. Those that they start inherit it."""
    for _ in range(BOUNDS.rounds):  # one that was being started may be missing from the list, but not from the next
        moved = False
        for process in below(ancestor):
            with contextlib.suppress(OSError):  # it has ended
                for thread in Path(f"/proc/{process}/task").iterdir():
                    if os.sched_getaffinity(int(thread.name)) != {*processors}:
                        os.sched_setaffinity(int(thread.name), processors)
                        moved = True
        if not moved:
            return


def _processor_s(process: int) -> float:
    """Return the processor time in s of a process and of its children that have ended; 0 if it has ended."""
    with contextlib.suppress(OSError):
        ended = stat_of(process)[13:15]
        # The clock of all threads of another process, as clock_getcpuclockid returns it: `stat` has ticks of 10 ms.
        return time.clock_gettime((~process << 3) | CPUCLOCK_SCHED) + sum(map(int, ended)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _by_parent() -> Callable[[int], list[int]]:
    """Read all processes of this machine. Return a function from a parent to the children."""
    by_parent: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(folder.name)
            by_parent.setdefault(parent_of(process), []).append(process)
    return lambda parent: by_parent.get(parent, [])


def wait_for_group(leader: int, timeout_s: float) -> bool:
    """Wait for the leader of a process group, kill the rest of the group, and return whether the leader ended in time.

    The leader, a child, is not reaped, so no other process has the number of the child or the group.
    """
    end = select.poll()
    end.register(handle := os.pidfd_open(leader), select.POLLIN)
    try:
        return bool(end.poll(1e3 * timeout_s))
    finally:
        os.close(handle)
        kill_group(leader)


def has_ended(child: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(leader: int) -> None:
    """Kill the process group led by a child, which has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def close_all_but(keep: Collection[int]) -> None:
    """Close all other descriptors of this process."""
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
