"""Run `tritonbench` or a piece of code for each line of JSON on standard input, in a fork of this process.

Importing torch, Triton and TritonBench takes ten seconds of a core's time for each command: the command's own process,
that of TritonBench and the fork server's each import them. Here they are imported once. All else is as in a process of
its own: arguments, files, signals, exit codes. A line is {"args": [...], "out": FILE, "err": FILE}; the answer is the
exit code. Arguments that begin with -c and code are the interpreter's.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

os.environ["TRITON_INTERPRET"] = "1"  # as the host sets it on a CPU, before Triton is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forks of a process that has touched a GPU cannot use it
os.environ["OMP_NUM_THREADS"] = "1"  # a fork lacks the threads of its parent

from forks import become, end
from launches import patch_once

from groupbench.operators import cli
from groupbench.operators.hosts import tritonbench as host
from groupbench.operators.measure import worker


class Forked:
    """In the place of subprocess.Popen([python, "-m", MODULE, ...]): a fork that runs the module."""

    def __init__(self, command: list[str], start_new_session: bool, env: dict[str, str]) -> None:
        assert command[1] == "-m" and start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            atexit._clear()
            sys.argv = command[2:]
            os.environ |= env
            folders = env.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[1:1] = [each for each in folders if each not in ("", *sys.path)]
            end(lambda: runpy.run_module(command[2], run_name="__main__", alter_sys=True))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def command(args: list[str], out: str, err: str) -> NoReturn:
    become(["tritonbench", *args], (Path(os.devnull), Path(out), Path(err)))
    host.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]
    if args[:1] == ["-c"]:
        sys.argv = ["-c", *args[2:]]
        end(lambda: exec(args[1], {"__name__": "__main__"}))
    end(cli.main)


def main() -> None:
    for name in ("torch", "triton", "helion", "tritonbench.utils.triton_op", "tritonbench.utils.run_utils"):
        importlib.import_module(name)
    patch_once()
    worker.call(os.getpid)  # starts the fork server
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            command(**json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


if __name__ == "__main__":
    main()
