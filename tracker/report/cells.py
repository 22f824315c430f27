"""Tables as data: what the templates show, sort and filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FILTERED = 8
"""A table of fewer rows needs no filter."""


@dataclass(frozen=True)
class Cell:
    """Text and its classes of the style sheet; where it leads, and what it is sorted by if not by its text."""

    text: str | None
    style: str = ""
    href: str | None = None  # within the page
    sort: float | None = None
    more: str | None = None  # a second, fainter line
    items: Sequence[tuple[str, str | None]] = ()  # folded below it: texts, and where they lead

    def __bool__(self) -> bool:
        return bool(self.text or self.more)


Row = Sequence[Cell | str | None]


@dataclass(frozen=True)
class Table:
    """A table in a box of its own that scrolls."""

    name: str  # what it is a table of, for those who cannot see it
    identifier: str
    titles: Sequence[str]
    cells: Sequence[Row] = field(repr=False)

    @property
    def rows(self) -> list[list[Cell]]:
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.cells]

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Titles, and whether a column holds numbers."""
        right = {
            i for row in self.cells for i, cell in enumerate(row) if isinstance(cell, Cell) and "number" in cell.style
        }
        return [(title, i in right) for i, title in enumerate(self.titles)]

    @property
    def filtered(self) -> bool:
        return len(self.cells) >= FILTERED

    def without_empty_columns(self) -> Table:
        used = [i for i in range(len(self.titles)) if any(row[i] for row in self.cells)]
        cells = [[row[i] for i in used] for row in self.cells]
        return Table(self.name, self.identifier, [self.titles[i] for i in used], cells)


def number(value: float | None, digits: int = 4) -> Cell:
    if value is None:
        return Cell("", "number")
    large = 10**digits <= abs(value) < 1e9  # better than 1.20e+03
    return Cell(f"{value:.0f}" if large else f"{value:#.{digits}g}".rstrip("."), "number", sort=value)


def percent(value: float | None, signed: bool = False) -> Cell:
    if value is None:
        return Cell("", "number")
    return Cell(f"{100 * value:+.1f}%" if signed else f"±{100 * value:.2f}%", "number", sort=value)
