"""The driver's end of a side: modules, process and answers.

Both sides are timed by the same code: the driver provides the measuring code, the tree the kernels and operators.
A groupbench checkout is therefore presented to the process through a folder of links. Any other tree comes before the
installed packages on the path, for the plugin in the tree to be found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from groupbench.tracker.ab.answers import Answer, Greeting
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.measured_tree import MeasuredTree, add_to_path, with_folders
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.project import import_folders
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.tools import git

TRACKER = Path(__file__).resolve().parents[1]
ROOT = TRACKER.parent
"""The folder of the driver's own kernels, operators and tracker, installed or a checkout."""

PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")

MODULE = "groupbench.operators.measure.side"
START_TIMEOUT_S = 300.0
MARGIN_S = 30.0
"""Extra time, after a side's own time limit for its cell, before the driver gives up on the side."""


T = TypeVar("T")

logger = logging.getLogger(__name__)


class AbError(TrackerError):
    """No comparison is possible: a named item does not exist, or a side does not start."""


class SideError(AbError):
    """One side does not start, or lacks the other side's item: the commit's fault, not the user's."""

    exit_code = ExitCode.INCOMPLETE


Which = Literal["base", "head", "both"]


@dataclass(frozen=True)
class AbSide:
    """One side of a comparison.

    Attributes:
        title: The user's name for it: a commit or a folder.
        tree: Folder with the files; None for the installed packages.
        python: Interpreter of the process.
        commit: Full hash, if it is a commit.
        pythonpath: Folders of the tree with modules, in addition to the tree itself and `src`; absolute without a tree.
    """

    title: str
    tree: Path | None = None
    python: str = sys.executable
    commit: str | None = None
    pythonpath: tuple[str, ...] = ()


class SideFailure(Exception):
    """A side failed to carry out a request, which ends the comparison of the cell."""

    def __init__(self, who: Which, title: str, status: str, message: str) -> None:
        super().__init__(message)
        self.who = who
        self.title = title
        self.status = status  # error, oom, timeout, unavailable, usage
        self.message = " ".join(message.split())

    @property
    def reason(self) -> str:
        """The message without the name of the user-error exception."""
        return self.message.removeprefix("UsageError: ")


def is_groupbench(tree: Path) -> bool:
    """Return whether a tree is groupbench's own checkout."""
    return all((tree / part).exists() for part in ("operators/operator.py", "operators/measure", "kernels", "tracker"))


def make_layout(tree: Path, folder: Path) -> None:
    """Make a package `groupbench` in `folder`: the tree's kernels and operators, the driver's measure and tracker.

    The package hides an installed groupbench: a module missing in the tree must fail to import.
    """
    package = folder / "groupbench"
    operators = package / "operators"
    operators.mkdir(parents=True)
    (package / "kernels").symlink_to((tree / "kernels").resolve())
    (package / "tracker").symlink_to(TRACKER)
    (operators / "measure").symlink_to(ROOT / "operators" / "measure")
    for path in sorted((tree / "operators").iterdir()):
        if path.name not in ("measure", "__init__.py", "__pycache__"):
            (operators / path.name).symlink_to(path.resolve())
    init = tree / "operators" / "__init__.py"
    (operators / "__init__.py").write_text(
        f"""# Written by `groupbench ab`: import this folder's modules, never those of an installed groupbench.
import sys
import groupbench

groupbench.__path__ = [{str(package)!r}]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable___groupbench" not in getattr(f, "__module__", "")]
{init.read_text() if init.exists() else ""}"""
    )


def python_path(side: AbSide, layout: Path) -> list[str]:
    """Return the first folders on the side's module path. Raises AbError if the tree is not a folder."""
    if side.tree is None:
        make_layout(ROOT, layout)
        return [str(layout), *side.pythonpath]
    tree = side.tree.resolve()
    if not tree.is_dir():
        raise AbError(f"{side.title}: {tree} is not a folder")
    if is_groupbench(tree):
        make_layout(tree, layout)
        return [str(layout)]
    make_layout(ROOT, layout)
    return [str(layout), *import_folders(tree, side.pythonpath)]


def measured_tree(folder: Path) -> MeasuredTree:
    """Return the facts a process needs to measure a checkout's modules only.

    Args:
        folder: The checkout, or a folder within it.
    """
    tree = _top(folder) or folder.resolve()
    others = git.worktrees(tree)
    here = _top(Path.cwd())
    return MeasuredTree(
        str(tree),
        tuple(str(other) for other in dict.fromkeys([*others, *([] if here is None else [here])]) if other != tree),
        tuple(_projects(tree)),
    )


def _top(folder: Path) -> Path | None:
    top = git.ask(folder, "rev-parse", "--show-toplevel")
    return Path(top.removesuffix("\n")) if top else None


