"""Write tables as text, JSON, CSV or Markdown. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import csv
import io
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import click
import msgspec

from groupbench.tracker.cli.declared import option
from groupbench.tracker.facts.verdicts import Tone, Verdict
from groupbench.tracker.query.tables import RowT
from groupbench.tracker.text.cells import cell_for, formula_safe, json_for
from groupbench.tracker.text.terminal import shortened
from groupbench.tracker.text.wording import INTERPRETED, milliseconds, printable

Format = Literal["table", "json", "csv", "md"]

WIDTH = 120
"""Columns of a terminal that rows with details are made for."""

_DETAILS = 4
"""Most lines of details below a row."""

_SHORTENED_FROM = 36
"""Longest shape, in characters, whose middle is not left out in a row with details."""

_LONGEST_CELL = 44
"""Longest text, in characters, whose middle is not left out on a terminal."""

_COLOURS = {str(verdict): verdict.tone.terminal for verdict in Verdict}


@dataclass(frozen=True)
class Column:
    """A column of a table: `key` names it in JSON and CSV, `header` in text and Markdown."""

    header: str
    key: str
    show: Callable[[Any], str] = lambda value: "" if value is None else str(value)
    right: bool = False
    wraps: bool = False  # may be folded on a narrow terminal
    middle: bool = False  # on a terminal, the middle of a long text is left out
    varies: bool = False  # left out if every row has the same value
    tones: Mapping[str, Tone] = field(default_factory=dict, hash=False)  # of words that are not verdicts


CELL = (
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True, middle=True),
    Column("dtype", "dtype"),
)
"""Columns that name a cell."""

HARDWARE = Column("hardware", "hardware", wraps=True, varies=True)
HOST = Column("host", "host", varies=True)
PROTOCOL = Column("protocol", "protocol", varies=True)
SEED = Column("seed", "seed", right=True, varies=True)
APART = (HARDWARE, HOST, PROTOCOL, SEED)
"""Columns that distinguish series of the same operator, backend, mode, shape and dtype."""


def marked(row: dict[str, Any]) -> dict[str, Any]:
    """Return a point's row for a table: an interpreter's time, which is not a latency, becomes a word."""
    return row if row["timing"] != INTERPRETED else {**row, "latency_ms": INTERPRETED, "spread": None}


def marked_latency(value: float | str | None) -> str:
    """Return a latency from a `marked` row."""
    return value if isinstance(value, str) else milliseconds(value)


def plain(keys: Sequence[str], right: bool = False) -> list[Column]:
    """Return a column with unformatted values for each key, for JSON and CSV."""
    return [Column(key, key, right=right) for key in keys]


def output_format(*forms: Format) -> Any:
    """Declare `--format`, with the first of `forms` as the default."""
    return option("--format", "form", type=click.Choice(forms), default=forms[0], help="Format of the output.")


output_formats = output_format("table", "json", "csv", "md")


def write_json(value: Any) -> None:
    click.echo(json_for(sys.stdout, msgspec.json.format(msgspec.json.encode(value), indent=2)))


def write_table(columns: Sequence[Column], rows: Sequence[dict[str, Any]], form: Format) -> None:
    """Write rows to stdout in the given format."""
    columns = [
        replace(column, header=printable(column.header))  # of `sql`, it may be the name of any column
        for column in columns
        if not column.varies or len({row[column.key] for row in rows}) > 1
    ]
    if form == "json":
        write_json(rows)
    elif form == "csv":
        click.echo(_csv(columns, rows), nl=False, color=True)  # else click drops text that looks like a colour code
    elif form == "md":
        click.echo(_markdown(columns, rows))
    elif rows and sys.stdout.isatty():
        _terminal(columns, rows)
    elif rows:
        click.echo(_plain(columns, rows))


def write_rows(
    kind: type[RowT], columns: Sequence[Column], rows: Sequence[RowT], form: Format, nothing: str = ""
) -> None:
    """Write rows: the given columns for people, and every column for programs. Without rows, print `nothing`."""
    if nothing and not rows:
        say(nothing)
    write_table(plain(kind.columns()) if form in ("json", "csv") else columns, [row.flat() for row in rows], form)


def write_with_details(columns: Sequence[Column], rows: Sequence[dict[str, Any]], details: Sequence[str]) -> None:
    """Print a table with a text below each row, in at most `WIDTH` columns where names are not longer."""
    columns = [column for column in columns if any(row.get(column.key) for row in rows)]
    columns = [column for column in columns if not column.varies or len({row[column.key] for row in rows}) > 1]
    short = [
        {
            column.key: shortened(row[column.key], _SHORTENED_FROM) if column.middle else row[column.key]
            for column in columns
        }
        for row in rows
    ]
    head, *lines = _plain(columns, short).splitlines()
    click.echo(head)
    for line, row, text in zip(lines, rows, details, strict=True):
        word = str(row[columns[0].key])
        click.echo(line.replace(word, click.style(word, fg=_COLOURS.get(word) or None), 1))
        for column in columns:
            if column.middle and len(row[column.key]) > _SHORTENED_FROM:  # whole, to be copied
                click.echo(f"    {column.header} {printable(row[column.key])}")
        for part in _filled(printable(text), WIDTH - 4):
            click.echo(f"    {part}")


def _filled(text: str, width: int) -> list[str]:
    """Return the lines of a text, which break between parts if possible."""
    lines = [""]
    for part in text.replace("; ", ";\n").splitlines():
        for piece in textwrap.wrap(part, width):
            joined = f"{lines[-1]} {piece}".strip()
            lines[-1:] = [joined] if len(joined) <= width else [lines[-1], piece]
    return lines if len(lines) <= _DETAILS else [*lines[:_DETAILS], "…"]


def write_notes(lines: Sequence[str], form: Format) -> None:
    """Write lines below a table; for CSV, to stderr."""
    for line in lines:
        click.echo(f"\n{_escaped(printable(line))}" if form == "md" else printable(line), err=form == "csv")


def say(text: str) -> None:
    """Write a message for the user to stderr."""
    click.echo(printable(text), err=True)


def _cells(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[printable(column.show(row[column.key])) for column in columns] for row in rows]


def _plain(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for a pipe, whose reader can cut it: as wide as it needs to be."""
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
    """Print a table as wide as the terminal.

    If a row does not fit in one line, shared values are printed once, above the table.
    """
    from rich.console import Console
    from rich.text import Text

    from groupbench.tracker.cli.screen import folded, lay_out

    console = Console()
    cells = _cells(columns, rows)
    varying, shared = _shared(columns, cells)
    for line in cells:
        line[:] = [
            shortened(cell, _LONGEST_CELL) if column.middle else cell
            for cell, column in zip(line, columns, strict=True)
        ]
    layout = lay_out(columns, cells, console.width)
    lines = []
    if len(layout.lines) > 1 and len(rows) > 1:
        cells = [[line[i] for i in varying] for line in cells]
        layout = lay_out([columns[i] for i in varying], cells, console.width)
        lines += [Text(text) for text in folded(f"in every row: {shared}", console.width) if shared]
    lines += [*layout.header(), Text("─" * layout.width)]
    for line in cells:
        lines += layout.row(line, _colours(columns))
    console.print(Text("\n").join(lines), soft_wrap=True)


