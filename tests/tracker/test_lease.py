"""One queue for a device: commands that measure take turns, first come first served."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from groupbench.operators.measure.folders import SETTING
from groupbench.tracker.cli import main
from groupbench.tracker.night import measuring
from groupbench.tracker.tools import lease
from groupbench.tracker.tools.device_lock import HANDLE, HELD, lock_file

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks for each test."""
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def start() -> Iterator[Start]:
    running = []

    def run(*command: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}, **options
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        time.sleep(0.02)


def waiting() -> list[lease.Place]:
    return [place for place in lease.queue() if place.state == "waits"]


def in_turns(*names: str) -> tuple[list[threading.Thread], list[str]]:
    """Start commands that wait one after the other, and return their threads and the order in which they measured."""
    order: list[str] = []

    def measure(name: str) -> None:
        handle = lease.take("GPU-1", [name], 600)
        order.append(name)
        os.close(handle)

    threads = [threading.Thread(target=measure, args=(name,)) for name in names]
    for number, (name, thread) in enumerate(zip(names, threads, strict=True), 1):
        lease.WAITING.urgent = name.startswith("urgent")
        thread.start()
        until(lambda number=number: len(waiting()) == number)
    lease.WAITING.urgent = False
    return threads, order


def test_three_waiting_commands_take_turns_in_the_order_in_which_they_came() -> None:
    first = lease.take("GPU-1", ["first"])
    threads, order = in_turns("a", "b", "c")
    assert [place.command for place in lease.queue()] == ["first", "a", "b", "c"]
    with pytest.raises(lease.Busy, match=r"GPU-1 is in use by pid .*: first \("):
        lease.take("GPU-1", ["d"])
    os.close(first)
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c"]
    assert lease.queue() == []


def test_a_command_that_does_not_wait_passes_nobody() -> None:
    """The device is free for a moment before the first waiting command takes it."""
    with lease._ticket(lock_file("GPU-1"), ["a"]), pytest.raises(lease.Busy, match=r"next used by pid .*: a \("):
        lease.take("GPU-1", ["b"])
    os.close(lease.take("GPU-1", ["b"]))


def test_devices_whose_names_begin_alike_have_queues_of_their_own() -> None:
    with lease._ticket(lock_file("cpu-a.b"), ["x"]):
        os.close(lease.take("cpu-a", ["y"]))


def test_a_killed_command_loses_its_place(start: Start, locks: Path) -> None:
    held = lease.take("GPU-1", ["first"])
    code = "from groupbench.tracker.tools import lease; lease.take('GPU-1', ['x'], 600)"
    killed = start(sys.executable, "-c", code)
    until(waiting)
    killed.kill()
    killed.wait()
    assert list(locks.glob("*.wait")) and waiting() == []
    os.close(held)
    os.close(lease.take("GPU-1", ["y"]))
    assert not list(locks.glob("*.wait"))


def test_a_process_under_a_lease_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    held = lease.take("GPU-1", ["groupbench", "night"])
    with pytest.raises(lease.Busy), lease.lease("cuda", "GPU-1"):
        pytest.fail("it measured")
    monkeypatch.setenv(HELD, str(lock_file("GPU-1")))
    lease.require_free("cuda", "GPU-1")
    with lease.lease("cuda", "GPU-1"):
        os.close(held)


def test_a_command_that_has_begun_waits_for_its_turn() -> None:
    lease.require_free("cuda", "GPU-1")
    with lease.lease("cuda", "GPU-1"):
        pass
    held = lease.take("GPU-1", ["another"])
    threading.Timer(3 * lease.LOOK_S, os.close, (held,)).start()
    with lease.lease("cuda", "GPU-1"):
        assert lease.queue()[0].state == "holds"


def test_an_urgent_command_passes_the_waiting_ones() -> None:
    first = lease.take("GPU-1", ["first"])
    threads, order = in_turns("a", "b", "urgent", "urgent too")
    os.close(first)
    for thread in threads:
        thread.join()
    assert order == ["urgent", "urgent too", "a", "b"]


