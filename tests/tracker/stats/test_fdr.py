"""False-discovery control against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.stats.fdr import adjusted


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_as_scipy_has_it(p: list[float]) -> None:
    from scipy import stats  # takes half a second in each process that collects tests

    np.testing.assert_allclose(adjusted(p), stats.false_discovery_control(p))


@given(st.lists(st.floats(0, 1), max_size=20), st.integers(0, 3))
def test_untested_hypotheses_do_not_count(p: list[float], missing: int) -> None:
    q = adjusted([*p, *[np.nan] * missing])
    np.testing.assert_array_equal(q[: len(p)], adjusted(p))
    assert np.isnan(q[len(p) :]).all()


def test_bad_p_values() -> None:
    with pytest.raises(ValueError, match="p-values"):
        adjusted([0.1, 1.5])
