"""The table of tolerances, and the user's changes to it."""

from __future__ import annotations

import pytest

from groupbench.operators.tolerances import TOLERANCES, Tolerance

ROUNDOFF = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}


@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_one_rounding_fits_and_one_percent_does_not(dtype: str) -> None:
    tolerance = TOLERANCES[dtype]
    assert ROUNDOFF[dtype] < tolerance.rms < 0.01
    assert ROUNDOFF[dtype] < tolerance.rtol


def test_fp32_leaves_no_room_for_tf32() -> None:
    assert TOLERANCES["fp32"].rms < 3e-4 / 10


TABLE = Tolerance(rms=1e-3, rtol=2e-3, atol=3e-3)
CHANGED = {
    "nothing": (None, None, TABLE),
    "a looser rtol loosens rms": (0.1, None, Tolerance(0.1, 0.1, 3e-3)),
    "a tighter rtol leaves rms": (1e-6, None, Tolerance(1e-3, 1e-6, 3e-3)),
    "atol alone": (None, 0.5, Tolerance(1e-3, 2e-3, 0.5)),
    "both": (0.1, 0.5, Tolerance(0.1, 0.1, 0.5)),
    "zero is a value": (0.0, 0.0, Tolerance(1e-3, 0.0, 0.0)),
}


@pytest.mark.parametrize(("rtol", "atol", "expected"), CHANGED.values(), ids=CHANGED)
def test_overrides(rtol: float | None, atol: float | None, expected: Tolerance) -> None:
    assert TABLE.with_overrides(rtol, atol) == expected
