"""A hostile backend is named, its neighbours are measured, and the command ends in time and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from busy import BUSY

from groupbench.operators.measure import confine
from groupbench.tracker.facts.record import Record, read

PLUGIN = Path(__file__).parent / "hostile/bench_hostile.py"

CAPABLE = ("kills_all_above", "hangs_up_all_above", "interrupts_all_above")
"""Signals to the processes above are only impossible with Landlock."""

HARMLESS = (
    *("closes_its_output", "hangs_at_its_end", "prints_much", "starts_sleepers", "stops_all_above"),
    "removes_temporary_files",
)
"""Backends that may be measured, because the harm stays in their own process or is undone at once."""

SIGNALS = {f"landlock {version}" for version in range(6, 100)}
"""The versions of Landlock that keep signals inside of a domain."""

TIMEOUT_S = 5
QUICK = ("writes_to_descriptors", "promises_a_reply", "ends_the_group_above", "stops_itself", "kills_all_above")

ALL = tuple(
    line.removeprefix("def ").removesuffix("():")
    for before, line in zip(PLUGIN.read_text().splitlines(), PLUGIN.read_text().splitlines()[1:], strict=False)
    if before == "@on_first_call"
)
BATCHES = [ALL[start : start + 6] for start in range(0, len(ALL), 6)]


def test_there_are_many() -> None:
    assert len(ALL) >= 35


def test_hostile_backends_are_named(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


def test_a_backend_in_tritonbenchs_process_reaches_no_process_above(tmp_path: Path) -> None:
    """There, a backend's process is not its own, so only the processes outside of TritonBench's are safe."""
    pytest.importorskip("tritonbench", reason="NOT TESTED: TritonBench's process. It needs TritonBench")
    if not has_landlock():
        pytest.skip("NOT TESTED: limits of signals. They need Linux 6.12")
    records = measured(["good", *CAPABLE], tmp_path, host="tritonbench")
    assert {record.cell.backend: record.status for record in records} == dict.fromkeys(CAPABLE, "error") | {
        "good": "ok"
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", BATCHES, ids=lambda names: names[0])
def test_all_hostile_backends_are_named(tmp_path: Path, names: Sequence[str]) -> None:
    check(names, tmp_path)


def test_a_later_problem_is_measured_without_the_fork_servers_socket(tmp_path: Path) -> None:
    """The backend removes it, and processes of later problems need a fork server again."""
    records = measured(["good", "removes_temporary_files"], tmp_path, "--shapes", "M=32,N=64", "M=64,N=64")
    good = [record for record in records if record.cell.backend == "good"]
    assert [record.status == "ok" or BUSY in str(record.message) for record in good] == [True, True]


def check(names: Sequence[str], folder: Path) -> None:
    able = [name for name in names if name not in CAPABLE or has_landlock()]
    begun = time.monotonic()
    records = {record.cell.backend: record for record in measured(["good", *able, "good_too"], folder)}
    for name in ("good", "good_too"):
        assert records[name].status == "ok" or BUSY in str(records[name].message), (name, records[name].message)
    for name in able:
        assert records[name].status != "ok" or name in HARMLESS, name
        assert records[name].status in ("ok", "wrong") or records[name].message
    # Each may use its time limit once, and a loaded machine takes long to start processes.
    assert time.monotonic() - begun < 60 * TIMEOUT_S + 4 * TIMEOUT_S * len(able)


def measured(names: Sequence[str], folder: Path, *options: str, host: str = "builtin") -> list[Record]:
    """Measure backends, and check that no process and no file is left two seconds later."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for the path of a socket
    command = [sys.executable, "-m", "groupbench.operators", "--plugin", str(PLUGIN), "--op", "hostile"]
    limits = ["--device", "cpu", "--host", host, "--timeout", f"{TIMEOUT_S}s", "--records", str(folder / "r.jsonl")]
    environment = os.environ | {
        "TMPDIR": str(temporary), "GROUPBENCH_MEMORY_GIB": "3", "GROUPBENCH_LOCKS": str(folder), "HOSTILE": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # TritonBench makes it
    }  # fmt: skip
    environment.pop("GROUPBENCH_TEST_WARM", None)
    done = subprocess.run(
        [*command, "--only", ",".join(names), *limits, *options], capture_output=True, text=True, env=environment
    )
    assert host == "tritonbench" or "Traceback" not in done.stderr, done.stderr  # TritonBench prints its own
    until = time.monotonic() + 10  # 2 s, on a machine with nothing else to do
    while (left := [*temporary.iterdir(), *processes_with(f"HOSTILE={folder}")]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    temporary.rmdir()
    with (folder / "r.jsonl").open("rb") as file:
        return [record for _, record in read(file)]


def processes_with(variable: str) -> list[str]:
    """Return the commands of processes that inherited an environment variable."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{variable}\0".encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:
            continue
    return commands


def has_landlock() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if SIGNALS & {*confine.confine()} else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_confined_process_signals_only_its_own() -> None:
    if not has_landlock():
        pytest.skip("NOT TESTED: limits of signals. They need Linux 6.12")
    parent, child = os.getpid(), os.fork()
    if child == 0:
        confine.confine()
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
        os.kill(sleeper, 9)
        assert os.waitpid(sleeper, 0)[1] == 9
        try:
            os.kill(parent, 0)
        except PermissionError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_confined_process_of_root_has_no_power_over_others() -> None:
    """It could otherwise read the environment of the judge, since Linux 6.16, and set the clocks of a GPU."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: dropped capabilities. They need root")
    parent, child = os.getpid(), os.fork()
    if child == 0:
        confine.confine()
        try:
            resource.prlimit(parent, resource.RLIMIT_CPU, (3600, 3600))
            os._exit(2)
        except PermissionError:
            pass
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its own
        name_of_this = Path("/proc/self/comm")
        name_of_this.write_text(name_of_this.read_text())
        for name, text in (("oom_score_adj", "1000"), ("autogroup", "0"), ("comm", "other")):
            try:
                Path(f"/proc/{parent}/{name}").write_text(text)
                os._exit(3)
            except PermissionError:
                pass
        read = []
        for name in ("environ", "maps", "mem"):
            try:
                read.append(Path(f"/proc/{parent}/{name}").read_bytes()[:1])
            except OSError:
                read.append(b"")
        os._exit(0 if not any(read) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("mounts", [True, False], ids=["as root", "as a user"])
def test_a_confined_process_changes_no_file_but_its_own(monkeypatch: pytest.MonkeyPatch, mounts: bool) -> None:
    """Neither the code that judges it, nor results, nor another party's compiled kernels."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # not in shared memory, which is free for all
        check_files(Path(folder), monkeypatch, mounts)


def check_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: bool) -> None:
    if not mounts:
        monkeypatch.setattr(confine, "_mount", lambda libc, writable, layered: ())
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "groupbench.db").write_text("results")
    files = [tmp_path / "groupbench.db", *(Path(module.__file__).resolve() for module in (confine, pytest, os))]
    means = confined(lambda: change(own, files), own)
    if not means or (mounts and "mounts" not in means):
        pytest.skip("NOT TESTED: read-only files. They need Landlock, or root with the right to mount")
    assert (tmp_path / "groupbench.db").read_text() == "results"
    assert [path.name for path in tmp_path.iterdir() if path != own] == ["groupbench.db"]
    assert (own / "moved" / "mine").read_text() == "mine"


def test_changes_in_a_layer_belong_to_one_process(tmp_path: Path) -> None:
    """A library's cache next to its module or in the home works, and no other process reads it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home, kept, below = Path(folder), Path(folder, "kept"), Path(folder, "kept", "below")
        kept.mkdir(mode=0o705)
        below.mkdir()
        (home / "table.json").write_text("{}")
        before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}

        def act() -> None:
            (home / "table.json.lock").touch()
            (home / "table.json").rename(home / "old.json")
            (home / "table.json").write_text("[1]")
            below.rename(kept / "moved")
            assert kept.stat().st_mode & 0o777 == 0o705
            assert (home / "table.json").read_text() == "[1]"
            (tmp_path / "left").touch()

        if "mounts" not in confined(act, tmp_path, layered=[home, kept]):
            pytest.skip("NOT TESTED: layers. They need root with the right to mount")
        assert (tmp_path / "left").exists()
        assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before


