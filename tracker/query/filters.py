"""Parse filters: names, sizes, dates and commit ranges. Does not use the database.

Sizes are comma-separated conditions on a series' dims: `M>=4096`, `G=8..64,N=4096`, `K!=7168`. Ranges include both
ends, and either end may be omitted. A series without the size never matches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from groupbench.tracker.facts.errors import QueryError

PATTERNS = ("shape", "hardware")
"""Fields of a series that accept wildcards."""

_CONDITION = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<|=)\s*([^\s<>=!]\S*|)\s*", re.ASCII)
_NUMBER = re.compile(r"-?\d[\d_]{0,30}", re.ASCII)
_MORE_THAN_EQUALITY = re.compile(r"[<>]|!=|==|\.\.")

_LETTER = re.compile(r"(?<![^,])[A-Za-z_]\w*=(?=\d+(?![^,]))", re.ASCII)
_COMMA = re.compile(r"\s*,\s*")

_DURATION = re.compile(r"(\d+)\s*([mhdwy])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks", "y": "years"}
_BARE_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True)
class Filter:
    """A point selection. An empty field selects all; several values in one field are alternatives."""

    operator: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()  # exact, with * and ?, or sizes as in `sizes`
    host: tuple[str, ...] = ()
    protocol: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()  # exact, or with * and ?
    branch: tuple[str, ...] = ()
    commit: tuple[str, ...] = ()  # as in `resolve_commit`, or ranges A..B, which must all hold
    since: datetime | None = None
    until: datetime | None = None  # exclusive
    where: tuple[str, ...] = ()  # sizes as in `sizes`; all must hold

    @property
    def ranges(self) -> tuple[str, ...]:
        return tuple(text for text in self.commit if ".." in text)

    @property
    def named(self) -> tuple[str, ...]:
        """The single commits."""
        return tuple(text for text in self.commit if ".." not in text)


@dataclass(frozen=True)
class Size:
    """A condition on one problem size."""

    name: str
    low: int | None = None
    high: int | None = None
    outside: bool = False  # the condition holds outside the range

    def holds(self, dims: Mapping[str, int]) -> bool:
        value = dims.get(self.name)
        if value is None:
            return False
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return inside != self.outside


def sizes(text: str) -> tuple[Size, ...]:
    """Return an expression's conditions. Raises QueryError with the invalid part."""
    return tuple(_size(part, text) for part in text.split(","))


def is_expression(text: str) -> bool:
    """Return whether a shape text is a size expression rather than a name.

    Shapes have names such as `G=4,M=1024,N=64,K=64`. An expression has a comparison or a range, or is a single
    equality.
    """
    parts = text.split(",")
    if len(parts) > 1 and not _MORE_THAN_EQUALITY.search(text):
        return False
    try:
        sizes(text)
    except QueryError:
        return False
    return True


def unnamed_sizes(text: str) -> str | None:
    """Return a shape as in `tritonbench --shapes` (`4,128,128,128`) without blanks; None for any other text."""
    return _COMMA.sub(",", text.strip()) if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text, re.ASCII) else None


def without_letters(shape: str) -> str:
    """Return `4,128,128,128` for `G=4,M_g=128,N=128,K=128`. Parts other than sizes keep their name."""
    return _LETTER.sub("", shape)


def unknown(name: str, requested: Iterable[str], existing: Collection[str]) -> list[str]:
    """Return the requested names not found in a field, without wildcards and sizes."""
    missing = [text for text in requested if text not in existing]
    if name in PATTERNS:
        missing = [text for text in missing if "*" not in text and "?" not in text]
    if missing and name == "shape":
        unnamed = set(map(without_letters, existing))
        missing = [text for text in missing if not is_expression(text) and unnamed_sizes(text) not in unnamed]
    return missing


def refuse_longer(name: str, text: str | None, longest: int) -> None:
    """Raise QueryError where a text is longer than is stored."""
    if text is not None and len(text) > longest:
        raise QueryError(f"{name} is {len(text):,} characters long; at most {longest:,} are stored")


