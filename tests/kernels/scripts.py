"""Run a test file as a script for each line of JSON on standard input, in a fork of this process.

Each script would import torch and the kernels, and Triton read all its files for the key of its cache; here it is done
once. A line is {"args": [FILE, ...], "out": FILE, "err": FILE}; the reply is the exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
os.environ["OMP_NUM_THREADS"] = "1"  # a fork lacks the threads of its parent

import compiling  # noqa: F401
import pytest  # noqa: F401
import triton.experimental.gluon.nvidia.hopper  # noqa: F401
from forks import become, end

from groupbench import kernels
from groupbench.operators.measure import triton_key


def main() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if "helion" not in module.name:  # no script compiles Helion's kernels
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    triton_key.compute()
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(request["args"], [Path(os.devnull), Path(request["out"]), Path(request["err"])])
            end(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        replies.flush()


main()