def confined(act: Callable[[], None], *writable: Path, layered: Sequence[Path] = ()) -> tuple[str, ...]:
    """Run a function in a confined child, and return the means in force."""
    answer, its_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            means = confine.confine(writable, layered)
            if "mounts" in means or means[0].startswith("landlock"):
                act()
                os.write(its_end, ",".join(means).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(its_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return tuple(filter(None, os.read(answer, 200).decode().split(",")))


def change(own: Path, files: Sequence[Path]) -> None:
    """Try to change files, and use a folder, devices and memory that are free."""
    for path in files:
        beside = path.with_name("poison.py")
        for attempt in (beside.touch, lambda p=path: p.open("a"), path.unlink, lambda p=path: os.truncate(p, 0)):
            with pytest.raises(OSError, match=r"Read-only|Permission denied"):
                attempt()
    (own / "moved").mkdir()
    (own / "mine").write_text("mine")
    (own / "mine").rename(own / "moved" / "mine")
    Path("/dev/null").write_text("")
    multiprocessing.Lock()
    os.open(f"/proc/self/fd/{os.memfd_create('log')}", os.O_WRONLY)  # as a shell does for /dev/stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_compile_worker_of_a_confined_process_sees_the_gpu() -> None:
    """CUDA does not start in it, but Inductor only asks whether there is a GPU."""
    child = (
        "import subprocess, sys; from groupbench.operators.measure import folders; "
        "from groupbench.operators.measure.worker import _enter_cell; _enter_cell(folders.new()); "
    )
    asks = "'import torch; assert torch.cuda.is_available()'"
    subprocess.run(
        [sys.executable, "-c", f"{child}subprocess.run([sys.executable, '-c', {asks}], check=True)"], check=True
    )
