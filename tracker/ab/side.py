"""The driver's end of one side of an A/B comparison: which modules it runs, its process, its answers.

Both sides are timed by the same clock: the code that measures is the driver's own, the kernels and the operators are
the tree's. A tree that is a groupbench checkout is therefore shown to its process through a folder of links; any other
tree is put before the installed packages, for the plugin that it holds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.project import import_folders
from groupbench.tracker.text.scratch import Scratch

TRACKER = Path(__file__).resolve().parents[1]
ROOT = TRACKER.parent
"""The folder of the driver's own kernels, operators and tracker, installed or a checkout."""

MODULE = "groupbench.operators.measure.side"
START_TIMEOUT_S = 300.0
MARGIN_S = 30.0
"""A side gives up on its cell itself; the driver waits that much longer before it gives up on the side."""


class AbError(TrackerError):
    """A comparison that cannot be made at all: what is asked for does not exist, or a side does not start."""


class SideError(AbError):
    """One side does not start, or lacks what the other has: the commit's fault, not the user's."""

    exit_code = ExitCode.INCOMPLETE


Which = Literal["base", "head", "both"]


@dataclass(frozen=True)
class Side:
    """What is compared.

    title   as the user named it: a commit, a folder
    tree    its files; None for what is installed
    python  the interpreter that runs it
    commit  the full hash, where it is one
    pythonpath  folders of the tree that hold modules, besides itself and its `src`
    """

    title: str
    tree: Path | None = None
    python: str = sys.executable
    commit: str | None = None
    pythonpath: tuple[str, ...] = ()


class SideFailure(Exception):
    """A side did not do what it was asked; the comparison of this cell is over."""

    def __init__(self, who: Which, title: str, status: str, message: str) -> None:
        super().__init__(message)
        self.who = who
        self.title = title
        self.status = status  # error, oom, timeout, unavailable, usage
        self.message = " ".join(message.split())


def is_groupbench(tree: Path) -> bool:
    """Whether a tree is a checkout of groupbench itself, rather than of a package that uses it."""
    return all((tree / part).exists() for part in ("operators/operator.py", "operators/measure", "kernels", "tracker"))


CONTRACT = ("dtypes.py", "errors.py", "operator.py", "tolerances.py")
"""What measuring asks of operators. A tree from before it asked that is measured with the driver's own."""


def make_layout(tree: Path, folder: Path, own_contract: bool = True) -> None:
    """In `folder`, a package `groupbench` of the tree's kernels and operators and the driver's measure and tracker.

    own_contract  whether the files of CONTRACT are the tree's, or the driver's

    Modules of an installed groupbench are out of sight there: what the tree lacks must fail to import.
    """
    package = folder / "groupbench"
    operators = package / "operators"
    operators.mkdir(parents=True)
    (package / "kernels").symlink_to((tree / "kernels").resolve())
    (package / "tracker").symlink_to(TRACKER)
    (operators / "measure").symlink_to(ROOT / "operators" / "measure")
    for path in sorted((tree / "operators").iterdir()):
        if path.name not in ("measure", "__init__.py", "__pycache__", *(() if own_contract else CONTRACT)):
            (operators / path.name).symlink_to(path.resolve())
    for name in () if own_contract else CONTRACT:
        (operators / name).symlink_to(ROOT / "operators" / name)
    own = tree / "operators" / "__init__.py"
    (operators / "__init__.py").write_text(
        f"""# Made by `groupbench ab`: this folder's modules, none of a groupbench that is installed.
import sys
import groupbench

groupbench.__path__ = [{str(package)!r}]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable___groupbench" not in getattr(f, "__module__", "")]
{own.read_text() if own.exists() else ""}"""
    )


