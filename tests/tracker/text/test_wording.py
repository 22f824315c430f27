"""Values as text on one line."""

from __future__ import annotations

import pytest

from groupbench.tracker.text.wording import counted


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 cells"),
        (1, "1 cell"),
        (2, "2 cells"),
        (2000, "2,000 cells"),
        (10_000_000, "10,000,000 cells"),
        (0.5, "0.5 cells"),
        (1.0, "1 cell"),
    ],
    ids=str,
)
def test_one_and_several(number: float, expected: str) -> None:
    assert counted(number, "cell") == expected
