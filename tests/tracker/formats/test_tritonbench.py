"""TritonBench's JSON, CSV and v3 files. Where the samples come from: data/README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Record
from groupbench.tracker.formats import Options, load
from groupbench.tracker.formats.tritonbench_json import named, shape_of

DATA = Path(__file__).parents[1] / "data"
JSON, CSV, V3 = (
    DATA / name
    for name in ("tritonbench_grouped_gemm.json", "tritonbench_grouped_gemm.csv", "oss_ci_benchmark_v3.jsonl")
)
SAID = Options(commit="10b14473", date=datetime(2026, 1, 31, tzinfo=UTC), gpu="NVIDIA H100", dtype="bf16")

Write = Callable[[Any], Path]


def cells(records: tuple[Record, ...]) -> dict[tuple[str, str], tuple[str, float | None]]:
    """(status, ms) by shape and backend."""
    return {
        (r.cell.shape, r.cell.backend): (r.status, r.latency.bursts_ms[0][0] if r.latency else None) for r in records
    }


MEASURED = {
    ("x_val=1024", "aten_grouped_mm"): ("ok", 0.07385600358247757),
    ("x_val=1024", "triton_grouped_gemm"): ("ok", 0.2518079876899719),
    ("x_val=2048", "aten_grouped_mm"): ("ok", 0.20499199628829956),
    ("x_val=2048", "triton_grouped_gemm"): ("ok", 0.3288320004940033),
}
OOM = {("x_val=8192", "aten_grouped_mm"): ("ok", 2.5), ("x_val=8192", "triton_grouped_gemm"): ("oom", None)}


def test_json() -> None:
    loaded = load(JSON, options=SAID)
    assert list(loaded.summary.titles) == ["TritonBench JSON"]
    assert cells(loaded.records) == MEASURED, "averages are left out"
    record = loaded.records[0]
    cell = record.cell
    assert (cell.operator, cell.mode, cell.dtype, cell.host) == ("grouped_gemm", "fwd", "bf16", "tritonbench")
    assert cell.dims == {"x_val": 1024}
    assert cell.flops == 4 * 2 * 1024**3, "computed from tflops"
    assert (record.environment.device, record.environment.gpu) == ("cuda", "NVIDIA H100")
    assert record.latency is not None
    assert record.latency.timing == "gpu"
    assert {r.cell.backend for r in loaded.records if r.baseline} == {"aten_grouped_mm"}
    assert record.run.commit.hash == "10b14473"


def test_the_run_is_named_by_content_and_options(tmp_path: Path) -> None:
    first = load(JSON, options=SAID).records[0].run
    copy = tmp_path / "copy.json"
    copy.write_bytes(JSON.read_bytes())
    assert load(copy, options=SAID).records[0].run == first
    other = Options(commit="20b14473", date=SAID.date, gpu="NVIDIA H100", dtype="bf16")
    assert load(JSON, options=other).records[0].run.id != first.id
    copy.write_bytes(JSON.read_bytes().replace(b"0.0738", b"0.0739"))
    assert load(copy, options=SAID).records[0].run.id != first.id


def test_csv() -> None:
    loaded = load(CSV, options=Options(commit="1", date=SAID.date, gpu="H100", operator="grouped_gemm"))
    assert list(loaded.summary.titles) == ["TritonBench CSV"]
    assert cells(loaded.records) == MEASURED | OOM
    oom = loaded.records[-1]
    assert oom.message == "CUDA OOM"
    assert {r.cell.backend for r in loaded.records if r.baseline} == {"aten_grouped_mm"}
    assert {r.cell.operator for r in loaded.records} == {"grouped_gemm"}


def test_v3() -> None:
    loaded = load(V3, options=Options(date=SAID.date))
    assert list(loaded.summary.titles) == ["oss_ci_benchmark_v3"]
    # The writer replaces text by 0.0. This loses the reason, but must not be read as a latency.
    lost = {("x_val=8192", "triton_grouped_gemm"): ("error", None)}
    assert cells(loaded.records) == MEASURED | OOM | lost
    assert any("0, which it writes for a failure" in (record.message or "") for record in loaded.records)
    record = loaded.records[0]
    assert record.run.commit.hash == "c" * 40, "TritonBench's own commit is tracked"
    assert record.run.commit.branch == "main"
    assert record.run.commit.time == datetime(2026, 1, 30, 21, 5, tzinfo=UTC)
    environment = record.environment
    assert (environment.gpu, environment.cuda) == ("NVIDIA H100", "13.0")
    assert (environment.torch, environment.triton, environment.tritonbench) == ("a" * 40, "b" * 40, None)
    assert record.cell.flops == 4 * 2 * 1024**3
    assert {r.cell.backend for r in loaded.records if r.baseline} == {"aten_grouped_mm"}
    triton = load(V3, options=Options(date=SAID.date, commit_of="triton")).records[0]
    assert (triton.run.commit.hash, triton.environment.triton) == ("b" * 40, None)
    assert triton.environment.tritonbench == "c" * 40


def test_v3_as_a_list_with_samples_and_units(tmp_path: Path) -> None:
    entry = json.loads(V3.read_text().split("\n")[0])
    entry["metric"] |= {"name": "latency(us)", "benchmark_values": [70.0, 80.0]}
    path = tmp_path / "list.json"
    path.write_text(json.dumps([entry | {"timestamp": 1767225600, "head_sha": "d" * 40}]))
    (record,) = load(path).records
    assert record.latency is not None
    assert record.latency.bursts_ms == (pytest.approx((0.07, 0.08)),)
    assert record.run.commit.hash == "d" * 40
    assert record.run.started == datetime(2026, 1, 1, tzinfo=UTC)


def test_the_three_make_one_series() -> None:
    """The same measurement, whichever file it came by, continues one series."""
    facts = Options(commit="1", date=SAID.date, gpu="NVIDIA H100", dtype="bf16", operator="grouped_gemm")
    ways = []
    for path in (JSON, CSV, V3):
        cells = [r.cell for r in load(path, options=facts).records if r.cell.shape == "x_val=1024"]
        ways.append(sorted(cells, key=lambda cell: cell.backend))
    assert len(ways[0]) == 2
    assert ways[0] == ways[1] == ways[2]


def rows(write: Any, *lines: str, name: str = "grouped_gemm.csv", **facts: Any) -> tuple[Record, ...]:
    path = write([("\n".join(lines) + "\n").encode()], name)
    return load(path, options=Options(commit="1", date=SAID.date, device="cuda", **facts)).records


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("0.5", "ok"),
        ("0.500000 (±3.21%)", "ok"),
        ("CUDA OOM", "oom"),
        ("HIP out of memory. Tried to allocate 2 GiB", "oom"),
        ("Triton OOR: out of resource: shared memory", "error"),
        ("needs sm_100, which is not supported here", "unavailable"),
        ("CudaGraph error", "error"),
        ("timeout after 60 s", "timeout"),
        ("", "skipped"),
        ("nan", "error"),
        ("inf", "error"),
        ("0.0", "error"),
        ("-1", "error"),
        ("1e999", "error"),
    ],
)
def test_text_is_a_status_and_never_a_number(write: Any, cell: str, status: str) -> None:
    _, other = rows(write, "x_val;a-latency;b-latency", f"1;0.5;{cell}")
    assert other.status == status
    assert (other.latency is not None) == (status == "ok")
    assert status == "ok" or other.message


def test_an_error_stands_in_the_first_column_of_a_backend(write: Any) -> None:
    (record,) = rows(write, "x_val;a-accuracy;a-latency;a-tflops", "1;CUDA OOM;;")
    assert (record.status, record.message, record.latency) == ("oom", "CUDA OOM", None)


def test_a_failed_check_is_wrong_and_keeps_its_latency(write: Any) -> None:
    (record,) = rows(write, "x_val;a-latency;a-accuracy", "1;0.5;0.0")
    assert record.status == "wrong"
    assert record.latency is not None


def test_inputs_that_x_does_not_tell_apart(write: Any) -> None:
    """TritonBench's JSON keeps the last of them; the CSV has all."""
    imported = rows(write, "x_val;a-latency", "64;0.1", "64;0.2", "64;0.3")
    assert [r.cell.shape for r in imported] == ["x_val=64", "x_val=64#2", "x_val=64#3"]
    assert {r.cell.dims["x_val"] for r in imported} == {64}


