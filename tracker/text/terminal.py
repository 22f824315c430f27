"""Shorten texts and draw bars in a terminal."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def shortened(text: str, width: int) -> str:
    """Return the text, without the middle if it is longer than `width`, since shapes differ at both ends."""
    if len(text) <= width or width < 3:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def bar(share: float, width: int) -> str:
    """Return a bar over `share` of the width, to an eighth of a column; it is empty for 0 only."""
    eighths = max(round(share * width * 8), share > 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
