"""The tracker on a real history: six commits on two H100s, described in tests/data/h100/README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nights import Cli, rows

HISTORY = sorted((Path(__file__).parents[2] / "data" / "h100").glob("*.jsonl"))


@pytest.fixture
def h100(cli: Cli, fill: Callable[..., None]) -> Cli:
    """Ingest the files once for all tests on SQLite."""

    def ingest() -> None:
        done = cli("ingest", *map(str, HISTORY))
        assert done.exit_code == 0, done.output

    fill(b"h100", ingest)
    return cli


def run_of(number: int) -> str:
    return json.loads(HISTORY[number - 1].open().readline())["run"]["id"]


def verdicts(cli: Cli, run: str) -> tuple[int, list[dict[str, Any]]]:
    return cli("gate", "--run", run).exit_code, rows(cli, "--run", run)


def test_nothing_changed_where_nothing_did(h100: Cli) -> None:
    code, of_run = verdicts(h100, run_of(3))
    assert code == 0
    assert not {row["verdict"] for row in of_run} & {"regressed", "improved", "wrong", "missing"}


SLOWER = ("helion_persistent", "G=4,M_g=1024,N=1024,K=1024,B=shared")


def test_the_change_of_tiles_makes_suspects_series_by_series(h100: Cli) -> None:
    """Real work: every kernel of ours changed, torch's did not, and one unexpectedly got slower.

    Many have a single earlier result. That proves nothing, but a deviation from it is worth an A/B comparison.
    """
    code, of_run = verdicts(h100, run_of(4))
    assert code == 3
    suspects = [row for row in of_run if row["verdict"] == "unconfirmed"]
    slower = next(row for row in suspects if (row["backend"], row["shape"]) == SLOWER)
    assert slower["change"] == pytest.approx(0.53, abs=0.01)
    assert (slower["commits"], slower["cause"]) == ("fc7ede973c..87b80271e3", "code")
    assert not {row["backend"] for row in suspects} & {"torch_loop", "torch_grouped_mm"}
    tuned = [row for row in suspects if row["backend"] == "triton_pointer"]
    assert any((row["cause"], "BLOCK_N 128 → 256" in row["note"]) == ("tuning", True) for row in tuned)


def test_an_unconfirmed_suspect_stays_one_and_keeps_its_date(h100: Cli) -> None:
    code, of_run = verdicts(h100, run_of(5))
    assert code == 3
    suspects = [row for row in of_run if row["verdict"] == "suspect" and row["change"] > 0]
    slower = next(row for row in suspects if (row["backend"], row["shape"]) == SLOWER and row["n"] > 2)
    assert slower["commits"] == "fc7ede973c..87b80271e3"
    assert not {row["backend"] for row in suspects} & {"torch_loop", "torch_grouped_mm"}


def test_hosts_and_cards_never_mix(h100: Cli) -> None:
    """The same problem and backend under TritonBench is another series, and on another card incomparable."""
    series = h100("list", "series", "--backend", "triton_flat", "--shape", "G=4,M_g=1024,*", "--format=json").stdout
    assert {row["host"] for row in json.loads(series)} == {"builtin", "tritonbench"}
    done = h100("gate", "--run", run_of(9))
    assert done.exit_code == 4
    assert "gpu_uuid" in done.stdout or "GPU" in done.stdout
