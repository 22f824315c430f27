"""`groupbench list series`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import Cli, rarely


def rows(cli: Cli, *args: str) -> list[dict[str, Any]]:
    result = cli("list", "series", *args, "--format=json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_counts_and_dates(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(2), make(1, status="oom"), make(1, backend="a", cell={"dims": {"M": 8}})])
    listed = rows(cli)
    assert [(r["backend"], r["points"], r["ok"]) for r in listed] == [("a", 1, 1), ("triton", 3, 2)]
    assert (listed[1]["first"][:10], listed[1]["last"][:10]) == ("2026-01-01", "2026-01-03")
    assert listed[0]["dims"] == {"M": 8}
    text = cli("list", "series").stdout.split("\n")
    assert text[0].split()[:3] == ["series", "operator", "backend"]
    assert "2026-01-03 03:00" in text[2]


def test_slices(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(n, backend=b, cell={"dims": {"M": n}}, shape=f"M={n}") for n, b in enumerate("abc")])
    assert [r["backend"] for r in rows(cli, "--shape", "M>=1")] == ["b", "c"]
    assert [r["backend"] for r in rows(cli, "--since", "2026-01-02", "--until", "2026-01-02")] == ["b"]
    assert [r["backend"] for r in rows(cli, "--commit", "latest")] == ["c"]
    assert [r["backend"] for r in rows(cli, "--backend", "a")] == ["a"]
    assert "no backend 'z'; known: a, b, c" in cli("list", "series", "--backend", "z").stderr
    nothing = cli("list", "series", "--until", "2025-01-01")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "no series match" in nothing.stderr


COMMANDS: list[tuple[str, ...]] = [
    *[("list", "series"), ("history",), ("compare", "000", "001"), ("show", "run:")],
    *[("gate", "--update"), ("incidents", "--each")],
]
DIFFERENCES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("host", ("builtin", "tritonbench"), {"cell": {"host": "tritonbench"}}),
    ("protocol", ("cooled", "sustained"), {"cell": {"protocol": "sustained"}}),
    ("seed", ("0", "7"), {"cell": {"seed": 7}}),
    ("hardware", (" H100", " B200"), {"environment": {"gpu": "NVIDIA B200"}}),
]
ASKED = [(command, *difference) for command in COMMANDS for difference in DIFFERENCES]
# One function adds the columns of all commands. By default, one of them shows every difference, and the others one.
OFTEN = [case for case in ASKED if case[0] == ("history",) or case[1] == "hardware"]


@pytest.mark.parametrize(
    ("command", "field", "values", "expected"), [*OFTEN, *rarely(*(case for case in ASKED if case not in OFTEN))]
)
def test_series_that_differ_in_one_thing_are_told_apart(
    cli: Cli, stored: Any, make: Any, command: tuple[str, ...], field: str, values: tuple[str, ...], expected: Any
) -> None:
    def header() -> list[str]:
        lines = cli(*command).stdout.split("\n")
        return next(line for line in lines if "backend" in line).split()

    always = (command[0], field) in {("list", "hardware"), ("list", "protocol"), ("compare", "hardware")}
    stored([make(0), make(1, status="wrong")])
    cli("gate", "--update")
    assert (field in header()) is always
    stored([make(0, **expected), make(1, status="wrong", **expected)])
    cli("gate", "--update")
    assert field in header()
    table = cli(*command, "--format=md").stdout
    assert all(value in table for value in values)
