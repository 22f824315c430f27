"""Make a fork of this process run a command as a new process would, and start servers that fork themselves."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn


def end(run: Callable[[], object]) -> NoReturn:
    """Run a function, then end this process as the interpreter does, with its exit code."""
    code: object = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def become(argv: Sequence[str], streams: Sequence[Path]) -> None:
    """Give this fork its own arguments and the files `streams` as standard input, output and error."""
    atexit._clear()  # functions of the parent
    for number, path in enumerate(streams):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = list(argv)


def start_server(folder: Path, socket: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a server that all test processes share, unless it is running. It listens at FOLDER/SOCKET.

    Args:
        command: Its program and options; the folder is its last argument.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / f"{socket}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / socket).exists():
            return
        out = folder / f"{socket}.log"
        with out.open("w") as log:
            begun = [sys.executable, *command, str(folder)]
            to_log = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            server = subprocess.Popen(begun, **to_log, env=environment, start_new_session=True)
        while not (folder / socket).exists():
            assert server.poll() is None, out.read_text()
            time.sleep(0.05)
