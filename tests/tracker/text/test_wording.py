"""Values as text: on one line, in cells of CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.query.rows import State
from groupbench.tracker.report.figures.drawing import tick_text
from groupbench.tracker.report.shown import RunLabel
from groupbench.tracker.text.cells import cell_for, formula_safe, json_for
from groupbench.tracker.text.wording import (
    change_in_words,
    commit_text,
    counted,
    milliseconds,
    no_such,
    printable,
    signed_change,
    signed_ends,
    signed_percent,
)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 cells"),
        (1, "1 cell"),
        (2, "2 cells"),
        (2000, "2,000 cells"),
        (10_000_000, "10,000,000 cells"),
        (0.5, "0.5 cells"),
        (1.0, "1 cell"),
    ],
    ids=str,
)
def test_one_and_several(number: float, expected: str) -> None:
    assert counted(number, "cell") == expected


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("moo", ["moe", "smoke"], "no suite 'moo' (did you mean 'moe'?); known: moe, smoke"),
        ("other", ["moe", "smoke"], "no suite 'other'; known: moe, smoke"),
        ("moe", [], "no suite 'moe'; known: none"),
    ],
    ids=["mistyped", "unlike any", "nothing known"],
)
def test_an_unknown_name(name: str, names: list[str], expected: str) -> None:
    assert no_such("no suite", name, names) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        (0.05, "+5.0%"),
        (-0.0001, "+0.0%"),
        (-0.984, "-98.4%"),
        (8.994, "+899.4%"),
        (9.0, "10.0×"),
        (59.8, "60.8×"),
        (1234.0, "1235×"),
    ],
    ids=str,
)
def test_a_large_change_is_a_factor(value: float | None, expected: str) -> None:
    assert signed_change(value) == expected


def test_a_range_and_a_column_have_one_unit() -> None:
    assert (signed_ends(0.05, 8.9), signed_ends(5.25, 19.1)) == ("+5.0% to +890.0%", "6.25× to 20.1×")
    assert signed_percent(19.1) == "+1910.0%"


def test_latencies_have_four_digits_and_no_stray_dot() -> None:
    latencies = {0.5: "0.5000", 99.964: "99.96", 999.96: "1000", 1234.5: "1234", None: ""}
    assert {ms: milliseconds(ms) for ms in latencies} == latencies


def test_a_plural_of_its_own() -> None:
    assert (counted(1, "series", "series"), counted(2000, "series", "series")) == ("1 series", "2,000 series")


def test_every_label_of_a_commit_shows_that_its_tree_was_dirty() -> None:
    full = "0123456789abcdef"
    assert (commit_text(None), commit_text(full + "+")) == ("", "0123456789+")
    assert commit_text(full, dirty=True) == str(State(full, True)) == "0123456789+"
    assert tick_text(RunLabel("run", "0123456789+", "2026-01-31 03:00")) == "0123456+<br>01-31"


@pytest.mark.parametrize(
    ("change", "expected"),
    [(0.05, "5.0% slower"), (-0.05, "5.0% faster"), (8.994, "899.4% slower"), (59.8, "60.8× slower")],
    ids=str,
)
def test_a_change_in_words(change: float, expected: str) -> None:
    assert change_in_words(change) == expected
    words = {"5.0% slower": "5 % worse", "5.0% faster": "5 % better", "899.4% slower": "899 % worse"}
    assert change_in_words(change, ("worse", "better"), ".0f", " %") == words.get(expected, "60.8× worse")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1"])
def test_a_formula_becomes_text(text: str) -> None:
    assert formula_safe(text) == "'" + text


@pytest.mark.parametrize("value", [-1.5, 0, None, True, "triton", "a=b", "", "1-2"])
def test_anything_else_stays(value: Any) -> None:
    assert formula_safe(value) is value


@pytest.mark.parametrize(
    ("text", "line"),
    [("  a\n b\t c ", "  a b c"), ("a", "a"), ("", ""), ("\n  a\x1b[31m", "a\ufffd[31m")],
)
def test_a_line_keeps_its_indent(text: str, line: str) -> None:
    assert printable(text) == line


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
