"""The signals that end a program: a terminal's Ctrl-C and hangup, and the SIGTERM by which CI ends a job.

All three interrupt a command, so that it removes its temporary files and keeps its measurements. Before and
after the command they end the process at once: a traceback from an import would explain nothing.
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """Let these signals end the process, except those that are ignored, such as by `nohup`."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            _handle(number, signal.SIG_DFL)


def interrupt() -> None:
    """Let these signals raise KeyboardInterrupt, except those that are ignored or have a handler already."""
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            _handle(number, _raise)


def _handle(number: signal.Signals, handler: signal.Handlers | object) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread, which alone receives signals
        signal.signal(number, handler)  # type: ignore[arg-type]


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
