"""Find new series equal to earlier ones but for one text.

A name that changes with each run begins a new history each time, and the gate never has anything to compare with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.identity import IDENTITY
from groupbench.tracker.store import schema

_LOOKED_AT = 200
"""Number of new series compared with earlier ones."""

_EARLIER = 10_000
"""Number of earlier series read, the latest."""

_CANDIDATES = 32
"""Number of earlier texts compared with a new one."""

_ALIKE = {"operator": 0.4, "backend": 0.4, "shape": 0.4, "hardware": 0.0}
"""Fields in which a text may change with each run, and the least share of common characters."""

_FLAGS = {"hardware": "--cpu or --gpu", "operator": "--operator", "backend": "--backend"}


def renamed(session: Session, new: Sequence[int], all_of_file: Collection[int]) -> str | None:
    """Return a note if more than half of a file's series are new and equal earlier ones but for one field, or None.

    An earlier series that the file has too does not count: then both exist.

    Args:
        session: After the file is stored.
        new: Keys of the series that the file began.
        all_of_file: Keys of all of the file's series.
    """
    total = len(all_of_file)
    if not new or 2 * len(new) <= total:
        return None
    columns = [getattr(schema.Series, name) for name in IDENTITY]
    looked_at = new[:: -(-len(new) // _LOOKED_AT)]
    began = [tuple(row) for row in session.execute(select(*columns).where(schema.Series.id.in_(looked_at)))]
    query = select(schema.Series.id, *columns).where(schema.Series.id < min(new))
    latest = session.execute(query.order_by(schema.Series.id.desc()).limit(_EARLIER))
    pairs = _pairs(began, [tuple(row[1:]) for row in latest if row[0] not in all_of_file])
    if not pairs:
        return None
    ((field, count),) = Counter(name for name, _, _ in pairs).most_common(1)
    if 2 * count * len(new) <= total * len(began):
        return None
    fresh, old = next((fresh, old) for name, fresh, old in pairs if name == field)
    advice = f"; if both are the same, give {_FLAGS[field]}" if field in _FLAGS else ""
    share = "all" if len(new) == total else f"{len(new)} of {total}"
    return (
        f"{share} series are new, but equal earlier ones except for the {field}: "
        f"{_short(fresh)!r} here, {_short(old)!r} before{advice}"
    )


Row = tuple[Any, ...]
"""The fields of IDENTITY."""


def _pairs(began: Sequence[Row], earlier: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return (field, new text, earlier text) for each new series equal to an earlier one but for one field."""
    places = {name: IDENTITY.index(name) for name in _ALIKE}
    texts: dict[Row, list[str]] = {}
    for row in earlier:
        for name, at in places.items():
            earlier_texts = texts.setdefault((name, *row[:at], *row[at + 1 :]), [])
            if len(earlier_texts) < _CANDIDATES:
                earlier_texts.append(row[at])
    pairs = []
    for row in began:
        for name, at in places.items():
            earlier_texts = texts.get((name, *row[:at], *row[at + 1 :]), [])
            old = max(earlier_texts, key=partial(_common, row[at]), default=None)
            if old is not None and _common(row[at], old) >= _ALIKE[name] * max(len(row[at]), len(old)):
                pairs.append((name, row[at], old))
                break
    return pairs


def _common(one: str, other: str) -> int:
    """Return the length of the common start and end."""
    start = _prefix(one, other)
    return start + _prefix(one[start:][::-1], other[start:][::-1])


def _prefix(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _short(text: object) -> str:
    return str(text) if len(str(text)) <= 80 else f"{str(text)[:77]}..."
