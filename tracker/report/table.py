"""HTML tables. Every text is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

RIGHT = ("ms", "±", "speedup", "tflops", "rms", "change", "threshold")


@dataclass(frozen=True)
class Cell:
    """Text and its classes of the style sheet."""

    text: str | None
    style: str = ""


def table(head: str, rows: Sequence[Sequence[Cell | str | None]], identifier: str = "") -> str:
    """`head` names the columns, apart by spaces; a comma stands for a space."""
    titles = "".join(
        f"<th{_class('number' if name.endswith(RIGHT) else '')}>{escape(name.replace(',', ' '))}</th>"
        for name in head.split()
    )
    body = "\n".join("<tr>" + "".join(map(_td, row)) + "</tr>" for row in rows)
    mark = f' id="{escape(identifier)}"' if identifier else ""
    return f"<table{mark}><thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table>"


def number(value: float | None, digits: int = 4) -> Cell:
    return Cell("" if value is None else f"{value:#.{digits}g}".rstrip("."), "number")


def percent(value: float | None, signed: bool = False) -> Cell:
    if value is None:
        return Cell("", "number")
    return Cell(f"{100 * value:+.1f}%" if signed else f"±{100 * value:.2f}%", "number")


def _td(cell: Cell | str | None) -> str:
    found = cell if isinstance(cell, Cell) else Cell(cell)
    return f"<td{_class(found.style)}>{escape(found.text or '')}</td>"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""
