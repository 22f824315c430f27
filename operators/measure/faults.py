"""Describe a backend's exception for the author: type, message, and the raising line in their file."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from groupbench.operators.measure.deferred import torch
from groupbench.operators.measure.folders import SETTING
from groupbench.operators.measure.texts import LONGEST_LINE, joined_lines, storable
from groupbench.tracker.facts.record import cut

HERE = Path(__file__).parent
HARNESS = (f"{HERE}/", *(f"{HERE.parent}/{name}" for name in ("define.py", "plugins.py", "problems/")))
"""Where frames are the harness's way to a backend or plugin."""

_REFUSED = re.compile("read-?only|permission denied|unable to open database", re.IGNORECASE)
"""In the messages by Python, SQLite and compilers when a file cannot be changed."""

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory")


def describe(error: BaseException) -> str:
    """Return an exception in one line, at most `LONGEST_LINE` characters."""
    return _described(error, str(error), LONGEST_LINE)


def _described(error: BaseException, message: str, longest: int) -> str:
    text = storable(joined_lines(message))
    return cut(f"{type(error).__name__}: {text}" if text else type(error).__name__, longest)


def located(error: BaseException) -> str:
    """Return an exception in one line, with the author's file line: `..., at FILE:LINE in FUNCTION`.

    If a file could not be changed, a hint follows: code that is imported or run for a cell changes few folders' files.
    """
    message, where = str(error), ""
    cause: BaseException | None = error
    while cause is not None:  # Triton raises its own error from that of the kernel
        frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(cause.__traceback__)]
        where = authors_frame(frames[::-1]) or where
        if isinstance(cause, SyntaxError) and cause.filename:  # no frame is in a file that does not compile
            where = f", at {shown(cause.filename)}:{cause.lineno}"
            message = str(cause.msg) if cause is error else message  # without the file's name, which lacks its folder
        cause = cause.__cause__
    if _REFUSED.search(message):
        where += f"; a backend changes files only in TMPDIR, and in the folders that {SETTING} names"
    return _described(error, message, LONGEST_LINE - len(where)) + where


def authors_frame(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return `, at FILE:LINE in FUNCTION` for the innermost frame outside the harness and libraries, or "".

    At module level there is no function.

    Args:
        frames: (file, line, function), innermost first.
    """
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    for file, line, function in frames:
        if file.startswith((*HARNESS, "<")):
            continue
        if not file.startswith(libraries) or "/groupbench/" in file:
            return f", at {shown(file)}:{line}" + (f" in {function}" if function != "<module>" else "")
    return ""


def shown(file: str) -> str:
    """Return a file's path, relative to the current folder if the file is below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def is_oom(error: BaseException) -> bool:
    """Return whether the GPU's or the host's memory ran out.

    torch's CPU allocator reports it in a RuntimeError's text, as does CUDA for allocations outside torch's allocator.
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    )
