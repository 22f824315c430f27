"""Formats of other tools: values, units, directions, counts, and results left out.

The values of the `data.js` cases and of hyperfine's are those of public files; their texts are not.
"""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.formats import Loaded, Options, load
from groupbench.tracker.formats.values import quantity_of

SAID = Options(commit="a" * 40, date=datetime(2026, 1, 1, tzinfo=UTC), cpu="box")


def read(write: Any, content: Any, name: str = "x.json", options: Options = SAID, title: str = "") -> Loaded:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    loaded = load(write([data], name), options=options)
    assert title in loaded.title
    return loaded


def times(loaded: Loaded) -> dict[tuple[str, str], float]:
    return {
        (one.cell.operator, one.cell.shape): one.latency.bursts_ms[0][0]
        for one in loaded.records
        if one.latency is not None
    }


def action(tool: str, benches: list[tuple[str, float, str]], day: int = 1, commit: str = "b") -> dict[str, Any]:
    return {
        "commit": {"id": commit * 40, "message": "Fix\n\nmore", "timestamp": "2026-03-01T10:00:00+02:00"},
        "date": (1772323200 + day * 86400) * 1000,
        "tool": tool,
        "benches": [{"name": name, "value": value, "unit": unit} for name, value, unit in benches],
    }


def data_js(**suites: list[Any]) -> bytes:
    return b"window.BENCHMARK_DATA = " + json.dumps({"lastUpdate": 1, "repoUrl": "u", "entries": suites}).encode()


@pytest.mark.parametrize(
    ("tool", "benches", "ms"),
    [
        ("pytest", [("t::main", 952.4881575451848, "iter/sec"), ("t::call", 8036.42067288928, "iter/sec")],
         [1.0498818196094595, 0.12443350599769894]),
        ("cargo", [("full", 11111625, "ns/iter"), ("shard", 12, "ns/iter")], [11.111625, 1.2e-5]),
        ("googlecpp", [("f<int8_t>/1/0", 23650.877700000023, "ns/iter")], [0.0236508777]),
        ("jmh", [("a", 2.0, "us/op"), ("b", 4.0, "ops/ms")], [0.002, 0.25]),
        ("benchmarkjs", [("a", 500.0, "ops/sec")], [2.0]),
    ],
)  # fmt: skip
def test_data_js(write: Any, tool: str, benches: list[Any], ms: list[float]) -> None:
    loaded = read(write, data_js(suite=[action(tool, benches)]), "data.js", Options(), "github-action-benchmark")
    assert list(times(loaded).values()) == pytest.approx(ms)
    first = loaded.records[0]
    assert (first.cell.backend, first.run.commit.hash, first.run.commit.subject) == ("suite", "b" * 40, "Fix")
    assert first.run.commit.time == datetime(2026, 3, 1, 8, tzinfo=UTC)


def test_data_js_grows_and_only_its_new_runs_are_new(cli: Any, write: Any) -> None:
    one, two = action("cargo", [("a", 1.0, "ns/iter")]), action("cargo", [("a", 2.0, "ns/iter")], 2, "c")
    assert "1 point added" in cli("import", write([data_js(s=[one])], "data.js")).stdout
    again = cli("import", write([data_js(s=[one, two])], "data.js")).stdout
    assert "1 point added, 1 already known, 0 series new" in again


def metrics(loaded: Loaded) -> dict[tuple[str, str], dict[str, float]]:
    return {(one.cell.operator, one.cell.shape): one.metrics for one in loaded.records if one.metrics}


def test_data_js_keeps_other_units_and_merges_nothing(write: Any) -> None:
    rows = [("a", 1.0, "ns/iter"), ("a", 900.0, "ns/iter"), ("a", 3.0, "MB/s"), ("b", 64.0, "B/op"), ("c", -1.0, "%")]
    loaded = read(write, data_js(s=[action("go", rows)]), "data.js", Options())
    assert times(loaded) == {("a", "-"): pytest.approx(1e-6), ("a", "-#2"): pytest.approx(9e-4)}
    assert metrics(loaded) == {("a", "unit=MB/s"): {"bandwidth": 0.003}, ("b", "unit=B/op"): {"memory_mib": 64 / 2**20}}
    assert loaded.losses == "1 without a number (c)"


