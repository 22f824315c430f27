"""Pictures made of text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.cli.output import Column, write_table
from groupbench.tracker.terminal import histogram, knows_blocks, shortened


def test_a_histogram_counts_every_sample() -> None:
    lines = histogram([1.0, 1.1, 1.1, 1.2, 2.0], rows=2, width=8)
    assert lines == ["1.00  ████████  4", "1.50  ██        1"]
    assert histogram([1.0, 1.1, 1.1, 1.2, 2.0], rows=2, width=8, blocks=False)[1].startswith("1.50  ## ")
    assert histogram([]) == histogram([math.nan, math.inf]) == []


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200), st.integers(1, 30))
def test_any_samples(values: list[float], rows: int) -> None:
    lines = histogram(values, rows=rows, width=10)
    assert 1 <= len(lines) <= rows
    assert sum(int(line.split()[-1]) for line in lines) == len(values)


def test_samples_that_are_alike_are_one_bin() -> None:
    assert len(histogram([3.0] * 5)) == 1
    assert len(histogram([3.0, math.nextafter(3.0, 4)])) == 1


@given(st.text(max_size=80), st.integers(3, 60))
def test_both_ends_stay(text: str, width: int) -> None:
    short = shortened(text, width)
    assert len(short) <= width or short == text
    if short != text:
        head, tail = short.split("…")[0], short.rsplit("…", 1)[1]
        assert text.startswith(head)
        assert text.endswith(tail)


def test_what_a_terminal_knows() -> None:
    assert knows_blocks("utf-8")
    assert not any(map(knows_blocks, ("ascii", None, "no-such-encoding")))


def test_a_terminal_shortens_shapes_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