def python_path(side: Side, layout: Path, own_contract: bool = True) -> list[str]:
    """Folders that come first in the side's search for modules. Raises AbError where the tree is no folder."""
    if side.tree is None:
        make_layout(ROOT, layout)
        return [str(layout)]
    tree = side.tree.resolve()
    if not tree.is_dir():
        raise AbError(f"{side.title}: {tree} is no folder")
    if is_groupbench(tree):
        make_layout(tree, layout, own_contract)
        return [str(layout)]
    make_layout(ROOT, layout)
    return [str(layout), *import_folders(tree, side.pythonpath)]


class SideProcess:
    """A running side. `send` and `receive` are apart so that two sides can work at the same time."""

    def __init__(self, who: Which, side: Side, device: str) -> None:
        self.who = who
        self.side = side
        self.device = device
        self.facts: dict[str, Any] = {}
        self._scratch = Scratch("side")
        self._buffer = b""
        self._asked = ""
        self._words = ""
        self._own_contract = True
        self._wait_s = START_TIMEOUT_S
        try:
            self._process = self._start()
        except BaseException:
            self._scratch.remove()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        path = python_path(self.side, self._scratch.path / f"layout-{self._own_contract}", self._own_contract)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["PYTHONUNBUFFERED"] = "1"
        # Threads that wait by spinning would slow the other side's burst.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        if self.device == "cuda":
            environment.pop("TRITON_INTERPRET", None)
        with (self._scratch.path / "log").open("wb") as log:
            try:
                return subprocess.Popen(
                    # -P: the current folder's modules are not the side's
                    [self.side.python, "-P", "-m", MODULE],
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
        """Ask without waiting; `receive` gets the answer, or fails after `wait_s`."""
        self._asked, self._wait_s = verb, wait_s + MARGIN_S
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead process is noticed by receive
            self._process.stdin.write(msgspec.json.encode({"verb": verb, "arguments": arguments}) + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The answer. Raises SideFailure."""
        line = self._line()
        if line is None:
            code = self._process.poll()
            self.close()
            how = f"no answer to {self._asked}" if code is None else f"its process ended ({code}) during {self._asked}"
            raise self._failure("timeout" if code is None else "error", how + self._last_words())
        answer = msgspec.json.decode(line)
        if "failure" in answer:
            raise self._failure(answer["failure"]["status"], answer["failure"]["message"])
        return answer["value"]

    def ask(self, verb: str, wait_s: float = 300.0, **arguments: Any) -> Any:
        self.send(verb, wait_s, **arguments)
        return self.receive()

    def hello(self) -> None:
        """Wait for what it runs on.

        Raises AbError where the user asked for a device that is not there, SideFailure where the side does not start.
        """
        try:
            self.facts = self.receive()
        except SideFailure as failure:
            if failure.status == "usage":
                raise AbError(failure.message.removeprefix("UsageError: ")) from None
            old = any(word in failure.message for word in ("ImportError", "ModuleNotFoundError", "AttributeError"))
            if old and self._own_contract and self.side.tree is not None and is_groupbench(self.side.tree):
                self._start_over()
                self.send("hello", START_TIMEOUT_S, device=self.device)
                self.hello()
                return
            why = "too old, or too broken, to be measured by this groupbench" if old else "does not start"
            raise self._failure(failure.status, f"{why}: {failure.message}") from None

    def _start_over(self) -> None:
        """Once more, with the driver's contract."""
        self._own_contract = False
        self.close()
        self._scratch = Scratch("side")
        self._buffer = b""
        self._process = self._start()

    def close(self) -> None:
        """End it and what it started."""
        self._end()
        self._scratch.remove()

    def _end(self) -> None:
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        # The end of its questions ends it, unless it is in the middle of one.
        for seconds, stop in ((2, process.terminate), (20, self._kill)):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                stop()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._words = self._read_log()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, status: str, message: str) -> SideFailure:
        return SideFailure(self.who, self.side.title, status, message)

    def _line(self) -> bytes | None:
        """The next line it writes; None where it ends or takes too long."""
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

    def _last_words(self) -> str:
        return f"; it last wrote: {self._words}" if self._words else ""

    def _read_log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._scratch.path / "log").read_text(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1][:400] if lines else ""
        return ""
