"""Tables as data, which the templates show, sort and filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from groupbench.tracker.text.wording import spread

FILTERED = 8
"""Minimum number of rows for which a table gets a filter."""


@dataclass(frozen=True)
class TableCell:
    """One table cell on a page: text, style classes, link, and a number to sort by instead."""

    text: str | None
    style: str = ""
    href: str | None = None  # an address within the page
    sort: float | None = None
    more: str | None = None  # a second, fainter line
    items: Sequence[tuple[str, str | None]] = ()  # folded below it: (text, address)
    command: str | None = None  # folded below it

    def __bool__(self) -> bool:
        return bool(self.text or self.more or self.command)


Row = Sequence[TableCell | str | None]


@dataclass(frozen=True)
class Table:
    """A table, shown in a box with separate scrolling."""

    name: str  # the caption, for screen readers
    identifier: str
    titles: Sequence[str]
    cells: Sequence[Row] = field(repr=False)
    left_out: int = 0  # rows that the page has no room for
    cards: bool = False  # on a phone each row is a card, so that nothing scrolls sideways

    @property
    def rows(self) -> list[list[TableCell]]:
        return [[cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row] for row in self.cells]

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Return (title, whether numeric) for each column."""
        right = {
            i
            for row in self.cells
            for i, cell in enumerate(row)
            if isinstance(cell, TableCell) and "number" in cell.style
        }
        return [(title, i in right) for i, title in enumerate(self.titles)]

    @property
    def filtered(self) -> bool:
        return len(self.cells) >= FILTERED

    def without_empty_columns(self) -> Table:
        used = [i for i in range(len(self.titles)) if any(row[i] for row in self.cells)]
        cells = [[row[i] for i in used] for row in self.cells]
        return replace(self, titles=[self.titles[i] for i in used], cells=cells)


def number(value: float | None, digits: int = 4) -> TableCell:
    if value is None:
        return TableCell("", "number")
    large = 10**digits <= abs(value) < 1e9  # better than 1.20e+03
    return TableCell(f"{value:.0f}" if large else f"{value:#.{digits}g}".rstrip("."), "number", sort=value)


def plus_minus(value: float | None) -> TableCell:
    return TableCell(spread(value), "number", sort=value)
