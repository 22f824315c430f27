"""`groupbench sql`: one statement of your own, which can only read."""

from __future__ import annotations

import base64
from typing import Any

import click

from groupbench.tracker.cli.output import Column, Format, output_formats, write_table


@click.command()
@click.argument("statement")
@click.option(
    "-p", "--param", "params", nargs=2, multiple=True, metavar="NAME VALUE", help="Value of :NAME in the statement."
)
@output_formats
@click.pass_obj
def sql(db: str, statement: str, params: tuple[tuple[str, str], ...], form: Format | None) -> None:
    """One SQL statement of your own, which can only read; the tables are in docs/schema.md."""
    from groupbench.tracker.store.sql import ask

    answer = ask(db, statement, dict(params))
    rows = [{name: _value(value, form) for name, value in row.items()} for row in answer.flat()]
    numbers = {n for n in answer.columns if rows and all(isinstance(row[n], int | float | None) for row in rows)}
    write_table([Column(name, name, right=name in numbers, wraps=True) for name in answer.columns], rows, form)


def _value(value: Any, form: Format | None) -> Any:
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode() if form in ("json", "csv") else f"<{len(value)} bytes>"
    return value
