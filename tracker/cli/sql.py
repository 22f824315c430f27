"""`groupbench sql`: run one read-only SQL statement."""

from __future__ import annotations

import base64
import math
from typing import Any

import click
import msgspec

from groupbench.tracker.cli.output import Column, Format, output_formats, write_table


@click.command()
@click.argument("statement")
@click.option(
    "-p", "--param", "params", nargs=2, multiple=True, metavar="NAME VALUE", help="Value of :NAME in the statement."
)
@output_formats
@click.pass_obj
def sql(db: str, statement: str, params: tuple[tuple[str, str], ...], form: Format | None) -> None:
    """Run one read-only SQL statement. docs/reference/schema.md describes the tables."""
    from groupbench.tracker.store.sql import ask

    result = ask(db, statement, dict(params))
    rows = [{name: _value(value, form) for name, value in row.items()} for row in result.flat()]
    numbers = {n for n in result.columns if rows and all(isinstance(row[n], int | float | None) for row in rows)}
    write_table([Column(name, name, right=name in numbers, wraps=True) for name in result.columns], rows, form)


def _value(value: Any, form: Format | None) -> Any:
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode() if form in ("json", "csv") else f"<{len(value)} bytes>"
    return _for_json(value) if form == "json" else value


def _for_json(value: Any) -> Any:
    """Return a value for JSON: as text if JSON has no such value, since null would be another one."""
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _for_json(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        msgspec.json.encode(value)
    except (TypeError, OverflowError):  # such as a range of PostgreSQL
        return str(value)
    return value
