"""Levels of a series, which end by history, an A/B comparison, an alert or the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.report.levels import levels_of
from groupbench.tracker.store.comparisons import Compared

SIX_SEVEN_TWO = [0.13] * 6 + [0.26] * 7 + [0.13] * 2


def past(ms: list[float], environment: list[int] | None = None) -> Past:
    n = len(ms)
    noise = 1 + 0.001 * np.sin(np.arange(n))
    return Past(
        series=1, run=np.arange(100, 100 + n), environment=np.array(environment or [0] * n),
        toolchain=np.zeros(n, np.int64), state=np.arange(n),
        log=np.log(np.array(ms) * noise), error=np.full(n, np.nan),
    )  # fmt: skip


def edges(
    ms: list[float], alerts: Sequence[Any] = (), compared: Sequence[Compared] = (), environment: list[int] | None = None
) -> list[int]:
    """Places of the first results of all levels."""
    commits = {100 + i: f"c{i}" for i in range(len(ms))}
    result = levels_of(past(ms, environment), "gpu", alerts, compared, commits)
    return [level.first - 100 for level in result.levels]


def different(base: int, head: int, verdict: str = "different", sign: int = 1) -> Compared:
    return Compared(f"c{base}", f"c{head}", verdict, datetime(2026, 1, 1, tzinfo=UTC), sign * math.log(2))


def alert(at: int, state: str = "new", metric: str = "latency") -> Any:
    run, base = SimpleNamespace(pk=100 + at), SimpleNamespace(pk=99 + at)
    size = {"before": 0.13, "effect": math.log(2), "distance": math.log(2)}
    return SimpleNamespace(metric=metric, state=state, run=run, base_run=base, pk=at, **size)


@pytest.mark.parametrize(
    ("alerts", "compared", "expected"),
    [
        ((), [different(5, 6), different(12, 13, sign=-1)], [0, 6, 13]),
        ((), [different(3, 8), different(12, 13, sign=-1)], [0, 6, 13]),
        ((), [different(5, 6, "same")], [0]),
        ((), [different(5, 40)], [0, 6, 13]),
        ([alert(6, "fixed")], (), [0, 6, 13]),
        ([alert(6, "new")], (), [0, 6, 13]),
        ([alert(6, metric="accuracy")], (), [0, 6, 13]),
    ],
    ids=["A/B", "A/B over several", "A/B same", "A/B of another commit", "fixed", "open", "accuracy"],
)
def test_levels_end_by_other_evidence_than_history(
    alerts: Sequence[Any], compared: Sequence[Compared], expected: list[int]
) -> None:
    assert edges(SIX_SEVEN_TWO, alerts, compared) == expected


def test_one_change_is_one_edge() -> None:
    """The history finds the change at the twentieth result, and an A/B of the commits around it adds no other."""
    ms = [1.0] * 20 + [1.1] * 20
    assert edges(ms) == [0, 20] and edges(ms, [alert(20)], [different(18, 22)]) == [0, 20]


def test_another_environment_ends_a_level() -> None:
    assert edges([1.0] * 8, environment=[0] * 3 + [1] * 5) == [0, 3]
