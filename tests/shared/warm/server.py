"""Import torch, Triton and Helion once, and run fork servers in forks of this process: server.py FOLDER.

It listens at FOLDER/socket, and ends with the process whose id is at the end of the folder's name. A request comes
from start.py: a command `python [-B] [-P] -c CODE` with its environment, folder and open files.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

PATH = list(sys.path)  # the packages, without PYTHONPATH
LATER = ("triton.experimental.gluon.nvidia.hopper", "sympy.physics.units", "sympy.tensor.tensor")
"""Modules that Triton imports at the first launch, and Helion with its first kernel."""
MOST = 64
"""Maximum number of open files of a request."""
HUGE = 2 << 20
"""Bytes of a huge page of x86."""
MADV_COLLAPSE = 25
"""Since Linux 6.1. Others, and machines with other huge pages, refuse it."""


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its open files."""
    files = array.array("i")
    head, rights, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MOST * files.itemsize))
    for _, _, data in rights:
        files.frombytes(data)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise EOFError
        text += part
    return json.loads(text), list(files)


def become(request: dict[str, Any], files: list[int]) -> None:
    """Make this fork like a new process that begins to run the command."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    wanted = request["descriptors"]
    above = max([*wanted, *files]) + 1
    moved = [os.dup2(file, above + place) for place, file in enumerate(files)]
    os.closerange(0, above)
    for number, file in zip(wanted, moved, strict=True):
        os.dup2(file, number)
    for number in {int(path.name) for path in Path("/proc/self/fd").iterdir()}.difference(wanted):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    argv = request["argv"]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*([] if "-P" in argv else [""]), *filter(None, added), *PATH]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.dont_write_bytecode = "-B" in argv or bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.argv, sys.orig_argv = ["-c"], argv
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115 - as the interpreter does
    random.seed()
    sys.modules["numpy"].random.seed()


def run(request: dict[str, Any], files: list[int]) -> int:
    """Run the code of a request in this fork, and return its exit code."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        become(request, files)
        exec(request["argv"][-1], main.__dict__)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(folder: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "new"))
    listener.listen(64)
    (folder / "new").rename(folder / "socket")
    owner = os.pidfd_open(int(folder.name.rpartition("-")[2]))
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process, and the connection of start.py
    while True:
        readable = select.select([listener, owner, *running, *(each for _, each in running.values())], [], [])[0]
        if owner in readable:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for pidfd, (process, connection) in list(running.items()):
            if pidfd in readable:
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(OSError):
                    connection.send(str(code).encode())
            elif connection in readable:  # start.py was killed
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitpid(process, 0)
            else:
                continue
            connection.close()
            os.close(pidfd)
            del running[pidfd]
        if listener in readable:
            connection = listener.accept()[0]
            request, files = received(connection)
            process = os.fork()
            if process == 0:
                code = run(request, files)
                atexit_and_flush()
                os._exit(code)
            for file in files:
                os.close(file)
            running[os.pidfd_open(process)] = process, connection


def atexit_and_flush() -> None:
    """End as the interpreter does."""
    import atexit

    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def collapse() -> None:
    """Put this process's memory into huge pages if possible: a fork of a fork then takes 18 ms instead of 42."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and name in ([], ["[heap]"]):
            for page in range(-(-first // HUGE) * HUGE, last - HUGE + 1, HUGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def main() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.modules["sklearn"] = None  # type: ignore[assignment] - 2 s, for a search of Helion that no test runs
    gc.disable()  # collections find nothing among modules, which no fork is to copy
    for name in ("numpy", "torch", "triton", "torch._dynamo", "helion", *LATER):
        with contextlib.suppress(ImportError):  # not every toolchain has all of them
            importlib.import_module(name)
    sys.path.append(str(Path(__file__).parents[1]))
    for package, patches in (("triton", "launches"), ("helion", "binds")):
        if package in sys.modules:
            importlib.import_module(patches).patch_once()
    sys.path.pop()
    import atexit

    atexit._clear()  # of the packages: their state is that of a fork
    gc.freeze()
    gc.enable()
    collapse()
    serve(Path(sys.argv[1]))


main()