def _projects(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and relative folder of each distribution in a checkout."""
    listed = git.ask(tree, "ls-files", "-z", "--", *(f":(glob)**/{name}" for name in PROJECT_FILES)) or ""
    for path in filter(None, listed.split("\0")):
        if name := _project_name(tree / path):
            yield name, str(Path(path).parent)


def _project_name(file: Path) -> str | None:
    try:
        text = file.read_text()
        if file.suffix != ".toml":
            match = re.search(r"""^\s*name\s*=\s*["']?([\w.-]+)""", text, re.MULTILINE)
            return match[1] if match else None
        content = tomllib.loads(text)
    except (OSError, ValueError):
        return None
    name = content.get("project", content.get("tool", {}).get("poetry", {})).get("name")
    return None if name is None else str(name)


class SideProcess:
    """The process of a side. `send` and `receive` are separate to let two sides work at the same time."""

    def __init__(self, who: Which, side: AbSide, device: str) -> None:
        self.who = who
        self.side = side
        self.device = device
        self.facts = Greeting()
        self._scratch = Scratch("side")
        self._buffer = b""
        self._request = ""
        self._is_busy = False  # with a request
        self._last_line = ""
        self._wait_s = START_TIMEOUT_S
        try:
            self._process = self._start()
        except BaseException:
            self._scratch.remove()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        path = python_path(self.side, self._scratch.path / "layout")
        # Only the layout: a tree's `statistics.py` or `sitecustomize.py` would run in the process that keeps the clock.
        environment = with_folders(path[1:], add_to_path(path[:1], os.environ))
        environment["PYTHONUNBUFFERED"] = "1"
        if self.side.tree is not None:
            environment |= measured_tree(self.side.tree).variables()
        # Threads that spin while they wait would slow down the other side's burst.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        if self.device == "cuda":
            environment.pop("TRITON_INTERPRET", None)
        logger.info("%s (%s): starting %s", self.who, self.side.title, self.side.python)
        with (self._scratch.path / "log").open("wb") as log:
            try:
                return subprocess.Popen(
                    own_program(MODULE, python=self.side.python),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self.side.tree or Path.cwd(),
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AbError(f"{self.side.title}: cannot start {self.side.python}: {error.strerror}") from error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, verb: str, wait_s: float = 300.0, **arguments: Any) -> None:
        """Send a request without waiting; `receive` returns the answer, or fails after `wait_s`."""
        self._request, self._wait_s, self._is_busy = verb, wait_s + MARGIN_S, True
        logger.debug("%s (%s): %s, waiting up to %g s", self.who, self.side.title, verb, self._wait_s)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead process is noticed by receive
            self._process.stdin.write(msgspec.json.encode({"verb": verb, "arguments": arguments}) + b"\n")
            self._process.stdin.flush()

    def receive(self, kind: type[T]) -> T:
        """Return the answer to the last request, as a `kind`. Raises SideFailure."""
        line = self._line()
        if line is None:
            code = self._process.poll()
            self.close()
            ended = f"its process ended with {code} during {self._request}"
            event = f"no answer to {self._request}" if code is None else ended
            raise self._failure("timeout" if code is None else "error", event + self._last_output())
        self._is_busy = False
        response = msgspec.json.decode(line, type=Answer)
        if response.failure is not None:
            raise self._failure(response.failure.status, response.failure.message)
        return msgspec.json.decode(response.value, type=kind)

    def ask(self, kind: type[T], verb: str, wait_s: float = 300.0, **arguments: Any) -> T:
        self.send(verb, wait_s, **arguments)
        return self.receive(kind)

    def hello(self) -> None:
        """Receive the facts about the side's device and environment.

        Raises AbError if the requested device does not exist, SideFailure if the side does not start.
        """
        try:
            self.facts = self.receive(Greeting)
        except SideFailure as failure:
            if failure.status == "usage":
                raise AbError(failure.message.removeprefix("UsageError: ")) from None
            old = any(word in failure.message for word in ("ImportError", "ModuleNotFoundError", "AttributeError"))
            reason = "too old or too broken for this groupbench to measure" if old else "does not start"
            raise self._failure(failure.status, f"{reason}: {failure.message}") from None

    def leave(self) -> None:
        """Close the process's input, which ends it unless it is working on a request."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self) -> None:
        """End the process and all children, and remove the folder."""
        self._end()
        self._scratch.remove()

    def _end(self) -> None:
        process = self._process
        self.leave()
        if self._is_busy:
            process.terminate()
        for seconds, stop in ((2, process.terminate), (20, self._kill)):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                stop()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._last_line = self._read_log()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, status: str, message: str) -> SideFailure:
        return SideFailure(self.who, self.side.title, status, message)

    def _line(self) -> bytes | None:
        """Return the next line of the process, or None if it ends or takes too long."""
        assert self._process.stdout is not None
        end = time.monotonic() + self._wait_s
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._process.stdout, selectors.EVENT_READ)
            except ValueError:  # closed
                return None
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(5)
                    return None
                self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_output(self) -> str:
        return f"; its last output: {self._last_line}" if self._last_line else ""

    def _read_log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._scratch.path / "log").read_text(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1][:400] if lines else ""
        return ""
