"""Split keys into chunks, because statements bind at most 32,766 (SQLite) or 65,535 (PostgreSQL) parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def chunks(keys: Iterable[T], size: int = 500) -> Iterator[list[T]]:
    """Yield the keys in lists no longer than `size`."""
    rest = iter(keys)
    while chunk := list(islice(rest, size)):
        yield chunk
