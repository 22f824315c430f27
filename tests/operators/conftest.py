"""Records, sessions and backends to test with. Nothing here opens a GPU: cells are measured on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from groupbench.operators.measure import witness, worker
from groupbench.tracker.facts.record import Record

HERE = Path(__file__).parent


def build(backend: str = "torch_loop", ms: float | None = 1.0, **facts: Any) -> Record:
    """Return the record of one cell; facts that are fields of a cell go to the cell, others to the record."""
    cell: dict[str, Any] = {
        "operator": "grouped_gemm",
        "backend": backend,
        "shape": "G=1,M_g=2,N=3,K=4",
        "dtype": "fp16",
        "flops": 48_000_000,
        "min_bytes": 1_000_000,
    }
    for name in ("operator", "shape", "dtype", "mode", "protocol", "seed", "flops", "min_bytes"):
        if name in facts:
            cell[name] = facts.pop(name)
    body: dict[str, Any] = {"status": facts.pop("status", "ok"), "baseline": backend == "torch_loop"}
    if body["status"] != "ok":
        body["message"] = "why"
    if ms is not None:
        body["latency"] = {"timing": facts.pop("timing", "cpu"), "bursts_ms": facts.pop("bursts", [[ms]])}
        body["accuracy"] = {"rms": 1e-4, "repeatable": True}
    run = {"id": "r", "started": datetime(2026, 1, 1, tzinfo=UTC), "commit": {"hash": "c" * 40}}
    return msgspec.convert(
        {"schema": 1, "run": run, "environment": {"device": "cpu"}, "cell": cell} | body | facts, Record
    )


@pytest.fixture(scope="session")
def make() -> Callable[..., Record]:
    return build


@pytest.fixture(scope="module")
def faulty() -> Iterator[str]:
    """Return the plugin of failing backends, importable in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield "faulty_backends.BACKENDS"


@pytest.fixture(scope="module")
def unaudited() -> Iterator[None]:
    """Let this process and its forks believe reported times. Audits of each cell take seconds on a busy machine.

    Tests of audits, and the end-to-end tests, have them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(witness, "audit", lambda ask, pace, median_ms, gauge: ask(1) and None)
        yield


LEFT_OUT = ("TRITON_INTERPRET", "FORCE_COLOR", "OMP_NUM_THREADS")


def _environment() -> dict[str, str]:
    """Return a user's environment, in which the faulty backends can be imported."""
    env = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), env.get("PYTHONPATH")]))
    return env


@pytest.fixture(scope="session")
def tritonbench(forked: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """Run the command as a user does, in a fork of this process."""
    worker.call(os.getpid)  # starts the fork server of the cells, which the forks share
    return lambda *args: forked("groupbench.operators.cli:main", *args, env=_environment())


@pytest.fixture(scope="session")
def tritonbench_apart() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a separate process, for tests of processes, imports or the environment."""

    def run(*args: str | os.PathLike[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "groupbench.operators", *map(str, args)],
            capture_output=True,
            text=True,
            env=_environment() | environment,
        )

    return run
