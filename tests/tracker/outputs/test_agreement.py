"""Test that the numbers of a row agree, whatever was measured: an effect, its interval and both latencies."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.ab import sequential
from groupbench.tracker.ab.result import AbCell, AbResult, rule_for
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.cli import gate as terminal
from groupbench.tracker.cli.ab import COLUMNS, as_row
from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.judge.parts import effect_on_latency
from groupbench.tracker.judge.verdicts import PIN, Effect, Gate, Judged
from groupbench.tracker.outputs import junit, summary
from groupbench.tracker.outputs.result import GateResult
from groupbench.tracker.report.views import Addresses, changed
from groupbench.tracker.serve import render as dashboard
from groupbench.tracker.serve.verdict import _changed
from groupbench.tracker.stats.predict import Predicted

from .test_outputs import judged, run_row


def row_of(effect: Effect, what: str = "latency", newest_ms: float = 1.0) -> Judged:
    row = judged(1, "improved" if (effect.change or 0) < 0 else "regressed", "", effect=effect, what=what)
    assert row.point is not None
    metrics = {"spills": 40.0, "kernels": 5.0}
    return replace(row, point=replace(row.point, median_ms=newest_ms, rms=1e-3, metrics=metrics))


effects = st.builds(
    lambda before, distance, deviation: effect_on_latency(before, distance, Predicted(before, deviation, 12)),
    st.floats(math.log(1e-3), math.log(50)),
    st.one_of(st.floats(-0.4, -0.003), st.floats(0.003, 0.4)),
    st.sampled_from([3e-4, 0.01, 0.1]),
)


def number_in(text: str) -> float:
    match = re.search(r"[-+]?[\d.]+(?:e-?\d+)?", text.replace(",", "").replace("−", "-"))
    assert match is not None, text
    return 100 * (float(match[0]) - 1) if text.endswith("×") else float(match[0])


def check(before: str | float, now: str | float, change: str | float, ends: list[float]) -> None:
    """Check numbers as printed. Rounding may make the two latencies equal, but never swap them."""
    first, last, moved = (number_in(each) if isinstance(each, str) else each for each in (before, now, change))
    assert (last - first) * moved >= 0
    assert ends[0] <= moved <= ends[1]


@given(effects, st.booleans(), st.floats(1e-3, 50))
def test_the_numbers_of_the_gates_tables_agree(effect: Effect, pinned: bool, newest_ms: float) -> None:
    """In the terminal, in a summary or comment, in JUnit and on the report page, whatever the newest result is."""
    row = row_of(effect, PIN if pinned else "latency", newest_ms)
    percents = [100 * end for end in (row.effect.low, row.effect.high) if end is not None]
    slack = 0.051 + 0.0056 * max(map(abs, percents))  # of rounding, such as 10.04 to 10.0×
    ends = [percents[0] - slack, percents[1] + slack]
    assert row.change is not None
    cells = terminal.cells(row)
    check(cells["was"], cells["now"], cells["change"], ends)

    page = summary.render(GateResult(Gate(run_row(), (row,), 0, "")))
    (line,) = [line for line in page.splitlines() if " ms |" in line][:1]
    before, now, change, interval = [cell.strip() for cell in line.split("|")][5:9]
    check(before, now, change, ends)
    low, high = map(number_in, interval.split(".."))
    assert low <= high

    if not pinned:
        latency = re.search(r"latency (\S+) ms → (\S+) ms, ([^\s;]+)", junit.message(row))
        assert latency is not None
        check(latency[1], latency[2], latency[3], ends)

    texts = [cell.text for cell in changed([row], Addresses({}, None)).rows[0]]  # type: ignore[arg-type]
    effect = next(text for text in texts if text.endswith(("%", "×")))
    before, now = (text for text in texts if text.endswith(" ms"))
    check(before, now, effect, ends)


def texts_of(row: Judged) -> list[list[str]]:
    """Return (change, before, now) of a row in the terminal, in a summary, on the report page and on the dashboard."""
    cells = terminal.cells(row)
    page = summary.render(GateResult(Gate(run_row(), (row,), 1, "")))  # type: ignore[arg-type]
    (line,) = [line for line in page.splitlines() if line.startswith("| `grouped_gemm`") and f"| {row.what} |" in line]
    before, now, change = [cell.strip() for cell in line.split("|")][5:8]
    report = changed([row], Addresses({}, None)).rows[0]  # type: ignore[arg-type]
    stored = _changed(row)
    verdict = {"folded": [], "rows": [{"id": "run-1", **stored}], "unmeasured": {"total": 0}, "paging": {"pages": 1}}
    template = '{% import "macros.html" as ui %}{{ ui.changed(verdict, "") }}'
    html = dashboard._environment().from_string(template).render(verdict=verdict)
    served = re.findall(r'data-title="(effect|before|now)"[^>]*>(?:<b>)?([^<]*)', html)
    return [
        [cells["change"], cells["was"], cells["now"]],
        [change, before, now],
        [cell.text for cell in report[2:5]],
        [text for _, text in served],
    ]


@pytest.mark.parametrize(
    ("what", "effect", "texts"),
    [
        ("spills", Effect(before=24.0, change=1.0, low=0.9, high=1.1), ["+100.0%", "24 B", "48 B"]),
        ("kernels", Effect(before=2.0, change=0.5), ["+50.0%", "2 kernels", "3 kernels"]),
        ("latency", Effect(1.0, change=0.03), ["+3.0%", "1.000 ms", "1.030 ms"]),
        # A kernel that got faster and less accurate has one row, of the error.
        (
            "accuracy",
            Effect(1.0, before_rms=1e-4, change=-0.2, low=-0.21, high=-0.19),
            ["10.0×", "0.0001 rms", "0.001 rms"],
        ),
    ],
)
def test_the_outputs_show_the_same_levels(what: str, effect: Effect, texts: list[str]) -> None:
    row = row_of(effect, what, 0.8)
    assert texts_of(row) == [texts] * 4
    if what == "accuracy":
        assert "interval" not in junit._details(row)
    else:
        assert f"{what} {texts[1]} → {texts[2]}" in junit.message(row)


@pytest.mark.parametrize("newest_ms", [None, 7.0])
def test_a_run_without_a_correct_result_shows_no_level(newest_ms: float | None) -> None:
    """Its row may be about an earlier change, whose level was not measured again."""
    row = row_of(Effect(1.0, change=0.03))
    assert row.point is not None
    row = replace(row, point=replace(row.point, status="wrong", median_ms=newest_ms))
    assert terminal.cells(row)["now"] == ""
    page = summary.render(GateResult(Gate(run_row(), (row,), 1, "")))  # type: ignore[arg-type]
    for text in (page, *map(str, changed([row], Addresses({}, None)).rows)):  # type: ignore[arg-type]
        assert "1.030 ms" not in text and "7.000 ms" not in text
    assert _changed(row)["level_now"] is row.latency_now is None


def test_a_large_change_is_a_factor_everywhere() -> None:
    row = row_of(Effect(1.0, change=59.8), newest_ms=60.8)
    result = GateResult(Gate(run_row(), (row,), 1, ""))  # type: ignore[arg-type]
    assert "| 60.8× |" in summary.render(result)
    assert junit.message(row) == "regressed: latency 1.000 ms → 60.80 ms, 60.8×"
    assert result.groups[0].change == "60.8×"
    assert changed([row], Addresses({}, None)).rows[0][2].text == "60.8×"  # type: ignore[arg-type]
    assert terminal.cells(row)["change"] == "60.8×"
    assert dashboard._environment().from_string("{{ 59.8|signed }}").render() == "60.8×"
    assert row.flat()["change"] == 59.8


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(-2, 2)), min_size=1, max_size=40),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_the_numbers_of_an_ab_agree(blocks: list[tuple[float, float]], base_ms: float, head_ms: float) -> None:
    """Medians of all bursts are of another drift than the pairs, so they may contradict the effect."""
    rule = rule_for("gpu", base_ms)
    differences = [difference for _, difference in blocks]
    decision = sequential.decide(differences, rule)
    single = sequential.estimate(differences, 0.95, rule.resolution)
    for effect, low, high in ((decision.effect, decision.low, decision.high), single):
        assert low <= effect <= high
        result = AbResult(
            AbCell("gemm", "triton", "N=1", "bf16"), AbSide("a", "b"), AbSide("c", "d"), "different", effect=effect,
            low=low if math.isfinite(low) else None, high=high if math.isfinite(high) else None, base_ms=base_ms,
            head_ms=head_ms,
        )  # fmt: skip
        row = as_row(result)
        shown = {column.key: column.show(row[column.key]) for column in COLUMNS if row[column.key] is not None}
        ends = [row["change_low"], row["change_high"]]
        bounds = [-math.inf if ends[0] is None else ends[0], math.inf if ends[1] is None else ends[1]]
        assert relative(effect) == row["change"]
        check(shown["base_ms"], shown["head_ms"], row["change"], bounds)


def test_the_latency_of_a_row_about_a_pin_is_the_level_of_its_effect() -> None:
    row = row_of(Effect(2.0, change=0.05, low=0.04, high=0.06), PIN)
    assert row.latency_now == 2.1
