"""`groupbench db export`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from cases import Cli

FIELDS: dict[str, tuple[str, ...]] = {
    "runners": (
        "name",
        "type",
        "cpu_info",
        "cpu_count",
        "mem_info",
        "avail_mem_in_gb",
        "gpu_info",
        "gpu_count",
        "gpu_mem_info",
        "avail_gpu_mem_in_gb",
        "extra_info",
    ),
    "benchmark": ("name", "mode", "dtype", "extra_info"),
    "model": ("name", "type", "backend", "origins", "extra_info"),
    "inputs": ("dtype", "extra_info"),
    "dependencies": ("repo", "branch", "sha", "version", "extra_info"),
    "metric": ("name", "benchmark_values", "target_value", "extra_info"),
}
"""Published names within the nested fields."""

TOP_FIELDS = (
    *("timestamp", "schema_version", "name", "repo", "head_branch", "head_sha", "workflow_id", "run_attempt"),
    *("job_id", "servicelab_experiment_id", "servicelab_trial_id", *FIELDS),
)
"""Published names of an entry."""


@pytest.fixture
def filled(stored: Any, make: Any) -> Any:
    """Return three nights with a value in every field of a record."""
    kernel = {"name": "gemm", "hash": "abc", "registers": 128, "config": {"B": 128, "x": [1, None, {"y": 2.5}]}}
    facts = {"parents": ["p", "q"], "branch": "main", "author": "A", "subject": 'say "hi", é'}
    facts["time"] = "2026-01-01T00:00:00Z"
    return stored(
        [
            make(2, commit_facts=facts, kernels=[kernel], duration_s=0.804, cell={"flops": 10**12, "dims": {"G": 4}}),
            make(0, kernels=[kernel, {**kernel, "hash": None}], metrics={"spills": 8.0}),
            make(1, backend="b", status="oom"),
            make(1, backend="c", status="wrong", message="rms 1\nbad", baseline=True),
            make(1, backend="d", ms=None, environment={"driver": "580.2"}),
            make(1, backend="e", status="unavailable"),
            make(2, backend="f", timing="interpreted", commit_facts=facts),
        ]
    )


def test_export_ingest_export_gives_the_same_bytes(cli: Cli, filled: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    done = cli("db", "export", first)
    assert (done.exit_code, done.stdout, "7 points" in done.stderr) == (0, "", True)
    other = tmp_path / "other.db"
    assert cli("ingest", first, db=other).exit_code == 0
    assert cli("db", "export", second, db=other).exit_code == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().count(b"\n") == 7


def test_stdout(cli: Cli, filled: Any, tmp_path: Path) -> None:
    cli("db", "export", tmp_path / "x.jsonl")
    assert cli("db", "export", "-").stdout_bytes == (tmp_path / "x.jsonl").read_bytes()
    assert len(cli("db", "export", "-", "--format", "csv").stdout.splitlines()) > 7


@pytest.mark.both
def test_csv_has_a_line_for_each_point(cli: Cli, filled: Any, tmp_path: Path) -> None:
    cli("db", "export", tmp_path / "x.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text(encoding="utf-8"), newline="")))
    assert len(rows) == 7
    first = rows[0]
    assert (first["run"], first["subject"], first["branch"]) == ("run-002", 'say "hi", é', "main")
    assert float(first["low_ms"]) <= float(first["latency_ms"]) <= float(first["high_ms"])
    assert (first["dirty"], first["kernel_hash"], first["duration_s"]) == ("false", "abc", "0.804")
    failed = next(row for row in rows if row["backend"] == "b")
    assert (failed["status"], failed["latency_ms"], failed["rms"]) == ("oom", "", "")


def test_v3_has_the_published_names_alone(cli: Cli, filled: Any, tmp_path: Path) -> None:
    cli("db", "export", tmp_path / "v3.json", "--format", "v3")
    entries = [json.loads(line) for line in (tmp_path / "v3.json").read_text(encoding="utf-8").splitlines()]
    for entry in entries:
        assert set(entry) <= set(TOP_FIELDS)
        for name in ("benchmark", "model", "metric"):
            assert set(entry[name]) <= set(FIELDS[name])
        for runner in entry["runners"]:
            assert set(runner) <= set(FIELDS["runners"])
        for dependency in entry["dependencies"].values():
            assert set(dependency) <= set(FIELDS["dependencies"])
        maps = (entry["benchmark"], entry["model"], entry["metric"], *entry["runners"], *entry["dependencies"].values())
        assert all(isinstance(value, str) for part in maps for value in part["extra_info"].values())
        assert all(isinstance(value, float) for value in entry["metric"]["benchmark_values"])


@pytest.mark.parametrize(
    ("file", "message"),
    [("x.txt", "the ending names no format; give --format"), ("none/x.csv", "No such file"), (".", "no format")],
)
def test_mistakes_are_one_line(cli: Cli, filled: Any, tmp_path: Path, file: str, message: str) -> None:
    assert message in cli("db", "export", tmp_path / file if file != "." else file).stderr


def test_an_empty_database_gives_an_empty_file(cli: Cli, opened: Any, tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.csv"):
        assert cli("db", "export", tmp_path / name).exit_code == 0
    assert (tmp_path / "x.jsonl").read_bytes() == b""


def test_the_newest_latency_of_each_series_for_other_services(cli: Cli, write: Any, make: Any) -> None:
    old = make(0, latency={"timing": "gpu", "bursts_ms": [[1.0], [3.0]]})
    new = make(1, latency={"timing": "gpu", "bursts_ms": [[2.0], [4.0]]})
    failed = make(2, backend="b", status="oom")
    cli("ingest", write([new, failed, old]))
    name = "grouped_gemm/triton/fwd/bf16/G=4,N=1024,K=1024"
    bencher = json.loads(cli("db", "export", "-", "--format", "bencher").stdout)
    assert bencher == {name: {"latency": {"value": 3e6, "lower_value": 2e6, "upper_value": 4e6}}}
    action = json.loads(cli("db", "export", "-", "--format", "github-action").stdout)
    assert action == [{"name": name, "unit": "ms", "value": 3.0, "range": "± 1"}]


def test_what_was_exported_is_imported(cli: Cli, write: Any, make: Any, tmp_path: Path) -> None:
    cli("ingest", write([make(0, latency={"timing": "gpu", "bursts_ms": [[1.5]]})]))
    for form in ("bencher", "github-action"):
        path = tmp_path / f"{form}.json"
        assert cli("db", "export", path, "--format", form).exit_code == 0
        done = cli("import", path, "--commit", "a" * 7, "--date", "2026-01-31", "--gpu", "g", "--dry-run")
        assert json.loads(done.stdout)["latency"]["bursts_ms"] == [[1.5]]
