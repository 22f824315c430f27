"""The latency of a record is the same number wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.table import median_ms, spread
from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.identity import series_identity
from groupbench.tracker.facts.record import Latency, Record
from groupbench.tracker.store.points import point_values

SAMPLES = st.lists(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("bursts", "median", "low", "high"),
    [
        pytest.param([[1.0]], 1.0, 1.0, 1.0, id="one sample"),
        pytest.param([[1.0, 3.0]], 2.0, 2.0, 2.0, id="an even burst"),
        pytest.param([[1.0, 9.0, 2.0], [4.0], [3.0]], 3.0, 2.0, 4.0, id="the burst is the unit"),
        pytest.param([[1 / 3]], 0.3333333, np.float32(1 / 3), np.float32(1 / 3), id="seven digits of float32"),
    ],
)
def test_the_median_over_bursts(bursts: list[list[float]], median: float, low: float, high: float) -> None:
    result = Bursts.of(bursts)
    assert (result.median, result.low, result.high) == (median, low, high)


@pytest.mark.parametrize("bursts", [[], [[]], [[1.0], []]])
def test_no_sample_is_refused(bursts: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="burst"):
        Bursts.of(bursts)


@given(SAMPLES)
def test_it_is_numpys(bursts: list[list[float]]) -> None:
    medians = [float(np.median(np.asarray(burst, dtype=np.float32).astype(np.float64))) for burst in bursts]
    assert Bursts.of(bursts).medians == pytest.approx(medians, rel=1e-12)
    assert Bursts.of(bursts).median == pytest.approx(np.median(medians), rel=1e-6)


def test_database_and_table_have_one_latency(make: Callable[..., Record]) -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        bursts = random.lognormal(0, 1, (int(random.integers(1, 6)), int(random.integers(1, 8)))).tolist()
        record = make(ms=None, latency=Latency(timing="gpu", bursts_ms=tuple(map(tuple, bursts))))
        stored = point_values(record, digest(record.environment), series_identity(record))
        assert record.latency is not None
        assert stored["median_ms"] == median_ms(record.latency)
        assert spread(record.latency) == Bursts.of(bursts).half_spread
