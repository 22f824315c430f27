"""Cells of CSV on terminals and in spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.text.cells import cell_for, formula_safe, json_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1"])
def test_a_formula_becomes_text(text: str) -> None:
    assert formula_safe(text) == "'" + text


@pytest.mark.parametrize("value", [-1.5, 0, None, True, "triton", "a=b", "", "1-2"])
def test_anything_else_stays(value: Any) -> None:
    assert formula_safe(value) is value


@given(st.text())
def test_a_terminal_is_never_steered_and_a_file_gets_all(text: str) -> None:
    assert cell_for(io.StringIO(), text) == text
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in cell_for(Terminal(), text))


class BinaryTerminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@given(st.dictionaries(st.text(), st.text()))
def test_json_on_a_terminal_is_the_same_value_without_control_characters(value: dict[str, str]) -> None:
    data = msgspec.json.format(msgspec.json.encode(value)) + b"\n"
    assert json_for(io.BytesIO(), data) is data
    text = json_for(BinaryTerminal(), data).decode()
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


def test_csv_is_safe_in_a_spreadsheet(cli: Any, stored: Any, make: Any) -> None:
    stored([make(backend="=cmd|' /C calc'!A0", commit_facts={"subject": "+1"})])
    (row,) = csv.DictReader(cli("db", "export", "-", "--format", "csv").stdout.splitlines())
    assert (row["backend"], row["subject"]) == ("'=cmd|' /C calc'!A0", "'+1")
    assert float(row["latency_ms"]) > 0
    assert "'=cmd" in cli("history", "--format=csv").stdout
    (text,) = json.loads(cli("history", "--format=json").stdout)
    assert text["backend"].startswith("=cmd")