@pytest.mark.parametrize(
    ("unit", "better", "expected"),
    [
        ("tokens/s", "neither", ("per_second", 8.0)),
        ("tokens_per_sec", "neither", ("per_second", 8.0)),
        ("Mrows/s", "neither", ("per_second", 8e6)),
        ("GFLOPS", "neither", ("per_second", 8e9)),
        ("queries per second", "higher", ("per_second", 8.0)),
        ("GB/s", "neither", ("bandwidth", 8.0)),
        ("Mbits/sec", "higher", ("bandwidth", 1e-3)),
        ("Gbps", "neither", ("bandwidth", 1.0)),
        ("MiB/s", "neither", ("bandwidth", 8 * 2**20 / 1e9)),
        ("bytes", "neither", ("memory_mib", 8 / 2**20)),
        ("KiB", "lower", ("memory_mib", 8 / 2**10)),
        ("mb", "neither", ("memory_mib", 8e6 / 2**20)),
        ("MB", "higher", ("score", 8.0)),
        ("misses/s", "lower", ("cost", 8.0)),
        ("%", "neither", ("value", 8.0)),
        ("%", "higher", ("score", 8.0)),
        ("", "lower", ("cost", 8.0)),
        ("allocs/op", "neither", ("value", 8.0)),
    ],
)
def test_units_that_are_not_times(unit: str, better: Any, expected: tuple[str, float]) -> None:
    metric, value = quantity_of(8.0, unit, better)
    assert (metric, value) == (expected[0], pytest.approx(expected[1]))


def test_the_gate_knows_the_direction_of_each_unit(cli: Any, write: Any) -> None:
    def suite(tool: str, unit: str, before: float, after: float) -> list[Any]:
        values = [before * (1 + 0.001 * (day % 3)) if day < 12 else after for day in range(15)]
        return [action(tool, [("x", value, unit)], day, f"{day:x}") for day, value in enumerate(values)]

    suites = {
        "fewer_tokens": suite("go", "tokens/s", 1000.0, 700.0),
        "more_tokens": suite("go", "tokens/s", 1000.0, 1400.0),
        "more_bytes": suite("go", "MB", 512.0, 700.0),
        "faster_link": suite("customBiggerIsBetter", "Mbits/sec", 3000.0, 5000.0),
        "worse_share": suite("customBiggerIsBetter", "%", 90.0, 50.0),
        "better_share": suite("customSmallerIsBetter", "%", 90.0, 50.0),
        "unknown": suite("go", "%", 90.0, 50.0),
    }
    cli("import", write([data_js(**suites)], "data.js"))
    result = json.loads(cli("gate", "--format", "json").stdout)
    verdicts = {row["backend"]: (row["verdict"], row["metric"]) for row in result["series"]}
    assert {name: verdicts.get(name, ("ok", ""))[0] for name in suites} == {
        "fewer_tokens": "regressed", "more_tokens": "improved", "more_bytes": "regressed", "faster_link": "improved",
        "worse_share": "regressed", "better_share": "improved", "unknown": "ok",
    }  # fmt: skip
    table = cli("history", "--backend", "fewer_tokens", "--limit", "1").stdout
    assert ("per_second 1/s" in table, "700" in table, "unit=tokens/s" in table) == (True, True, True)


def test_hyperfine_without_times_and_with_failures(write: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"command": "make -j 2", "mean": 2.0, "stddev": None, "parameters": {"threads": "2"}},
        {"command": "false", "mean": 0.1, "stddev": None, "times": [0.1], "exit_codes": [1]},
    ]
    loaded = read(write, {"results": rows}, title="hyperfine")
    assert times(loaded)["make -j 2", "threads=2"] == 2000.0
    failed = loaded.records[1]
    assert (failed.status, failed.message) == ("wrong", "1 of 1 runs failed, with exit code 1")


