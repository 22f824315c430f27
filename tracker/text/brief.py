"""Shorten the JSON of a command for a language model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from groupbench.tracker.facts.grouping import grouped

ANSWER_BYTES = 10_000
"""Largest answer of a tool, in bytes of compact JSON."""

BRIEF_TEXT = 400  # characters of a text in an answer
_HASH = re.compile(r"\b[0-9a-f]{32,64}\b")
_SIGNIFICANT_DIGITS = 5  # of a number in an answer
_WHOLE = ("repro", "to_try")
"""Keys of commands, which are kept as they are."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def size(value: Any) -> int:
    """Return the bytes of a value as JSON."""
    return len(json.dumps(value, default=str, ensure_ascii=False).encode())


def plain(value: Any, longest: int = BRIEF_TEXT) -> Any:
    """Return JSON without empty values, with short hashes, numbers and texts."""
    if isinstance(value, dict):
        shorter = {key: each if key in _WHOLE else plain(each, longest) for key, each in value.items()}
        return {key: each for key, each in shorter.items() if each not in _EMPTY}
    if isinstance(value, list):
        return [plain(each, longest) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    if isinstance(value, str):
        value = _HASH.sub(lambda match: match[0][:12], value)
        return value if len(value) <= longest else f"{value[: longest - 1]}…"
    return value


def brief(value: Any, narrow: str, most: int = ANSWER_BYTES) -> Any:
    """Return JSON of at most `most` bytes.

    Args:
        value: The answer of a command. In a list, the first entries are the most important.
        narrow: How to ask for less, for the note about missing entries.
    """
    value = plain(value, most if isinstance(value, str) else BRIEF_TEXT)
    if size(value) <= most:
        return value
    if isinstance(value, list):
        value = {"rows": value}
    if not isinstance(value, dict):
        text = value if isinstance(value, str) else json.dumps(value)
        return {"text": _cut(text, most - 500), "left_out": f"the rest of {len(text)} characters; {narrow}"}
    left: dict[str, int] = {}
    while size(value) > most - 600:
        name, longest = max(_lists(value), key=lambda item: size(item[1]), default=("", []))
        if not longest or size(longest) < 500:
            return brief(json.dumps(plain(value, 100)), narrow, most)
        share = size(longest) / len(longest)
        fewer = min(int(len(longest) - (size(value) - most + 700) / share), len(longest) - 1)
        left[name] = left.get(name, 0) + len(longest) - max(fewer, 0)
        del longest[max(fewer, 0) :]
    return value | {"left_out": ", ".join(f"{count} of {name}" for name, count in left.items()) + f"; {narrow}"}


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")


def _lists(value: Any, name: str = "") -> Iterable[tuple[str, list[Any]]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _lists(each, key)
    elif isinstance(value, list):
        yield name, value
        for each in value:
            yield from _lists(each, name)


def by_series(rows: list[dict[str, Any]], keys: tuple[str, ...], facts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows of a history as one entry for each series, those with the largest change first.

    Args:
        rows: Points, the oldest of a series first.
        keys: Columns of the series.
        facts: Columns to keep of a point.
    """
    series = grouped(rows, lambda row: tuple(row[key] for key in keys))
    entries = []
    for named, points in series.items():
        changes = [abs(point.get("change") or 0.0) for point in points]
        kept = [{fact: point.get(fact) for fact in facts} for point in points]
        entries.append((max(changes), dict(zip(keys, named, strict=True)) | {"points": kept}))
    return [entry for _, entry in sorted(entries, key=lambda entry: -entry[0])]


def fewer_points(entries: list[dict[str, Any]], fits: Callable[[Any], bool]) -> tuple[list[dict[str, Any]], int]:
    """Return series with as many of their newest points as fit, and the largest number of points."""
    most = max((len(entry["points"]) for entry in entries), default=0)
    while most > 1 and not fits(entries):
        most = max(most // 2, 1)
        entries = [entry | {"points": entry["points"][-most:]} for entry in entries]
    return entries, most
