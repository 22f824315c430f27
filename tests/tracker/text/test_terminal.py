"""Pictures made of text."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from groupbench.tracker.cli.output import Column, write_table
from groupbench.tracker.cli.screen import INDENT, folded, lay_out
from groupbench.tracker.text.terminal import bar, shortened


@given(st.text(max_size=80), st.integers(3, 60))
def test_both_ends_stay(text: str, width: int) -> None:
    short = shortened(text, width)
    assert len(short) <= width or short == text
    if short != text:
        head, tail = short.split("…")[0], short.rsplit("…", 1)[1]
        assert text.startswith(head)
        assert text.endswith(tail)


def test_a_terminal_shortens_shapes_and_a_pipe_does_not(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "G=64,M_g=" + "|".join(map(str, range(64))) + ",N=4096,K=7168"
    columns = [Column("shape", "shape", wraps=True, middle=True), Column("note", "note")]
    rows = [{"shape": shape, "note": "x" * 60}]
    write_table(columns, rows, None)
    assert shape in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_table(columns, rows, None)
    shown = capsys.readouterr().out
    assert shape not in shown
    assert "…" in shown
    assert "x" * 60 in shown
    write_table(columns, rows, "csv")
    assert shape in capsys.readouterr().out


GATE = [
    Column("verdict", "verdict"),
    Column("operator", "operator"),
    Column("shape", "shape", wraps=True),
    Column("change", "change", right=True),
    Column("note", "note", wraps=True),
]
NIGHT = [
    {
        "verdict": verdict,
        "operator": "grouped_gemm",
        "shape": f"G=4,M_g={m},N={m},K={m}",
        "change": change,
        "note": note,
    }
    for verdict, m, change, note in (
        ("regressed", 1024, "+53.2%", "1 point off the earlier level; compiled kernel changed"),
        ("suspect", 512, "-1.2%", "num_stages 4 → 3"),
        ("suspect", 64, "-5.6%", ""),
    )
]


def on_screen(rows: list[dict[str, str]], width: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_table(GATE, rows, None)
    return click.unstyle(capsys.readouterr().out)


def test_a_terminal_with_room_has_a_line_a_row(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wide = on_screen(NIGHT, 150, monkeypatch, capsys).splitlines()
    assert len(wide) == 2 + 3
    assert wide[0].split() == ["verdict", "operator", "shape", "change", "note"]
    assert wide[2].endswith("N=1024,K=1024  +53.2%  1 point off the earlier level; compiled kernel changed")


def test_what_all_rows_share_is_told_once_where_there_is_no_room(monkeypatch: Any, capsys: Any) -> None:
    shown = on_screen(NIGHT, 60, monkeypatch, capsys)
    assert (
        shown
        == """\
in every row: operator grouped_gemm
verdict    shape                       change
    note
──────────────────────────────────────────────────────────
regressed  G=4,M_g=1024,N=1024,K=1024  +53.2%
    1 point off the earlier level; compiled kernel changed
suspect    G=4,M_g=512,N=512,K=512      -1.2%
    num_stages 4 → 3
suspect    G=4,M_g=64,N=64,K=64         -5.6%
"""
    )
    alone = on_screen(NIGHT[:1], 60, monkeypatch, capsys)
    assert "in every row" not in alone
    assert "grouped_gemm" in alone


def test_shapes_that_look_the_same_are_not_told_as_one(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("id", "id"), Column("shape", "shape", wraps=True, middle=True), Column("note", "note")]
    rows = [{"id": str(i), "shape": "x" * 40 + str(i) + "x" * 40, "note": "n" * 30 + str(i)} for i in range(2)]
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_table(columns, rows, None)
    assert "in every row" not in capsys.readouterr().out


TEXT = st.text("ab ,é語→", max_size=50).map(str.strip)


@given(st.data(), st.integers(1, 60), st.lists(st.booleans(), min_size=1, max_size=6))
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(
    data: st.DataObject, width: int, wraps: list[bool]
) -> None:
    row = st.lists(TEXT, min_size=len(wraps), max_size=len(wraps))
    headers, *rows = data.draw(st.lists(row, min_size=2, max_size=4))
    layout = lay_out([Column(name, "", wraps=wrap) for name, wrap in zip(headers, wraps, strict=True)], rows, width)
    for cells, lines in [(headers, layout.header()), *((cells, layout.row(cells)) for cells in rows)]:
        shown = [line.plain for line in lines]
        if width > INDENT + 2 * len(wraps) + 2:
            assert max(map(cell_len, shown), default=0) <= width
        assert Counter("".join(shown).replace(" ", "")) == Counter("".join(cells).replace(" ", ""))


@given(TEXT, st.integers(2, 30))
def test_a_text_is_folded_whole(text: str, width: int) -> None:
    lines = folded(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_text_is_folded_at_blanks_and_commas() -> None:
    assert folded("1 point off the earlier level", 15) == ["1 point off the", "earlier level"]
    assert folded("G=4,M_g=1024,N=1024", 15) == ["G=4,M_g=1024,", "N=1024"]
    assert folded("abc", 0) == ["a", "b", "c", ""]  # a terminal that reports zero columns
    assert folded("x" * 20, 15) == ["x" * 15, "x" * 5]
    assert folded("", 15) == [""]


@given(share=st.floats(0, 1), room=st.integers(8, 100))
def test_a_bar_is_as_long_as_its_share(share: float, room: int) -> None:
    drawn = bar(share, room)
    assert bool(drawn) is (share > 0)
    assert len(drawn) <= room
    assert math.isclose(drawn.count("█") + (0.5 if drawn[-1:] not in ("█", "") else 0), room * share, abs_tol=1.01)
