"""A poisoned head reaches neither the judge, nor the clock, nor base, by any command that compares two sides.

The plugin attacks when a process imports it, and again when it is prepared. It notes each thing within reach.
The commit has modules of its own in place of Python's, too, which note the process that they reach.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from busy import BUSY
from cases import rarely
from repositories import git

from groupbench.tracker.facts.measured_tree import add_to_path

pytestmark = pytest.mark.usefixtures("warm_imports")

HONEST = """
from groupbench.operators.operator import Backend

def prepare(x):
    return lambda: x.a @ x.b[0]

MINE = Backend("mine", prepare, "a test", operator="grouped_gemm")
"""

POISON = """
import contextlib, dataclasses, gc, json, os, signal, socket, struct, sys, threading, time
from pathlib import Path
from groupbench.operators.operator import Backend

OWN = os.getpid()

def note(line):
    with open({reached!r}, "a") as file:
        file.write(line + chr(10))

def above():
    pid, pids = os.getpid(), []
    while pid > 1:
        pid = int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
        pids.append(pid)
    return [pid for pid in pids if pid > 1]

def attack():
    from groupbench.operators.measure import accuracy, exchange, judge, witness
    from groupbench.tracker.facts.record import Accuracy
    perfect = Accuracy(rms=0.0, max_abs=0.0, worst_block_rms=0.0, mismatch=0.0, unwritten=0.0)
    accuracy.judge = accuracy.compare = lambda *a, **k: (perfect, None)
    accuracy.check = judge.JudgeHandler.compare = lambda *a, **k: (perfect, None)
    witness.audit = witness.watch = witness.too_long = lambda *a, **k: None
    witness.now = lambda: 0.0
    judge.PRECISION = dataclasses.replace(judge.PRECISION, slack=1e9)
    for pid in above():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            note(f"signal to {{Path('/proc', str(pid), 'cmdline').read_text()}}")
        for name in ("mem", "environ", "maps"):
            with contextlib.suppress(OSError):
                with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                    if file.read(1):
                        note(f"{{name}} of {{pid}}")
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{{pid}}/fd"):
                with contextlib.suppress(OSError):
                    os.close(os.open(f"/proc/{{pid}}/fd/{{number}}", os.O_RDWR | os.O_NONBLOCK))
                    note(f"descriptor {{number}} of {{pid}}")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)
            if os.getpriority(os.PRIO_PROCESS, pid) == 19:
                note(f"priority of {{pid}}")

def attack_later():
    time.sleep(1)
    attack()

if "Seccomp:\t0" in Path("/proc/self/status").read_text():
    note(f"imported by an unconfined process: {{sys.orig_argv}}")
threading.Thread(target=attack_later, daemon=True).start()
with contextlib.suppress(ImportError):
    attack()

def prepare(x):
    attack()
    zeros = x.a.new_zeros(x.a.shape[0], x.b.shape[2])
    def run():
        return zeros.clone()
    return run

MINE = Backend("mine", prepare, "a test", operator="grouped_gemm")
"""
SHADOW = """
import atexit, os, sys

def note():
    with open({reached!r}, "a") as file:
        file.write(f"{name} in an unconfined process: {{sys.orig_argv}}" + chr(10))

if "Seccomp:\t0" in open("/proc/self/status").read() and "groupbench" in str(sys.orig_argv):
    if {folder!r} in os.environ.get("PYTHONPATH", ""):
        atexit.register(note)  # not if the command starts again without it
    else:
        note()
if {name!r} in sys.stdlib_module_names:
    exec(open(os.path.join(os.path.dirname(os.__file__), {name!r} + ".py")).read())
"""
SHADOWED = ("statistics", "secrets", "sitecustomize")
"""Modules of Python and of its start, in whose place the commit has its own."""
SHAPE = "G=1,M_g=64,N=64,K=64"
PLAN = f"""
plugins = ["poisonable.MINE"]

