"""Test the server's worker process: its limits, and that it ends when it is not needed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.serve import jobs, worker
from groupbench.tracker.serve.jobs import Jobs, Known, Working
from groupbench.tracker.serve.worker import JobWorker, Stopped


@pytest.fixture
def process() -> Iterator[JobWorker]:
    process = JobWorker()
    yield process
    process.close()


# Jobs as text: the process need not be able to import the tests.
REFUSE = """
from groupbench.tracker.facts.errors import QueryError
raise QueryError("no such run")
"""
UNSENDABLE = """
class Unsendable(Exception):
    def __reduce__(self):
        raise TypeError("no")
raise Unsendable
"""
UNKNOWN = """
class Unknown(Exception):
    pass
raise Unknown
"""


def test_jobs_in_their_order_by_one_process(process: JobWorker) -> None:
    futures = [process.submit(os.getpid, seconds=60) for _ in range(3)]
    (one,) = {future.result(60) for future in futures}
    assert one != os.getpid()


@pytest.mark.skipif(sys.platform == "win32", reason="priorities are POSIX's")
@pytest.mark.parametrize("nice", [worker.NICE_JOBS, worker.NICE_PAGES])
def test_pages_come_before_the_process(nice: int) -> None:
    process = JobWorker(nice)
    assert process.submit(os.nice, 0, seconds=60).result(60) == min(os.nice(0) + nice, 19)
    process.close()


def test_what_the_work_raises(process: JobWorker) -> None:
    with pytest.raises(QueryError, match="no such run"):
        process.submit(exec, REFUSE, seconds=60).result(60)
    for code, why in ((UNSENDABLE, "TypeError: no"), (UNKNOWN, "pickle")):
        with pytest.raises(StoreError, match=why):
            process.submit(exec, code, seconds=60).result(60)
    assert process.submit(abs, -1, seconds=60).result(60) == 1


def test_a_job_that_takes_too_long_is_stopped_and_the_next_is_done(process: JobWorker) -> None:
    slow = process.submit(time.sleep, 600, seconds=0.02)
    after = process.submit(abs, -1, seconds=60)
    with pytest.raises(Stopped, match=r"longer than 0\.2 s"):
        slow.result(60)
    assert after.result(60) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of CPU time is POSIX's")
def test_a_job_that_uses_too_much_cpu_time_is_stopped_without_a_core_file(
    process: JobWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of each job. A job that only waits for longer than that is not stopped."""
    monkeypatch.chdir(tmp_path)
    use = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    for work in ((exec, use), (exec, use), (exec, use), (time.sleep, 1.1)):
        assert process.submit(*work, seconds=1).result(60) is None
    with pytest.raises(Stopped, match="more than 1 s of CPU time"):
        process.submit(exec, "while True: pass", seconds=1).result(60)
    assert process.submit(abs, -1, seconds=60).result(60) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_needs_too_much_memory_is_refused(process: JobWorker) -> None:
    with pytest.raises(Stopped, match="MiB"):
        process.submit(bytearray, worker.LARGEST_MEMORY, seconds=60).result(60)
    assert process.submit(abs, -1, seconds=60).result(60) == 1


def test_a_process_that_is_killed_fails_its_job_alone(process: JobWorker) -> None:
    with pytest.raises(Stopped, match="ended early"):
        process.submit(os._exit, 1, seconds=60).result(60)
    assert process.submit(abs, -1, seconds=60).result(60) == 1


def test_a_job_nobody_waits_for_is_stopped(process: JobWorker) -> None:
    waiting = threading.Event()
    waiting.set()
    future = process.submit(time.sleep, 600, seconds=600, wanted=waiting.is_set)
    queued = process.submit(time.sleep, 600, seconds=600, wanted=waiting.is_set)
    waiting.clear()
    for each in (future, queued):
        with pytest.raises(Stopped, match="no client waited"):
            each.result(60)


def test_closing_ends_the_job_in_hand() -> None:
    process = JobWorker()
    pid = process.submit(os.getpid, seconds=60).result(60)
    future = process.submit(time.sleep, 600, seconds=600)
    process.close()
    assert isinstance(future.exception(60), Stopped)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it, on Linux alone")
def test_the_process_ends_with_a_server_that_is_killed() -> None:
    code = """
import os, time
from groupbench.tracker.serve.worker import JobWorker
if __name__ == "__main__":
    worker = JobWorker()
    print(worker.submit(os.getpid, seconds=60).result(60), flush=True)
    worker.submit(time.sleep, 600, seconds=600)
    time.sleep(600)
"""
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    server.kill()
    server.wait(60)
    end = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    server.stdout.close()


def test_the_process_ends_quietly_when_no_one_reads_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=worker._serve, args=(other_end,), daemon=True)
    process.start()
    other_end.close()
    pipe.send((time.sleep, (0.1,), 60))
    pipe.close()
    process.join(60)
    assert process.exitcode == 0
    assert capfd.readouterr().err == ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_stop_what_is_not_asked_for_again_and_keep_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "UNWANTED_S", 0.0)
    service = Jobs(patience=0)
    try:
        assert isinstance(service.ask("slow", 1, time.sleep, 600), Working)
        assert isinstance(service.ask("kept", 1, abs, -3, keep=True), Working)
        end = time.monotonic() + 60
        while (result := service.ask("kept", 1, abs, -3, keep=True)) != Known(3):
            assert isinstance(result, Working)
            assert time.monotonic() < end
            time.sleep(0.01)
        while service._running:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        service.close()


def test_comparisons_do_not_hold_up_verdicts() -> None:
    service = Jobs(patience=60)
    try:
        assert isinstance(service.ask("slow", 1, time.sleep, 600, patience=0), Working)
        assert service.ask("verdict", 1, abs, -3) == Known(3)
    finally:
        service.close()


def test_the_limit_of_memory_is_no_more_than_half_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.os, "sysconf", lambda name: 1 << 10)
    assert worker._memory_limit() == 1 << 19
