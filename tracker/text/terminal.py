"""Draw small charts in text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def histogram(values: Sequence[float], *, rows: int = 10, width: int = 40, blocks: bool = True) -> list[str]:
    """Return a line for each bin: the start, a bar and the count.

    Args:
        blocks: The terminal can show the characters ▏ to █.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    if high - low <= abs(high) * 1e-9:  # all equal: one bin
        rows = 1
    step = (high - low) / rows
    counts = [0] * rows
    for value in finite:
        counts[min(int((value - low) / step), rows - 1) if rows > 1 else 0] += 1
    digits = _digits(low, high, step)
    starts = [f"{low + step * i:.{digits}f}" if digits is not None else f"{low + step * i:.4g}" for i in range(rows)]
    left, right = max(map(len, starts)), len(str(max(counts)))
    return [
        f"{start:>{left}}  {bar(count / max(counts), width, blocks):<{width}}  {count:>{right}}".rstrip()
        for start, count in zip(starts, counts, strict=True)
    ]


def shortened(text: str, width: int) -> str:
    """Return the text, without the middle if it is longer than `width`, since shapes differ at both ends."""
    if len(text) <= width or width < 3:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def knows_blocks(encoding: str | None) -> bool:
    try:
        _EIGHTHS.encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def bar(share: float, width: int, blocks: bool = True) -> str:
    """Return a bar over `share` of the width, to an eighth of a column; it is empty for 0 only."""
    if not blocks:
        return "#" * max(round(share * width), share > 0)
    eighths = max(round(share * width * 8), share > 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _digits(low: float, high: float, step: float) -> int | None:
    """Return the number of decimals that distinguish the bins, or None if it is too large."""
    if step == 0:
        return None
    digits = max(0, 1 - math.floor(math.log10(step)))
    return digits if digits <= 9 and high < 1e9 and low > -1e9 else None
