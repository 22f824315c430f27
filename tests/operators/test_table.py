"""The table, and TritonBench's CSV and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from groupbench.operators import table
from groupbench.tracker.facts.record import Record

Make = Callable[..., Record]


def csv(records: list[Record], *metrics: str, baseline: str | None = None) -> str:
    file = io.StringIO()
    table.write_csv(records, metrics or table.DEFAULT_METRICS, baseline, file)
    return file.getvalue()


def as_json(records: list[Record], *metrics: str, baseline: str | None = None) -> dict[str, Any]:
    file = io.StringIO()
    table.write_json(records, metrics, baseline, file)
    return json.loads(file.getvalue())


def screen(records: list[Record], *metrics: str, baseline: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(table.screen_table(records, metrics or table.DEFAULT_METRICS, baseline))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_csv_is_tritonbenchs(make: Make) -> None:
    records = [
        make(ms=2.0),
        make("triton", ms=1.0),
        make(ms=4.0, shape="G=2,M_g=2,N=3,K=4"),
        make("triton", ms=8.0, shape="G=2,M_g=2,N=3,K=4"),
    ]
    assert csv(records, "latency", "speedup") == (
        "x_val;torch_loop-latency;torch_loop-speedup;triton-latency;triton-speedup\n"
        "G=1,M_g=2,N=3,K=4;2.0;1.0;1.0;2.0\n"
        "G=2,M_g=2,N=3,K=4;4.0;1.0;8.0;0.5\n"
        "average;3.0;1.0;4.5;1.25\n"
    )


def test_an_operator_that_defines_no_operations_shows_its_bytes(make: Make) -> None:
    title = screen([make(ms=2.0, flops=None)]).splitlines()[0]
    assert "gbps" in title and "tflops" not in title
    assert "tflops" in screen([make(ms=2.0, flops=None), make("triton", ms=2.0)]).splitlines()[0]
    assert "tflops" in screen([make(ms=2.0, flops=None)], "tflops").splitlines()[0]
    assert screen([make(ms=2.0, flops=None, min_bytes=None)]).split("\n")[0].split()[-4:-1] == [
        "speedup",
        "rms",
        "error",
    ]


def test_panels_of_a_plot(make: Make) -> None:
    other = {"shape": "G=2,M_g=2,N=3,K=4"}
    records = [
        make(ms=2.0),
        make("triton", ms=1.0),
        make("helion", ms=None, status="oom"),
        make(ms=4.0, **other),
        make("triton", ms=9.0, timing="interpreted", **other),
        make(ms=8.0, dtype="fp32"),
    ]
    half, single = table.panels(records, "latency", None)
    assert (half.title, half.unit, half.names) == (
        "grouped_gemm fwd fp16",
        "latency, ms",
        ("torch_loop", "triton", "helion"),
    )
    assert [row.values for row in half.rows] == [
        {"torch_loop": 2.0, "triton": 1.0, "helion": None},
        {"torch_loop": 4.0, "triton": None},
    ]
    assert half.rows[0].notes == {"helion": "oom: why"}
    assert half.rows[1].notes == {"triton": "interpreted"}
    assert [row.values for row in single.rows] == [{"torch_loop": 8.0}]
    assert table.panels(records, "speedup", None)[0].rows[0].values["triton"] == 2.0
    assert table.panels([], "latency", None) == []


def test_a_missing_value_is_empty_and_never_zero(make: Make) -> None:
    records = [
        make(ms=2.0),
        make("triton", ms=None, status="oom"),
        make(ms=4.0, shape="G=2,M_g=2,N=3,K=4"),  # and no triton at all
    ]
    assert csv(records, "latency", "accuracy") == (
        "x_val;torch_loop-latency;torch_loop-accuracy;triton-latency;triton-accuracy\n"
        "G=1,M_g=2,N=3,K=4;2.0;1.0;;\n"
        "G=2,M_g=2,N=3,K=4;4.0;1.0;;\n"
        "average;3.0;1.0;;\n"
    )


def test_csv_of_nothing() -> None:
    assert csv([], "latency") == "x_val\naverage\n"


def test_json_keys(make: Make) -> None:
    records = [make(ms=2.0), make("triton", ms=None, status="error")]
    assert as_json(records, "latency", "accuracy") == {
        "tritonbench_grouped_gemm_fwd[x_G=1,M_g=2,N=3,K=4-torch_loop]_latency": 2.0,
        "tritonbench_grouped_gemm_fwd[x_G=1,M_g=2,N=3,K=4-torch_loop]_accuracy": 1.0,
        "tritonbench_grouped_gemm_fwd[x_G=1,M_g=2,N=3,K=4-triton]_latency": None,
        "tritonbench_grouped_gemm_fwd[x_G=1,M_g=2,N=3,K=4-triton]_accuracy": None,
    }
    assert as_json([], "latency") == {}


def test_several_precisions_have_rows_of_their_own(make: Make) -> None:
    records = [make(ms=1.0), make(ms=2.0, dtype="fp32")]
    assert csv(records, "latency").splitlines()[1:3] == ["G=1,M_g=2,N=3,K=4,fp16;1.0", "G=1,M_g=2,N=3,K=4,fp32;2.0"]


@pytest.mark.parametrize(
    "unlike", [{"protocol": "sustained"}, {"seed": 1}, {"mode": "bwd"}, {"operator": "canary"}], ids=str
)
def test_cells_that_differ_in_anything_do_not_overwrite_each_other(unlike: dict[str, Any], make: Make) -> None:
    records = [make(ms=1.0), make(ms=2.0, **unlike)]
    lines = csv(records, "latency").splitlines()
    assert [line.rpartition(";")[2] for line in lines[1:3]] == ["1.0", "2.0"]
    assert lines[1] != lines[2]
    assert sorted(as_json(records, "latency").values()) == [1.0, 2.0]


def test_json_names_each_cells_own_operator_and_mode(make: Make) -> None:
    keys = list(as_json([make(operator="canary", backend="torch"), make(mode="bwd")], "latency"))
    assert keys[0].startswith("tritonbench_canary_fwd[")
    assert any(key.startswith("tritonbench_grouped_gemm_bwd[") for key in keys)
    assert not any(key.startswith("tritonbench_canary_bwd[") for key in keys)


def test_speedup_is_over_the_baseline_of_the_same_problem(make: Make) -> None:
    records = [make(ms=2.0), make("triton", ms=1.0), make(ms=6.0, dtype="fp32"), make("triton", ms=1.0, dtype="fp32")]
    values = as_json(records, "speedup")
    assert list(values.values()) == [1.0, 2.0, 1.0, 6.0]


def test_another_baseline(make: Make) -> None:
    records = [make(ms=2.0), make("triton", ms=1.0), make("helion", ms=4.0)]
    assert list(as_json(records, "speedup", baseline="triton").values()) == [0.5, 1.0, 0.25]
    assert list(as_json(records[:1], "speedup", baseline="triton").values()) == [None]


def test_interpreted_time_is_not_a_speed(make: Make) -> None:
    records = [make(ms=2.0), make("triton", ms=100.0, timing="interpreted")]
    values = as_json(records, "speedup", "tflops", "gbps")
    assert [v for k, v in values.items() if "triton]" in k] == [None, None, None]
    text = screen(records)
    assert "interpreted" in text
    assert "100" not in text
    assert list(as_json(records, "latency").values()) == [2.0, None]
    # ... nor is anything faster than it
    assert list(as_json(records, "speedup", baseline="triton").values()) == [None, None]


def test_a_wrong_result_has_no_speed(make: Make) -> None:
    records = [make(ms=2.0), make("triton", ms=1.0, status="wrong")]
    values = as_json(records, "latency", "speedup", "tflops", "accuracy")
    assert [v for k, v in values.items() if "triton]" in k] == [1.0, None, None, 0.0]


def test_rates(make: Make) -> None:
    values = list(as_json([make(ms=2.0)], "tflops", "gbps").values())
    assert values == pytest.approx([48e6 / 2e-3 / 1e12, 1e6 / 2e-3 / 1e9])
    assert list(as_json([make(ms=2.0, flops=0)], "tflops").values()) == [None]


def test_median_is_of_the_bursts_medians(make: Make) -> None:
    record = make(bursts=[[1.0, 1.0, 50.0], [2.0, 2.0, 2.0], [3.0, 3.0, 0.1]])
    assert table.median_ms(record.latency) == 2.0
    assert table.spread(record.latency) == 0.5


def test_one_burst_has_no_spread(make: Make) -> None:
    assert "±" in screen([make(bursts=[[1.0], [1.0]])])
    assert "±" not in screen([make(bursts=[[1.0, 2.0]])])


def test_screen_says_why(make: Make) -> None:
    text = screen([make(ms=None, status="unavailable"), make("triton", ms=None, status="error")])
    assert "unavailable why" in text
    assert "error why" in text


def test_a_long_shape_loses_its_middle_on_a_screen_only(make: Make) -> None:
    long = make(shape="groups=" + "|".join(["16x16x16"] * 300))
    assert long.cell.shape not in screen([long]) and "groups=16x16x16|" in screen([long])
    assert long.cell.shape in csv([long])


def test_screen_survives_markup_in_a_message(make: Make) -> None:
    assert "[/red] [bold" in screen([make(ms=None, status="error", message="[/red] [bold")])


def test_screen_says_that_two_runs_differ(make: Make) -> None:
    assert "two runs differ" in screen([make(accuracy={"rms": 1e-4, "repeatable": False})])


def test_screen_names_operators_where_there_are_several(make: Make) -> None:
    assert "canary fwd fp16" in screen([make(), make("torch", operator="canary")])
    assert "grouped_gemm" not in screen([make(), make("triton")])


@pytest.mark.parametrize("name", table.METRICS)
def test_every_metric_has_a_value_or_none_for_every_record(name: str, make: Make) -> None:
    for record in (make(), make(ms=None, status="error"), make("triton", timing="interpreted"), make(status="wrong")):
        value = table.METRICS[name][1](record, make())
        assert value is None or isinstance(value, (float, bool, str))
        assert csv([record], name)
        assert screen([record], name)


def test_names_of_tritonbench(make: Make) -> None:
    one, two = (
        {"name": name, "config": {"BLOCK_M": size, "num_warps": 4}} for name, size in (("a", 64), ("b[1]", 128))
    )
    metrics = {"compile_ms": 12.5, "workspace_mib": 1.0, "kept_mib": 2.0}
    values = as_json([make(kernels=[one], metrics=metrics)], "best_config", "compile_time", "gpu_peak_mem")
    assert list(values.values()) == ["BLOCK_M=64, num_warps=4", 12.5, pytest.approx((1e6 + 3 * 2**20) / 1e9)]
    both = make(kernels=[one, two])
    assert "a: BLOCK_M=64, num_warps=4; b[1]: BLOCK_M=128" in " ".join(screen([both], "best_config").split())
    assert list(as_json([make(metrics={"kept_mib": 1.0})], "gpu_peak_mem").values()) == [None]
    assert table.costs_of(["latency", "compile_time", "gpu_peak_mem", "energy_j", "dram_mib"]) == {
        *("cold", "memory", "energy", "ncu")
    }


@pytest.mark.parametrize(("latency", "shown"), [(0.5, "2.00"), (9.0, "0.11"), (580.0, "0.0017")])
def test_a_small_speedup_keeps_two_digits(latency: float, shown: str, make: Make) -> None:
    assert shown in screen([make(baseline=True), make("slow", ms=latency)], "speedup").split()


def test_no_text_of_a_backend_steers_the_terminal(make: Make) -> None:
    hostile = "\x1b[31mred\x1b]0;title\x07 \x9b2J"
    records = [make("triton", status="error", message=hostile), make("x\x1b[2J", ms=1.0)]
    shown = screen(records)
    assert "red" in shown
    assert not any(char in shown for char in "\x1b\x07\x9b")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    table.write_csv(records, ("latency",), None, file)
    assert "\x1b" not in file.getvalue()
    assert "\x1b" in csv(records, "latency")
