"""Latencies that no device can reach: refused on ingestion, and not an improvement if already stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cases import Cli

from groupbench.tracker.facts.record import Record
from groupbench.tracker.store import checked


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


def test_the_gate_calls_it_wrong_where_it_is_stored(
    cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "implausible", lambda record: None)  # as before records were refused
    stored([fast(make, 0)])
    result = cli("gate")
    assert result.exit_code == 1
    assert "1 wrong" in result.stdout and "implausible: 0.0009999 ms" in result.stdout