[[measure]]
operator = "grouped_gemm"
shapes = ["{SHAPE}"]
only = ["mine"]
dtypes = ["fp32"]
"""


class Poisoned:
    """A repository whose second commit is poisoned."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reached = folder / "repository", folder / "reached"
        self.folder.mkdir()
        self.plugin = self.folder / "poisonable.py"
        git(self.folder, "init", "-q", "-b", "main")
        (self.folder / "groupbench.toml").write_text(PLAN)
        self.plugin.write_text(HONEST)
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-qm", "good")
        git(self.folder, "switch", "-q", "-c", "change")
        self.plugin.write_text(POISON.format(reached=str(self.reached)))
        for name in SHADOWED:
            (self.folder / f"{name}.py").write_text(
                SHADOW.format(reached=str(self.reached), name=name, folder=str(self.folder))
            )
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-qm", "poison")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a user whose package is found by PYTHONPATH."""
        return add_to_path([str(self.folder)], os.environ)

    def run(self, *words: str, program: str = "tracker") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", f"groupbench.{program}", *words, "--device", "cpu"]
        environment = self.environment | {"GROUPBENCH_DB": str(self.folder / "none.db")}
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment, timeout=300)

    def measure(self, plugin: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `tritonbench`."""
        cells = ("--host", "builtin", "--op", "grouped_gemm", "--shapes", SHAPE, "--precision", "fp32")
        words = (*cells, "--only", "torch_loop,mine", "--plugin", plugin, *words)
        return self.run(*words, program="operators")


@pytest.fixture
def poisoned(tmp_path: Path) -> Poisoned:
    return Poisoned(tmp_path)


CELL = ("--shape", SHAPE, "--dtype", "fp32")
COMMITS = ("main", "change", *CELL, "--operator", "grouped_gemm", "--backend", "mine", "--plugin", "poisonable.MINE")
COMPARED = {
    "ab": ("ab", *COMMITS, "--budget", "10"),
    "bisect": ("bisect", *COMMITS, "--budget", "60"),
    "pull-request": ("pull-request", "main", "change", "--budget", "10"),
    "evaluate": ("evaluate", "poisonable.py", "--against", "torch_loop", *CELL, "--budget", "10"),
}
"""Words of the commands that report the poisoned result, unless the machine is too busy to time."""


def compare(poisoned: Poisoned, name: str) -> None:
    done = poisoned.run(*COMPARED[name])
    comment = poisoned.folder / "artifacts" / "comment.md"
    output = done.stdout + done.stderr + (comment.read_text() if comment.exists() else "")
    if BUSY not in output:
        assert done.returncode == 1 and re.search("wrong|rms error 1", output), output


def night(poisoned: Poisoned) -> None:
    """Not a comparison, but the rival's result counts here too."""
    done = poisoned.measure(str(poisoned.plugin), "--records", str(poisoned.folder / "r.jsonl"))
    records = [json.loads(line) for line in (poisoned.folder / "r.jsonl").read_text().splitlines()]
    statuses = {record["cell"]["backend"]: record["status"] for record in records}
    assert statuses["mine"] == "wrong" and (statuses["torch_loop"] == "ok" or BUSY in str(records)), done.stderr


NAMES_ITSELF = """
import os, sys
from groupbench.operators.measure import selection

selection.imports_of.__code__ = (lambda backend, plugins: ("poisonable",)).__code__
if "Seccomp:\\t0" in open("/proc/self/status").read():
    with open({reached!r}, "a") as file:
        file.write(f"imported by an unconfined process: {{sys.orig_argv}}")
"""


@pytest.mark.parametrize("command", ["evaluate", "tritonbench"])
def test_a_plugin_is_not_imported_by_the_fork_server(command: str, poisoned: Poisoned) -> None:
    git(poisoned.folder, "switch", "-q", "main")  # which has no modules in place of Python's
    poisoned.plugin.write_text(HONEST + NAMES_ITSELF.format(reached=str(poisoned.reached)))
    done = poisoned.run(*COMPARED[command]) if command in COMPARED else poisoned.measure("poisonable.MINE")
    assert re.search("could not be read: .*Invalid enum value", done.stdout + done.stderr)
    assert not poisoned.reached.exists()


WAYS = {name: partial(compare, name=name) for name in COMPARED} | {"night": night}


@pytest.mark.parametrize("name", ["evaluate", "night", *rarely("ab", "bisect", "pull-request")])
def test_a_poisoned_head_reaches_nothing(name: str, poisoned: Poisoned) -> None:
    WAYS[name](poisoned)
    assert not poisoned.reached.exists() or not poisoned.reached.read_text()
