"""The tracker on a real history: three commits on one H100 (tests/data/h100/README.md says what happened in them)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Cli = Callable[..., Result]
HISTORY = sorted((Path(__file__).parents[1] / "data" / "h100").glob("*.jsonl"))


@pytest.fixture
def h100(cli: Cli) -> Cli:
    done = cli("ingest", *map(str, HISTORY))
    assert done.exit_code == 0, done.output
    return cli


def run_of(number: int) -> str:
    return json.loads(HISTORY[number - 1].open().readline())["run"]["id"]


def verdicts(cli: Cli, run: str) -> tuple[int, list[dict[str, Any]]]:
    done = cli("gate", "--run", run, "--json")
    return done.exit_code, json.loads(done.stdout)["series"]


def test_nothing_changed_where_nothing_did(h100: Cli) -> None:
    code, rows = verdicts(h100, run_of(3))
    assert code == 0
    assert not {row["verdict"] for row in rows} & {"regressed", "improved", "wrong", "missing"}


def test_the_change_of_tiles_is_found_series_by_series(h100: Cli) -> None:
    """Real work: every kernel of ours changed, torch's did not, and one got slower where nobody looked."""
    code, rows = verdicts(h100, run_of(4))
    assert code == 1
    count = Counter(row["verdict"] for row in rows)
    assert (count["regressed"], count["improved"]) == (1, 15)
    (slower,) = [row for row in rows if row["verdict"] == "regressed"]
    assert (slower["backend"], slower["shape"]) == ("helion_persistent", "G=4,M_g=1024,N=1024,K=1024,B=shared")
    assert not {row["backend"] for row in rows if row["verdict"] == "improved"} & {"torch_loop", "torch_grouped_mm"}


def test_hosts_and_cards_never_mix(h100: Cli) -> None:
    """The same problem and backend under TritonBench is another series, and on another card incomparable."""
    rows = json.loads(h100("series", "--backend", "triton_flat", "--shape", "G=4,M_g=1024,*", "--json").stdout)
    assert {row["host"] for row in rows} == {"builtin", "tritonbench"}
    done = h100("gate", "--run", run_of(9))
    assert done.exit_code == 4
    assert "gpu_uuid" in done.stdout or "GPU" in done.stdout


def test_the_same_files_again_change_nothing(h100: Cli) -> None:
    done = h100("ingest", *map(str, HISTORY))
    assert done.exit_code == 0
    assert done.output.count("nothing new") == len(HISTORY)
