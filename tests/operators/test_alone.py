"""One command at a time on a device."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from groupbench.operators import alone
from groupbench.operators.errors import UsageError
from groupbench.tracker.tools import device_lock, lease
from groupbench.tracker.tools.device_lock import HELD, lock_file, warn_if_shared

Start = Callable[..., "subprocess.Popen[str]"]
SLEEP = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")
SAY = (sys.executable, "-c", "import os; print(os.environ['GROUPBENCH_ALONE'], os.environ.get('TRITON_INTERPRET'))")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run a command alone on the CPU, with a separate folder of locks."""
    running: list[subprocess.Popen[str]] = []
    left_out = ("TRITON_INTERPRET", "GROUPBENCH_ALONE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}

    def run(*command: str, options: tuple[str, ...] = ("--device", "cpu")) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "groupbench.operators.alone", *options, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"GROUPBENCH_LOCKS": str(tmp_path)},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def test_the_second_learns_the_holder_and_the_lock_ends_with_it(start: Start) -> None:
    first = start(*SLEEP)
    assert first.stdout is not None and first.stdout.readline() == "here\n"
    second = start("--", *SAY)
    out, err = second.communicate()
    assert (second.returncode, out) == (75, "")
    assert f"pid {first.pid} of " in err and "time.sleep(600)" in err
    assert err.count("\n") == 1
    first.kill()  # without a chance to clean up
    first.wait()
    third = start(*SAY)
    out, err = third.communicate()
    assert third.returncode == 0, err


def test_a_process_left_by_a_killed_holder_is_named(start: Start) -> None:
    first = start("bash", "-c", "sleep 600 & echo $!; wait")
    left = int(first.stdout.readline())
    try:
        first.kill()
        first.wait()
        waiting = start(*SAY, options=("--device", "cpu", "--wait", "10m"))  # has the file open too, without the lock
        second = start(*SAY)
        err = second.communicate()[1]
        assert second.returncode == 75
        assert f"pid {left}: sleep 600, which pid {first.pid} of " in err
        assert err.endswith(f" started and left behind; wait for it with `--wait 1h`, or end it: kill {left}\n")
    finally:
        os.kill(left, signal.SIGTERM)
    assert waiting.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_waiting_command_that_is_ended_leaves_its_place(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    first = start(*SLEEP)
    assert first.stdout is not None and first.stdout.readline() == "here\n"
    second = start(*SAY, options=("--device", "cpu", "--wait", "10m"))
    assert second.stderr is not None and "waiting for" in second.stderr.readline()
    second.send_signal(number)
    assert (second.wait(), second.stderr.read()) == (130, "groupbench: interrupted; nothing was measured yet\n")
    assert not list(tmp_path.glob("*.wait")) and first.poll() is None


def test_waiting(start: Start) -> None:
    first = start(*SLEEP)
    assert first.stdout is not None and first.stdout.readline() == "here\n"
    second = start(*SAY, options=("--device", "cpu", "--wait", "10m"))
    time.sleep(1)
    assert second.poll() is None
    first.kill()
    assert second.communicate()[0].endswith("None\n")
    assert second.returncode == 0


def test_the_command_has_the_lock_its_own_environment_and_its_own_exit_code(start: Start, tmp_path: Path) -> None:
    done = start(*SAY)
    path, interpreted = done.communicate()[0].split()
    assert Path(path).parent == tmp_path and Path(path).name.startswith("groupbench-cpu-")
    assert interpreted == "None"  # the variable set to look at the device is not passed to the command
    done = start("bash", "-c", "exit 3")
    assert (done.wait(), done.poll()) == (3, 3)


@pytest.mark.parametrize(
    ("command", "message"),
    [((), "no command"), (("--wait", "-1", "true"), "--wait"), (("--", "no-such-command"), "no-such-command")],
    ids=["no command", "wait", "no such command"],
)
def test_usage(command: tuple[str, ...], message: str, start: Start) -> None:
    done = start(*command)
    err = done.communicate()[1]
    assert done.returncode == 2
    assert message in err


def test_devices_do_not_share_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    names = ("GPU-1", "GPU-2", "cpu-a/b")
    assert len({alone.take(name, ["x"]) for name in names}) == 3
    assert [path.parent for path in map(lock_file, names)] == [tmp_path] * 3
    with pytest.raises(alone.Busy, match=r"GPU-1 is in use by pid .* wait for it with `--wait 1h`"):
        alone.take("GPU-1", ["y"])


def test_a_command_without_the_lock_warns_once_of_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    monkeypatch.setattr(device_lock, "_WARNED", set())
    warn_if_shared("tritonbench", "cuda", "GPU-6")
    alone.take("GPU-6", ["groupbench", "night"])
    warn_if_shared("tritonbench", "cuda", "GPU-7")
    warn_if_shared("tritonbench", "cpu", None)
    with monkeypatch.context() as under_the_lock:
        under_the_lock.setenv(HELD, str(lock_file("GPU-6")))
        warn_if_shared("tritonbench", "cuda", "GPU-6")
    assert capsys.readouterr().err == ""
    for _ in range(2):
        warn_if_shared("tritonbench", "cuda", "GPU-6")
    err = capsys.readouterr().err
    assert err.startswith(f"tritonbench: GPU-6 is also in use by pid {os.getpid()} of ")
    assert err.count("\n") == 1 and ": groupbench night (" in err and "--wait" in err


def test_a_glance_at_the_lock_does_not_make_a_device_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    monkeypatch.setattr(lease, "LOOK_S", 60.0)
    with lock_file("GPU-8").open("w") as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (glance, fcntl.LOCK_UN)).start()
        alone.take("GPU-8", ["x"])


