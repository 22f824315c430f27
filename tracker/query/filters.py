"""What a person writes to say which points: names, sizes, dates, ranges of commits. Free of the database.

Sizes are conditions on the dims of a series, joined by commas: `M>=4096`, `G=8..64,N=4096`, `K!=7168`. Both ends of a
range belong to it, and either may be left out. A series without that size never matches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from groupbench.tracker.errors import QueryError

PATTERNS = ("shape", "hardware")
"""Fields of a series that wildcards may be given for."""

_CONDITION = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<|=)\s*(\S+)\s*", re.ASCII)
_NUMBER = re.compile(r"-?\d[\d_]{0,30}", re.ASCII)
_MORE_THAN_EQUALITY = re.compile(r"[<>]|!=|==|\.\.")

_LETTER = re.compile(r"(?<![^,])[A-Za-z_]\w*=(?=\d+(?![^,]))", re.ASCII)
_COMMA = re.compile(r"\s*,\s*")

_DURATION = re.compile(r"(\d+)\s*([mhdwy])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks", "y": "years"}
_BARE_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True)
class Filter:
    """Which points: empty means all; several values of one field are alternatives."""

    operator: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()  # exact, with * and ?, or sizes as `sizes` takes them
    host: tuple[str, ...] = ()
    protocol: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()  # exact, or with * and ?
    branch: tuple[str, ...] = ()
    commit: tuple[str, ...] = ()  # as resolve_commit takes them
    since: datetime | None = None
    until: datetime | None = None  # exclusive
    where: tuple[str, ...] = ()  # sizes as `sizes` takes them; all must hold
    commits: tuple[str, ...] = ()  # ranges A..B; all must hold


@dataclass(frozen=True)
class Size:
    """One condition on one size of the problem."""

    name: str
    low: int | None = None
    high: int | None = None
    outside: bool = False  # true of what does not lie in between

    def holds(self, dims: Mapping[str, int]) -> bool:
        value = dims.get(self.name)
        if value is None:
            return False
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return inside != self.outside


def sizes(text: str) -> tuple[Size, ...]:
    """The conditions of an expression. Raises QueryError, which names the part that is none."""
    return tuple(_size(part, text) for part in text.split(","))


def is_expression(text: str) -> bool:
    """Whether a text given for a shape says sizes rather than names a shape.

    `G=4,M=1024,N=64,K=64` is how shapes are named; it takes a comparison or a range to be an expression, or to be
    one equality alone.
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
    """`4,128,128,128`, as `tritonbench --shapes` takes a shape, without blanks; None for any other text."""
    return _COMMA.sub(",", text.strip()) if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text, re.ASCII) else None


def without_letters(shape: str) -> str:
    """`4,128,128,128` of `G=4,M_g=128,N=128,K=128`; what is no size keeps its name."""
    return _LETTER.sub("", shape)


def unknown(name: str, asked: Iterable[str], known: Collection[str]) -> list[str]:
    """What is asked for by name, and is none of the known values of a field. Wildcards and sizes name nothing."""
    absent = [text for text in asked if text not in known]
    if name in PATTERNS:
        absent = [text for text in absent if "*" not in text and "?" not in text]
    if absent and name == "shape":
        unnamed = set(map(without_letters, known))
        absent = [text for text in absent if not is_expression(text) and unnamed_sizes(text) not in unnamed]
    return absent


def refuse_unknown(name: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raises QueryError where `unknown` finds something, and says which there are."""
    for text in unknown(name, asked, known):
        said = list(known)
        if name == "shape":  # of hundreds those with the same numbers, and of long ones the start
            said.sort(key=lambda shape: len(_numbers_in(shape) ^ _numbers_in(text)))
            said = [shape if len(shape) <= 80 else shape[:79] + "…" for shape in said[:5]]
            said += ["…"] * (len(known) > len(said))
        raise QueryError(f"no {name} {text!r}; known: {', '.join(said) or 'none'}")


def _numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def all_hold(conditions: Iterable[Size], dims: Mapping[str, int]) -> bool:
    return all(condition.holds(dims) for condition in conditions)


def instant(text: str, *, end: bool = False, now: datetime | None = None) -> datetime:
    """A date, a date and time (UTC unless it says otherwise), or how long ago: 7d, 12h.

    `end`: a bare date means the end of that day. Raises QueryError.
    """
    given = text.strip()
    try:
        duration = _DURATION.fullmatch(given)
        if duration:
            number, unit = int(duration[1]), duration[2]
            ago = timedelta(days=365 * number) if unit == "y" else timedelta(**{_UNITS[unit]: number})
            return (now or datetime.now(UTC)) - ago
        when = datetime.fromisoformat(given)
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
        return when + timedelta(days=1) if end and _BARE_DATE.fullmatch(given) else when
    except (ValueError, OverflowError) as error:
        raise QueryError(f"{text!r} is no date; give 2026-01-31, 2026-01-31T12:00 or 7d") from error


def looks_like_date(text: str) -> bool:
    return _DURATION.fullmatch(text) is not None or re.match(r"\d{4}-\d{2}-\d{2}", text, re.ASCII) is not None


def commit_range(text: str) -> tuple[str | None, str | None]:
    """The ends of `A..B`: what came after A, up to and with B. Either may be left out, not both."""
    first, dots, last = text.partition("..")
    if not dots or ".." in last or last.startswith(".") or not (first or last):
        raise QueryError(f"{text!r} is no range of commits; give A..B, A.. or ..B")
    return first or None, last or None


def _size(part: str, whole: str) -> Size:
    found = _CONDITION.fullmatch(part)
    if found is None:
        raise QueryError(f"{whole!r}: {part.strip()!r} is no condition; give M>=4096, N=4096 or G=8..64")
    name, sign, value = found.groups()
    if ".." in value:
        if sign not in ("=", "==", "!="):
            raise QueryError(f"{whole!r}: a range goes with =, as in {name}={value}")
        first, _, last = value.partition("..")
        if not first and not last:
            raise QueryError(f"{whole!r}: {value!r} has no end; give {name}=8..64")
        low = _number(first, whole) if first else None
        high = _number(last, whole) if last else None
        if low is not None and high is not None and low > high:
            raise QueryError(f"{whole!r}: {value} holds nothing; the smaller comes first")
        return Size(name, low, high, sign == "!=")
    number = _number(value, whole)
    match sign:
        case ">=":
            return Size(name, low=number)
        case ">":
            return Size(name, low=number + 1)
        case "<=":
            return Size(name, high=number)
        case "<":
            return Size(name, high=number - 1)
    return Size(name, number, number, sign == "!=")


def _number(text: str, whole: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise QueryError(f"{whole!r}: {text!r} is no whole number")
    return int(text.replace("_", ""))
