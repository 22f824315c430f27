"""`groupbench gains`: problems by how much time is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from groupbench.tracker.record import Record

Cli = Callable[..., Result]


@pytest.fixture
def stored(cli: Cli, write: Callable[..., Path], make: Callable[..., Record]) -> None:
    def cell(backend: str, rows: int, ms: float, gap: float | None) -> Record:
        metrics: dict[str, Any] = {} if gap is None else {"metrics": {"sol_gap": gap}}
        latency = {"timing": "gpu", "bursts_ms": [[ms]]}
        return make(0, backend=backend, shape=f"G=4,M_g={rows},N=8,K=8", latency=latency, **metrics)

    records = [
        cell("slow", 8, 4.0, 4.0),
        cell("fast", 8, 2.0, 2.0),
        cell("fast", 16, 4.0, 4.0),
        cell("fast", 32, 9.0, None),
    ]
    done = cli("ingest", write(records))
    assert done.exit_code == 0, done.output


def test_the_largest_gain_of_the_best_backend_comes_first(stored: None, cli: Cli) -> None:
    rows = json.loads(cli("gains", "--json").stdout)
    assert [(row["backend"], row["shape"][:8]) for row in rows] == [("fast", "G=4,M_g="), ("fast", "G=4,M_g=")]
    assert [(row["gain_ms"], row["floor_ms"], row["share"]) for row in rows] == [(3.0, 1.0, 0.75), (1.0, 1.0, 0.25)]
    table = cli("gains")
    assert (table.exit_code, "75%" in table.stdout) == (0, True)


def test_filters_name_the_products_of_a_layer(stored: None, cli: Cli) -> None:
    (row,) = json.loads(cli("gains", "--shape", "*M_g=8,*", "--json").stdout)
    assert row["share"] == 1.0


def test_without_canaries_there_is_nothing_to_list(
    cli: Cli, write: Callable[..., Path], make: Callable[..., Record]
) -> None:
    cli("ingest", write([make(0)]))
    assert cli("gains").exit_code == 3
