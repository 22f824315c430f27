"""Parse the values in files: JSON, numbers, text instead of a number, sizes and dates."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.metrics import Better
from groupbench.tracker.facts.record import Status

T = TypeVar("T")

UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ns": 1e-6}
"""Milliseconds per unit."""


_TIME_WORDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1000.0),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds", "millis"), 1.0),
    **dict.fromkeys(("us", "µs", "μs", "usec", "microsecond", "microseconds", "micros"), 0.001),
    **dict.fromkeys(("ns", "nsec", "nanosecond", "nanoseconds", "nanos"), 1e-06),
}
_CALLS = {"iter", "iters", "iteration", "iterations", "op", "ops", "operation", "operations", "call", "calls", "run"}


def milliseconds_of(value: float, unit: str) -> float | None:
    """Return a time per call (`ns/iter`) or the inverse of a rate of calls (`iter/sec`) in ms; None for other units."""
    above, _, below = (word.strip() for word in unit.strip().lower().partition("/"))
    if above in _TIME_WORDS and (below in _CALLS or not below):
        return value * _TIME_WORDS[above]
    if above in _CALLS and below in _TIME_WORDS:
        return _TIME_WORDS[below] / value if value else 0.0
    return None


_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_BYTES = re.compile(r"([kmgt]i?)?(?:b|bytes?|(bits?))", re.IGNORECASE)
_RATE = re.compile(r"(.+?)(?:/s|/sec|/seconds?|[ _]per[ _]s(?:ec|econds?)?|((?<=b)ps)|(?<=flop)s)", re.IGNORECASE)
_THINGS = re.compile(
    r"([kmgt])? ?(?:(?:tok(?:en)?|req(?:uest)?|item|sample|row|elem(?:ent)?|image|frame|step|event|msg|message)s?|"
    r"quer(?:y|ies)|transactions?|prompts?|flops?)",
    re.IGNORECASE,
)


def quantity_of(value: float, unit: str, better: Better = "neither") -> tuple[str, float]:
    """Return the metric of a value that is not a time, and the value in the metric's unit.

    Args:
        unit: As the file spells it, such as `tokens/s` or `MB`.
        better: The file's own direction. It wins over the usual one, by which bytes should fall and rates rise.
    """
    rate = _RATE.fullmatch(unit.strip())
    word = rate[1] if rate else unit.strip().removesuffix("/op").removesuffix("/iter")
    if (match := _BYTES.fullmatch(word)) and better != ("lower" if rate else "higher"):
        bits = match[2] or (word[-1] == "b" and match[1] and (match[1].isupper() or (rate and rate[2])))
        size = value * _SCALES[(match[1] or "").lower()] / (8 if bits else 1)
        return ("bandwidth", size / 1e9) if rate else ("memory_mib", size / 2**20)
    if rate and (match := _THINGS.fullmatch(word)) and better != "lower":
        return "per_second", value * _SCALES[(match[1] or "").lower()]
    return {"higher": "score", "lower": "cost", "neither": "value"}[better], value


_IN_NAME = re.compile(
    r"(?:.*[^ ])? ?\((.+)\)|(?:.*[_-])?([a-z]+_per_sec(?:onds?)?)|.*[_-](s|ms|us|ns|bytes|[kmg]i?b)", re.IGNORECASE
)


def unit_in(name: str) -> str:
    """Return the unit at the end of a name, as in `peak_mem(mb)`, `ttft_ms` and `tokens_per_second`; empty for none."""
    match = _IN_NAME.fullmatch(name.strip())
    return next(filter(None, match.groups()), "") if match else ""


class FormatError(IngestError):
    """A file does not follow the format. The message names the line or the key, not the file."""


def read_bytes(path: Path) -> bytes:
    """Return a file's content, without Windows's byte order mark."""
    if path.is_dir():
        raise FormatError("is a folder, not a file")
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def load_json(data: bytes) -> Any:
    """Return decoded JSON, with NaN and Infinity, as Python writes them.

    Raises FormatError, with line and column if it is not JSON, and if an object has two values for one key.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_contradictions)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(f"line {line}: is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"line {error.lineno}: is not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise FormatError("is nested too deeply") from error


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if values.setdefault(name, value) is not value and repr(values[name]) != repr(value):
            raise FormatError(f"the key {name!r} has two values in one object")
    return values


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Return a value as a declared structure. Raises FormatError, which names the key."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}{': ' if where else ''}{error}".replace("`$.", "`")) from error


