"""`groupbench gains`: problems by how much time is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Cli

from groupbench.tracker.facts.record import Record


@pytest.fixture
def stored(cli: Cli, write: Callable[..., Path], make: Callable[..., Record]) -> None:
    def cell(backend: str, rows: int, ms: float, gap: float | None) -> Record:
        metrics: dict[str, Any] = {} if gap is None else {"metrics": {"sol_gap": gap}}
        latency = {"timing": "gpu", "bursts_ms": [[ms]]}
        return make(0, backend=backend, shape=f"G=4,M_g={rows},N=8,K=8", latency=latency, **metrics)

    fast = [cell("fast", rows, ms, gap) for rows, ms, gap in ((8, 2.0, 2.0), (16, 4.0, 4.0), (32, 9.0, None))]
    done = cli("ingest", write([cell("slow", 8, 4.0, 4.0), *fast]))
    assert done.exit_code == 0, done.output


def test_nothing_to_gain_has_a_reason(cli: Cli, write: Callable[..., Path], make: Callable[..., Record]) -> None:
    cli("ingest", write([make(0)]))
    result = cli("gains")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "`canary`" in result.stderr


def test_the_largest_gain_of_the_best_backend_comes_first(stored: None, cli: Cli) -> None:
    rows = json.loads(cli("gains", "--format=json").stdout)
    assert [(row["backend"], row["shape"][:8]) for row in rows] == [("fast", "G=4,M_g="), ("fast", "G=4,M_g=")]
    gains = [(row["gain_ms"], row["floor_ms"], row["gain_share"]) for row in rows]
    assert gains == [(3.0, 1.0, 0.75), (1.0, 1.0, 0.25)]
    table = cli("gains")
    assert (table.exit_code, "75%" in table.stdout) == (0, True)
    assert [row["time_share"] for row in rows] == pytest.approx([2 / 3, 1 / 3])


def test_filters_name_the_products_of_a_layer(stored: None, cli: Cli) -> None:
    (row,) = json.loads(cli("gains", "--shape", "*M_g=8,*", "--format=json").stdout)
    assert row["gain_share"] == 1.0


def test_the_canary_of_another_run_of_the_commit_counts(cli: Cli, write: Any, make: Callable[..., Record]) -> None:
    def of(run: str, ms: float, **cell: Any) -> Record:
        return make(0, run=run, dtype="bf16", latency={"timing": "gpu", "bursts_ms": [[ms]]}, **cell)

    copy = of("canaries", 1.0, operator="canary", shape="copy", cell={"min_bytes": 10**9})
    product = of("canaries", 1.0, operator="canary", shape="product", cell={"flops": 10**11})
    kernel = of("kernels", 8.0, shape="G=1", cell={"flops": 2 * 10**11, "min_bytes": 4 * 10**9})
    cli("ingest", write([kernel], "kernels.jsonl"))
    assert cli("gains", "--run", "kernels").exit_code == 3
    cli("ingest", write([copy, product], "canaries.jsonl"))
    (row,) = json.loads(cli("gains", "--run", "kernels", "--format=json").stdout)
    assert (row["floor_ms"], row["sol_gap"], row["gain_ms"]) == pytest.approx((4.0, 2.0, 4.0))
