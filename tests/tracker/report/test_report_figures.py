"""Test figures and their data: pure functions of plain data, and of rows of the store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import Cli
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.report import selection
from groupbench.tracker.report.figures import burst_plot, drawing, history_plots, roofline_plot, speedup_map
from groupbench.tracker.report.gather import Report, gather
from groupbench.tracker.report.shown import (
    CanaryCeilings,
    Mark,
    ResultBursts,
    RoofPoint,
    RunLabel,
    ShownHistory,
    ShownLevel,
    SpeedRow,
)
from groupbench.tracker.report.speed import problem_label
from groupbench.tracker.store.engine import open_store

from ..conftest import backfilled

SERIES = SeriesRow(
    1, "gemm", "triton", "fwd", "bf16", "G=4,N=64", "builtin", "cooled", "H100", 0, {"G": 4, "N": 64}, 1, 1
)
RUNS = tuple(RunLabel(f"run-{n}", f"{n:010d}", f"2026-01-{n + 1:02d} 03:00", f"<b>{n}</b>") for n in range(20))
CEILINGS = CanaryCeilings(RUNS[0], tflops=800.0, gbps=3000.0, dtype="bf16")


def history(ms: list[float | None], **fields: Any) -> ShownHistory:
    n = len(ms)
    low = [None if v is None else 0.99 * v for v in ms]
    high = [None if v is None else 1.02 * v for v in ms]
    plain: dict[str, Any] = {"runs": tuple(range(n)), "rms": (2e-3,) * n} | fields
    return ShownHistory(SERIES, ms=tuple(ms), low=tuple(low), high=tuple(high), **plain)


def by_name(figure: drawing.Figure) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figure["data"]}


# ---- heat map


def row(ms: dict[str, float], why: dict[str, str] | None = None, problem: str = "G=4") -> SpeedRow:
    return SpeedRow(problem, problem, RUNS[0], False, ms, why or {})


def test_colour_sign_and_number_say_the_same() -> None:
    figure = speedup_map.speedup_heatmap(
        [row({"base": 2.0, "fast": 1.0, "slow": 4.0, "same": 2.001})], BACKENDS, "base"
    )
    map_ = figure["data"][0]
    assert map_["text"] == [["1.00×", "▲ 2.00×", "▼ 0.50×", "1.00×"]]
    assert map_["z"] == [[0.0, 1.0, -1.0, pytest.approx(0, abs=0.01)]]
    assert "2.00× by fast at G=4; 1 are below 1." in figure["layout"]["meta"]["alt"]


BACKENDS = ("base", "fast", "slow", "same")


def test_a_cell_without_speed_says_why_and_one_without_baseline_its_latency() -> None:
    rows = [row({"base": 2.0}, {"fast": "oom: <out> of memory"}), row({"slow": 0.5})]
    map_, lacking = speedup_map.speedup_heatmap(rows, ("base", "fast", "slow"), "base")["data"]
    assert map_["z"] == [[0.0, None, None], [None, None, None]]
    labels = dict(zip(zip(lacking["y"], lacking["x"], strict=True), lacking["text"], strict=True))
    assert labels[0, 1] == "oom"
    assert labels[0, 2] == "not measured"
    assert labels[1, 2] == "0.500 ms"
    assert "oom: &lt;out&gt; of memory" in lacking["hovertext"][0]


@pytest.mark.parametrize(
    ("speedup", "text"),
    [(1.0, "1.00×"), (1.009, "1.01×"), (1.02, "▲ 1.02×"), (0.98, "▼ 0.98×"), (12.34, "▲ 12.3×"), (432.1, "▲ 432×"),
     (0.0012, "▼ 0.0012×")],
)  # fmt: skip
def test_a_speedup_has_its_direction_and_never_reads_as_nothing(speedup: float, text: str) -> None:
    assert speedup_map.speedup_text(speedup) == text


# ---- roofline


def test_points_stand_below_the_roof_at_their_intensity() -> None:
    bound, free = RoofPoint("a", "G=1", "bf16", 10**9, 10**8, 0.1), RoofPoint("b", "G=<2>", "bf16", 10**12, 10**8, 2.0)
    assert (bound.intensity, bound.tflops, bound.gbps) == (10.0, 10.0, 1000.0)
    assert bound.share(CEILINGS) == pytest.approx(10 / 30)  # 3000 GB/s at 10 FLOP/byte are 30 TFLOP/s
    assert free.share(CEILINGS) == pytest.approx(500 / 800)
    figure = roofline_plot.roofline([bound, free], CEILINGS)
    roof, first, second = figure["data"]
    ridge = 1e3 * 800 / 3000
    assert roof["x"][1] == pytest.approx(ridge, rel=1e-3)
    assert roof["y"][1:] == [800.0, 800.0]
    assert roof["y"][0] == pytest.approx(3.0 * roof["x"][0], rel=1e-3)
    assert (first["x"], first["y"], first["customdata"]) == ([10.0], [10.0], [[1000.0, 33.3]])
    assert first["marker"]["symbol"] != second["marker"]["symbol"]
    assert first["marker"]["color"] != second["marker"]["color"]
    assert second["text"] == ["G=&lt;2&gt;"]
    assert "800 TFLOP/s" in figure["layout"]["meta"]["alt"]


# ---- history


def test_a_roof_of_a_processor_is_told_in_digits_that_count() -> None:
    low = CanaryCeilings(RUNS[0], tflops=0.0421, gbps=9.6, dtype="fp32")
    figure = roofline_plot.roofline([RoofPoint("a", "p", "fp32", 10**9, 10**8, 20.0)], low)
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert texts == ["0.042 TFLOP/s, fp32 matmul canary", "9.6 GB/s, copy canary"]
    assert "below 0.042 TFLOP/s and 9.6 GB/s." in figure["layout"]["meta"]["alt"]


@pytest.mark.parametrize("intensity", [0.5, 30.0, 4000.0])
def test_words_of_the_roof_stay_within_it(intensity: float) -> None:
    """Each begins or ends at the edge that it could run over."""
    points = [RoofPoint("a", "p", "bf16", round(intensity * 10**8), 10**8, 20.0)]
    layout = roofline_plot.roofline(points, CEILINGS)["layout"]
    roof, slope = layout["annotations"]
    left, right = layout["xaxis"]["range"]
    assert (roof["xanchor"], roof["x"]) == ("right", 1)
    assert (slope["xanchor"], slope["x"]) == ("left", 0)
    assert (roof["xref"], slope["xref"]) == ("x domain", "x domain")
    assert left < right
    assert len(layout["xaxis"]["title"]["text"]) < 45  # letters that a phone has room for


def test_what_is_not_ok_is_a_cross_and_no_point_of_the_line() -> None:
    shown = history([1.0, None, 1.1, 3.0], status={1: "oom", 3: "wrong"}, message={1: "<no> memory", 3: "0.5 outside"})
    traces = by_name(history_plots.latency_history(shown, RUNS))
    assert (traces["ok"]["x"], traces["ok"]["y"]) == ([0, 2], [1.0, 1.1])
    assert traces["ok"]["error_y"]["array"] == [0.02, 0.022]
    assert traces["ok"]["error_y"]["arrayminus"] == [0.01, 0.011]
    assert (traces["not ok"]["x"], traces["not ok"]["y"]) == ([1, 3], [1.1, 3.0])
    assert traces["not ok"]["text"][0].endswith("&lt;b&gt;1&lt;/b&gt;<br>oom: &lt;no&gt; memory")


def test_texts_of_runs_are_left_out_where_the_page_has_them() -> None:
    shown = history([1.0, None], status={1: "oom"})
    long, short = history_plots.latency_history(shown, RUNS), history_plots.latency_history(shown)
    assert "ticktext" in long["layout"]["xaxis"]
    assert "ticktext" not in short["layout"]["xaxis"]
    assert (by_name(short)["ok"]["meta"], "text" in by_name(short)["ok"]) == ("runs", False)
    assert by_name(short)["not ok"]["text"] == ["oom"]
    assert "0000000001 · 2026-01-02 03:00<br>" in by_name(long)["not ok"]["text"][0]


def test_each_kind_of_mark_has_a_line_a_symbol_and_words() -> None:
    marks = (
        Mark("environment", 1, "driver 1 → 2"),
        Mark("change", 2, "+5.0%"),
        Mark("alert", 2, "incident 1 new"),
        Mark("verdict", 3, "suspect +9.0%"),
    )
    figure = history_plots.latency_history(
        history([1.0] * 4, marks=marks, levels=(ShownLevel(0, 1, 1.0), ShownLevel(2, 3, 1.05))), RUNS
    )
    traces = by_name(figure)
    assert [traces[mark.kind]["x"] for mark in marks] == [[0.5], [1.5], [1.5], [2.5]]
    assert len({traces[mark.kind]["marker"]["symbol"] for mark in marks}) == 4
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [0.5, 1.5, 1.5, 2.5]
    assert {label["text"] for label in figure["layout"]["annotations"]} == {mark.text for mark in marks}
    assert traces["level"]["y"] == [1.0, 1.0, None, 1.05, 1.05]
    for mark in marks:
        assert f"{mark.kind.capitalize()} at {RUNS[mark.at].commit}: {mark.text}." in figure["layout"]["meta"]["alt"]


def test_interpreted_latencies_are_called_no_speed() -> None:
    figure = history_plots.latency_history(history([1.0, 1.0], interpreted=True))
    assert figure["layout"]["yaxis"]["title"]["text"] == "ms, interpreted: no speed"


def test_errors_that_moved_far_are_on_a_logarithmic_scale() -> None:
    near, far, zero = (history_plots.accuracy_history(history([1.0, 1.0], rms=rms))["layout"]["yaxis"]
                       for rms in ((2e-3, 3e-3), (2e-3, 0.5), (0.0, 0.5)))  # fmt: skip
    assert "type" not in near
    assert far["type"] == "log"
    assert far["range"][0] < math.log10(2e-3) < math.log10(0.5) < far["range"][1]
    assert "type" not in zero


def test_bursts_stand_side_by_side_the_newest_last() -> None:
    figure = burst_plot.burst_distribution([ResultBursts(0, ((1.0, 1.1), (1.2,))), ResultBursts(1, ((2.0,),))], RUNS)
    before, newest = figure["data"]
    assert (before["x"], before["y"]) == ([1, 1, 2], [1.0, 1.1, 1.2])
    assert before["name"] == f"{RUNS[0].commit}, before"
    assert newest["name"] == RUNS[1].commit
    assert "3 samples in 2 bursts, median 1.1 ms, from 1 to 1.2" in figure["layout"]["meta"]["alt"]


values = st.one_of(st.none(), st.floats(min_value=1e-7, max_value=1e7))
texts = st.text(max_size=30)


@given(
    st.lists(st.tuples(values, values, st.sampled_from(["ok", "oom", "wrong"]), texts), max_size=8),
    st.lists(st.tuples(st.sampled_from(["change", "environment", "alert", "closed", "verdict"]), texts), max_size=4),
)
def test_any_history_becomes_a_figure_that_json_holds(results: list[Any], marks: list[Any]) -> None:
    shown = ShownHistory(
        SERIES,
        runs=tuple(range(len(results))),
        ms=tuple(ms for ms, *_ in results),
        low=tuple(ms for ms, *_ in results),
        high=tuple(None if ms is None else 2 * ms for ms, *_ in results),
        rms=tuple(rms for _, rms, *_ in results),
        status={i: status for i, (*_, status, _) in enumerate(results) if status != "ok"},
        message={i: message for i, (*_, status, message) in enumerate(results) if status != "ok"},
        marks=tuple(Mark(kind, i, text) for i, (kind, text) in enumerate(marks)),
    )
    for figure in (
        history_plots.latency_history(shown, RUNS),
        history_plots.accuracy_history(shown),
        history_plots.latency_history(shown),
    ):
        assert json.loads(json.dumps(figure, allow_nan=False)) == json.loads(msgspec.json.encode(figure))
        low, high = figure["layout"]["yaxis"]["range"]
        assert low < high
        for trace in figure["data"]:
            assert len(trace["x"]) == len(trace["y"])
            if "meta" not in trace and "text" in trace:
                assert len(trace["text"]) == len(trace["x"])
                assert not any(character in text.replace("<br>", "") for text in trace["text"] for character in "<>")


@pytest.mark.parametrize(
    ("ms", "spread", "text"),
    [
        (0.0420, {"a": 356.0}, "noisy"),
        (0.5, {"a": 0.01, "b": 0.01}, "▲ 2.00×"),
        (0.98, {"a": 0.02, "b": 0.04}, "noisy"),
        (0.98, {"a": 0.002, "b": 0.002}, "▲ 1.02×"),
        (0.5, {"a": 0.3, "b": 0.2}, "▲ 2.00×"),
    ],
    ids=["garbage", "quiet", "more noise than effect", "small and quiet", "more effect than noise"],
)
def test_a_speedup_within_its_noise_is_none(ms: float, spread: dict[str, float], text: str) -> None:
    row = SpeedRow("s", "s", RUNS[0], False, {"b": 1.0, "a": ms}, {}, spread)
    map_, *lacking = speedup_map.speedup_heatmap([row], ["b", "a"], "b")["data"]
    assert (map_["text"][0][1] or lacking[0]["text"][0]) == text
    assert (map_["z"][0][1] is None) == (text == "noisy")
    assert map_["text"][0][0] == "1.00×", "the baseline over itself is sure"


@pytest.mark.parametrize(
    ("mark", "ink"),
    [
        (Mark("alert", 1, "incident 1 new"), "var(--bad)"),
        (Mark("closed", 1, "incident 1 fixed"), "var(--faint)"),
        (Mark("verdict", 1, "regressed +3.0%"), "var(--change)"),
        (Mark("verdict", 1, "improved -3.0%", good=True), "var(--good)"),
    ],
    ids=["open alert", "closed alert", "slower", "faster"],
)
def test_only_bad_news_is_red(mark: Mark, ink: str) -> None:
    figure = history_plots.latency_history(history([1.0] * 3, marks=(mark,)), RUNS)
    (label,), (line,) = figure["layout"]["annotations"], figure["layout"]["shapes"]
    assert (figure["data"][-1]["marker"]["color"], label["font"]["color"], line["line"]["color"]) == (ink, ink, ink)


# ---- from the store


@pytest.fixture
def report(db: Any) -> Callable[..., Report]:
    def read(run: str | None = None, **options: Any) -> Report:
        with open_store(db, create=False) as store, store.read() as session:
            return gather(session, judge_run(session, find_run(session, run)), **options)

    return read


def test_a_change_an_environment_and_a_level_are_found(stored: Any, make: Any, report: Any) -> None:
    stored([
        make(night, ms=(1.0 if night < 20 else 1.1) * (1 + 0.0005 * (night % 3)), backend=backend,
             environment={"power_limit_w": 700.0 if night < 8 else 350.0})
        for night in range(30) for backend in ("a", "b")
    ])  # fmt: skip
    (page,) = report().pages
    for shown in page.histories:
        assert [(mark.kind, mark.at) for mark in shown.marks] == [("environment", 8), ("change", 20)]
        assert shown.marks[0].text == "power_limit_w 700 → 350"
        assert shown.marks[1].text.startswith("+10.")
        assert [(level.first, level.last) for level in shown.levels] == [(0, 7), (8, 19), (20, 29)]
        assert [level.ms for level in shown.levels] == pytest.approx([1.0, 1.0, 1.1], rel=2e-3)
        assert [bursts.run for bursts in shown.bursts] == [28, 29]
        assert [len(burst) for burst in shown.bursts[-1].ms] == [7] * 5


@pytest.mark.usefixtures("two_nights_are_certain")
def test_what_the_gate_says_of_a_young_change_is_marked_and_its_alert(
    cli: Cli, stored: Any, make: Any, report: Any
) -> None:
    stored([make(night, ms=1.0 if night < 5 else 1.1) for night in range(7)])
    (shown,) = report().pages[0].histories
    assert [(mark.kind, mark.at) for mark in shown.marks] == [("change", 5)]
    assert cli("gate", "--update").exit_code == 1
    (shown,) = report().pages[0].histories
    assert [mark.kind for mark in shown.marks] == ["change", "alert"]
    assert shown.marks[1].text.startswith("incident 1 new since 20")


def test_every_change_that_the_gate_lists_is_marked(cli: Cli, stored: Any, make: Any, report: Any) -> None:
    rng = np.random.default_rng(8)
    levels = [1.0] * 30 + [1.2] * 4 + [1.1] * 3
    stored([make(night, ms=float(ms * np.exp(rng.normal(0, 0.002)))) for night, ms in enumerate(levels)])
    rows = [row for row in report().gate.rows if row.verdict.changed]
    assert [row.change > 0 for row in rows] == [True]
    (shown,) = report().pages[0].histories
    assert {30, 34} <= {mark.at for mark in shown.marks if mark.kind in ("change", "verdict")}


def test_speeds_are_of_one_run_and_environment(stored: Any, make: Any, report: Any) -> None:
    stored([make(0, ms=4.0, backend="base", baseline=True), make(0, ms=2.0), make(0, shape="old", ms=1.0)])
    stored([make(1, ms=5.0, backend="base", baseline=True), make(1, status="oom")])
    stored([make(1, ms=1.0, backend="elsewhere", environment={"driver": "2"})])
    (one,) = report().pages[0].speeds
    assert one.backends == ("base", "elsewhere", "triton")
    newest, old = sorted(one.rows, key=lambda row: row.older)
    assert newest.ms == {"base": pytest.approx(5.0, rel=0.01)}
    assert newest.why["triton"] == "oom: it was oom"
    assert newest.why["elsewhere"].startswith("elsewhere: measured in another environment")
    assert (old.problem, old.older, old.run.run) == ("old", True, "run-000")


def test_many_series_leave_room_for_fewer_runs(stored: Any, make: Any, report: Any, monkeypatch: Any) -> None:
    stored([make(night, backend=backend) for night in range(6) for backend in "abc"])
    monkeypatch.setattr("groupbench.tracker.report.gather.POINTS", 10)
    assert [run.id for run in report().runs] == ["run-003", "run-004", "run-005"]
    monkeypatch.setattr("groupbench.tracker.report.gather.POINTS", 1)
    assert [run.id for run in report().runs] == ["run-005"]


@pytest.mark.usefixtures("two_nights_are_certain")
def test_of_many_series_the_changed_and_the_slowest_are_shown_in_full(
    stored: Any, make: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = []
    for night in range(7):
        for number in range(10):
            shape = {"shape": f"s{number}"}
            slow = 5.0 if number == 7 else 1.0
            worse = 1.1 if number == 3 and night > 4 else 1.0
            records.append(make(night, ms=1.0, backend="base", baseline=True, **shape))
            records.append(make(night, ms=slow * worse, backend="fast", **shape))
    stored(records)
    assert (report().coverage.complete, len(report().pages[0].histories)) == (True, 20)
    monkeypatch.setattr("groupbench.tracker.report.selection.FULL", 4)
    monkeypatch.setattr(selection.choose, "__defaults__", (4,))
    page = report()
    (operator,) = page.pages
    shown = {(one.series.shape, one.series.backend) for one in operator.histories}
    assert shown == {(shape, backend) for shape in ("s3", "s7") for backend in ("base", "fast")}
    assert (page.coverage.shown, page.coverage.total) == (4, 20)
    assert len(page.runs) == 7
    assert {row.problem for row in operator.speeds[0].rows} == {"s3", "s7"}
    index = selection.index(page.gate, page.coverage)
    assert (index["total"], len(index["rows"])) == (20, 20)
    assert [row[-1] for row in index["rows"]].count(1) == 4
    first = index["rows"][0]
    assert (index["names"][2][first[2]], index["verdicts"][first[5]][0]) == ("s3", "regressed")
    assert first[6:8] == [pytest.approx(1.1, rel=0.01), pytest.approx(0.91, abs=0.01)]


def test_one_changed_backend_keeps_its_row_of_the_map_whole(
    stored: Any, make: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make(0, backend=name, ms=1.0 + number, baseline=not number) for number, name in enumerate("abcdef")])
    monkeypatch.setattr("groupbench.tracker.report.selection.FULL", 2)
    monkeypatch.setattr(selection.choose, "__defaults__", (2,))
    (operator,) = report().pages
    assert len(operator.histories) == 2
    assert operator.speeds[0].backends == tuple("abcdef")


def test_an_outlier_does_not_flatten_the_bursts() -> None:
    quiet = (1.0, 1.01, 0.99, 1.02)
    labels = [RunLabel("r", "c", "2026-01-01 03:00")]
    plain = burst_plot.burst_distribution([ResultBursts(0, (quiet, quiet))], labels)
    assert len(plain["data"]) == 1
    low, high = plain["layout"]["yaxis"]["range"]
    assert low < 0.99 < 1.02 < high < 1.1
    clipped = burst_plot.burst_distribution([ResultBursts(0, (quiet, (*quiet, 40.0)))], labels)
    assert clipped["layout"]["yaxis"]["range"] == [low, high]
    marks = clipped["data"][-1]
    assert (marks["name"], marks["x"], marks["y"], marks["text"]) == ("1 clipped", [2], [1.02], ["40 ms"])
    assert 40.0 in clipped["data"][0]["y"]  # the table of its data has it
    assert "marked at its edge: 1 samples" in clipped["layout"]["meta"]["alt"]
    alike = burst_plot.burst_distribution([ResultBursts(0, ((1.0, 1.0),))], labels)["layout"]["yaxis"]["range"]
    assert alike[0] < 1.0 < alike[1]


def test_hosts_and_protocols_have_maps_of_their_own(stored: Any, make: Any, report: Any) -> None:
    stored([make(), make(cell={"host": "tritonbench"}), make(cell={"protocol": "hot"}, ms=3.0)])
    assert len(report().pages[0].speeds) == 3


def canaries(make: Any, night: int, **fields: Any) -> list[Any]:
    copy = {"flops": 0, "min_bytes": 2 * 10**9}
    product = {"flops": 10**12, "min_bytes": 10**8}
    return [
        make(night, ms=1.0, operator="canary", shape="copy", cell=copy, **fields),
        make(night, ms=2.0, operator="canary", shape="matmul", cell=product, **fields),
    ]


WORK = {"cell": {"flops": 10**11, "min_bytes": 10**9}}


def test_ceilings_are_of_the_same_run_and_environment(stored: Any, make: Any, report: Any) -> None:
    stored([make(0, **WORK), *canaries(make, 0), make(1, **WORK), *canaries(make, 1, environment={"driver": "2"})])
    first, canary = report().pages
    assert first.roofline.ceilings.run.run == "run-000"
    assert first.roofline.ceilings.tflops == pytest.approx(500, rel=0.01)
    assert first.roofline.ceilings.gbps == pytest.approx(2000, rel=0.01)
    assert "newest run with canaries: 000ccccccc" in first.roofline.note
    assert canary.name == "canary"
    assert canary.roofline is None


@pytest.mark.parametrize("canary", [0, 1], ids=["no canary", "only a copy"])
def test_without_ceilings_or_work_it_says_so(stored: Any, make: Any, report: Any, canary: int) -> None:
    stored([make(**WORK), *canaries(make, 0)[:canary]])
    page = next(page for page in report().pages if page.name == "grouped_gemm")
    assert page.roofline.ceilings is None
    assert "No ceilings were measured" in page.roofline.missing


@pytest.mark.parametrize("fields", [{}, {"timing": "interpreted", **WORK}], ids=["no flops", "interpreted"])
def test_an_operator_that_cannot_have_a_roofline_has_no_section(
    cli: Cli, stored: Any, make: Any, report: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    stored([make(**fields), *canaries(make, 0)])
    assert [page.roofline for page in report().pages] == [None, None]
    assert cli("report", "-o", tmp_path / "report.html").exit_code == 0
    assert "<h3>Roofline</h3>" not in (tmp_path / "report.html").read_text()


def test_another_dtype_than_the_ceiling_s_is_told(stored: Any, make: Any, report: Any) -> None:
    stored([make(dtype="fp8", **WORK), *canaries(make, 0)])
    assert "ceiling was measured in bf16; fp8 may have another" in report().pages[0].roofline.note


def test_long_shapes_are_cut_in_the_middle() -> None:
    label = problem_label(replace(SERIES, shape="G=128," + "1|" * 200 + "N=64"), ["dtype"])
    assert label.startswith("G=128,1|")
    assert label.endswith("1|N=64 bf16")
    assert len(label) < 70


@pytest.mark.parametrize(("driver", "speedup"), [("570.1", 2.0), ("580.1", None)])
def test_the_index_compares_with_a_baseline_of_one_environment(
    stored: Any, make: Any, report: Any, driver: str, speedup: float | None
) -> None:
    stored([make(ms=3.0, backend="torch", baseline=True, environment={"driver": driver}), make(ms=1.5)])
    whole = report()
    index = selection.index(whole.gate, whole.coverage)
    backends = {index["names"][1][row[1]]: row[7] for row in index["rows"]}
    assert backends == {"torch": 1.0, "triton": speedup and pytest.approx(speedup, rel=0.01)}


def test_a_backfilled_commit_is_not_the_newest(stored: Any, report: Any) -> None:
    work = {"cell": {"dims": {"G": 4}, "flops": 10**9, "min_bytes": 10**6}}
    canary = [
        {"operator": "canary", "cell": {"dims": {"N": 4096}, "flops": 10**12, "min_bytes": 10**8}, "shape": "product"},
        {"operator": "canary", "cell": {"dims": {}, "min_bytes": 10**9}, "shape": "copy"},
    ]
    stored([record for fields in (work, *canary) for record in backfilled(**fields)])
    page = report("run-001").pages[0]
    (row,) = page.speeds[0].rows
    assert (row.run.run, row.older, row.ms["triton"]) == ("run-001", False, pytest.approx(1, rel=0.01))
    assert page.roofline is not None and page.roofline.ceilings is not None
    assert page.roofline.ceilings.run.run == "run-001"
