"""`groupbench compare`: runs, dates, tags, files, slices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from repositories import git

Cli = Callable[..., Result]
Stored = Callable[..., Any]


def compared(cli: Cli, *args: Any, **settings: Any) -> dict[str, Any]:
    result = cli("compare", *args, "--format=json", **settings)
    assert result.exit_code in (0, 4), result.stderr
    return json.loads(result.stdout)


def test_files_need_no_database(cli: Cli, write: Any, make: Any, tmp_path: Path) -> None:
    a = write([make(0), make(0, backend="gone")], "a.jsonl")
    b = write([make(1, ms=1.1), make(1, backend="fresh")], "b.jsonl")
    none = tmp_path / "none.db"
    output = compared(cli, a, b, db=none)
    assert {r["backend"]: r["verdict"] for r in output["series"]} == {
        "triton": "regressed",
        "gone": "missing",
        "fresh": "new",
    }
    assert output["a"] == str(a)
    assert output["geometric_mean"] == pytest.approx(1.1, rel=1e-2)
    assert not none.exists()


def test_a_file_against_the_store_is_the_file_against_itself(cli: Cli, stored: Stored, write: Any, make: Any) -> None:
    """The same numbers come out of a file as out of the database."""
    old = [make(0, backend=b, ms=ms) for b, ms in (("a", 1.0), ("b", 2.0))]
    new = [make(1, backend=b, ms=ms, rms=4e-3) for b, ms in (("a", 1.2), ("b", 2.0))]
    stored([*old, *new])
    a, b = write(old, "a.jsonl"), write(new, "b.jsonl")
    series = [compared(cli, *words)["series"] for words in ((a, b), (a, "001"), ("000", b), ("000", "001"))]
    for rows in series:
        for row, same in zip(rows, series[0], strict=True):
            assert row == {
                name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
                for name, value in same.items()
            }


def test_the_newest_run_before_a_date(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(n, ms=1.0 + n / 10) for n in range(4)])  # at 03:00 of 1 to 4 January
    output = compared(cli, "2026-01-02", "2026-01-04T02:59")
    assert "run-001" in output["a"]
    assert "run-002" in output["b"]
    assert output["series"][0]["ratio"] == pytest.approx(1.2 / 1.1, rel=1e-3)
    assert "run-003" in compared(cli, "2026-01-01", "@1m")["b"]
    early = cli("compare", "2025-01-01", "latest")
    assert (early.exit_code, "no run at or before" in early.stderr) == (2, True)


def test_a_hash_goes_before_a_date(cli: Cli, stored: Stored, make: Any) -> None:
    """`7d` is also the start of a hash; `@` marks a date."""
    stored([make(0, commit="7d" + "0" * 38), make(1)])
    assert compared(cli, "7d", "001")["a"] == "7d00000000"
    assert "run-001" in compared(cli, "7d", "@7d")["b"]


def test_one_run(cli: Cli, stored: Stored, make: Any) -> None:
    commit = {"commit": "a" * 40}
    stored([make(0, **commit), make(1, ms=1.5, **commit)])
    output = compared(cli, "run:run-000", "run:run-001")
    assert [row["verdict"] for row in output["series"]] == ["regressed"]
    assert "no run 'x'" in cli("compare", "run:x", "latest").stderr


def test_a_tag_of_git(cli: Cli, stored: Stored, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()

    git(tree, "init", "-q")
    git(tree, "commit", "-q", "--allow-empty", "-m", "x")
    git(tree, "tag", "v1.0")
    stored([make(0, commit=git(tree, "rev-parse", "HEAD")), make(1)])
    monkeypatch.chdir(tree)
    assert compared(cli, "v1.0", "001")["a"] == git(tree, "rev-parse", "HEAD")[:10]
    assert "no commit or branch 'v2.0'" in cli("compare", "v2.0", "001").stderr


def test_slices(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(n, backend=b, cell={"dims": {"M": m}}) for n in (0, 1) for b, m in (("a", 8), ("b", 4096))])
    assert [r["backend"] for r in compared(cli, "000", "001", "--shape", "M>=4096")["series"]] == ["b"]
    assert [r["backend"] for r in compared(cli, "000", "001", "--backend", "a")["series"]] == ["a"]
    assert "no backend 'x'; known: a, b" in cli("compare", "000", "001", "--backend", "x").stderr
    assert "no size 'Z'; known: M" in cli("compare", "000", "001", "--shape", "Z>1").stderr
    assert len(compared(cli, "000", "001", "--shape", "4,1024,1024")["series"]) == 2
    assert "no shape '4,8,8'; known: G=4,N=1024,K=1024" in cli("compare", "000", "001", "--shape", "4,8,8").stderr


def test_unlike_environments_are_named_and_refused(cli: Cli, write: Any, make: Any) -> None:
    a = write([make(0)], "a.jsonl")
    b = write([make(1, environment={"driver": "580.2", "torch": "2.14.0"})], "b.jsonl")
    refused = cli("compare", a, b)
    assert refused.exit_code == 4
    assert "environments differ: driver 570.1 → 580.2; torch 2.13.0 → 2.14.0; --force compares" in refused.stderr
    assert refused.stdout.rstrip().endswith("no latency could be compared")
    assert compared(cli, a, b)["differences"] == ["driver 570.1 → 580.2; torch 2.13.0 → 2.14.0"]
    forced = cli("compare", a, b, "--force")
    assert forced.exit_code == 0
    assert forced.stdout.rstrip().split("\n")[-1].startswith("geometric mean")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{}\n", "no known format"),
        (b'{"schema":1,"run":1}\n', "line 1: "),
        (b'{"schema":99,"run":1}\n', "record schema 99"),
    ],
)
def test_a_file_that_cannot_be_read(cli: Cli, write: Any, make: Any, content: bytes, message: str) -> None:
    result = cli("compare", write([content], "a.jsonl"), write([make()], "b.jsonl"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "a.jsonl" in result.stderr


def test_a_file_that_does_not_hold_records_is_no_commit(
    cli: Cli, stored: Stored, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text("")
    message = cli("compare", "kernel.py", "latest").stderr
    assert "kernel.py is not a file of records (.jsonl, .ndjson, .json, .csv), and no commit or branch" in message


def test_identical_sides_are_not_compared(cli: Cli, stored: Stored, write: Any, make: Any) -> None:
    a = write([make()], "a.jsonl")
    assert "are the same" in cli("compare", a, a).stderr
    stored([make()])
    assert "are the same commit" in cli("compare", "000", "latest").stderr
    assert cli("compare", "nope.jsonl", "000").exit_code == 2


@pytest.mark.both
def test_only_the_newest_run_without_a_commit_is_a_side(cli: Cli, stored: Stored, make: Any) -> None:
    """Runs outside git may be of different code: pooled, they would hide a change."""
    stored([make(n, commit="unknown", ms=1.0 + n) for n in (0, 1, 2)])
    newest = compared(cli, f"@{make(1).run.started:%Y-%m-%dT%H:%M}", "latest")
    assert newest["b"].startswith("run ") and newest["b"].endswith(" at unknown")
    assert [row["ratio"] for row in newest["series"]] == [pytest.approx(1.5, rel=0.1)]


def test_files_of_other_benchmarks(cli: Cli, tmp_path: Path) -> None:
    """Files need no commit or date, because their results are not stored."""
    before = Path(__file__).parents[1] / "data" / "tritonbench_grouped_gemm.json"
    after = tmp_path / "after.json"
    after.write_text(before.read_text().replace('"0.2518079876899719"', '"0.5036159753799438"'))
    output = compared(cli, before, after, db=tmp_path / "none.db")
    assert {row["verdict"] for row in output["series"]} == {"~"}, "one sample tells no noise"
    ratios = {(row["backend"], row["shape"]): round(row["ratio"], 3) for row in output["series"]}
    assert ratios.pop(("triton_grouped_gemm", "x_val=1024")) == 2
    assert set(ratios.values()) == {1}
    assert output["geometric_mean"] == pytest.approx(2**0.25)
