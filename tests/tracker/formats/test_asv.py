"""asv's results."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.formats import Options, load

COLUMNS = [
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25"),
    *("stats_q_75", "stats_number", "stats_repeat", "samples", "profile"),
]
RESULTS: dict[str, Any] = {
    "commit_hash": "a" * 40,
    "env_name": "virtualenv-py3.12-numpy",
    "date": 1767225600000,
    "params": {"arch": "x86_64", "cpu": "EPYC", "machine": "box", "os": "Linux", "ram": "16GB", "python": "3.12"},
    "python": "3.12",
    "requirements": {"numpy": "2.0"},
    "env_vars": {"OMP_NUM_THREADS": "1"},
    "result_columns": COLUMNS,
    "results": {
        "bench.Suite.time_keys": [
            [0.001, None, float("nan"), 0.004],
            [["10", "20"], ["'a'", "'b'"]],
            "v1",
            1767229200000,
            3.5,
            *[None] * 6,
            [[0.001, 0.002, 0.0015], None, None, None],
        ],
        "bench.time_plain": [[0.5], [], "v1", 1767229100000, 1.0],
        "bench.time_broken": [None, [], "v1"],
        "bench.time_old": [[0.7], [], "v0"],
        "bench.track_size": [[17.0], [], "v1"],
        "bench.mem_list": [[100], [], "v1"],
    },
    "durations": {},
    "version": 2,
}


def known(kind: str, unit: str, names: list[str]) -> dict[str, Any]:
    return {"type": kind, "unit": unit, "version": "v1", "param_names": names, "params": [], "code": ""}


BENCHMARKS: dict[str, Any] = {
    "bench.Suite.time_keys": known("time", "seconds", ["n", "kind"]),
    "bench.time_plain": known("time", "seconds", []),
    "bench.time_broken": known("time", "seconds", []),
    "bench.time_old": known("time", "seconds", []),
    "bench.track_size": known("track", "unit", []),
    "bench.mem_list": known("memory", "bytes", []),
    "version": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    (root / "box").mkdir(parents=True)
    (root / "benchmarks.json").write_text(json.dumps(BENCHMARKS))
    (root / "box" / "machine.json").write_text(json.dumps({"machine": "box", "version": 1}))
    (root / "box" / "aaaaaaaa-py3.12.json").write_text(json.dumps(RESULTS))
    other = RESULTS | {"commit_hash": "b" * 40, "results": {"bench.time_plain": [[0.6], [], "v1"]}}
    (root / "box" / "bbbbbbbb-py3.12.json").write_text(json.dumps(other))
    return root


def test_a_folder(folder: Path) -> None:
    loaded = load(folder)
    assert list(loaded.summary.titles) == ["asv results"]
    of = {(r.run.commit.hash[0], r.cell.operator, r.cell.shape): r for r in loaded.records}
    assert {key: r.status for key, r in of.items()} == {
        ("a", "bench.Suite.time_keys", "n=10,kind='a'"): "ok",
        ("a", "bench.Suite.time_keys", "n=10,kind='b'"): "error",
        ("a", "bench.Suite.time_keys", "n=20,kind='a'"): "skipped",
        ("a", "bench.Suite.time_keys", "n=20,kind='b'"): "ok",
        ("a", "bench.time_plain", "-"): "ok",
        ("a", "bench.time_broken", "-"): "error",
        ("a", "bench.track_size", "unit=unit"): "ok",
        ("a", "bench.mem_list", "unit=bytes"): "ok",
        ("b", "bench.time_plain", "-"): "ok",
    }
    first = of["a", "bench.Suite.time_keys", "n=10,kind='a'"]
    assert first.latency is not None
    assert first.latency.bursts_ms == (pytest.approx((1.0, 2.0, 1.5)),)
    assert first.latency.timing == "cpu"
    assert first.cell.dims == {"n": 10}
    assert (first.cell.backend, first.cell.host) == ("virtualenv-py3.12-numpy", "asv")
    last = of["a", "bench.Suite.time_keys", "n=20,kind='b'"]
    assert last.latency is not None
    assert last.latency.bursts_ms == ((4.0,),), "without samples the result is one"
    assert first.run.started == datetime(2026, 1, 1, 0, 58, 20, tzinfo=UTC), "when the first benchmark began"
    assert first.run.commit.time == datetime(2026, 1, 1, tzinfo=UTC)
    assert of["b", "bench.time_plain", "-"].run.started == datetime(2026, 1, 1, tzinfo=UTC)
    environment = first.environment
    assert (environment.device, environment.cpu, environment.python) == ("cpu", "EPYC", "3.12")
    assert environment.settings == {"requirement numpy": "2.0", "OMP_NUM_THREADS": "1"}
    assert first.duration_s == 3.5


def test_what_is_left_out_is_counted_and_named(folder: Path, cli: Any) -> None:
    loaded = load(folder)
    assert loaded.summary.losses == "1 of another version of the benchmark (bench.time_old)"
    assert f"; 1 result left out: {loaded.summary.losses}" in cli("import", folder).stdout


@pytest.mark.parametrize(
    ("name", "unit", "metrics"),
    [
        ("bench.peakmem_sum", "bytes", {"memory_mib": 1.0}),
        ("bench.mem_dict", "bytes", {"memory_mib": 1.0}),
        ("bench.track_answer", "unknown", {"value": 2.0**20}),
    ],
)
def test_without_benchmarks_json_the_name_tells_the_unit(
    tmp_path: Path, name: str, unit: str, metrics: dict[str, float]
) -> None:
    path = tmp_path / "alone.json"
    results = {"bench.time_plain": [[0.6], [], "v1"], name: [[2.0**20, None], [["1", "2"]], "v1"]}
    path.write_text(json.dumps(RESULTS | {"results": results}))
    loaded = load(path)
    first, failed = (record for record in loaded.records if record.cell.operator == name)
    assert (first.cell.shape, first.metrics, first.latency) == (f"param1=1,unit={unit}", metrics, None)
    assert (failed.cell.shape, failed.status) == (f"param1=2,unit={unit}", "error")
    assert loaded.summary.losses == ""


def test_one_file_knows_the_folder_above(folder: Path, tmp_path: Path) -> None:
    path = folder / "box" / "aaaaaaaa-py3.12.json"
    assert {r.cell.shape for r in load(path).records} >= {"n=10,kind='a'"}
    alone = tmp_path / "alone.json"
    alone.write_bytes(path.read_bytes())
    shapes = {r.cell.operator: r.cell.shape for r in load(alone).records}
    assert shapes["bench.Suite.time_keys"] == "param1=20,param2='b'"
    assert "bench.time_old" in shapes
    assert shapes["bench.track_size"] == "unit=unknown"


def test_a_commit_measured_again_is_another_run(folder: Path) -> None:
    path = folder / "box" / "aaaaaaaa-py3.12.json"
    before = load(path).records[0].run.id
    assert load(folder).records[0].run.id == before
    path.write_text(path.read_text().replace("0.0015", "0.0016"))
    assert load(folder).records[0].run.id != before
    assert load(folder, options=Options(commit="c" * 40)).records[0].run.commit.hash == "c" * 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1 of asv's results"),
        ({"results": {"t.time_x": [[1.0, 2.0], [["1"]], "v"]}}, "results.t.time_x: 2 results for 1 combinations"),
        ({"results": {"t.time_x": [[1.0], [], "v", None, None, *[None] * 6, [["x"]]]}}, "a sample is not a number"),
        ({"results": {"t.time_x": ["x"]}}, "results.t.time_x: Expected"),
        ({"results": {"t.time_x": [None, [["1"] * 2000] * 3]}}, "8000000000 combinations"),
        ({"commit_hash": None}, "Expected `str`, got `null` - at `commit_hash`"),
        ({"date": 1e300}, "is not a valid time"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "box" / "cc.json").write_text(json.dumps(RESULTS | change))
    with pytest.raises(IngestError) as raised:
        load(folder)
    assert message in raised.value.message
    assert str(Path("box") / "cc.json") in raised.value.message


def test_a_folder_without_results(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "box").iterdir():
        file.unlink()
    with pytest.raises(IngestError, match=r"no MACHINE/COMMIT-ENVIRONMENT\.json"):
        load(folder)
    (folder / "benchmarks.json").write_text("{")
    with pytest.raises(IngestError, match=r"benchmarks\.json: line 1: is not JSON"):
        load(folder)
    with pytest.raises(IngestError, match="no known format"):
        load(tmp_path)


@pytest.mark.parametrize("unit", ["unit", "bytes", "ms"])
def test_a_skipped_track_is_skipped_in_any_unit(folder: Path, unit: str) -> None:
    (folder / "benchmarks.json").write_text(json.dumps({"t.track_x": known("track", unit, ["n"]), "version": 2}))
    path = folder / "box" / "aaaaaaaa-py3.12.json"
    path.write_text(json.dumps(RESULTS | {"results": {"t.track_x": [[math.nan, 2.0, None], [["1", "2", "3"]], "v1"]}}))
    assert [one.status for one in load(path).records] == ["skipped", "ok", "error"]


def test_files_of_asv_before_its_second_version_name_the_way_out(tmp_path: Path) -> None:
    """airspeed-velocity/asv@7032df7: the 41 files of test/example_results have neither result_columns nor env_name."""
    facts = {key: RESULTS[key] for key in ("commit_hash", "date", "params", "python", "requirements")}
    path = tmp_path / "05d283b9-py2.7.json"
    path.write_text(json.dumps(facts | {"results": {"time_units.time_unit_to": 7.2e-06}, "version": 1}))
    with pytest.raises(IngestError, match="version 1 of asv's results, not 2; `asv update` converts it"):
        load(path)


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_duration_that_is_no_number_is_none(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RESULTS | {"results": {"bench.time_plain": [[0.5], [], "v1", 1767229100000, seconds]}}))
    (record,) = load(path, "asv").records
    assert (record.duration_s, record.status) == (None, "ok")


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RESULTS | {"result_columns": ["value", *COLUMNS[1:]]}))
    with pytest.raises(IngestError, match=r"does not name a column `result`$"):
        load(path, "asv")