def test_an_x_that_names_the_whole_shape(write: Any) -> None:
    first, second, third = rows(
        write, "x_val;a-latency", "G=4,M_g=64,N=8,K=16,B=shared;0.1", "(4096, 14336);0.2", "G=2,M_g=5|130,N=45,K=33;0.3"
    )
    assert first.cell.shape == "G=4,M_g=64,N=8,K=16,B=shared"
    assert first.cell.dims == {"G": 4, "M": 256, "N": 8, "K": 16}
    assert second.cell.shape == "(4096, 14336)"
    assert third.cell.dims == {"G": 2, "M": 135, "N": 45, "K": 33}


def test_a_table_does_not_say_on_which_device(write: Any) -> None:
    path = write([b"x_val;a-latency\n1;0.5\n"], "grouped_gemm.csv")
    options = Options(commit="1", date=SAID.date)
    with pytest.raises(IngestError, match="the device it was measured on; give --gpu NAME or --cpu NAME"):
        load(path, options=options)
    (record,) = load(path, options=replace(options, cpu="EPYC")).records
    assert record.latency is not None
    assert (record.environment.device, record.environment.cpu, record.latency.timing) == ("cpu", "EPYC", "cpu")


def test_other_metrics_are_counted(write: Any) -> None:
    path = write([b"x_val;a-latency;a-gpu_peak_mem;b-latency;b-gpu_peak_mem;b-speedup\n1;0.5;2.0;0.6;;0.8\n"], "g.csv")
    loaded = load(path, options=replace(SAID, gpu="H100"))
    assert loaded.summary.losses == "1 of another metric (gpu_peak_mem)"
    assert len(loaded.records) == 2