def test_bencher(write: Any) -> None:
    content = {
        "a::b": {"latency": {"value": 1500.0, "lower_value": 1.0}, "throughput": {"value": 3.0}},
        "c": {"latency_p99_us": {"value": 2.0}},
        "bin": {"file-size": {"value": 2.0**21}, "score": {"value": 5.0}},
    }
    loaded = read(write, content, title="Bencher")
    assert times(loaded) == {
        ("a::b", "-"): pytest.approx(0.0015),
        ("a::b", "throughput"): pytest.approx(1000 / 3),
        ("c", "latency_p99_us"): pytest.approx(0.002),
    }
    assert metrics(loaded) == {("bin", "file-size,unit=bytes"): {"memory_mib": 2.0}, ("bin", "score"): {"value": 5.0}}


def nv_state(summaries: list[Any], **fields: Any) -> dict[str, Any]:
    axes = [{"name": "T", "type": "string", "value": "I32"}, {"name": "Elements{io}", "type": "int64", "value": "1024"}]
    return {"name": "s", "device": 0, "axis_values": axes, "summaries": summaries, "is_skipped": False} | fields


def nv_summary(tag: str, **values: Any) -> dict[str, Any]:
    return {
        "tag": tag,
        "data": [{"name": name, "type": "string", "value": str(value)} for name, value in values.items()],
    }


def nvbench(*states: Any) -> dict[str, Any]:
    meta = {"argv": ["./b"], "version": {"nvbench": {"git_sha": "f" * 40}}}
    devices = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "number_of_sms": 132}]
    return {"meta": meta, "devices": devices, "benchmarks": [{"name": "copy", "states": list(states)}]}


def test_nvbench_with_samples(tmp_path: Path) -> None:
    (tmp_path / "r.json-bin").mkdir()
    (tmp_path / "r.json-bin" / "0.bin").write_bytes(struct.pack("<3f", 1e-3, 2e-3, 3e-3))
    mean = nv_summary("nv/cold/time/gpu/mean", value=2e-3)
    sampled = nv_state([mean, nv_summary("nv/json/bin:nv/cold/sample_times", filename="r.json-bin/0.bin", size=3)])
    outside = nv_state([mean, nv_summary("nv/json/bin:nv/cold/sample_times", filename="../../etc/0.bin", size=3)])
    skipped = nv_state([], is_skipped=True, skip_reason="out of memory")
    path = tmp_path / "r.json"
    path.write_text(json.dumps(nvbench(sampled, outside, skipped)))
    loaded = load(path, options=Options(commit="a", date=SAID.date))
    one, two, three = loaded.records
    assert one.latency is not None
    assert one.latency.bursts_ms == (pytest.approx((1.0, 2.0, 3.0)),)
    assert (one.cell.operator, one.cell.shape) == ("copy", "T=I32,Elements=1024")
    assert one.environment.gpu == "NVIDIA H100 80GB HBM3"
    assert one.run.commit.hash == "a", "the commit of NVBench is not the project's"
    assert two.latency is not None
    assert (two.latency.bursts_ms, two.cell.shape) == (((2.0,),), "T=I32,Elements=1024#2")
    assert (three.status, three.message) == ("oom", "out of memory")
    assert loaded.notes == ("1 files of samples are missing next to the JSON, so the mean is the only sample",)


