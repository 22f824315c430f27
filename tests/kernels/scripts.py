"""Run test files as scripts in forks of this process: scripts.py FOLDER, for all test processes.

Each script would import torch and the kernels, and Triton read all its files for the key of its cache; here it is done
once. At FOLDER/scripts, a request is a line of JSON, {"args": [FILE, ...], "out": FILE, "err": FILE}; the reply is the
exit code. The server ends with the folder, or with the process whose id is at the end of its name.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import socketserver
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

FOLDER = Path(sys.argv[1])


class Scripts(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        pid = os.fork()
        if pid == 0:
            become(request["args"], [Path(os.devnull), Path(request["out"]), Path(request["err"])])
            end(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
        self.wfile.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    def service_actions(self) -> None:
        super().service_actions()
        owner = Path("/proc", FOLDER.name.rpartition("-")[2])
        if not (FOLDER.exists() and owner.exists()):
            sys.exit()


def main() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if "helion" not in module.name:  # one script imports one of them
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    triton_key.compute()
    server = Server(str(FOLDER / "scripts.new"), Scripts)
    (FOLDER / "scripts.new").rename(FOLDER / "scripts")
    server.serve_forever()


main()
