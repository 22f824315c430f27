"""Series with a step that an A/B measured: it must not hide a later one, and a reverted one must not stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from groupbench.tracker.judge import alert_moves, alerts
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import open_store

pytestmark = pytest.mark.sqlite

Night = tuple[list[Judged], set[int]]  # rows of the night, and the nights whose regressions have an open alert


def play(
    make: Any,
    stored: Callable[..., Any],
    levels: Sequence[float],
    noise: float,
    timing: str,
    outliers: Mapping[int, float] = MappingProxyType({}),
) -> list[Night]:
    """Store and judge nights one by one, as the nightly job does: A/Bs of all suspects, then an update of the alerts.

    levels    true latency of each night's commit, which each A/B measures exactly
    outliers  latency that a night measures instead
    """
    rng = np.random.default_rng(len(levels))
    truth: dict[str | None, float] = {}
    nights: list[Night] = []
    for number, level in enumerate(levels, 1):
        record = make(number, outliers.get(number, level) * math.exp(abs(rng.normal(0, noise))), timing=timing)
        truth[record.run.commit.hash] = level
        with open_store(stored([record]), create=False) as store, store.write() as session:
            run = find_run(session, None)
            for row in judge_run(session, run).suspects:
                base, head = row.ab_base, row.span.head if row.span else run
                assert base is not None
                effect = math.log(truth[head.commit] / truth[base.commit])
                compared = Compared(
                    base.commit or "", head.commit or "", "different" if effect else "same",
                    datetime(2026, 1, 9, tzinfo=UTC), effect, effect - 0.002, effect + 0.002,
                )  # fmt: skip
                comparisons.store(session, row.series.pk, compared)
            gate = judge_run(session, run)
            alert_moves.update(session, gate)
            stored_alerts = alerts.find(session, series={row.series.pk for row in gate.rows})
            nights.append((list(gate.rows), {night(one.run) for one in stored_alerts if one.state in alerts.OPEN}))
    return nights


def night(run: Any) -> int:
    return int(run.commit[:3], 16)


def changes(nights: list[Night], verdict: str = "regressed") -> list[dict[int, float]]:
    """Return for each night the changes of rows with a verdict, by the night whose commit they name."""
    return [
        {night(row.span.head): row.change or 0.0 for row in rows if row.span and row.verdict == verdict}
        for rows, _ in nights
    ]


QUIET, BUSY = (0.002, "gpu"), (0.02, "cpu")


@pytest.mark.parametrize(
    ("levels", "noise"),
    [
        ([1, 1, 2.5, 1, 1, 1.5, 1.5], BUSY),
        ([1, 1, 1.1, 1, 1, 1.05], QUIET),
        ([1, 1.1, 1, 1.05], QUIET),
        ([1, 1, 1, 1, 1.1, 1.1, 1, 1, 1, 1, 1, 1.04], QUIET),
        ([1, 1, 1.1, 1, 1, 1, 1, 1, 1, 1, 1, 1.05], QUIET),
        ([*[1] * 12, 1.1, 1, 1, 1.05], QUIET),
    ],
    ids=["cpu", "gpu", "at once", "later", "past the tenth result", "of a long history"],
)
def test_a_reverted_slowdown_does_not_hide_the_next(
    levels: list[float], noise: tuple[float, str], make: Any, stored: Any
) -> None:
    nights = play(make, stored, levels, *noise)
    slower = [number for number in range(2, len(levels) + 1) if levels[number - 1] > levels[number - 2]]
    back = next(number for number in range(slower[0], len(levels) + 1) if levels[number - 1] == 1)
    first, second = slower
    reported = changes(nights)
    for number in range(1, len(levels) + 1):
        expected = {first} if first <= number < back else {second} if number >= second else set()
        assert set(reported[number - 1]) == expected, number
        assert nights[number - 1][1] == expected, number
    assert reported[second - 1][second] == pytest.approx(levels[second - 1] - 1, rel=0.2)


@pytest.mark.parametrize(
    ("levels", "noise"),
    [([1, 1, *[2.5] * 4, 3.7, 3.7], BUSY), ([1, 1, *[1.5] * 8, 1.6], QUIET), ([1, 1.5, 1.6], QUIET)],
    ids=["cpu", "past the tenth result", "at once"],
)
def test_an_open_slowdown_does_not_hide_the_next(
    levels: list[float], noise: tuple[float, str], make: Any, stored: Any
) -> None:
    nights = play(make, stored, levels, *noise)
    second = levels.index(levels[-1]) + 1
    first = next(number for number, level in enumerate(levels, 1) if level > 1)
    for number, (reported, (_, opened)) in enumerate(zip(changes(nights), nights, strict=True), 1):
        assert set(reported) == opened == {one for one in (first, second) if one <= number}, number
    assert changes(nights)[-1][second] == pytest.approx(levels[-1] / levels[second - 2] - 1, rel=0.2)


def test_a_row_of_an_open_alert_shows_the_newest_result(make: Any, stored: Any) -> None:
    """Half of a slowdown was taken back: the row shows the rest, without an interval of the whole slowdown."""
    nights = play(make, stored, [1, 1, 2.5, *[1.2] * 14], *BUSY)
    assert changes(nights, "improved")[3] == {4: pytest.approx(-0.52, abs=0.05)}
    for rows, opened in nights[3:]:
        (row,) = [row for row in rows if row.verdict == "regressed"]
        assert opened == {3} and row.point is not None
        assert row.level_now == pytest.approx(row.point.median_ms)
        assert row.change == pytest.approx(0.2, abs=0.05) and row.effect.low is None


def test_an_improvement_that_is_lost_is_a_slowdown(make: Any, stored: Any) -> None:
    """Only slowdowns that are over are taken out of the history."""
    nights = play(make, stored, [1, 1, 0.7, 1, 1], *QUIET)
    assert [set(one) for one in changes(nights)][3:] == [{4}, {4}]


def test_a_fast_outlier_does_not_end_a_slowdown(make: Any, stored: Any) -> None:
    """The A/B of the outlier's commit and the next finds no difference, so the slowdown was never over."""
    nights = play(make, stored, [1, 1, *[2.5] * 4], *BUSY, outliers={4: 1.0})
    assert [set(one) for one in changes(nights)][4:] == [{3}, {3}]
    assert [opened for _, opened in nights][4:] == [{3}, {3}]
