"""Test that a cell's warden ends all of its processes, limits them and counts their time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupbench.operators.measure import warden

CHAIN = """
import os, sys, time
from groupbench.operators.measure import warden

warden._prctl(warden.PR_SET_CHILD_SUBREAPER, 1)
end = time.monotonic() + 60
if os.fork() == 0:
    while time.monotonic() < end:
        if sys.argv[1] == "sessions":
            os.setsid()
        if os.fork():
            os._exit(0)
    open("survived", "w").close()
    os._exit(0)
time.sleep(0.3)
warden._end_children()
"""

GUARDED = """
import os, sys, time
from groupbench.operators.measure import warden

def serve():
    {serve}

warden.BOUNDS = warden.Bounds(processes=8, log=1 << 20, log_end=1000)
warden._threads_of_machine = lambda: 9  # few threads are busy on this machine, or many
log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
warden.guard(serve, [], log, 1 << 40)
"""


@pytest.mark.parametrize("kind", ["one group", "sessions"])
def test_a_process_that_forks_and_ends_again_and_again_is_ended(tmp_path: Path, kind: str) -> None:
    subprocess.run([sys.executable, "-c", CHAIN, kind], cwd=tmp_path, check=True)
    assert not (tmp_path / "survived").exists()


def _guard(folder: Path, serve: str) -> tuple[int, bytes]:
    """Return the exit code of a guarded process, and its log."""
    done = subprocess.run([sys.executable, "-c", GUARDED.replace("{serve}", serve)], cwd=folder)
    return done.returncode, (folder / "log").read_bytes()


def test_too_many_processes_are_killed_with_the_reason(tmp_path: Path) -> None:
    code, log = _guard(tmp_path, "[os.fork() for _ in range(4)]; time.sleep(600)")
    assert code == -9
    assert b" processes; at most 8 are allowed" in log


def test_a_log_without_end_keeps_its_end(tmp_path: Path) -> None:
    serve = "[(os.write(1, b'x' * 1000), time.sleep(0.001)) for _ in range(3000)]; os.write(1, b'the end')"
    code, log = _guard(tmp_path, serve)
    assert code == 0
    assert log.endswith(b"x" * 500 + b"the end") and len(log) < 3_000_000


def test_threads_of_the_machine_are_counted() -> None:
    assert warden._threads_of_machine() >= len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("has_lists", [True, False], ids=["with lists of children", "without"])
def test_processor_time_of_children_is_counted_on_every_kernel(
    has_lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_lists:
        monkeypatch.setattr(warden, "_has_lists", lambda: False)
        monkeypatch.setattr(warden, "_listed", lambda parent: [])
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            before = warden.processor_s(os.getpid())
            here_before, busy_before = time.process_time(), warden.processor_s(busy.pid)
            while warden.processor_s(busy.pid) < busy_before + 0.05:
                time.sleep(0.01)
            assert busy.pid in warden.below(os.getpid())
            spent_here = time.process_time() - here_before  # first, so that time between both counts for the sum
            assert warden.processor_s(os.getpid()) - before > spent_here
        finally:
            busy.kill()


def test_a_cell_inherits_no_blocked_signal_from_its_warden() -> None:
    """The warden blocks SIGCHLD for itself: a backend that waits for its own children would wait forever."""
    program = """if True:
        import os, re
        from pathlib import Path
        from groupbench.operators.measure import warden
        def serve():
            os.write(1, re.search("SigBlk:.*", Path("/proc/self/status").read_text())[0].encode())
        warden.guard(serve, keep=(), log=1, memory=1 << 40)
    """
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(output.removeprefix("SigBlk:"), 16) == 0


@pytest.mark.parametrize("processor", sorted(os.sched_getaffinity(0)))
def test_the_processor_that_ran_a_process_last_is_known(processor: int) -> None:
    code = f"import os, sys; os.sched_setaffinity(0, {{{processor}}}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen((sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert warden.last_processor(process.pid) == processor
        process.communicate()
    assert warden.last_processor(process.pid) is None


def test_all_threads_of_a_cell_stay_on_its_processors() -> None:
    """Also those that it starts later: more threads than its rivals have make it no faster."""
    program = (
        "import os, threading, time; "
        "begin = lambda: threading.Thread(target=time.sleep, args=(60,)).start(); begin(); print(flush=True); input(); "
        "begin(); print(*[len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')], flush=True); "
        "os._exit(0)"
    )
    above = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", above, program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        warden.keep_on([min(os.sched_getaffinity(0))], process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().split() == ["1"] * 3
