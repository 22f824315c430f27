"""Read rows from the pages of a SQLite file that SQLite itself cannot read, such as one without its first page.

Each page is read on its own: no table definition is needed, and no page leads to another. Free pages, which may contain
deleted rows, are left out. Format: https://sqlite.org/fileformat.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_SIZES = tuple(1 << power for power in range(9, 17))

_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE = 2, 5, 10, 13
_PENDING_BYTE = 1 << 30
"""Offset of the page that SQLite locks, which holds no data."""

_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of an integer, by serial type."""

_SAMPLE = 2000
"""Number of pages that are looked at to find the page size."""


class _PageError(ValueError):
    """A page or record that cannot be read."""


@dataclass(frozen=True)
class PageRows:
    """The readable rows of a table's leaf page, as (rowid, values)."""

    number: int
    rows: list[tuple[int, list[Any]]]
    unreadable: int  # number of rows


@dataclass
class PageFile:
    """The pages of a SQLite file. `page_bytes` is their size."""

    path: Path
    page_bytes: int
    damaged: list[int] = field(default_factory=list)  # numbers of unreadable pages, once `leaves` is exhausted

    def __post_init__(self) -> None:
        self.count = self.path.stat().st_size // self.page_bytes

    def leaves(self) -> Iterator[PageRows]:
        """Yield every table's leaf pages in the order of the file, except page 1."""
        free = self._free()
        chained: set[int] = set()  # overflow pages of a row
        others: list[int] = []
        with self.path.open("rb") as self._file:
            for number in range(2, self.count + 1):
                if number in free or (number - 1) * self.page_bytes == _PENDING_BYTE:
                    continue
                page = self._page(number)
                try:
                    if page[0] == _LEAF_TABLE:
                        yield self._leaf(number, page, chained)
                    elif page[0] in (_LEAF_INDEX, _INTERIOR_INDEX):
                        for place in _cells(page):
                            child_bytes = 4 if page[0] == _INTERIOR_INDEX else 0
                            _values(self._payload(page, place + child_bytes, chained, index=True)[1])
                    elif page[0] == _INTERIOR_TABLE:
                        _cells(page)
                    else:
                        others.append(number)
                except _PageError:
                    self.damaged.append(number)
        self.damaged += [number for number in others if number not in chained]
        if self.path.stat().st_size % self.page_bytes:
            self.damaged.append(self.count + 1)  # the file was cut off within a page

    def _page(self, number: int) -> bytes:
        if not 1 <= number <= self.count:
            raise _PageError
        self._file.seek((number - 1) * self.page_bytes)
        return self._file.read(self.page_bytes)

    def _free(self) -> set[int]:
        """Return the numbers of the free pages, by the header's list if it is whole, otherwise by its pages' form."""
        with self.path.open("rb") as self._file:
            head = self._page(1) if self.count else bytes(100)
            first, expected = struct.unpack_from(">II", head, 32)
            free: set[int] = set()
            while first and (trunk := self._trunk(first)) is not None and first not in free:
                first, listed = trunk[0], {first, *trunk[1]}
                free |= listed
            if not first and len(free) == expected:
                return free
            free.clear()
            for number in range(2, self.count + 1):
                trunk = self._trunk(number)
                if trunk is not None and (trunk[0] or trunk[1]):
                    free |= {number, *trunk[1]}
            return free

    def _trunk(self, number: int) -> tuple[int, list[int]] | None:
        """Return (next, listed pages) of a page of the list of free pages; None if it has not the form of one."""
        if not 2 <= number <= self.count:
            return None
        page = self._page(number)
        following, length = struct.unpack_from(">II", page)
        if following > self.count or following == 1 or length > self.page_bytes // 4 - 2:
            return None
        listed = list(struct.unpack_from(f">{length}I", page, 8))
        whole = all(2 <= each <= self.count for each in listed) and len(set(listed)) == length
        return (following, listed) if whole else None

    def _leaf(self, number: int, page: bytes, chained: set[int]) -> PageRows:
        rows, unreadable = [], 0
        for place in _cells(page):
            try:
                rowid, payload = self._payload(page, place, chained, index=False)
                rows.append((rowid, _values(payload)))
            except _PageError:
                unreadable += 1
        if unreadable and not rows:
            raise _PageError
        return PageRows(number, rows, unreadable)

    def _payload(self, page: bytes, place: int, chained: set[int], *, index: bool) -> tuple[int, bytes]:
        """Return (rowid, payload) of a cell, including the part on overflow pages."""
        size, place = _varint(page, place)
        rowid = 0
        if not index:
            rowid, place = _varint(page, place)
        usable = self.page_bytes
        most = (usable - 12) * 64 // 255 - 23 if index else usable - 35
        here = size
        if size > most:
            least = (usable - 12) * 32 // 255 - 23
            here = least + (size - least) % (usable - 4)
            here = here if here <= most else least
        if not 0 < size <= self.count * usable or place + here > usable:
            raise _PageError
        parts = [page[place : place + here]]
        missing = size - here
        if missing:
            (following,) = struct.unpack_from(">I", page.ljust(place + here + 4), place + here)
            while missing:
                if following in chained:
                    raise _PageError
                content = self._page(following)
                chained.add(following)
                (following,) = struct.unpack_from(">I", content)
                parts.append(content[4 : 4 + missing])
                missing -= len(parts[-1])
        return rowid - (1 << 64) * (rowid >> 63), b"".join(parts)