def test_a_holder_that_left_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    path = alone.take("GPU-3", ["x"])
    path.write_text("no json")
    with pytest.raises(alone.Busy, match="another process"):
        alone.take("GPU-3", ["y"])


@pytest.mark.parametrize("kind", ["a link", "a folder that is a file"])
def test_a_lock_that_cannot_be_made(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that everyone may write to, a link could make this write to another user's file."""
    target = tmp_path / "somebodys"
    target.write_text("theirs")
    if kind == "a link":
        monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
        lock_file("GPU-4").symlink_to(target)
    else:
        monkeypatch.setenv("GROUPBENCH_LOCKS", str(target))
    with pytest.raises(UsageError, match="GROUPBENCH_LOCKS"):
        alone.take("GPU-4", ["x"])
    assert target.read_text() == "theirs"


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a file of something else": (lambda path: path.write_text("dear diary"), "not a lock file"),
    "a folder": (Path.mkdir, "Is a directory"),
}


@pytest.mark.parametrize(("make", "message"), KINDS.values(), ids=KINDS)
def test_another_file_in_place_of_the_lock_is_reported_and_left_alone(
    make: Callable[[Path], object], message: str, tmp_path: Path, start: Start
) -> None:
    path = tmp_path / f"groupbench-cpu-{platform.node() or 'here'}.lock"
    make(path)
    before = path.stat().st_size
    done = start("true")
    err = done.communicate(timeout=60)[1]
    assert (done.returncode, err.count("\n")) == (2, 1)
    assert f"cannot lock {path}: " in err and message in err
    assert path.stat().st_size == before


def test_a_holders_name_steers_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    path = alone.take("GPU-5", ["x"])
    names = {"pid": os.getpid(), "user": "\x1b[31mred", "host": "h", "since": "s", "folder": "f", "command": "c" * 9999}
    path.write_text(json.dumps(names))
    with pytest.raises(alone.Busy) as caught:
        alone.take("GPU-5", ["y"])
    assert "of \ufffd[31mred on h" in str(caught.value)
    assert len(str(caught.value)) < 1000
