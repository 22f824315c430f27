"""Formats of other tools: values, units, directions, counts, and results left out.

Most values are those of public files, which are not copied: comments name their repositories.
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
    assert title in "".join(loaded.summary.titles)
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
        # benchmark-action/github-action-benchmark@28787ca:dev/bench/data.js, 33 of its 4,181 results
        ("go", [("BenchmarkFib20WithAuxMetric", 50318.0, "ns/op\t         4.000 auxMetricUnits")], [0.050318]),
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
    assert loaded.summary.losses == "1 without a number (c)"


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
    assert tuple(map(str, loaded.summary.notes.values())) == (
        "1 files of samples are missing next to the JSON, so the mean is the only sample",
    )


def test_nvbench_without_a_gpu(write: Any) -> None:
    """NVIDIA/nvbench@66212f1: json_printer.cu writes null for a list without an element."""
    cpu = nv_state([nv_summary("nv/cpu_only/time/cpu/mean", value=2e-3), {"tag": "hidden", "data": None}], device=None)
    content = nvbench(cpu | {"axis_values": None}) | {"devices": None}
    content["benchmarks"].append({"name": "filtered", "states": None})
    (one,) = read(write, content, title="NVBench").records
    assert (one.cell.operator, one.cell.shape, one.environment.device, value_of(one)) == ("copy", "-", "cpu", [2.0])


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
    latencies = times(read(write, data, "x.jsonl", title="SGLang"))
    assert (latencies["ttft", "request_rate=4.0"], latencies["ttft", "request_rate=4.0#2"]) == (16.0, 18.0)
    shape = "batch_size=8,input_len=512,output_len=8"
    assert (latencies["prefill_latency", shape], latencies["total_latency", shape]) == (50.0, 250.0)


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
    assert loaded.summary.losses == "3 of another metric (helion_speedup)"
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


def value_of(one: Any) -> Any:
    return one.metrics or (one.latency and list(one.latency.bursts_ms[0]))


def results(loaded: Loaded) -> dict[str, Any]:
    return {one.cell.operator.rpartition(" ")[2]: value_of(one) for one in loaded.records}


def command(name: str, median: float, times: list[float], codes: list[int] | None) -> dict[str, Any]:
    facts = {"command": name, "mean": median, "stddev": 0.1, "median": median, "times": times}
    return facts if codes is None else facts | {"exit_codes": codes}


HYPERFINE = [
    # zeroows/1brc: hyperfine.json, two commands of three runs
    ([("lucretiel", 12.04923320852, [12.04923320852, 12.36225804252, 10.25172425152], [0, 0, 0])],
     [("ok", [12049.23320852, 12362.25804252, 10251.72425152])]),
    # RUCICS/meowhw-delique1984: hyperfine_results.json, the fastest of five commands
    ([("mycat5", 10.54934323512, [10.32999727012, 10.70378179112, 10.54934323512], [0, 0, 0])],
     [("ok", [10329.99727012, 10703.78179112, 10549.34323512])]),
    # dandavison/misc: hyperfine.json, a command that ended at once: two of its three times are 0
    ([("delta [ERROR]", 0.0, [9.066039999998821e-06, 0.0, 0.0], None)], [("error", None)]),
]  # fmt: skip


@pytest.mark.parametrize(("commands", "expected"), HYPERFINE)
def test_hyperfine(write: Any, commands: list[Any], expected: list[Any]) -> None:
    loaded = read(write, {"results": [command(*one) for one in commands]})
    assert [one.status for one in loaded.records] == [status for status, _ in expected]
    for one, (_, values) in zip(loaded.records, expected, strict=True):
        assert value_of(one) == (None if values is None else pytest.approx(values))


SERVE = {"backend": "vllm", "model_id": "m", "tokenizer_id": "m", "num_prompts": 8, "request_rate": "inf"}
VLLM = [
    # er0080/vllm-benchmarking: bench_serve_v0.25.1.json
    (SERVE | {"date": "20260816-160853", "failed": 0, "completed": 8, "median_ttft_ms": 55.68139649994919,
              "median_tpot_ms": 11.20450286665194, "median_itl_ms": 10.492878499917424, "p99_ttft_ms": 734.40491,
              "request_throughput": 5.180810671273421, "request_goodput": None, "rtfx": 0.0,
              "output_throughput": 82.89297074037474, "total_token_throughput": 248.6789122211242},
     {"ttft": [55.68139649994919], "tpot": [11.20450286665194], "itl": [10.492878499917424],
      "request_throughput": {"per_second": 5.180810671273421}, "output_throughput": {"per_second": 82.89297074037474},
      "total_token_throughput": {"per_second": 248.6789122211242}}),
    # er0080/vllm-benchmarking: bench_serve_all_requests_failed_v0.25.1.json
    (SERVE | {"date": "20260818-041350", "failed": 8, "completed": 0, "median_ttft_ms": 0.0, "request_throughput": 0.0},
     {"ttft": None}),
    # zhangxinyuehfad/vllm-benchmarks: serving_llama8B_tp1_sharegpt_qps_16.json, latency and throughput of the folder
    (SERVE | {"date": "20250217-104449", "median_ttft_ms": 279.9712708219886, "median_tpot_ms": 131.5868797753837},
     {"ttft": [279.9712708219886], "tpot": [131.5868797753837]}),
    ({"avg_latency": 7.1091228867570555, "latencies": [6.898985657840967, 7.935083007439971], "percentiles": {}},
     {"avg_latency": [6898.985657840967, 7935.083007439971]}),
    ({"elapsed_time": 71.89681227505207, "num_requests": 200, "total_num_tokens": 86204,
      "requests_per_second": 2.781764499305893, "tokens_per_second": 1198.996134490826},
     {"elapsed_time": [71896.81227505207], "requests_per_second": {"per_second": 2.781764499305893},
      "tokens_per_second": {"per_second": 1198.996134490826}}),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), VLLM)
def test_a_file_of_vllm(write: Any, content: dict[str, Any], expected: dict[str, Any]) -> None:
    loaded = read(write, content)
    assert list(loaded.summary.titles) == ["vLLM benchmark JSON"]
    assert results(loaded).keys() == expected.keys()
    for name, values in expected.items():
        assert results(loaded)[name] == (None if values is None else pytest.approx(values))
    assert {one.status for one in loaded.records} == ({"error"} if content.get("failed") else {"ok"})


def test_two_configurations_of_vllm_are_two_series(write: Any) -> None:
    """er0080/vllm-benchmarking: the runs of vllm_sweep_v0.25.1 differ in max_num_seqs alone."""
    shapes = {
        read(write, SERVE | {"date": "20260818-021333", "median_ttft_ms": 44.9, "max_num_seqs": number})
        .records[0].cell.shape
        for number in (4, 8)
    }  # fmt: skip
    assert len(shapes) == 2


def test_sglang(write: Any) -> None:
    """TonyLi15/sglang-benchmark: agg_n100_in128_out128_c8.jsonl; others of the folder differ in the tag alone."""
    line = {
        "tag": "agg_n100_in128_out128_c8", "backend": "sglang", "dataset_name": "random", "request_rate": float("inf"),
        "max_concurrency": 8, "sharegpt_output_len": None, "random_input_len": 128, "random_output_len": 128,
        "server_info": {"model_path": "Qwen/Qwen2.5-3B-Instruct"}, "completed": 100, "accept_length": None,
        "median_e2e_latency_ms": 330.32854506745934, "mean_e2e_latency_ms": 339.22403649426997,
        "median_ttft_ms": 22.6287511177361, "request_throughput": 22.909936340661435,
        "total_throughput": 2823.6496539865216,
    }  # fmt: skip
    lines = [line | {"tag": tag} for tag in ("agg_n100", "agg_n50", "pd_intra_n100")]
    loaded = read(write, b"\n".join(json.dumps(one).encode() for one in lines))
    assert len(loaded.records) == len({(one.cell.operator, one.cell.shape) for one in loaded.records}) == 12
    assert {one.cell.operator.partition(" ")[0] for one in loaded.records} == {"Qwen/Qwen2.5-3B-Instruct"}
    assert results(loaded) == {
        "e2e": [330.32854506745934], "ttft": [22.6287511177361],
        "request_throughput": {"per_second": 22.909936340661435},
        "total_throughput": {"per_second": 2823.6496539865216},
    }  # fmt: skip


SGLANG = [
    # TonyLi15/sglang-benchmark@8864250, all 59 files were compared: a line each, of 39 plain values, 8 of them results
    ("agg_local", {"server_info": {"model_path": "Qwen/Qwen2.5-3B-Instruct"}, "max_concurrency": 200},
     (1502.6927408762276, 587.2724917717278, 13.879961983893827, 4.802457056939602, 112.7500110348843,
      29493.711636560205, 7420.0782262057355, 36913.789862765945)),
    ("pd_1p8d_n100_in2048_out512_c128", {"server_info": None, "max_concurrency": 128},
     (37229.00700336322, 34747.35026760027, 9.388247978050344, 9.008543565869331, 2.563723673209145,
      2792.638559989989, 663.568598336723, 3456.207158326712)),
    ("pd_inter_node_gh200_a100", {"server_info": None, "max_concurrency": 8},
     (288.6011437512934, 111.80513072758913, 6.123667815700173, 6.024700589478016, 13.680781835321977,
      826.0456072167409, 383.33550702572177, 1209.3811142424627)),
]  # fmt: skip
SGLANG_KEYS = (
    *("median_e2e_latency_ms", "median_ttft_ms", "median_tpot_ms", "median_itl_ms"),
    *("request_throughput", "input_throughput", "output_throughput", "total_throughput"),
)


@pytest.mark.parametrize(("name", "facts", "values"), SGLANG, ids=[name for name, *_ in SGLANG])
def test_a_file_of_sglang(write: Any, name: str, facts: dict[str, Any], values: tuple[float, ...]) -> None:
    derived = {"duration": 1.77, "mean_ttft_ms": 1.0, "p99_itl_ms": 9.0, "concurrency": 168.1, "completed": 200}
    line = {"tag": name, "backend": "sglang", "sharegpt_output_len": None, **facts, **derived}
    loaded = read(write, line | dict(zip(SGLANG_KEYS, values, strict=True)), f"{name}.jsonl", title="SGLang")
    names = ("e2e", "ttft", "tpot", "itl", *SGLANG_KEYS[4:])
    expected = {key: [value] if index < 4 else {"per_second": value}
                for index, (key, value) in enumerate(zip(names, values, strict=True))}  # fmt: skip
    assert results(loaded) == expected
    assert loaded.summary.losses == ""
    assert {one.cell.shape.partition(",unit=")[0] for one in loaded.records} == {
        f"max_concurrency={facts['max_concurrency']},tag={name}"
    }


def test_helion_dashboard(write: Any, cli: Any) -> None:
    """pytorch/helion@4ca41c3:dashboard-data.json: 1,518 latencies of 35 runs, 26 of them wrong, and 11 failures."""
    shapes = ["(8, 2048, 4096)", "(8, 2048, 8192)"]

    def night(sha: str, day: int, latencies: list[float], right: list[float]) -> dict[str, Any]:
        return {
            "run_id": "1", "full_sha": sha * 40, "date": f"2026-04-{day:02}T08:22:41Z", "branch": "main",
            "helion_speedup_geomean": 1.1,
            "per_shape": {
                "shapes": shapes, "helion_latency_ms": latencies, "helion_accuracy": right,
                "triton_speedup": [1.0, 2.0],
                "helion_compile_time_s": [413.64, 497.13], "torch_compile_speedup": [],
            },
        }  # fmt: skip

    nights = [night("b", 8, [2.1766, 2.127], [1.0, 1.0]), night("c", 9, [1.9013, 2.0782], [1.0, 0.0])]
    summary = [
        {"kernel": "cross_entropy", "platform": "AMD Radeon Graphics gfx942", "history": nights},
        {"kernel": "layer_norm-bwd", "platform": "NVIDIA B200", "history": nights[:1]},
    ]
    failed = {"shapes": ["(4096, 1024)"], "helion_accuracy": [0.0], "helion_speedup": [0.0], "helion_latency_ms": []}
    failure = {"kernel": "rms_norm-bwd", "platform": "H100", "history": [nights[0] | {"per_shape": failed}]}
    (one,) = read(write, {"summary": [failure]}, options=Options(), title="Helion").records
    assert (one.status, one.message) == ("error", "no latency: Helion's accuracy check failed")
    assert (one.cell.operator, one.cell.shape, one.latency) == ("rms_norm", "(4096, 1024)", None)
    content = {"generated_at": "x", "platforms": [], "summary": summary}
    loaded = read(write, content, options=Options())
    assert len({one.run.id for one in loaded.records}) == 3
    assert {one.environment.gpu for one in loaded.records} == {"AMD Radeon Graphics gfx942", "NVIDIA B200"}
    assert [one.status for one in loaded.records] == ["ok", "ok", "ok", "wrong", "ok", "ok"]
    first, last = loaded.records[0], loaded.records[-1]
    assert (first.run.commit.hash, first.run.started) == ("b" * 40, datetime(2026, 4, 8, 8, 22, 41, tzinfo=UTC))
    assert (value_of(loaded.records[1]), first.metrics) == ({"compile_ms": 497130.0}, {"compile_ms": 413640.0})
    assert first.latency is not None
    assert first.latency.bursts_ms == ((2.1766,),)
    assert (last.cell.operator, last.cell.mode) == ("layer_norm", "bwd")
    path = write([json.dumps(content | {"summary": summary[:1]}).encode()], "old.json")
    assert "4 points added" in cli("import", path).stdout
    path = write([json.dumps(content).encode()], "new.json")
    assert "2 points added, 4 already known" in cli("import", path).stdout


def hud(metric: dict[str, Any], values: list[float], **changes: Any) -> dict[str, Any]:
    entry = {
        "benchmark": {"name": "b", "mode": "inference", "dtype": "bfloat16", "extra_info": {"device": "cuda"}},
        "model": {"name": "m", "type": "OSS model", "backend": "eager"},
        "metric": {"benchmark_values": values, "target_value": None} | metric,
        "runners": [{"name": "r", "type": "cuda", "gpu_info": "NVIDIA H100"}],
    }
    return entry | changes


@pytest.mark.parametrize(
    ("name", "unit", "values", "expected"),
    [
        # pytorch/test-infra: the five add_loop files, and json-each-row.json
        ("compile_time_instruction_count", None, [3086359081], {"cost": 3086359081.0}),
        # pytorch/test-infra: do_not_overwrite_runners_info.json
        ("peak_inference_mem_usage(mb)", None, [333.2014794921875], {"memory_mib": 333.2014794921875e6 / 2**20}),
        # names and directions of pytorch/test-infra's dashboard for models
        ("avg_inference_latency(ms)", None, [2.5, 3.5], [2.5, 3.5]),
        ("compilation_time(s)", None, [12.0], [12000.0]),
        ("memory_bandwidth(GB/s)", None, [1500.0], {"bandwidth": 1500.0}),
        ("token_per_sec", None, [90.0, 100.0, 130.0], {"per_second": 100.0}),
        ("tokens_per_second", None, [90.0], {"per_second": 90.0}),
        ("median_ttft_ms", None, [25.0], [25.0]),
        ("flops_utilization", None, [0.4], {"score": 0.4}),
        ("Speedup (%)", None, [12.0], {"score": 12.0}),
        ("load_status", None, [1], {"value": 1.0}),
        ("latency", None, [1.5], [1500.0]),
        ("latency", "us", [1.5], [0.0015]),
    ],
)
def test_hud(write: Any, name: str, unit: str | None, values: list[float], expected: Any) -> None:
    options = Options(commit="a", date=SAID.date, gpu="GPU")
    loaded = read(write, [hud({"name": name} | ({"unit": unit} if unit else {}), values)], options=options)
    (one,) = loaded.records
    assert value_of(one) == pytest.approx(expected)
    assert (one.status, one.cell.operator, one.cell.backend) == ("ok", "m", "eager")
    assert (one.cell.mode, one.cell.dtype, one.environment.gpu) == ("inference", "bfloat16", "GPU")


def test_hud_lines_hold_an_entry_or_a_list_and_devices_are_runs(write: Any) -> None:
    count = {"name": "compile_time_instruction_count"}
    dynamic = {"benchmark": {"name": "pr_time_benchmarks", "extra_info": {"is_dynamic": True, "device": "cpu"}}}
    entries = [hud(count, [1.0], runners=[]), hud(count, [2.0], runners=[], **dynamic)]
    data = json.dumps(entries[0]).encode() + b"\n" + json.dumps([entries[1], entries[1]]).encode() + b"\n"
    options = Options(commit="a" * 40, date=SAID.date)
    loaded = read(write, data, options=options)
    assert len({one.run.id for one in loaded.records}) == 2
    assert [one.environment.device for one in loaded.records] == ["cuda", "cpu", "cpu"]
    name = "compile_time_instruction_count"
    assert [one.cell.shape for one in loaded.records] == [name, f"{name},is_dynamic=True", f"{name},is_dynamic=True#2"]
    phone = hud({"name": "avg_inference_latency(ms)"}, [3.0], runners=[{"name": "Apple iPhone 15", "type": "iOS 18.0"}])
    phone["benchmark"]["extra_info"] = {}
    (one,) = read(write, [phone], options=options).records
    assert (one.environment.device, one.environment.cpu) == ("cpu", "Apple iPhone 15")
