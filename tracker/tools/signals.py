"""The signals that end a program: a terminal's Ctrl-C and hangup, and the SIGTERM by which CI ends a job.

All three interrupt a command, which reports this in one line, removes its temporary files and keeps its measurements.
Before and after the command they end the process at once: a traceback from an import would explain nothing. Imports
take seconds, so an end during them is reported too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NoReturn

from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.text.wording import printable

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Report:
    """The line about an interrupt, which is printed once."""

    def __init__(self, program: str) -> None:
        self.program, self.printed = program, False
        self.kept: list[tuple[Callable[[], str], bool]] = []

    def text(self) -> str:
        """Return the line. The outermost command knows its user's next step."""
        self.printed = True
        kept = f"; {self.kept[0][0]()}" if self.kept else ""
        return f"{self.program}: interrupted{printable(kept)}"


_REPORT = _Report("groupbench")


def end_at_once() -> None:
    """Let these signals end the process, except those that are ignored, such as by `nohup`."""
    _handle_all(signal.SIG_DFL)


def report_and_end(program: str) -> None:
    """Let these signals end the process after a line that reports it, while modules are imported."""

    def handle(number: int, frame: FrameType | None) -> None:
        _report_at_once()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    begin(program)
    _handle_all(handle)


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program. This package's own ones take even the signals of their first moments."""
    end_at_once()  # a thread would take a signal for a handler that the new program does not have
    if command[1:3] == own_program("")[1:3]:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # inherited; `_handle_all` lets them through
    os.execvpe(command[0], command, environment)


def begin(program: str) -> None:
    """Set the prefix for the report of an interrupt."""
    global _REPORT
    _REPORT = _Report(program)


def interrupt() -> None:
    """Let these signals raise KeyboardInterrupt, except those that are ignored."""
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # not a child that inherited this handler
            _report_at_once()  # since ending the processes takes a while
        raise KeyboardInterrupt

    _handle_all(handle)


@contextlib.contextmanager
def keeping(text: Callable[[], str], *, at_once: bool = True) -> Iterator[None]:
    """Report an interrupt with `text()`, which names the kept results and the next step.

    Args:
        at_once: Report when the signal arrives. Otherwise at the end: another program still adds results.
    """
    kept = _REPORT.kept
    if not kept:
        _REPORT.printed = False  # of an earlier command in this process
    kept.append((text, at_once))
    try:
        yield
    except KeyboardInterrupt:
        report()
        raise
    finally:
        kept.pop()


def report() -> None:
    """Print that this program was interrupted, unless it was printed when a signal arrived."""
    if not _REPORT.printed:
        with contextlib.suppress(OSError):
            print(_REPORT.text(), file=sys.stderr, flush=True)


def _report_at_once() -> None:
    """Report from a signal handler: not by sys.stderr, which may be writing."""
    if not _REPORT.printed and all(at_once for _, at_once in _REPORT.kept[:1]):
        line = "\n" * os.isatty(2) + _REPORT.text() + "\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode("ascii", "replace"))


def _handle_all(handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone receives signals
                signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