def test_vllm(write: Any) -> None:
    serve = {
        "date": "20260131-101112", "backend": "vllm", "model_id": "m/8b", "tokenizer_id": "m/8b", "num_prompts": 200,
        "request_rate": "inf", "max_concurrency": 8, "completed": 200, "git_sha": "c" * 40, "request_throughput": 2.5,
        "output_throughput": 400.0, "mean_ttft_ms": 30.0, "median_ttft_ms": 25.0, "p99_ttft_ms": 90.0,
        "median_tpot_ms": 7.5, "mean_tpot_ms": 8.0, "median_itl_ms": 7.0,
    }  # fmt: skip
    loaded = read(write, serve, options=Options(gpu="H100"), title="vLLM")
    shape = "num_prompts=200,request_rate=inf,max_concurrency=8"
    assert times(loaded) == {("m/8b ttft", shape): 25.0, ("m/8b tpot", shape): 7.5, ("m/8b itl", shape): 7.0}
    assert (loaded.records[0].run.commit.hash, loaded.records[0].run.started) == (
        "c" * 40, datetime(2026, 1, 31, 10, 11, 12, tzinfo=UTC),
    )  # fmt: skip
    assert metrics(loaded) == {
        ("m/8b request_throughput", f"{shape},unit=requests/s"): {"per_second": 2.5},
        ("m/8b output_throughput", f"{shape},unit=tokens/s"): {"per_second": 400.0},
    }


def test_sglang_numbers_equal_loads_and_reads_batches(write: Any) -> None:
    line = {"backend": "sglang", "request_rate": 4.0, "median_ttft_ms": 16.0}
    batch = {"batch_size": 8, "input_len": 512, "output_len": 8, "prefill_latency": 0.05, "total_latency": 0.25}
    data = b"\n".join(json.dumps(one).encode() for one in (line, line | {"median_ttft_ms": 18.0}, batch))
    found = times(read(write, data, "x.jsonl", title="SGLang"))
    assert (found["ttft", "request_rate=4.0"], found["ttft", "request_rate=4.0#2"]) == (16.0, 18.0)
    shape = "batch_size=8,input_len=512,output_len=8"
    assert (found["prefill_latency", shape], found["total_latency", shape]) == (50.0, 250.0)


def helion(metric: str, values: list[Any], shape: list[Any], model: str = "softmax") -> dict[str, Any]:
    return {
        "benchmark": {"name": "Helion Benchmark", "extra_info": {"device": "NVIDIA B200"}},
        "model": {"name": model},
        "metric": {"name": metric, "benchmark_values": values},
        "shape": shape,
    }


def test_helion(write: Any) -> None:
    shapes = ["(32, 64)", "(64, 64)", "(64, 64)"]
    content = [
        helion("helion_latency_ms", [1.0, 2.0, 3.0], shapes),
        helion("helion_accuracy", [1.0, 0.0, 1.0], shapes),
        helion("helion_compile_time_s", [4.0, 5.0, 6.0], shapes),
        helion("torch_latency_ms", [2.0, 4.0, 6.0], shapes),
        helion("helion_speedup", [2.0, 2.0, 2.0], shapes),
    ]
    loaded = read(write, content, options=Options(commit="a", date=SAID.date), title="Helion")
    of = {(one.cell.backend, one.cell.shape): one for one in loaded.records}
    assert len(of) == 6
    assert of["helion", "(64, 64)"].status == "wrong"
    assert of["helion", "(64, 64)#2"].metrics == {"compile_ms": 6000.0}
    assert of["torch", "(32, 64)"].latency is not None
    assert of["torch", "(32, 64)"].environment.gpu == "NVIDIA B200"
    assert loaded.losses == "3 of another metric (helion_speedup)"
    with pytest.raises(IngestError, match="2 values for 1 shapes"):
        read(write, [helion("helion_latency_ms", [1.0, 2.0], ["a"])], options=SAID)


def test_tritonbench_v3_without_shapes(write: Any) -> None:
    def entry(metric: str, value: float) -> dict[str, Any]:
        return {
            "benchmark": {"name": "t", "mode": "fwd", "dtype": "bf16"},
            "model": {"name": "gemm", "type": "tritonbench-oss", "backend": "aten"},
            "metric": {"name": metric, "benchmark_values": [value]},
            "runners": [{"gpu_info": "H100"}],
        }

    rows = [entry("latency", 1.0), entry("tflops", 5.0), entry("latency", 2.0), entry("tflops", 6.0)]
    loaded = read(write, rows, options=Options(commit="a", date=SAID.date))
    assert times(loaded) == {("gemm", "input=1"): 1.0, ("gemm", "input=2"): 2.0}
