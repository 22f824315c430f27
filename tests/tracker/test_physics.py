"""The limits of devices; ingest refuses latencies beyond them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cases import Cli

from groupbench.tracker.facts.physics import CARDS, FASTEST, floor_ms, too_fast, unusual
from groupbench.tracker.facts.record import Record
from groupbench.tracker.store import checked

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
    "nvfp4 on a B200": (2 * 8192**3 / 6e12, 2 * 8192**3, 0, "nvfp4", "gpu", "NVIDIA B200", False),
    "nvfp4 beyond a B200": (2 * 8192**3 / 11e12, 2 * 8192**3, 0, "nvfp4", "gpu", "NVIDIA B200", True),
    "fp8 at the speed of fp4": (2 * 8192**3 / 6e12, 2 * 8192**3, 0, "fp8", "gpu", "NVIDIA B200", True),
    "e4m3 at the speed of fp4": (2 * 8192**3 / 6e12, 2 * 8192**3, 0, "fp8_e4m3fn", "gpu", "NVIDIA B200", True),
    "weights of 4 bits": (2 * 8192**3 / 6e12, 2 * 8192**3, 0, "w4a8", "gpu", "NVIDIA B200", False),
    "int4 on an A100": (2 * 8192**3 / 1.1e12, 2 * 8192**3, 0, "int4", "gpu", "NVIDIA A100-SXM4-80GB", False),
    "int8 on an A100": (2 * 8192**3 / 0.6e12, 2 * 8192**3, 0, "int8", "gpu", "NVIDIA A100-SXM4-80GB", False),
    "int4 at the speed of fp4, on an H200": (2 * 8192**3 / 6e12, 2 * 8192**3, 0, "int4", "gpu", H200, True),
    "an unknown card": (0.01, GEMM, BYTES, "bf16", "gpu", "Acme 1", False),
    "nothing is known, and a kernel cannot be launched so fast": (3e-9, 0, 0, "bf16", "gpu", None, True),
    "nothing is known": (1e-3, 0, 0, "bf16", "gpu", None, False),
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


@pytest.mark.parametrize(("ms", "gpu", "warned"), [(0.3, "Acme 1", True), (0.6, "Acme 1", False), (0.3, H200, False)])
def test_an_unknown_card_gives_a_warning(ms: float, gpu: str, warned: bool) -> None:
    warning = unusual(ms, GEMM, BYTES, "bf16", "gpu", gpu)
    assert (warning is not None) == warned
    assert warning is None or warning.startswith("Acme 1 is not a known card")


@pytest.mark.parametrize("name", CARDS)
def test_no_card_is_faster_than_the_fastest(name: str) -> None:
    assert all(getattr(CARDS[name], field) <= getattr(FASTEST, field) for field in FASTEST.__dataclass_fields__)


def test_the_longer_name_is_found_first() -> None:
    for at, name in enumerate(CARDS):
        assert not any(earlier in name for earlier in list(CARDS)[:at] if CARDS[earlier] != CARDS[name])


def fast(make: Any, night: int) -> Record:
    """8,590 TFLOP/s on an H100."""
    record: Record = make(night, ms=0.001)
    return msgspec.structs.replace(
        record,
        cell=msgspec.structs.replace(record.cell, flops=8_590_000_000),
        environment=msgspec.structs.replace(record.environment, device="cuda", gpu="NVIDIA H100 80GB HBM3"),
        latency=record.latency and msgspec.structs.replace(record.latency, timing="gpu"),
    )


def test_ingest_refuses_it_and_names_the_line(cli: Cli, write: Any, make: Any) -> None:
    result = cli("ingest", write([make(0), fast(make, 0)]))
    assert result.exit_code == 2
    assert (
        "line 2: implausible: 0.0009999 ms is less than the 0.008686 ms of arithmetic at 989 TFLOP/s" in result.stderr
    )


def test_one_that_is_marked_as_wrong_is_stored(cli: Cli, write: Any, make: Any) -> None:
    wrong = msgspec.structs.replace(fast(make, 0), status="wrong", message="implausible: too fast")
    assert cli("ingest", write([wrong])).exit_code == 0


def test_the_gate_calls_it_wrong_where_it_is_stored(cli: Cli, stored: Any, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(checked, "implausible", lambda record: None)  # as before records were refused
    stored([fast(make, 0)])
    result = cli("gate")
    assert result.exit_code == 1
    assert "1 wrong" in result.stdout and "implausible: 0.0009999 ms" in result.stdout
