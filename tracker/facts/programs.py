"""The package's own programs run in interpreters that find no module of the measured repository.

Otherwise, a repository's `statistics.py`, `json.py` or `sitecustomize.py` would run in place of Python's in the command
and in the judging process. Imports only what an interpreter has already imported at its start.
"""
# ruff: noqa: PTH100, PTH109, PTH110, PTH118, PTH120, PTH208

from __future__ import annotations

import _signal  # built into the interpreter: a repository's `signal.py` cannot replace it
import os
import sys

FOLDERS = "GROUPBENCH_FOLDERS"
"""Environment variable with the folders in which the measured modules are found, as in PYTHONPATH."""


def own_program(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of this package, without the current folder's modules."""
    return [python, "-P", "-m", module, *arguments]


def begin() -> None:
    """Let an interrupt end this program without a traceback, and leave the repository around the current folder."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not ignored, such as by `nohup`
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _leave_repository()


def _leave_repository() -> None:
    """Start this program again if it finds modules in the repository.

    The repository's folders move from PYTHONPATH to `FOLDERS`, which only processes that measure have on their path.
    """
    try:
        here = os.getcwd()
    except OSError:  # removed, which the command reports
        return
    top, path = _top(here), os.environ.get("PYTHONPATH")
    folders = [os.path.abspath(folder) for folder in path.split(os.pathsep)] if path else []
    measured = [folder for folder in folders if _within(folder, top) and not _has_libraries(folder)]
    by_module = sys.path[0] == here and not sys.flags.safe_path and not _has_libraries(here)  # `python -m`
    if sys.flags.ignore_environment or not (measured or by_module):
        return
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder not in measured)
    earlier = filter(None, [environment.get(FOLDERS)])
    environment[FOLDERS] = os.pathsep.join([*([here] if by_module else []), *measured, *earlier])
    # Python's own start prints a traceback. A blocked signal waits for `tools.signals`.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP))
    os.execve(sys.executable, [sys.executable, *(["-P"] if by_module else []), *sys.orig_argv[1:]], environment)


def _top(folder: str) -> str:
    """Return the top folder of the git repository around a folder, or the folder itself."""
    above = folder
    while not os.path.exists(os.path.join(above, ".git")):
        above, below = os.path.dirname(above), above
        if above == below:
            return folder
    return above


def _within(place: str, folder: str) -> bool:
    return os.path.join(os.path.realpath(place), "").startswith(os.path.join(os.path.realpath(folder), ""))


def _has_libraries(folder: str) -> bool:
    """Return whether a folder has installed packages, this package or TritonBench, which the command needs."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name in ("groupbench", "tritonbench") or name.endswith(".dist-info") for name in names)