@pytest.mark.parametrize(
    ("name", "facts", "operator"),
    [
        ("grouped_gemm.csv", {}, "grouped_gemm"),
        ("op_fp8_gemm_ab12cd_9.csv", {}, "fp8_gemm"),
        ("bf16_gemm_bwd.csv", {}, "gemm"),
        ("results 1.csv", {"operator": "gemm"}, "gemm"),
    ],
)
def test_the_operator_is_in_the_name_of_the_file(write: Any, name: str, facts: Any, operator: str) -> None:
    (record,) = rows(write, "x_val;a-latency", "1;0.1", name=name, **facts)
    assert record.cell.operator == operator


@pytest.mark.parametrize(
    ("benchmark", "expected"),
    [
        ("grouped_gemm_fwd", ("grouped_gemm", "fwd", None)),
        ("grouped_gemm_bwd", ("grouped_gemm", "bwd", None)),
        ("softmax_fwd_bwd", ("softmax", "fwd_bwd", None)),
        ("softmax_fwd_no_grad", ("softmax", "fwd_no_grad", None)),
        ("bf16_gemm_fwd", ("gemm", "fwd", "bf16")),
        ("fp8_gemm_fwd", ("fp8_gemm", "fwd", "fp8")),
        ("my_own_name", ("my_own_name", "fwd", None)),
    ],
)
def test_names_of_benchmarks(benchmark: str, expected: tuple[str, str, str | None]) -> None:
    assert named(benchmark) == expected


def test_a_negative_x_and_an_empty_one() -> None:
    assert [shape_of(text) for text in ("1024", "-1", "", " a  b ")] == ["x_val=1024", "x_val=-1", "-", "a b"]


def test_the_object_that_its_ci_writes(write: Any) -> None:
    env = {
        "benchmark_date": "20260130210500", "device": "NVIDIA H100", "cuda_version": "13.0",
        "pytorch_commit": "a" * 40, "triton_commit": "unknown", "tritonbench_commit": "c" * 40,
        "tritonbench_branch": "main",
    }  # fmt: skip
    content = {"name": "nightly", "env": env, "metrics": json.loads(JSON.read_text())}
    (first, *_) = load(write([json.dumps(content).encode()], "ci.json")).records
    assert first.run.started == datetime(2026, 1, 30, 21, 5, tzinfo=UTC)
    assert (first.run.commit.hash, first.run.commit.branch) == ("c" * 40, "main")
    environment = first.environment
    versions = (environment.gpu, environment.cuda, environment.torch, environment.triton)
    assert versions == ("NVIDIA H100", "13.0", "a" * 40, None)


