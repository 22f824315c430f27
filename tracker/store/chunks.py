"""Keys in chunks: a statement binds only so many parameters (32,766 in SQLite, 65,535 in PostgreSQL)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def chunks(keys: Iterable[T], size: int = 500) -> Iterator[list[T]]:
    """Yield the keys in lists of at most `size`."""
    rest = iter(keys)
    while chunk := list(islice(rest, size)):
        yield chunk
