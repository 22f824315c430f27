"""Test plots: all data is shown in the terminal, for any numbers and names."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from cases import Cli
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.cli.history_plot import trends
from groupbench.tracker.text.wording import printable
from groupbench.tracker.tools import plots
from groupbench.tracker.tools.plots import Curve, DrawError, Row, Trend, ValueTable

pytestmark = pytest.mark.sqlite

TREND = Trend(
    "grouped_gemm fwd bf16 G=4,M_g=0|1|2",
    "ms",
    ("aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"),
    (
        Curve("torch_loop", (1.0, 1.01, 1.0), (0.9, 1.0, 0.9), (1.1, 1.1, 1.1)),
        Curve("triton_flat", (None, 0.5, 0.7)),
        Curve("helion", (None, None, None)),
    ),
    ((2, "driver 1 -> 2"),),
)
COMPARISON = ValueTable(
    "grouped_gemm fwd bf16",
    "latency, ms",
    ("torch_loop", "triton_flat", "helion"),
    (
        Row("one_row", {"torch_loop": 2.0, "triton_flat": 1.0, "helion": None}, {"helion": "oom: no memory"}),
        Row("ragged", {"torch_loop": 200.0, "triton_flat": 0.001}, {}),
    ),
)
EMPTY = ValueTable("nothing", "ms", (), ())


def test_a_trend_in_the_terminal() -> None:
    text = plots.terminal([TREND], 80, coloured=False)
    lines = text.splitlines()
    assert lines[0] == f"{TREND.title}, ms"
    assert max(map(len, lines)) <= 80
    assert "a torch_loop: 1 ms last" in text and "b triton_flat: 0.7 ms last" in text
    assert "c helion: nothing measured" in text
    assert "| before cccccccccc: driver 1 -> 2" in text
    (axis,) = [line for line in lines if "aaaaaaaaaa" in line and "bbbbbbbbbb" in line]
    assert axis.index("aaaaaaaaaa") < axis.index("bbbbbbbbbb") < axis.index("cccccccccc")
    rows = [line[plots._AXIS :] for line in lines if re.match(r" *[\d.]+ \|", line)]
    assert len(rows) >= 8
    assert sum(row.count("a") for row in rows) == 3 and sum(row.count("b") for row in rows) == 2
    above = [i for i, row in enumerate(rows) if "a" in row]
    below = [i for i, row in enumerate(rows) if "b" in row]
    assert max(above) < min(below)  # the larger value is higher


def test_bars_in_the_terminal() -> None:
    lines = plots.terminal([COMPARISON], 60, coloured=False).splitlines()
    assert lines[0] == "grouped_gemm fwd bf16, latency, ms"
    assert max(map(len, lines)) <= 60
    one, two, three, _, _, four, five = lines[3:10]
    assert one.count("█") // 2 == two.count("█") > 0
    assert one.endswith(" 2") and "oom: no memory" in three
    assert four.count("█") == one.count("█")  # each problem has its own scale
    assert five.endswith("▏ 0.001")  # every measured value has a bar


def test_colour_only_where_it_is_asked_for() -> None:
    assert "\x1b[" not in plots.terminal([TREND, COMPARISON], 80, coloured=False)
    assert "\x1b[38;2;" in plots.terminal([TREND], 80, coloured=True)
    assert "\x1b[38;2;" in plots.terminal([COMPARISON], 80, coloured=True)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_is_coloured_unless_told_otherwise(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", no_color)
    out = Terminal()
    plots.draw([TREND], out, 80)
    assert ("\x1b[" in out.getvalue()) is not bool(no_color)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotille", None)
    with pytest.raises(DrawError, match=re.escape("pip install -e '.[plot]'")):
        plots.check()


NUMBERS = st.none() | st.floats(1e-9, 1e9)
NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20)


@st.composite
def panels(draw: st.DrawFn) -> Any:
    ticks = draw(st.lists(NAMES, min_size=1, max_size=6))
    row = st.lists(NUMBERS, min_size=len(ticks), max_size=len(ticks)).map(tuple)
    curves = draw(st.lists(st.builds(Curve, NAMES, row, st.just(()), st.just(())), max_size=4))
    breaks = draw(st.lists(st.tuples(st.integers(0, len(ticks) - 1), NAMES), max_size=2))
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    rows = [Row(label, {name: draw(NUMBERS) for name in names}, {}) for label in draw(st.lists(NAMES, max_size=3))]
    return [
        Trend(draw(NAMES), "ms", tuple(ticks), tuple(curves), tuple(breaks)),
        ValueTable(draw(NAMES), "ms", tuple(names), tuple(rows)),
    ]


@given(panels=panels(), width=st.integers(20, 200), coloured=st.booleans())
def test_any_numbers_in_the_terminal(panels: Any, width: int, coloured: bool) -> None:
    text = plots.terminal(panels, width, coloured)
    assert printable(panels[0].title) in text and printable(panels[1].title) in text
    for curve in panels[0].curves if any(y is not None for c in panels[0].curves for y in c.y) else ():
        assert printable(curve.name) in text


# ---- history --plot


def test_history_is_drawn(cli: Cli, stored: Any, make: Any) -> None:
    stored(
        [make(night, backend=name, ms=ms * (1 + night / 10)) for night in range(3) for name, ms in (("a", 1), ("b", 2))]
    )
    drawn = cli("history", "--plot")
    assert drawn.exit_code == 0, drawn.stderr
    assert "a a: 1.2 ms last" in drawn.stdout and "b b: 2.4 ms last" in drawn.stdout
    faster = cli("history", "--plot", "--metrics", "speedup", "--baseline", "b")
    assert "a a: 2 times the baseline last" in faster.stdout


def test_history_is_a_plot_or_a_table(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0)])
    result = cli("history", "--plot", "--format=json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_what_is_no_value_is_a_gap() -> None:
    def row(run: int, **unlike: Any) -> dict[str, Any]:
        facts = {"operator": "o", "mode": "fwd", "shape": "s", "dtype": "fp16", "hardware": "h", "host": "builtin"}
        facts |= {"protocol": "cooled", "seed": 0, "backend": "b", "run": f"r{run}", "started": run}
        facts |= {"latency_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "status": "ok", "timing": "gpu", "rms": 0.1}
        return facts | {"commit": f"c{run}", "environment_changed": []} | unlike

    rows = [
        row(3, timing="interpreted"),  # the newest comes first, as a history may
        row(2, status="wrong"),
        row(1, environment_changed=["driver 1 -> 2"]),
        row(0),
        row(4, backend="other", latency_ms=None, status="oom"),
        row(4, shape="t"),
    ]
    runs = [f"r{n}" for n in range(5)]
    first, second = trends(rows, runs, "latency")
    assert first.ticks == ("c0", "c1", "c2", "c3", "c4")
    assert [(c.name, c.y) for c in first.curves] == [
        ("b", (1.0, 1.0, None, None, None)),
        ("other", (None, None, None, None, None)),
    ]
    assert first.curves[0].low == (0.9, 0.9, None, None, None)
    assert first.breaks == ((1, "driver 1 -> 2"),)
    assert second.title == "o fwd fp16 t"
    assert trends(rows, runs, "rms")[0].curves[0].y == (0.1, 0.1, None, 0.1, None)  # an interpreted result is one


def test_no_text_steers_a_terminal() -> None:
    """Backends, commits and versions come from files of others."""
    hard = "\x1b[31m\x07\x9b\u202ea$b\nc"
    trend = Trend(hard, "ms", (hard, hard), (Curve(hard, (1.0, 2.0)),), ((1, hard),))
    table = ValueTable(hard, "ms", (hard, "b"), (Row(hard, {hard: None, "b": 1.0}, {hard: hard}),))
    empty = Trend(hard, "ms", (hard,), (Curve(hard, (None,)),))
    text = plots.terminal([trend, table, empty], 80, coloured=False)
    assert text.replace("\n", "").isprintable()
    assert text.count("�[31m") == 11