def _colours(columns: Sequence[Column]) -> dict[str, str]:
    """Return colours by word."""
    return _COLOURS | {word: tone.terminal for column in columns for word, tone in column.tones.items()}


def _shared(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> tuple[list[int], str]:
    """Return (the first column and all differing ones, the others' shared values as text)."""
    varying = [i for i in range(len(columns)) if not i or any(line[i] != cells[0][i] for line in cells)]
    others = [i for i in range(len(columns)) if i not in varying and cells[0][i]]
    return varying, ", ".join(f"{columns[i].header} {cells[0][i]}" for i in others)


def _csv(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Return a table as CSV that is safe in a spreadsheet: formula-like text gets an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(cell_for(sys.stdout, formula_safe(column.key)) for column in columns)
    for row in rows:
        writer.writerow(cell_for(sys.stdout, formula_safe(_csv_value(row[column.key]))) for column in columns)
    return out.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, dict):
        return "; ".join(f"{key}={item}" for key, item in value.items())
    return value


def _markdown(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---:" if column.right else "---" for column in columns]
    body = [line([_escaped(cell) for cell in cells]) for cells in _cells(columns, rows)]
    return "\n".join([line([_escaped(column.header) for column in columns]), line(rule), *body])


def _escaped(text: str) -> str:
    """Return a text escaped for Markdown."""
    for char in "\\`*_[]<>|":
        text = text.replace(char, "\\" + char if char not in "<>" else {"<": "&lt;", ">": "&gt;"}[char])
    return text
