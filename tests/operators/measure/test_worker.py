"""The processes of cells: the imports of their server, their ends, and the reports of their deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from groupbench.operators.errors import GroupbenchError
from groupbench.operators.measure import folders, servers, worker


def test_the_fork_server_looks_up_plugins_and_imports_operators_once_for_its_processes() -> None:
    looked_up = "__import__('sys').modules['groupbench.operators.plugins'].offered.cache_info().currsize"
    assert worker.call(eval, looked_up) == 1
    assert worker.call(eval, "'groupbench.operators.catalog.canary' in __import__('sys').modules")


STACK = """Current thread 0x00007f58b30b2b80 [python] (most recent call first):
  File "/x/groupbench/operators/measure/accuracy.py", line 9 in __torch_dispatch__
  File "{library}/torch/functional.py", line 7 in einsum
  File "/home/me/my kernels.py", line 23 in run
  File "/x/groupbench/operators/measure/cell.py", line 160 in prepare
  File "/x/elsewhere.py", line 1 in main

Extension modules: numpy (total: 1)
""".format(library=sysconfig.get_path("purelib"))


OTHERS = """Thread 0x00007f5890f146c0 (most recent call first):
  File "/home/me/thread.py", line 982 in wait

"""


LOGS = {
    "nothing": ("", ""),
    "no fault": ("one\ntwo\n", "; it last wrote: one / two"),
    "a signal": (f"Fatal Python error: Aborted\n\n{OTHERS}{STACK}", ", at /home/me/my kernels.py:23 in run"),
    "a signal and words": (
        f"LLVM ERROR: no\nFatal Python error: Segmentation fault\n\n{STACK}",
        ", at /home/me/my kernels.py:23 in run; it last wrote: LLVM ERROR: no",
    ),
    "a fault of Python's": (
        f"Fatal Python error: none_dealloc: deallocating None\nPython runtime state: initialized\n\n{STACK}",
        ", at /home/me/my kernels.py:23 in run; it last wrote: none_dealloc: deallocating None",
    ),
    "a library alone": (
        "Fatal Python error: Aborted\n\n" + STACK.replace("/home/me", sysconfig.get_path("stdlib")),
        f", at {sysconfig.get_path('purelib')}/torch/functional.py:7 in einsum",
    ),
    "no frame": ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no frame>\n", ""),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS)
def test_a_death_is_reported_with_the_backends_own_line(
    log: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # files below the current folder are named from there
    assert worker.last_words(log) == expected


def test_a_process_leaves_no_file_whenever_it_or_its_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log and the file for outputs have no name. Its scratch folder has a keeper (tracker/text/test_scratch.py)."""
    folders.new().remove()  # the folder above all of this process's, which the first one makes
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = worker.Worker("cpu", timeout_s=300.0)
    assert list(tmp_path.glob("groupbench-*")) == []
    os.write(left._log.fileno(), b"first\nlast\0")
    assert left.printed == "first\nlast\\x00"
    left.close()


def test_an_interrupt_while_the_fork_server_imports_is_quiet(tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to the whole process group; only the process that asked may react and print.

    Its import of torch takes half a second here, and then fails, as on a machine without torch.
    """
    (tmp_path / "torch.py").write_text("import time; time.sleep(0.5); raise ImportError")
    script = (
        "import time; from groupbench.operators.measure import worker\n"
        "try: worker.call(time.sleep, 600, timeout_s=600)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        while not any(map(_minds_interrupts, _fork_servers(client.pid))):
            assert client.poll() is None
            time.sleep(0.01)
        os.killpg(client.pid, signal.SIGINT)
        assert client.communicate() == ("interrupted\n", "")
    finally:
        client.kill()
        client.wait()


def _fork_servers(pid: int) -> list[Path]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        Path("/proc", child)
        for child in children
        if b"fork_server import main" in Path("/proc", child, "cmdline").read_bytes()
    ]


def _minds_interrupts(process: Path) -> bool:
    """Return whether SIGINT is blocked or caught: before Python starts it would just end the process."""
    fields = dict(line.split(":\t") for line in (process / "status").read_text().splitlines() if ":\t" in line)
    return any(int(fields[name], 16) >> (signal.SIGINT - 1) & 1 for name in ("SigBlk", "SigCgt"))


def test_call_says_how_its_process_died(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GroupbenchError, match="exit code 5"):
        worker.call(os._exit, 5)
    with pytest.raises(GroupbenchError, match="ValueError"):
        worker.call(int, "x")
    monkeypatch.setattr(servers.Forked, "join", lambda self, timeout=None: None)  # it would wait for five seconds
    with pytest.raises(GroupbenchError, match=r"no answer within 0\.5 s"):
        worker.call(time.sleep, 60, timeout_s=0.5)
