"""The speed of light of a card, from its canaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from groupbench.operators.ceilings import Ceilings
from groupbench.tracker.facts.record import Record

Make = Callable[..., Record]
CARD = {"device": "cuda", "gpu": "NVIDIA H200", "gpu_uuid": "GPU-1"}


def canary(make: Make, ms: float, flops: int, min_bytes: int, **facts: Any) -> Record:
    record = make(
        "cublas", ms, operator="canary", flops=flops, dtype="bf16", timing="gpu", **{"environment": CARD} | facts
    )
    return with_bytes(record, min_bytes)


def with_bytes(record: Record, min_bytes: int) -> Record:
    import msgspec

    return msgspec.structs.replace(record, cell=msgspec.structs.replace(record.cell, min_bytes=min_bytes))


@pytest.fixture
def ceilings(make: Make) -> Ceilings:
    """Return ceilings of 800 TFLOP/s and 4 TB/s."""
    ceilings = Ceilings()
    ceilings.see(canary(make, 1.0, int(800e9), 10))
    ceilings.see(canary(make, 1.0, 10, int(4e9)))
    return ceilings


@pytest.mark.parametrize(
    ("dtype", "flops", "min_bytes", "ms", "gap"),
    [
        pytest.param("bf16", int(400e9), int(1e9), 1.0, 2.0, id="operations"),
        pytest.param("bf16", int(80e9), int(4e9), 1.5, 1.5, id="traffic"),
        pytest.param("fp8", int(800e9), int(1e9), 1.0, 2.0, id="fp8"),
        pytest.param("fp32", int(400e9), int(1e9), 1.0, None, id="no ceiling of this dtype"),
    ],
)
def test_gap(
    dtype: str, flops: int, min_bytes: int, ms: float, gap: float | None, ceilings: Ceilings, make: Make
) -> None:
    record = with_bytes(make("torch_loop", ms, dtype=dtype, flops=flops, timing="gpu", environment=CARD), min_bytes)
    assert ceilings.see(record).metrics.get("sol_gap") == (None if gap is None else pytest.approx(gap))


def test_each_card_has_its_own(ceilings: Ceilings, make: Make) -> None:
    other = {**CARD, "gpu_uuid": "GPU-2"}
    assert ceilings.see(make("torch_loop", 1.0, dtype="bf16", timing="gpu", environment=other)).metrics == {}


def test_a_wrong_canary_and_a_cpu_say_nothing(make: Make) -> None:
    ceilings = Ceilings()
    ceilings.see(canary(make, 1.0, 10**12, 10**9, status="wrong"))
    ceilings.see(make("cublas", 1.0, operator="canary", flops=10**12, dtype="bf16"))
    assert (ceilings.flops, ceilings.bandwidth) == ({}, {})
