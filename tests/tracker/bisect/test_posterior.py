"""The parts of a search: probabilities of commits, sides of a difference, pooled comparisons, rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.bisect.search import AbFinding, Posterior, Rates, pooled
from groupbench.tracker.bisect.search import side as side_of


def finding(effect: float, verdict: str = "different", half: float = 0.002, **more: object) -> AbFinding:
    return AbFinding(verdict, effect, effect - half, effect + half, **more)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_probabilities_stay_probabilities(n: int, levels: list[tuple[int, bool]]) -> None:
    posterior = Posterior(n, Rates())
    for j, above in levels:
        posterior.level(min(j, n), above)
    sums = posterior.cumulative()
    assert len(sums) == n + 2
    assert sums[0] == 0
    assert sums[-1] == pytest.approx(1)
    assert all(b >= a for a, b in pairwise(sums))


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (finding(0.0, "same"), "below"),
        (finding(0.02), "above"),
        (finding(-0.02), "below"),
        (finding(0.004), "below"),
        (finding(0.016), "above"),
        (finding(0.011, half=0.005), "above"),
        (finding(0.009, half=0.005), "unclear"),
        (finding(0.009, "unknown", half=0.005), "unclear"),
        (finding(0.001, "unknown", half=0.005), "below"),
        (AbFinding("different", 0.02), "above"),
        (AbFinding("unknown"), "unclear"),
        (AbFinding("same"), "below"),
        (AbFinding("failed"), "failed"),
    ],
)
def test_half_of_the_difference_decides(comparison: AbFinding, expected: str) -> None:
    assert side_of(comparison, 0.02) == expected
    if comparison.effect is not None and comparison.low is not None and comparison.high is not None:
        mirrored = replace(comparison, effect=-comparison.effect, low=-comparison.high, high=-comparison.low)
        assert side_of(mirrored, -0.02) == expected


@given(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(0, 0.05), st.floats(0, 0.05))
def test_pooling_lies_between_and_is_no_wider(a: float, b: float, wide: float, other: float) -> None:
    both = pooled(finding(a, half=wide), finding(b, half=other))
    assert both.effect is not None and both.low is not None and both.high is not None
    assert min(a, b) - 1e-9 <= both.effect <= max(a, b) + 1e-9
    assert both.high - both.low <= 2 * min(wide, other) + 1e-9


def test_rates_are_checked() -> None:
    for false, missed in ((0.0, 0.1), (0.1, 0.5), (-1, 0.1)):
        with pytest.raises(ValueError, match="rates"):
            Rates(false, missed)
