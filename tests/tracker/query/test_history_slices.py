"""`groupbench history`: slices by size and commit, speed-ups, metrics, ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Cli
from repositories import git

Stored = Callable[..., Any]


def rows(cli: Cli, *args: str) -> list[dict[str, Any]]:
    result = cli("history", *args, "--format=json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


DIMS = [{"G": 4, "M": 1024, "N": 64}, {"G": 8, "M": 4096, "N": 64}, {"G": 64, "M": 32768, "N": 4096}, {}]


def shape_of(dims: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in dims.items()) or "copy"


@pytest.fixture
def sized(stored: Stored, make: Any) -> None:
    stored([make(shape=shape_of(dims), cell={"dims": dims}) for dims in DIMS])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--shape", "M>=4096,N=64"], [1]),
        (["--shape", "G=8..64"], [1, 2]),
        pytest.param(["--shape", "G!=8"], [0, 2], marks=pytest.mark.both),
        (["--shape", "M>10000000"], []),
        (["--shape", "M>=4096"], [1, 2]),
        (["--shape", "M>=4096", "--shape", "copy"], [1, 2, 3]),
        (["--shape", "N=4096"], [2]),
        (["--shape", "G=8,M=4096,N=64"], [1]),
    ],
    ids=str,
)
def test_sizes(cli: Cli, sized: None, args: list[str], expected: list[int]) -> None:
    assert sorted(r["shape"] for r in rows(cli, *args)) == sorted(shape_of(DIMS[i]) for i in expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "Z>=1"], "no size 'Z'; known: G, M, N"),
        (["--commit", "a...b"], "not a range of commits"),
        (["--commit", "zzz.."], "no commit or branch 'zzz'"),
        (
            ["--metrics", "latency,speed"],
            "no metric 'speed' (did you mean 'speedup'?); known: latency, tflops, gbps, rms",
        ),
        (["--metrics", "speedup"], "requires --baseline"),
        pytest.param(
            *(["--baseline", "tritn"], "no backend 'tritn' (did you mean 'triton'?); known: triton"),
            marks=pytest.mark.both,
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(cli: Cli, sized: None, args: list[str], message: str) -> None:
    result = cli("history", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.both
def test_speed_up_is_over_the_same_run_problem_and_environment(cli: Cli, stored: Stored, make: Any) -> None:
    stored(
        [
            make(0, ms=2.0, backend="base"),
            make(0, ms=1.0, backend="fast"),
            make(0, ms=1.0, backend="fast", shape="other"),
            make(0, ms=1.0, backend="fast", dtype="fp16"),
            make(0, ms=1.0, backend="failed", status="wrong"),
            make(0, ms=1.0, backend="interpreted", timing="interpreted"),
            make(0, ms=1.0, backend="elsewhere", environment={"driver": "2"}),
            make(1, ms=8.0, backend="base", status="wrong"),
            make(1, ms=1.0, backend="fast"),
            make(2, ms=3.0, backend="base"),
            make(2, ms=1.0, backend="fast"),
        ]
    )
    speedups = {
        (r["backend"], r["run"], r["shape"][0], r["dtype"]): r["speedup"] for r in rows(cli, "--baseline", "base")
    }
    rounded = {key: round(value, 1) for key, value in speedups.items() if value is not None}
    assert rounded == {
        ("base", "run-000", "G", "bf16"): 1.0,
        ("fast", "run-000", "G", "bf16"): 2.0,
        ("base", "run-002", "G", "bf16"): 1.0,
        ("fast", "run-002", "G", "bf16"): 3.0,
    }
    text = cli("history", "--baseline", "base", "--backend", "fast").stdout
    assert "speedup" in text.split("\n")[0]
    assert "2.00×" in text


def test_metrics_choose_the_columns(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(ms=2.0, cell={"flops": 10**12, "min_bytes": 2 * 10**9})])
    (row,) = rows(cli)
    assert row["tflops"] == pytest.approx(500, rel=1e-2)
    assert row["gbps"] == pytest.approx(1000, rel=1e-2)
    head = cli("history", "--metrics", "gbps,accuracy").stdout.split("\n")[0].split()
    assert {"GB/s", "rms", "max", "repeatable"} <= set(head)
    assert not {"ms", "tflops"} & set(head)


def test_ids_are_those_that_show_takes(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1)])
    shown = [line.split()[0] for line in cli("history", "--ids").stdout.strip().split("\n")[1:]]
    assert shown == [r["id"] for r in rows(cli)]
    assert "run-001" in cli("show", shown[1]).stdout


def test_one_burst_has_no_spread(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(latency={"timing": "gpu", "bursts_ms": [[1.0, 2.0]]})])
    assert rows(cli)[0]["spread"] is None


def times(night: int) -> dict[str, Any]:
    return {"commit_facts": {"time": f"2026-01-{night + 1:02d}T00:00:00Z"}}


def test_ranges_of_commits_by_order(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(n, **times(n)) for n in range(5)])

    def nights(*args: str) -> list[int]:
        return [int(r["run"][-1]) for r in rows(cli, *args)]

    assert nights("--commit", "001..003") == [2, 3]
    assert nights("--commit", "002..") == [3, 4]
    assert nights("--commit", "..001") == [0, 1]
    assert nights("--commit", "001..", "--commit", "..002") == [2]
    assert nights("--commit", "previous..latest") == [4]
    wrong = cli("history", "--commit", "003..001")
    assert wrong.exit_code == 2
    assert "is reversed" in wrong.stderr


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository of four commits, the second tagged v1, in which the command runs; their hashes."""
    tree = tmp_path / "checkout"
    tree.mkdir()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    git(tree, "init", "-q")
    hashes = []
    for n in range(4):
        git(tree, "commit", "-q", "--allow-empty", "-m", str(n))
        hashes.append(git(tree, "rev-parse", "HEAD"))
        if n == 1:
            git(tree, "tag", "-a", "v1", "-m", "v1")
    monkeypatch.chdir(tree)
    return hashes


def test_git_knows_tags_and_ranges(cli: Cli, stored: Stored, make: Any, checkout: list[str]) -> None:
    # Measured the wrong way round: only git knows which came first.
    stored([make(n, commit=hash_) for n, hash_ in enumerate(reversed(checkout[:3]))])
    assert [r["commit"] for r in rows(cli, "--commit", "v1")] == [checkout[1]]
    assert [r["commit"] for r in rows(cli, "--commit", "HEAD~3")] == [checkout[0]]
    assert [r["commit"] for r in rows(cli, "--commit", f"v1..{checkout[2][:12]}")] == [checkout[2]]
    unknown = cli("history", "--commit", "HEAD")
    assert unknown.exit_code == 2
    assert f"'HEAD' is commit {checkout[3][:12]}, which has no stored run" in unknown.stderr


def test_a_checkout_is_not_needed(
    cli: Cli, stored: Stored, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no commit or branch 'v1'" in cli("history", "--commit", "v1").stderr
    assert "no commit" in cli("history", "--commit", "--help").stderr