NIGHT = """
import os, sys
from pathlib import Path
from groupbench.tracker.night import measuring

measuring.PROGRAM = (sys.executable, "problems.py")
sys.exit(measuring.measure([], Path(), dict(os.environ)))
"""
PROBLEMS = """
import time
from pathlib import Path
from groupbench.tracker.tools import lease

while not Path("stop").exists():
    print(lease.give_way() > 0, flush=True)
    Path("began").touch()
    time.sleep(0.05)
"""


@pytest.mark.usefixtures("warm_imports")
def test_a_night_gives_way_to_an_urgent_command_and_to_no_other(tmp_path: Path, start: Start, monkeypatch: Any) -> None:
    (tmp_path / "night.py").write_text(NIGHT)
    (tmp_path / "problems.py").write_text(PROBLEMS)
    command = ["-m", "groupbench.operators.alone", "--device", "cpu", "--", sys.executable, "night.py"]
    night = start(sys.executable, *command, cwd=tmp_path)
    until((tmp_path / "began").exists)
    device = f"cpu-{os.uname().nodename}"
    usual = threading.Thread(target=lambda: os.close(lease.take(device, ["usual"], 600)))
    usual.start()
    until(waiting)
    monkeypatch.setattr(lease.WAITING, "urgent", True)
    handle = lease.take(device, ["urgent"], 600)
    until(lambda: len(waiting()) == 2)
    assert [place.command for place in lease.queue()] == ["urgent", shlex.join(command[-2:]), "usual"]
    assert night.poll() is None
    os.close(handle)
    until(lambda: len(waiting()) == 1)
    holds, waits = lease.queue()
    assert (holds.command, holds.pid, waits.command) == (shlex.join(command[-2:]), night.pid, "usual")
    (tmp_path / "stop").touch()
    assert night.communicate()[0].split().count("True") == 1 and night.returncode == 0
    usual.join()
    assert lease.queue() == []


def test_a_night_that_is_killed_while_it_gives_way_leaves_no_place(tmp_path: Path, start: Start) -> None:
    held = lease.take("GPU-1", ["urgent"])
    code = """
from groupbench.tracker.tools import lease; from groupbench.tracker.tools.device_lock import lock_file
with lease._ticket(lock_file("GPU-1"), ["night"], lease.RETURNS):
    open("began", "w"); __import__("time").sleep(600)
"""
    night = start(sys.executable, "-c", code, cwd=tmp_path)
    until((tmp_path / "began").exists)
    night.kill()
    night.wait()
    assert [place.command for place in lease.queue()] == ["urgent"]
    os.close(held)
    os.close(lease.take("GPU-1", ["next"]))


def test_a_command_without_a_lease_gives_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with lease._ticket(lock_file("GPU-1"), ["urgent"], lease.URGENT):
        assert lease.give_way() == 0
        monkeypatch.setenv(HELD, str(lock_file("GPU-1")))
        for handle in ("", "x", "0", "99999"):
            monkeypatch.setenv(HANDLE, handle)
            assert lease.give_way() == 0


MEASURES = ("night", "backfill", "pull-request", "evaluate", "tune", "ab", "confirm", "bisect", "profile")


@pytest.mark.parametrize("command", MEASURES)
def test_every_command_that_measures_takes_the_lease(command: str) -> None:
    assert "--wait" in CliRunner().invoke(main, [command, "--help"]).output


def test_the_time_to_wait_is_the_options_the_environments_or_the_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "become", lambda command: None)

    def wait(*options: str) -> float:
        assert CliRunner().invoke(main, ["tune", *options]).exit_code == 0
        return lease.WAITING.first_s

    assert wait() == 0
    (tmp_path / "groupbench.toml").write_text('wait = "2m"\n')
    assert wait() == 120
    monkeypatch.setenv("GROUPBENCH_WAIT_MINUTES", "3")
    assert wait() == 180
    assert wait("--wait", "5s") == 5
    monkeypatch.delenv("GROUPBENCH_WAIT_MINUTES")
    (tmp_path / "groupbench.toml").unlink()
    assert CliRunner().invoke(main, ["--urgent", "tune"]).exit_code == 0
    assert (lease.WAITING.first_s, lease.WAITING.urgent) == (lease.URGENT_WAIT_S, True)
    assert wait() == 0 and not lease.WAITING.urgent


