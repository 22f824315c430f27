"""`groupbench explain`: a person reads the cause in the first three lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import Cli

from groupbench.tracker.facts.record import Kernel, Record

OLD = Kernel(
    name="_gemm", hash="a" * 16, registers=168, spills=0, shared_bytes=131072, occupancy=0.125,
    config={"num_stages": 4, "num_warps": 8, "BLOCK_N": 256}, counted_in="sass",
    counts={"instructions": 900, "wgmma m64n256k16": 4, "TMA load": 8},
)  # fmt: skip
NEW = msgspec.structs.replace(
    OLD, hash="b" * 16, registers=255, spills=24, shared_bytes=98304, config={**OLD.config, "num_stages": 3},
    counts={"instructions": 960, "wgmma m64n128k16": 8, "TMA load": 6, "local load": 12, "local store": 12},
)  # fmt: skip
CAUSE = "4 stages → 3; 96 B spilled; wgmma m64n256k16 → m64n128k16; 168 registers → 255"


@pytest.fixture
def stored(cli: Cli, write: Callable[..., Path], make: Callable[..., Record]) -> None:
    """Two nights: of two shapes the kernel changed, of torch's nothing is known."""

    def night(number: int, kernel: Kernel) -> list[Record]:
        cells = [
            make(number, kernels=[msgspec.to_builtins(kernel)], shape=f"G=4,M_g={rows},N=8,K=8") for rows in (8, 16)
        ]
        return [*cells, make(number, backend="torch")]

    for number, kernel in enumerate((OLD, NEW)):
        done = cli("ingest", write(night(number, kernel)))
        assert done.exit_code == 0, done.output


def test_a_commit_against_itself_is_refused(stored: None, cli: Cli) -> None:
    done = cli("explain", "latest", "latest")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "are the same commit" in done.stderr and "give two different ones" in done.stderr


@pytest.mark.both
def test_the_cause_is_in_the_first_three_lines(stored: None, cli: Cli) -> None:
    done = cli("explain", "previous", "latest")
    assert done.exit_code == 0, done.output
    first, second, *rest = done.stdout.splitlines()
    assert CAUSE in first and "2 cells" in first
    assert "2 cells with different kernels, 0 with the same kernels, 1 with unknown kernels" in second
    assert "num_stages" in "\n".join(rest)


def test_json_has_everything(stored: None, cli: Cli) -> None:
    explanation: dict[str, Any] = json.loads(cli("explain", "previous", "latest", "--format=json").stdout)
    (group,) = explanation["groups"]
    assert (len(group["series"]), group["kernels"][0]["facts"]["registers"]) == (2, [168, 255])


@pytest.mark.parametrize(
    ("timing", "reason"),
    [
        ("interpreted", "no machine code on a CPU"),
        ("cpu", "no machine code on a CPU"),
        ("gpu", "no kernels are recorded"),
    ],
)
def test_it_says_why_there_is_nothing_to_explain(cli: Cli, write: Any, make: Any, timing: str, reason: str) -> None:
    cli("ingest", write([make(0, timing=timing), make(1, timing=timing)]))
    done = cli("explain", "previous", "latest")
    assert done.exit_code == 3
    assert reason in done.stderr and done.stderr.count("\n") == 1


def test_one_backend_is_explained_by_another(cli: Cli, write: Callable[..., Path], make: Callable[..., Record]) -> None:
    cells = [make(0, backend=name, kernels=[msgspec.to_builtins(k)]) for name, k in (("one", OLD), ("other", NEW))]
    cli("ingest", write(cells))
    done = cli("explain", "latest", "--backend", "one", "--against", "other")
    assert done.exit_code == 0, done.output
    assert "one → other" in done.stdout.splitlines()[0] and CAUSE in done.stdout.splitlines()[0]


def test_b_or_a_backend_must_be_named(stored: None, cli: Cli) -> None:
    assert cli("explain", "latest").exit_code == 2


def test_a_file_is_refused_since_its_points_are_not_those_of_the_database(
    stored: None, cli: Cli, write: Callable[..., Path], make: Callable[..., Record]
) -> None:
    file = write([make(0, kernels=[msgspec.to_builtins(OLD)])], "a.jsonl")
    done = cli("explain", file, "latest")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is a file, but kernels are read from the database: ingest it first" in done.stderr
