"""Facts of public result files, in files with the same keys: values, units, directions, counts.

The files themselves are not copied. The list names each one by its repository.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from groupbench.tracker.formats import Loaded, Options, load

SAID = Options(commit="a" * 40, date=datetime(2026, 1, 1, tzinfo=UTC), gpu="GPU")


def read(write: Any, content: Any, options: Options = SAID) -> Loaded:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return load(write([data], "x.json"), options=options)


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
def test_vllm(write: Any, content: dict[str, Any], expected: dict[str, Any]) -> None:
    loaded = read(write, content)
    assert loaded.title == "vLLM benchmark JSON"
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


def test_helion_dashboard(write: Any, cli: Any) -> None:
    """pytorch/helion: dashboard-data.json, 1,518 latencies of 35 runs, 26 of them wrong; some lists are empty."""
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
    content = {"generated_at": "x", "platforms": [], "summary": summary}
    loaded = read(write, content, Options())
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
    loaded = read(write, [hud({"name": name} | ({"unit": unit} if unit else {}), values)])
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
    loaded = read(write, data, options)
    assert len({one.run.id for one in loaded.records}) == 2
    assert [one.environment.device for one in loaded.records] == ["cuda", "cpu", "cpu"]
    name = "compile_time_instruction_count"
    assert [one.cell.shape for one in loaded.records] == [name, f"{name},is_dynamic=True", f"{name},is_dynamic=True#2"]
    phone = hud({"name": "avg_inference_latency(ms)"}, [3.0], runners=[{"name": "Apple iPhone 15", "type": "iOS 18.0"}])
    phone["benchmark"]["extra_info"] = {}
    (one,) = read(write, [phone], options).records
    assert (one.environment.device, one.environment.cpu) == ("cpu", "Apple iPhone 15")
