"""Values as text on one line."""

from __future__ import annotations

import pytest

from groupbench.tracker.text.wording import counted, no_such


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


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("moo", ["moe", "smoke"], "no suite 'moo' (did you mean 'moe'?); known: moe, smoke"),
        ("other", ["moe", "smoke"], "no suite 'other'; known: moe, smoke"),
        ("moe", [], "no suite 'moe'; known: none"),
    ],
    ids=["mistyped", "unlike any", "nothing known"],
)
def test_an_unknown_name(name: str, names: list[str], expected: str) -> None:
    assert no_such("no suite", name, names) == expected