def refuse_unknown(name: str, requested: Iterable[str], existing: Collection[str]) -> None:
    """Raise QueryError for an unknown requested name, and list the known ones."""
    for text in unknown(name, requested, existing):
        shown = list(existing)
        if name == "shape":  # show a few with similar numbers, shortened, since there may be hundreds
            shown.sort(key=lambda shape: len(_numbers_in(shape) ^ _numbers_in(text)))
            shown = [shape if len(shape) <= 80 else shape[:79] + "…" for shape in shown[:5]]
            shown += ["…"] * (len(existing) > len(shown))
        raise QueryError(f"no {name} {text!r}; known: {', '.join(shown) or 'none'}")


def _numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def all_hold(conditions: Iterable[Size], dims: Mapping[str, int]) -> bool:
    return all(condition.holds(dims) for condition in conditions)


def instant(text: str, *, end: bool = False, now: datetime | None = None) -> datetime:
    """Parse a date, a date and time (UTC by default), or a duration before now: 7d, 12h.

    With `end`, a bare date means midnight after the day. Raises QueryError.
    """
    stripped = text.strip()
    try:
        duration = _DURATION.fullmatch(stripped)
        if duration:
            number, unit = int(duration[1]), duration[2]
            ago = timedelta(days=365 * number) if unit == "y" else timedelta(**{_UNITS[unit]: number})
            return (now or datetime.now(UTC)) - ago
        when = datetime.fromisoformat(stripped)
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
        return when + timedelta(days=1) if end and _BARE_DATE.fullmatch(stripped) else when
    except (ValueError, OverflowError) as error:
        if _DURATION.fullmatch(stripped):
            raise QueryError(f"{text!r} is too long ago: it is before the year 1") from error
        raise QueryError(f"{text!r} is not a date; give 2026-01-31, 2026-01-31T12:00 or 7d") from error


def looks_like_date(text: str) -> bool:
    return _DURATION.fullmatch(text) is not None or re.match(r"\d{4}-\d{2}-\d{2}", text, re.ASCII) is not None


def commit_range(text: str) -> tuple[str | None, str | None]:
    """Return the ends from `A..B`, which excludes A and includes B. One end may be omitted. Raises QueryError."""
    first, dots, last = text.partition("..")
    if not dots or ".." in last or last.startswith(".") or not (first or last):
        raise QueryError(f"{text!r} is not a range of commits; give A..B, A.. or ..B")
    return first or None, last or None


def _size(part: str, whole: str) -> Size:
    match = _CONDITION.fullmatch(part)
    if match is None:
        raise QueryError(f"{whole!r}: {part.strip()!r} is not a condition; give M>=4096, N=4096 or G=8..64")
    name, sign, value = match.groups()
    if not value:
        raise QueryError(f"{whole!r}: {part.strip()!r} has no number; give one, as in {name}{sign}4096")
    if ".." in value:
        return _range(name, sign, value, whole)
    number = _number(value, whole)
    open_ends = {">=": (number, None), ">": (number + 1, None), "<=": (None, number), "<": (None, number - 1)}
    low, high = open_ends.get(sign, (number, number))
    return Size(name, low, high, sign == "!=")


def _range(name: str, sign: str, value: str, whole: str) -> Size:
    if sign not in ("=", "==", "!="):
        raise QueryError(f"{whole!r}: a range needs =, as in {name}={value}")
    first, _, last = value.partition("..")
    if not first and not last:
        raise QueryError(f"{whole!r}: {value!r} has neither end; give {name}=8..64")
    low = _number(first, whole) if first else None
    high = _number(last, whole) if last else None
    if low is not None and high is not None and low > high:
        raise QueryError(f"{whole!r}: {value} is empty; put the smaller number first")
    return Size(name, low, high, sign == "!=")


def _number(text: str, whole: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise QueryError(f"{whole!r}: {text!r} is not an integer")
    return int(text.replace("_", ""))
