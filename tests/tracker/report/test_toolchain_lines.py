"""Test the lines of a chart, one for each toolchain that is measured alternately."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from cases import Cli

from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.report.figures import history_plots
from groupbench.tracker.report.gather import gather
from groupbench.tracker.report.shown import ShownHistory
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import open_store

from .test_report_figures import RUNS, by_name, history

# ---- several toolchains

OLD, NEW = {"environment": {"triton": "3.7.1"}}, {"environment": {"triton": "3.8.0"}}
NEWER = {"environment": {"triton": "3.8.1"}}
DRIVER = {"environment": {"triton": "3.7.1", "driver": "580.1"}}
ELSEWHERE = {"environment": {"triton": "3.8.0", "gpu_uuid": "GPU-2"}}


def shown_of(cli: Cli, stored: Callable[..., Any], db: Any, records: list[Any]) -> ShownHistory:
    stored(records)
    with open_store(db, create=False) as store, store.read() as session:
        report = gather(session, judge_run(session, find_run(session, None)))
    return report.pages[0].histories[0]


def test_toolchains_in_turns_have_a_line_each(cli: Cli, stored: Any, db: Any, make: Any) -> None:
    nights = [make(n, ms=0.9 if n % 2 else 1.0, **(NEW if n % 2 else OLD)) for n in range(20)]
    nights[7] = make(7, status="oom", **NEW)
    shown = shown_of(cli, stored, db, nights)
    assert shown.toolchains == ("triton 3.7.1", "triton 3.8.0") and shown.lines == (0, 1) * 10
    assert [mark.kind for mark in shown.marks] == []
    assert [(level.first, level.last, level.line) for level in shown.levels] == [(0, 18, 0), (1, 19, 1)]
    assert [round(level.ms, 2) for level in shown.levels] == [1.0, 0.9]
    assert [burst.run for burst in shown.bursts] == [17, 19]  # each toolchain is compared with itself
    for figure in (history_plots.latency_history(shown), history_plots.accuracy_history(shown)):
        old, new = by_name(figure)["triton 3.7.1"], by_name(figure)["triton 3.8.0"]
        assert old["x"] == list(range(0, 20, 2)) and set(new["customdata"]) == {"triton 3.8.0"}
        assert old["line"]["color"] != new["line"]["color"] and old["marker"]["symbol"] != new["marker"]["symbol"]
        assert figure["layout"]["showlegend"] and old["showlegend"]
        crosses = by_name(figure)["not ok"]
        assert (crosses["x"], crosses["customdata"], crosses["showlegend"]) == ([7], ["triton 3.8.0"], False)
    alt = history_plots.latency_history(shown)["layout"]["meta"]["alt"]
    assert "With triton 3.7.1: 10 results, newest 1 ms. With triton 3.8.0: 10 results, newest 0.9" in alt
    names = [trace["name"] for trace in history_plots.backend_latencies([shown], RUNS)["data"]]
    assert names == ["triton, triton 3.7.1", "triton, triton 3.8.0"]


def test_the_level_of_a_toolchain_does_not_end_where_the_ab_of_another_does(
    cli: Cli, stored: Callable[..., Any], db: Any, make: Callable[..., Any]
) -> None:
    levels = [1.05 if n % 2 and n > 9 else 1.0 for n in range(20)]
    nights = [
        make(n, ms=ms, commit=f"{n // 2:03x}" + "c" * 37, **(NEW if n % 2 else OLD)) for n, ms in enumerate(levels)
    ]
    stored(nights[:2])
    software = {"torch": "2.13.0", "triton": "3.8.0", "cuda": "13.0", "python": "3.11"}
    ends = (nights[9].run.commit.hash, nights[11].run.commit.hash)
    with open_store(db, create=False) as store, store.write() as session:
        details = {"software": [software, software]}
        different = Compared(*ends, "different", datetime(2026, 1, 12, tzinfo=UTC), 0.05, details=details)
        comparisons.store(session, 1, different)
    shown = shown_of(cli, stored, db, nights[2:])
    assert [(level.first, level.last, level.line) for level in shown.levels] == [(0, 18, 0), (1, 9, 1), (11, 19, 1)]


@pytest.mark.parametrize(
    ("used", "lines", "marks"),
    [
        ([OLD, OLD, NEW, NEW], (), ["triton 3.7.1 → 3.8.0"]),  # an upgrade
        ([OLD, ELSEWHERE, OLD, ELSEWHERE], (), None),  # each machine has its own
        ([OLD, NEW, OLD, NEWER, OLD, NEWER], (0, 1, 0, 1, 0, 1), ["triton 3.8.0 → 3.8.1"]),
        ([OLD, NEW, OLD, NEW, DRIVER, NEWER, DRIVER], (0, 1, 0, 1, 0, 1, 0), ["driver", "triton 3.8.0 → 3.8.1"]),
        ([OLD, NEW, OLD, ELSEWHERE, ELSEWHERE], (0, 1, 0, 1, 1), ["gpu_uuid GPU-1 → GPU-2"]),
    ],
)
def test_which_toolchains_share_a_line(
    used: list[dict[str, Any]], lines: tuple[int, ...], marks: list[str] | None,
    cli: Cli, stored: Callable[..., Any], db: Any, make: Callable[..., Any],
) -> None:  # fmt: skip
    shown = shown_of(cli, stored, db, [make(n, **fields) for n, fields in enumerate(used)])
    assert shown.lines == lines
    texts = [mark.text for mark in shown.marks if mark.kind == "environment"]
    assert marks is None or len(texts) == len(marks)
    assert all(text.startswith(start) for text, start in zip(texts, marks or (), strict=False)), texts
    if NEWER in used:
        new = history_plots.latency_history(shown)["data"][1]
        assert "triton 3.8.1" in new["name"] and len(set(new["customdata"])) == 2  # the table names each version


def test_a_toolchain_that_the_plan_names_has_a_line_from_its_first_night(
    cli: Cli, stored: Callable[..., Any], db: Any, make: Callable[..., Any]
) -> None:
    nights = [make(n, **OLD) for n in range(4)]
    shown = shown_of(cli, stored, db, [*nights, make(4, plan="nightly@next", **NEW)])
    assert (shown.lines, shown.toolchains) == ((0, 0, 0, 0, 1), ("triton 3.7.1", "next, triton 3.8.0"))
    assert shown.marks == ()


def test_one_toolchain_has_no_legend() -> None:
    layout = history_plots.latency_history(history([1.0, 1.0]))["layout"]
    assert not layout["showlegend"] and "legend" not in layout and layout["height"] == 250
