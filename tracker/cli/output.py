"""Tables for people and for programs: text, JSON, CSV, Markdown. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import csv
import io
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

import click

Format = Literal["text", "json", "csv", "md"]
F = TypeVar("F", bound=Callable[..., Any])

_NARROWEST = 16
"""Columns that a text may be folded to."""


@dataclass(frozen=True)
class Column:
    """One column: `key` names it for programs, `header` for people."""

    header: str
    key: str
    show: Callable[[Any], str] = lambda value: "" if value is None else str(value)
    right: bool = False
    wraps: bool = False  # may be folded where a terminal is narrow


def output_formats(command: F) -> F:
    """`--json`, `--csv`, `--md`: gives the command `form`."""
    for name, text in (("md", "Markdown"), ("csv", "CSV"), ("json", "JSON")):
        command = click.option(f"--{name}", "form", flag_value=name, help=f"Write {text}.")(command)
    return command


def write_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def write_table(columns: Sequence[Column], rows: Sequence[dict[str, Any]], form: Format | None) -> None:
    """Rows by key, as `form` says."""
    if form == "json":
        write_json(rows)
    elif form == "csv":
        click.echo(_csv(columns, rows), nl=False, color=True)  # or click drops what looks like a colour
    elif form == "md":
        click.echo(_markdown(columns, rows))
    elif rows and sys.stdout.isatty():
        _terminal(columns, rows)
    elif rows:
        click.echo(_plain(columns, rows))


def say(text: str) -> None:
    """Talk, for a person."""
    click.echo(printable(text), err=True)


def printable(text: str) -> str:
    """One line without control characters: a stored message must not steer a terminal."""
    flat = " ".join(text.split())
    return "".join("�" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in flat)


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}" if value < 1000 else f"{value:.0f}"


def signed_percent(value: float | None) -> str:
    """A relative change; `+0.0%` for what rounds to nothing."""
    return "" if value is None else f"{100 * value:+.1f}%".replace("-0.0%", "+0.0%")


def spread(value: float | None) -> str:
    return "" if value is None else f"±{100 * value:.2f}%"


def short_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def date(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M}"


def _cells(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[printable(column.show(row[column.key])) for column in columns] for row in rows]


def _plain(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """As wide as it needs: whoever reads a pipe cuts it themselves."""
    lines = [[column.header for column in columns], *_cells(columns, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def _terminal(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = _cells(columns, rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    least = 0
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.header), justify=justify, overflow="fold", no_wrap=not column.wraps)
        width = max(len(column.header), *(len(line[i]) for line in cells))
        least += 1 + (min(width, _NARROWEST) if column.wraps else width)
    colours = {"regressed": "red", "wrong": "red", "missing": "yellow", "improved": "green", "ok": "green"}
    for line in cells:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in line))
    console = Console()
    console.width = max(console.width, least)  # the terminal breaks the line, rather than this a number
    console.print(table)


def _csv(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.key for column in columns)
    for row in rows:
        writer.writerow(_csv_value(row[column.key]) for column in columns)
    return out.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return value


def _markdown(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def escape(text: str) -> str:
        for char in "\\`*_[]<>|":
            text = text.replace(char, "\\" + char if char not in "<>" else {"<": "&lt;", ">": "&gt;"}[char])
        return text

    rule = ["---:" if column.right else "---" for column in columns]
    body = [line([escape(cell) for cell in cells]) for cells in _cells(columns, rows)]
    return "\n".join([line([column.header for column in columns]), line(rule), *body])
