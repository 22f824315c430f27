"""Parse durations such as `90s`, `20m` and `1h30m`."""

from __future__ import annotations

import math
import re

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|min|m|h|d)")


def seconds(text: str, unit: str = "s") -> float:
    """Return the seconds of a duration such as `1h30m`, or of a plain number in `unit`. Raises ValueError."""
    parts = list(_PART.finditer(text))
    if parts and "".join(part.group() for part in parts) == text.replace(" ", ""):
        return sum(float(part[1]) * SECONDS[part[2]] for part in parts)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a duration; give for example 90s, 20m or 1h30m")
    return number * SECONDS[unit]
