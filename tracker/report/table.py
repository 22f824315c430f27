"""HTML tables that `tables.js` sorts and filters. Every text is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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


def table(
    head: str,  # names of the columns, apart by spaces; a comma stands for a space
    rows: Sequence[Sequence[Cell | str | None]],
    *,
    name: str,  # what it is a table of, for who cannot see it
    identifier: str,
) -> str:
    """A table in a box of its own that scrolls, with a filter where it is long."""
    right = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, Cell) and "number" in cell.style}
    titles = "".join(
        f'<th scope="col" aria-sort="none"{_class("number" if i in right else "")}>'
        f'<button type="button">{escape(title.replace(",", " "))}</button></th>'
        for i, title in enumerate(head.split())
    )
    body = "\n".join("<tr>" + "".join(map(_td, row)) + "</tr>" for row in rows)
    mark = escape(identifier)
    box = (
        f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">'
        f'<table id="{mark}" class="sortable"><caption class="unseen">{escape(name)}</caption>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
    return (filter_box(f"#{mark} tbody tr", name) if len(rows) >= FILTERED else "") + box


def filter_box(selector: str, name: str) -> str:
    """Where words are typed that each shown item must contain, and how many are shown."""
    return (
        f'<p class="filter"><input type="search" data-filter="{escape(selector)}" placeholder="Filter" '
        f'aria-label="Filter {escape(name)}" autocomplete="off"> <output aria-live="polite"></output></p>'
    )


def number(value: float | None, digits: int = 4) -> Cell:
    if value is None:
        return Cell("", "number")
    large = 10**digits <= abs(value) < 1e9  # better than 1.20e+03
    return Cell(f"{value:.0f}" if large else f"{value:#.{digits}g}".rstrip("."), "number", sort=value)


def percent(value: float | None, signed: bool = False) -> Cell:
    if value is None:
        return Cell("", "number")
    return Cell(f"{100 * value:+.1f}%" if signed else f"±{100 * value:.2f}%", "number", sort=value)


def _td(cell: Cell | str | None) -> str:
    found = cell if isinstance(cell, Cell) else Cell(cell)
    text = _breakable(found.text)
    text = _linked(text, found.href)
    if found.items:
        listed = "".join(f"<li>{_linked(_breakable(item), href)}</li>" for item, href in found.items)
        text = f"<details><summary>{text}</summary><ul>{listed}</ul></details>"
    if found.more:
        text += f'<span class="more">{_breakable(found.more)}</span>'
    order = "" if found.sort is None else f' data-sort="{found.sort:.6g}"'
    return f"<td{_class(found.style)}{order}>{text}</td>"


def _linked(text: str, href: str | None) -> str:
    return text if href is None else f'<a href="{escape(href)}">{text}</a>'


def _breakable(text: str | None) -> str:
    """Long shapes break between their sizes, and nowhere else."""
    return escape(text or "").replace(",", ",<wbr>")


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""
