"""Exceptions described in one line, with the place that raised them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from groupbench.operators.measure.faults import authors_frame, describe, located
from groupbench.operators.measure.texts import LONGEST_LINE, joined_lines, one_line

LINES = {
    "one": ("a  b", "a b"),
    "two": ("M must be 128\n   of them\n", "M must be 128 / of them"),
    "blank ones": ("\n a\n\n\tb", "a / b"),
    "none": ("", ""),
}


@pytest.mark.parametrize(("text", "expected"), LINES.values(), ids=LINES)
def test_lines_never_run_together(text: str, expected: str) -> None:
    assert joined_lines(text) == expected == one_line(text)


def raised(source: str, file: Path) -> BaseException:
    """Run a file and return the exception that it raises."""
    file.write_text(source)
    with pytest.raises(Exception) as caught:
        exec(compile(source, str(file), "exec"), {"json": json})
    return caught.value


SOURCES = {
    "its own line": (
        "def kernel():\n    raise ValueError('one\\ntwo')\nkernel()",
        "ValueError: one / two",
        2,
        "kernel",
    ),
    "called into a library": ("def load():\n    json.loads('{')\n\nload()", "JSONDecodeError: ", 2, "load"),
    "the cause of another": (
        "def run():\n  try:\n    [][1]\n  except IndexError as e:\n    raise RuntimeError('x') from e\nrun()",
        "RuntimeError: x",
        3,
        "run",
    ),
}


@pytest.mark.parametrize(("source", "message", "line", "function"), SOURCES.values(), ids=SOURCES)
def test_the_line_of_the_authors_file_is_named(
    source: str, message: str, line: int, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = raised(source, tmp_path / "mine.py")
    assert located(error).startswith(message)
    assert located(error).endswith(f", at mine.py:{line} in {function}")


def test_a_long_message_leaves_room_for_the_place(tmp_path: Path) -> None:
    error = raised("raise ValueError('x' * 5000)", tmp_path / "mine.py")
    for text in (describe(error), located(error)):
        assert LONGEST_LINE - 50 < len(text) <= LONGEST_LINE
        assert re.search(r"x \.\.\. \(4,\d{3} more characters\)", text)
    assert located(error).endswith("mine.py:1")


def test_library_frames_are_not_reported() -> None:
    assert located(ValueError("no traceback")) == "ValueError: no traceback"
    assert authors_frame([(json.__file__, 3, "loads"), ("<string>", 1, "f")]) == ""