def json_lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each line of JSON."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, load_json(line)
            except FormatError as error:
                raise FormatError(f"line {number}: {error.message.removeprefix('line 1: ')}") from error


def csv_table(data: bytes, delimiter: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header of a CSV, and the other lines with their numbers."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"line {data.count(bytes([10]), 0, error.start) + 1}: is not UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        table = [(lines.line_num, cells) for cells in lines if cells]
    except csv.Error as error:
        raise FormatError(f"line {lines.line_num}: {error}") from error
    if not table:
        raise FormatError("is empty")
    return table[0][1], table[1:]


_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?)\s*(?:\(±[^)]*\))?\s*", re.ASCII)
_NOT_FINITE = {"nan", "+nan", "-nan", "inf", "+inf", "-inf", "infinity", "-infinity"}


def number_of(value: Any) -> float | None:
    """Return the value of a table cell as a number, or None if it is empty or text. NaN and infinity are numbers."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match:
            return float(match[1])
        if value.strip().lower() in _NOT_FINITE:
            return float(value.strip())
    return None


def status_of(text: str) -> tuple[Status, str]:
    """Return status and message for text in place of a number."""
    message = " ".join(text.split())
    lower = message.lower()
    if not message:
        return "skipped", "no value"
    if re.search(r"\boom\b|out of memory|outofmemory", lower):
        return "oom", message
    if re.search(r"time ?out|timed out", lower):
        return "timeout", message
    if re.search(r"not implemented|notimplemented|unsupported|not supported|unavailable|not available", lower):
        return "unavailable", message
    if re.search(r"\bskip", lower):
        return "skipped", message
    return "error", message


def without_message(status: str) -> str:
    """Return the message for a result with only a status."""
    return f"the file has the status {status!r} without a reason"


_SIZE = re.compile(r"\s*([A-Za-z_]\w*)\s*[=:]\s*(-?\d{1,18})\s*", re.ASCII)


def dims_of(shape: str) -> dict[str, int]:
    """Return the sizes in a shape's text, such as `G=4,N=64`. M is the sum of M_g over the groups."""
    return dict(_dims_of(shape))


@lru_cache(maxsize=1 << 15)
def _dims_of(shape: str) -> dict[str, int]:
    shape = re.sub(r"#\d+$", "", shape)
    parts = [part.partition("=") for part in shape.split(",")]
    dims = {match[1]: int(match[2]) for part in shape.split(",") if (match := _SIZE.fullmatch(part))}
    each = dims.pop("M_g", None)
    listed = next((value for name, _, value in parts if name.strip() == "M_g" and "|" in value), None)
    if each is not None and "G" in dims and "M" not in dims:
        dims["M"] = dims["G"] * each
    elif listed is not None and "M" not in dims and re.fullmatch(r"\d{1,15}(\|\d{1,15})*", listed.strip(), re.ASCII):
        dims["M"] = sum(map(int, listed.split("|")))
    return {name: value for name, value in dims.items() if abs(value) < 2**63}


def from_timestamp(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise FormatError(f"{seconds!r} is not a valid time") from error


def from_iso(text: str, where: str) -> datetime:
    """Return a date and time as in ISO 8601, by git or as 14 digits; UTC without an offset. Raises FormatError."""
    plain = re.sub(r"^(\d{8})(\d{6})$", r"\1T\2", text.strip(), flags=re.ASCII)
    try:
        when = datetime.fromisoformat(re.sub(r" ([+-]\d\d:?\d\d)$", r"\1", plain))
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{where}: {text!r} is not a date") from error


def date_if_valid(text: Any) -> datetime | None:
    """Return a date and time as `from_iso` does, or None for anything else."""
    try:
        return from_iso(text, "") if isinstance(text, str) else None
    except FormatError:
        return None
