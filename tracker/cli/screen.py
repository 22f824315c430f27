"""Lay out tables for a terminal: a row too long for a line takes several, and nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

if TYPE_CHECKING:
    from groupbench.tracker.cli.output import Column

BETWEEN = 2
"""Blanks between two columns of the table."""

INDENT = 4
"""Indentation of the second and later lines of a row, in characters."""

NARROWEST = 32
"""Narrowest width, in characters, that a text is folded to before it moves to the next line of its row."""


@dataclass(frozen=True)
class Layout:
    """Column positions: for each line in a row, the columns in it with their widths."""

    columns: Sequence[Column]
    lines: tuple[Mapping[int, int], ...]

    @property
    def width(self) -> int:
        return max(
            INDENT * bool(at) + sum(line.values()) + BETWEEN * (len(line) - 1) for at, line in enumerate(self.lines)
        )

    def header(self) -> Iterator[Text]:
        for text in self.row([column.header for column in self.columns]):
            text.stylize("bold")
            yield text

    def row(self, cells: Sequence[str], colours: Mapping[str, str] | None = None) -> Iterator[Text]:
        """Yield the lines of a row, without empty last ones."""
        last = max((at for at, line in enumerate(self.lines) if any(cells[i] for i in line)), default=0)
        for at, line in enumerate(self.lines[: last + 1]):
            parts = (folded(cells[i], width) for i, width in line.items())
            for texts in zip_longest(*parts, fillvalue=""):
                rendered = Text(" " * INDENT if at else "")
                for text, (i, width) in zip(texts, line.items(), strict=True):
                    blank = " " * (width - cell_len(text))
                    styled = Text(text, style=(colours or {}).get(cells[i], ""))
                    rendered.append_text(Text(blank) + styled if self.columns[i].right else styled + Text(blank))
                    rendered.append(" " * BETWEEN)
                rendered.rstrip()
                yield rendered


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Layout:
    """Return a layout with as many columns in a line as fit, folding texts to fit one more."""
    wanted = [
        min(max(cell_len(column.header), *(cell_len(row[i]) for row in rows)), max(width - INDENT, 1))
        for i, column in enumerate(columns)
    ]
    lines: list[list[int]] = [[]]
    used = 0
    for i, column in enumerate(columns):
        least = min(wanted[i], NARROWEST) if column.wraps else wanted[i]
        if lines[-1] and used + least > width:
            lines.append([])
            used = INDENT
        lines[-1].append(i)
        used += least + BETWEEN
    placed = []
    for at, line in enumerate(lines):
        fixed = {i: wanted[i] for i in line if not columns[i].wraps}
        room = width - INDENT * bool(at) - BETWEEN * (len(line) - 1) - sum(fixed.values())
        widths = fixed | _shared({i: wanted[i] for i in line if columns[i].wraps}, room)
        placed.append({i: widths[i] for i in line})
    return Layout(columns, tuple(placed))


def _shared(wanted: Mapping[int, int], room: int) -> dict[int, int]:
    """Return column widths: as wanted, or an equal part of the room left by narrower columns."""
    widths = {}
    for at, i in enumerate(sorted(wanted, key=lambda i: wanted[i])):
        widths[i] = max(1, min(wanted[i], room // (len(wanted) - at)))
        room -= widths[i]
    return widths


def folded(text: str, width: int) -> list[str]:
    """Return lines up to `width`, broken after a blank or comma in a line's second half, if there is one."""
    lines = []
    while cell_len(text) > width:
        end = max(1, min(len(text), width))
        while end > 1 and cell_len(text[:end]) > width:
            end -= 1
        after = 1 + max(text.rfind(" ", 0, end + 1), *(text.rfind(mark, 0, end) for mark in ",;|"))
        after = after if after > end // 2 else end
        lines.append(text[:after].rstrip())
        text = text[after:].lstrip()
    return [*lines, text]
