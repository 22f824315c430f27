"""The limits of devices."""

from __future__ import annotations

import pytest

from groupbench.tracker.facts.physics import CARDS, FASTEST, floor_ms, too_fast

H200 = "NVIDIA H200"
GEMM = 2 * 32768 * 4096 * 4096
BYTES = 2 * (32768 * 4096 * 2 + 8 * 4096 * 4096)

CASES = {
    "a product at 80 % of the peak": (1.43, GEMM, BYTES, "bf16", "gpu", H200, False),
    "on a side stream": (0.0015, GEMM, BYTES, "bf16", "gpu", H200, True),
    "a copy of a computed result": (0.13, GEMM, BYTES, "bf16", "gpu", H200, True),
    "fp8 is twice as fast": (0.6, GEMM, BYTES, "fp8", "gpu", H200, False),
    "fp32 by six products in bf16": (7.0, GEMM, BYTES, "fp32", "gpu", H200, False),
    "fp32 at bf16's speed": (1.4, GEMM, BYTES, "fp32", "gpu", H200, True),
    "a copy faster than memory": (0.1, 0, 2 << 30, "bf16", "gpu", H200, True),
    "a copy within the cache": (0.002, 0, 32 << 20, "bf16", "gpu", H200, False),
    "an unknown card": (0.3, GEMM, BYTES, "bf16", "gpu", "Acme 1", True),
    "an unknown card that may be faster": (0.6, GEMM, BYTES, "bf16", "gpu", "Acme 1", False),
    "nothing is known": (1e-6, 0, 0, "bf16", "gpu", None, False),
    "a processor": (0.05, 8_600_000, 0, "fp32", "cpu", None, False),
    "a processor's clock that stopped": (1e-6, 8_600_000, 0, "fp32", "cpu", None, True),
    "an interpreter": (1e-6, GEMM, BYTES, "fp32", "interpreted", None, False),
}


@pytest.mark.parametrize(("ms", "flops", "traffic", "dtype", "timing", "gpu", "refused"), CASES.values(), ids=CASES)
def test_a_latency_is_possible_or_not(
    ms: float, flops: int, traffic: int, dtype: str, timing: str, gpu: str | None, refused: bool
) -> None:
    reason = too_fast(ms, floor_ms(flops, traffic, dtype, timing, gpu, 2))  # type: ignore[arg-type]
    assert (reason is not None) == refused, reason
    assert reason is None or reason.startswith("implausible: ")


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_is_not_known_is_as_fast_as_any(name: str) -> None:
    card = CARDS[name]
    assert card.tflops <= FASTEST.tflops and card.fp8 <= FASTEST.fp8 and card.fp32 <= FASTEST.fp32
    assert card.terabytes <= FASTEST.terabytes and card.l2_mib <= FASTEST.l2_mib


def test_the_longer_name_is_found_first() -> None:
    for at, name in enumerate(CARDS):
        assert not any(earlier in name for earlier in list(CARDS)[:at] if CARDS[earlier] != CARDS[name])