def page_bytes_of(path: Path) -> int | None:
    """Return the page size by the form of a file's pages, or None if no size gives any."""
    total = path.stat().st_size
    b_tree_pages = {}
    with path.open("rb") as file:
        for size in PAGE_SIZES:
            numbers = range(1, total // size)
            if len(numbers) > _SAMPLE:
                numbers = numbers[:: len(numbers) // _SAMPLE]
            whole = 0
            for number in numbers:
                file.seek(number * size)
                try:
                    whole += bool(_cells(file.read(size)))
                except _PageError:
                    continue
            b_tree_pages[size] = whole * total // size / max(len(numbers), 1)
    best = max(b_tree_pages, key=lambda size: b_tree_pages[size])
    return best if b_tree_pages[best] else None


def _cells(page: bytes) -> list[int]:
    """Return the positions of the cells of a b-tree page."""
    kind = page[0]
    if kind not in (_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE):
        raise _PageError
    _, number, start = struct.unpack_from(">HHH", page, 1)
    first = 8 if kind in (_LEAF_INDEX, _LEAF_TABLE) else 12
    end = first + 2 * number
    if end > len(page) or (start or 65536) < end:
        raise _PageError
    places = list(struct.unpack_from(f">{number}H", page, first))
    if any(not max(start, end) <= place < len(page) for place in places) or len(set(places)) < number:
        raise _PageError
    return places


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return (number, position after it)."""
    number = 0
    for count, byte in enumerate(data[place : place + 9]):
        if count == 8:
            return number << 8 | byte, place + 9
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            return number, place + count + 1
    raise _PageError


def _values(record: bytes) -> list[Any]:
    """Return the values of a record. Text with damaged bytes contains U+FFFD."""
    end, place = _varint(record, 0)
    if not place <= end <= len(record):
        raise _PageError
    kinds = []
    while place < end:
        kind, place = _varint(record, place)
        kinds.append(kind)
    lengths = [_INTEGER_BYTES.get(kind, 8 if kind == 7 else max(kind - 12, 0) // 2) for kind in kinds]
    if place != end or sum(lengths) != len(record) - end or {10, 11} & set(kinds):
        raise _PageError
    values: list[Any] = []
    for kind, length in zip(kinds, lengths, strict=True):
        data, end = record[end : end + length], end + length
        if kind in _INTEGER_BYTES:
            values.append(int.from_bytes(data, "big", signed=True))
        elif kind == 7:
            values.append(struct.unpack(">d", data)[0])
        elif kind >= 12:
            values.append(data.decode(errors="replace") if kind % 2 else data)
        else:
            values.append({0: None, 8: 0, 9: 1}[kind])
    return values