KEY = '"tritonbench_op_fwd[x_1-a]_latency"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: is not JSON"),
        (f'{{{KEY}: "1",\n "other": 1}}', "key 'other' is not one of TritonBench's"),
        ('{"tritonbench_op_fwd[a]-latency-avg": 1.0}', "contains no result of an input"),
        (f'{{"metrics": [{KEY}]}}', "Expected `object`, got `array` - at `metrics`"),
        (f'{{{KEY}: "1"}}', "names no commit; give --commit"),
    ],
)
def test_what_is_wrong_with_a_json(write: Any, content: str, message: str) -> None:
    path = write([content.encode()], "x.json")
    with pytest.raises(IngestError) as raised:
        load(path, "tritonbench-json")
    assert message in raised.value.message
    assert raised.value.message.startswith(str(path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x_val;a-tflops", "1;2"], "line 1: no column is named BACKEND-latency"),
        (["x_val;a-latency", "1;2;3"], "line 2: 3 cells for 2 columns"),
        (["x_val;a-latency"], "contains no results"),
        (["x_val;a-latency;a-latency", "64;0.1;0.2"], "2 columns are named 'a-latency'"),
    ],
)
def test_what_is_wrong_with_a_csv(write: Any, lines: list[str], message: str) -> None:
    with pytest.raises(IngestError, match=message):
        rows(write, *lines)
    with pytest.raises(IngestError, match="give --operator"):
        rows(write, "x_val;a-latency", "1;2", name="2026 results.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": {"name": "latency"}}, "line 1: Object missing required field `benchmark_values` - at `metric`"),
        ({"model": 3}, "line 1: Expected `object`, got `int` - at `model`"),
        ({"metric": {"name": "tflops", "benchmark_values": [1.0], "extra_info": {"input_shape": "1"}}}, "no latency"),
        ({"dependencies": {"pytorch": {"sha": "a"}}}, "no dependency 'tritonbench' to track; known: pytorch"),
    ],
)
def test_what_is_wrong_with_a_v3(write: Any, change: dict[str, Any], message: str) -> None:
    entry = json.loads(V3.read_text().split("\n")[0]) | change
    with pytest.raises(IngestError) as raised:
        load(write([json.dumps(entry).encode()], "v3.jsonl"), "v3", Options(date=SAID.date))
    assert message in raised.value.message


def test_what_export_writes_comes_back(cli: Any, stored: Any, make: Any, tmp_path: Path) -> None:
    """v3 keeps a point's median, status and error. It has no samples, and nothing that was not measured."""
    at_rest = {"cell": {"host": "builtin", "protocol": "cooled", "dims": {"G": 4, "N": 1024, "K": 1024}}}
    stored(
        [
            make(0, ms=2.0, cell={**at_rest["cell"], "flops": 10**12}),
            make(0, backend="gone", status="oom", **at_rest),
            make(0, backend="bad", status="wrong", **at_rest),
            make(0, backend="left out", status="unavailable", **at_rest),
            make(0, backend="interpreted", timing="interpreted", **at_rest),
        ]
    )
    path = tmp_path / "out.jsonl"
    assert cli("db", "export", path, "--format", "v3").exit_code == 0
    loaded = load(path)
    assert list(loaded.summary.titles) == ["oss_ci_benchmark_v3"]
    of = {record.cell.backend: record for record in loaded.records}
    statuses = {name: record.status for name, record in of.items()}
    assert statuses == {"triton": "ok", "gone": "oom", "bad": "wrong", "interpreted": "ok"}
    good = of["triton"]
    assert good.latency is not None
    assert good.latency.bursts_ms == ((pytest.approx(2.0, rel=1e-2),),)
    assert good.cell == make(0, cell={**at_rest["cell"], "flops": good.cell.flops}).cell
    assert good.cell.flops == pytest.approx(10**12, rel=1e-6)
    assert good.accuracy is not None
    assert good.accuracy.rms == 2e-3
    assert [of[name].latency for name in ("gone", "bad", "interpreted")] == [None] * 3


@pytest.mark.both
def test_an_export_of_runs_at_one_commit_and_time_comes_back(cli: Any, stored: Any, make: Any, tmp_path: Path) -> None:
    """Runs, and seeds of a cell, that nothing else tells apart."""
    twice = [make(0, ms=2.0), make(0, ms=2.5, run="again"), make(0, ms=3.0, cell={"seed": 7})]
    stored(twice)
    path = tmp_path / "out.jsonl"
    assert cli("db", "export", path, "--format", "v3").exit_code == 0
    records = load(path).records
    medians = {(r.run.id, r.cell.seed): r.latency.bursts_ms[0][0] for r in records if r.latency}
    assert sorted(medians.values()) == pytest.approx([2.0, 2.5, 3.0], rel=0.02)
    assert sorted(seed for _, seed in medians) == [0, 0, 7]
    assert len({run for run, _ in medians}) == 2
    assert "3 points added" in cli("import", path).stdout
    assert "0 points added, 3 already known" in cli("import", path).stdout