CANDIDATE = """
import pathlib, time
from groupbench.operators.operator import Backend

def prepare(x):
    pathlib.Path({folder!r}, "begun").touch()
    while not pathlib.Path({folder!r}, "go").exists():
        time.sleep(0.05)
    return lambda: x.x + x.x

ALL = [Backend("fast", prepare, "", operator="doubled")]
"""
OPERATOR = """
import torch
from groupbench.operators.define import operator

@operator({"smoke": ["N=4096"]}, dtypes="fp32")
def doubled(N, dtype, device):
    return torch.randn(N, dtype=dtype, device=device)

@doubled.reference
@doubled.backend
def slow(x):
    return x + x
"""


@pytest.mark.usefixtures("warm_imports")
def test_two_evaluations_take_turns_and_a_killed_one_frees_the_device(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, str(tmp_path))
    (tmp_path / "candidate.py").write_text(CANDIDATE.format(folder=str(tmp_path)))
    (tmp_path / "doubled.py").write_text(OPERATOR)
    command = [sys.executable, "-m", "groupbench.tracker", "evaluate", "candidate.py", "--plugin", "doubled.py"]
    command += ["--device", "cpu", "--budget", "1s"]
    first = start(*command, cwd=tmp_path)
    until((tmp_path / "begun").exists)
    second = start(*command, "--wait", "10m", cwd=tmp_path)
    until(waiting)
    done = subprocess.run(
        [sys.executable, "-m", "groupbench.tracker", "queue", "--format", "json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = [(place["state"], place["place"], place["pid"]) for place in json.loads(done.stdout)]
    assert shown == [("holds", 0, first.pid), ("waits", 1, second.pid)]
    refused = start(*command, "--wait", "0s", cwd=tmp_path)
    err = refused.communicate()[1]
    assert refused.returncode == 75 and f"in use by pid {first.pid} of " in err and ": groupbench evaluate" in err
    (tmp_path / "begun").unlink()
    first.kill()
    until((tmp_path / "begun").exists)  # the second prepares the candidate, after the first has ended
    assert [(place.state, place.pid) for place in lease.queue()] == [("holds", second.pid)]
    (tmp_path / "go").touch()
    out, err = second.communicate()
    assert "doubled/fast against slow" in out, err
    assert f"waiting for cpu-{os.uname().nodename}, in use by pid {first.pid}" in err
    assert lease.queue() == []


def test_the_bursts_of_two_comparisons_never_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run at once in threads, which switch during every burst."""
    from groupbench.tracker.ab import bench
    from groupbench.tracker.ab.bench import Bench
    from groupbench.tracker.ab.result import AbCell, AbSettings
    from groupbench.tracker.ab.side import AbSide

    calls: list[int] = []

    class Comparison:
        def __init__(self, *arguments: object) -> None: ...

        def run(self, sides: object) -> Any:
            for _ in range(20):
                calls.append(threading.get_ident())
                time.sleep(0.002)
            raise KeyboardInterrupt

    class Side:
        alive, device = True, "cuda"
        facts = type("Facts", (), {"device": "cuda", "gpu_uuid": "GPU-1"})

        def __init__(self, *arguments: object) -> None: ...
        def send(self, *arguments: object, **options: object) -> None: ...
        def hello(self) -> None: ...
        def leave(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(bench, "RunningComparison", Comparison)
    monkeypatch.setattr(bench, "SideProcess", Side)
    monkeypatch.setattr(lease.WAITING, "first_s", 600.0)

    def compare() -> None:
        with Bench(AbSide("a"), AbSide("b"), AbSettings()) as running, pytest.raises(KeyboardInterrupt):
            running.compare(AbCell("op", "backend", "N=1", "fp32", device="cuda"))

    threads = [threading.Thread(target=compare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 60
    assert sum(one != other for one, other in pairwise(calls)) == 2
