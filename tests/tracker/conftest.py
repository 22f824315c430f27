"""Builders of records, files and databases. Times are made up, and no test waits for a clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from groupbench.tracker.cli import main
from groupbench.tracker.record import Record, encode
from groupbench.tracker.store import Store, open_store

H100: dict[str, Any] = {
    "device": "cuda",
    "gpu": "NVIDIA H100 80GB HBM3",
    "gpu_uuid": "GPU-1",
    "driver": "570.1",
    "cuda": "13.0",
    "power_limit_w": 700.0,
    "python": "3.11.9",
    "torch": "2.13.0",
    "triton": "3.7.1",
}


def build(night: int = 0, ms: float | None = 1.0, **given: Any) -> Record:
    """The record of one cell. `night` makes run, commit and time; other names go where they belong."""
    run: dict[str, Any] = {
        "id": given.pop("run", f"run-{night:03d}"),
        "started": datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night),
        "trigger": "nightly",
        "plan": given.pop("plan", "nightly"),
        "commit": {"hash": given.pop("commit", f"{night:03x}" + "c" * 37), **given.pop("commit_facts", {})},
    }
    cell = {"operator": "grouped_gemm", "backend": "triton", "shape": "G=4,N=1024,K=1024", "dtype": "bf16"}
    cell |= {name: given.pop(name) for name in list(given) if name in ("operator", "backend", "shape", "dtype", "mode")}
    cell |= given.pop("cell", {})
    environment = H100 | given.pop("environment", {})
    status = given.pop("status", "ok")
    body: dict[str, Any] = {"status": status}
    if status != "ok":
        body["message"] = given.pop("message", f"it was {status}")
    if status in ("ok", "wrong"):
        if ms is not None:
            spread = np.random.default_rng(night).normal(1, 0.0005, (5, 7))
            timing = given.pop("timing", "gpu")
            body["latency"] = {"timing": timing, "bursts_ms": (ms * spread).tolist()}
        body["accuracy"] = {"rms": given.pop("rms", 2e-3), "repeatable": given.pop("repeatable", True)}
    return msgspec.convert({"schema": 1, "run": run, "environment": environment, "cell": cell, **body, **given}, Record)


@pytest.fixture
def make() -> Callable[..., Record]:
    return build


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write records, or raw bytes, to a file."""

    def to_file(records: Iterable[Record | bytes], name: str = "records.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(r if isinstance(r, bytes) else encode(r) for r in records))
        return path

    return to_file


@pytest.fixture
def cli(db: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command on the test's database; an exception that reaches the top fails the test."""
    for name in ("GROUPBENCH_DB", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str | os.PathLike[str], stdin: bytes | None = None, db: Path = db) -> Result:
        result = CliRunner().invoke(main, ["--db", str(db), *map(str, args)], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == 2:
            assert result.stderr.startswith("groupbench: ")
            assert result.stderr.count("\n") == 1, result.stderr
        return result

    return run


@pytest.fixture
def stored(cli: Callable[..., Result], write: Callable[..., Path], db: Path) -> Callable[..., Path]:
    """Store records by the command, and give the database's path."""

    def store(records: Iterable[Record]) -> Path:
        result = cli("ingest", write(records))
        assert result.exit_code == 0, result.stderr
        return db

    return store


@pytest.fixture
def opened(db: Path) -> Iterable[Store]:
    with open_store(db, create=True) as store:
        yield store
