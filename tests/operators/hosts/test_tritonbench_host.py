"""TritonBench as the host. Needs it importable at the tested commit, e.g. its checkout on PYTHONPATH."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import TRITONBENCH, named

from groupbench.tracker.facts.record import Record

pytestmark = TRITONBENCH

Command = Callable[..., subprocess.CompletedProcess[str]]
HOST = ("--host", "tritonbench", "--device", "cpu")
ON_CPU = (*HOST, "--bursts", "2", "--samples", "2")
BRIEF = ("--num-inputs", "1", "--warmup", "1", "--rep", "1")


def few_inputs(operator: str) -> tuple[str, ...]:
    """Return the beginning of a command in which one of TritonBench's operators has only small inputs.

    TritonBench makes all inputs to count them, which takes five seconds for these operators.
    """
    change = {
        "mx4_to_fp32": "get_input_iter = lambda self: iter([(torch.zeros(17, dtype=torch.uint8), 32, 2, 1)])",
        "vector_add": "get_x_vals = lambda self: [4096, 8192]",
    }[operator]
    code = f"""
import sys
import torch
from tritonbench.operators.{operator} import Operator
from groupbench.operators import cli
assert hasattr(Operator, {change.split()[0]!r})
Operator.{change}
sys.argv[0] = "tritonbench"
cli.main()
"""
    return ("-c", code)


def test_mode_bwd_measures_our_backward(measured: Callable[..., Any]) -> None:
    args = ("--op", "grouped_gemm", "--mode", "bwd", "--precision", "fp16", "--only", "torch_loop,triton_pointer")
    done, records = measured(*args, "--shapes", "ragged", *ON_CPU[2:], "--host", "tritonbench")
    assert done.returncode == 0, done.stderr
    assert [(r.cell.backend, r.cell.mode, r.status, r.message) for r in records] == [
        ("torch_loop", "bwd", "ok", None),
        ("triton_pointer", "bwd", "unavailable", "triton_pointer has no backward"),
    ]
    assert records[0].latency and records[0].accuracy
    assert records[0].cell.flops == 2 * 2 * 99 * 96 * 80


def test_an_operator_that_names_no_precision_has_that_of_its_inputs(measured: Callable[..., Any]) -> None:
    """TritonBench's vector_add, for which no --precision is chosen; our backends are listed next to its own."""
    done, records = measured(
        *few_inputs("vector_add"), "--op", "vector_add", "--only", "torch_add,torch", "--num-inputs", "1", *HOST
    )
    assert done.returncode == 0, done.stderr
    assert "fewer cheats are detected than with --host builtin" in done.stderr
    assert [(r.cell.backend, r.cell.dtype, r.cell.min_bytes, r.status) for r in records] == [
        (name, "fp32", 3 * 4 * 4096, "ok") for name in ("torch_add", "torch")
    ]


@pytest.fixture(scope="module")
def both(measured: Callable[..., Any]) -> dict[str, list[Record]]:
    """Return the records of the same cells by host."""
    cells = ("--only", "torch_loop,triton_pointer", "--shapes", "ragged", "single")
    records = {}
    for host in ("tritonbench", "builtin"):
        args = ("--op", "grouped_gemm", "--precision", "fp16", *cells, *ON_CPU[2:], "--host", host)
        done, records[host] = measured(*args)
        assert done.returncode == 0, (host, done.stdout, done.stderr)
    return records


# Options of sum, and the names of its first problem and its protocol.
PROBLEMS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "dimensions": (("--input-dim", "2", "--reduce-dim", "0", "--M", "2"), "512 [2x512] input_dim=2,reduce_dim=0", ""),
    "that which is the default": (("--input-dim", "1", "--repcnt", "3"), "512", "+repcnt=3"),
    "timing": (("--rep", "1", "--skip-cache-clearing"), "512", "+skip_cache_clearing+rep=1"),
}


@pytest.mark.parametrize(("args", "shape", "protocol"), named(PROBLEMS))
def test_options_are_in_a_problems_identity(
    args: tuple[str, ...], shape: str, protocol: str, measured: Callable[..., Any]
) -> None:
    done, records = measured("--op", "sum", "--only", "torch_sum", "--num-inputs", "1", *args, *HOST)
    assert done.returncode == 0, done.stderr
    assert [(r.cell.shape, r.cell.protocol) for r in records] == [(shape, f"tritonbench:triton_do_bench{protocol}")]


def test_inputs_of_one_name_are_numbered(measured: Callable[..., Any]) -> None:
    """Numbers count all inputs, whichever of them are measured."""
    args = ("--op", "gemm", "--only", "aten_matmul", "--shapes", "8x8x8,8x8x8,16x8x8", "--warmup", "1", "--rep", "1")
    names = [[r.cell.shape for r in measured(*args, *which, *HOST)[1]] for which in ((), ("--input-id", "1,0"))]
    assert names == [["(8, 8, 8)", "(8, 8, 8) #2", "(16, 8, 8)"], ["(8, 8, 8)", "(8, 8, 8) #2"]]
    assert [r.cell.shape for r in measured(*args, "--input-id", "1", "--num-inputs", "1", *HOST)[1]] == ["(8, 8, 8) #2"]


# TritonBench has no tolerance for it. By default, its inputs have 64 million elements.
JAGGED = ("--op", "jagged_sum", "--B", "4", "--M", "4", "--seqlen", "8", "--sparsity", "0.5")

# Arguments: status of a backend that is plainly wrong, and why it is not judged.
WRONG: dict[str, tuple[tuple[str, ...], str, str]] = {
    "columns without accuracy": (("--op", "sum", "--only", "torch_sum,off", "--metrics", "latency"), "wrong", ""),
    "no tolerance was chosen": ((*JAGGED, "--only", "torch_jagged_sum_no_pad,off"), "wrong", ""),
    "one of the user's": ((*JAGGED, "--only", "torch_jagged_sum_no_pad,off", "--atol", "1e9", "--rtol", "1"), "ok", ""),
    "no baseline": (("--op", "sum", "--only", "off", "--metrics", "latency"), "ok", "no baseline was measured"),
}


@pytest.mark.parametrize(("args", "status", "message"), named(WRONG))
def test_a_wrong_result_is_wrong_whatever_columns_are_shown(
    args: tuple[str, ...], status: str, message: str, measured: Callable[..., Any], faulty: str
) -> None:
    done, records = measured(*args, "--plugin", "faulty_backends.off_in_tritonbench", *BRIEF, *HOST)
    assert {r.cell.backend: r.status for r in records}["off"] == status, done.stderr
    assert done.returncode == (1 if status == "wrong" else 0), done.stderr
    assert ("groupbench: off is not judged: " in done.stderr) is bool(message)
    assert message in done.stderr


def test_an_error_midway_is_a_failure(measured: Callable[..., Any]) -> None:
    """TritonBench shows its partial table and exits with 0: sum cannot name an input of one dimension."""
    done, records = measured("--op", "sum", "--only", "torch_sum", "--M", "8", *HOST)
    assert (done.returncode, records) == (3, [])
    last = done.stderr.splitlines()[-1]
    assert (
        last == "tritonbench: sum: TritonBench ended before it measured anything: IndexError: tuple index out of range"
    )


def test_lists_of_tritonbenchs_operators(warm: Command) -> None:
    done = warm("--op", "softmax", "--list-backends", *HOST)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "softmax:"
    assert "  naive_softmax (baseline): TritonBench's" in lines
    done = warm("--op", "sum", "--list-metrics", "--list-operators", *HOST)
    assert done.stdout.startswith("sum: TritonBench's; modes fwd; ")
    assert "accuracy" in done.stdout.splitlines()


def test_a_backend_that_no_operator_has(measured: Callable[..., Any]) -> None:
    """A name that another operator has is not reported."""
    done, records = measured("--op", "sum,test_op", "--only", "torch_sum,test_op,summ", "--num-inputs", "1", *HOST)
    assert [r.cell.backend for r in records] == ["torch_sum", "test_op"]
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "tritonbench: none of the selected operators has a backend 'summ'"


def test_operators_of_ours_take_their_own_of_only(measured: Callable[..., Any]) -> None:
    args = ("--op", "grouped_gemm,vector_add", "--suite", "smoke", "--num-inputs", "1", "--only", "torch_loop,torch")
    done, records = measured(*args, *ON_CPU)
    assert done.returncode == 0, done.stderr
    assert [(r.cell.operator, r.cell.backend) for r in records] == [
        ("grouped_gemm", "torch_loop"),
        ("vector_add", "torch"),
    ]


def test_an_output_folder_is_made(measured: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    args = ("--op", "sum,test_op", "--only", "torch_sum,test_op", "--num-inputs", "1", "--output-dir", str(folder))
    done, _ = measured(*args, *HOST)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"sum.json", "test_op.json"}


def test_records_are_of_the_built_in_hosts_kind(both: dict[str, list[Record]]) -> None:
    """Compare all fields but the times and the host's name."""
    for guest, ours in zip(both["tritonbench"], both["builtin"], strict=True):
        assert (guest.cell.host, ours.cell.host) == ("tritonbench", "builtin")
        for name in ("operator", "backend", "shape", "dtype", "mode", "protocol", "seed", "dims", "flops", "min_bytes"):
            assert getattr(guest.cell, name) == getattr(ours.cell, name), name
        assert (guest.status, guest.accuracy, guest.baseline) == ("ok", ours.accuracy, ours.baseline)
        assert guest.latency.timing == ours.latency.timing
        assert [len(b) for b in guest.latency.bursts_ms] == [len(b) for b in ours.latency.bursts_ms]
        assert guest.latency.prepare_ms


FAULTS = {
    "crashes": ("error", "signal SIGSEGV"),
    "raises": ("error", "RuntimeError: no such / instruction, at "),
    "half": ("wrong", "50 % of the output was never written"),
    "one_percent": ("wrong", "relative RMS error 0.01"),
    "not_here": ("unavailable", "needs a flux / capacitor"),
    "torch_loop": ("ok", None),
}


@pytest.fixture(scope="module")
def faults(measured: Callable[..., Any]) -> list[Record]:
    done, records = measured(
        *("--op", "grouped_gemm", *ON_CPU, "--shapes", "even", "--only", ",".join(FAULTS)),
        *("--plugin", "faulty_backends.BACKENDS", "--timeout", "20"),
    )
    assert len(records) == len(FAULTS)
    assert done.returncode == 1
    return records


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_its_status_once_and_the_others_go_on(name: str, faults: list[Record]) -> None:
    (record,) = [r for r in faults if r.cell.backend == name]
    status, message = FAULTS[name]
    assert record.status == status
    assert (record.message is None) if message is None else (message in (record.message or ""))


def test_a_crash_of_the_last_backend_leaves_the_baselines_record_alone(measured: Callable[..., Any]) -> None:
    done, records = measured(
        *("--op", "grouped_gemm", *ON_CPU, "--shapes", "single", "--only", "torch_loop,crashes"),
        *("--plugin", "faulty_backends.crash_last"),
    )
    assert [(r.cell.backend, r.status) for r in records] == [("torch_loop", "ok"), ("crashes", "error")]
    assert done.returncode == 3


def test_tritonbenchs_flags_reach_it(measured: Callable[..., Any], tmp_path: Path) -> None:
    output, output_json = tmp_path / "o.csv", tmp_path / "o.json"
    done, records = measured(
        *("--op", "grouped_gemm", *ON_CPU, "--suite", "smoke", "--only", "torch_loop,torch_grouped_mm"),
        *("--input-id", "1", "--num-inputs", "2", "--metrics", "latency,accuracy"),
        *("--csv", "--output", str(output), "--output-json", str(output_json)),
    )
    assert done.returncode == 0, done.stderr
    shapes = ["G=4,M_g=33|0|1|65,N=96,K=80", "G=2,M_g=5|130,N=45,K=33,W=nk"]
    assert list(dict.fromkeys(r.cell.shape for r in records)) == shapes
    for text in (done.stdout, output.read_text()):
        rows = list(csv.reader(io.StringIO(text), delimiter=";"))
        assert rows[0][0] == "x_val"
        assert [row[0] for row in rows[1:3]] == shapes
        assert "torch_grouped_mm-accuracy" in rows[0]
        assert not any("tflops" in header for header in rows[0])
    assert any("torch_grouped_mm" in key for key in json.loads(output_json.read_text()))


def test_tritonbenchs_own_operator(measured: Callable[..., Any]) -> None:
    """Its records have a latency, whether a CPU or the interpreter took it, and the distance from the baseline."""
    brief = ("--only", "torch_sum,triton_sum", "--num-inputs", "1", "--warmup", "1", "--rep", "1")
    done, records = measured("--op", "sum", "--device", "cpu", "--host", "tritonbench", *brief)
    assert done.returncode == 0, done.stderr
    by_name = {record.cell.backend: record for record in records}
    assert set(by_name) == {"torch_sum", "triton_sum"}
    for record in records:
        assert (record.cell.operator, record.cell.host, record.cell.shape) == ("sum", "tritonbench", "512")
        assert record.cell.protocol.startswith("tritonbench:")
        assert (record.status, record.accuracy.repeatable) == ("ok", True)
    baseline, triton = by_name["torch_sum"], by_name["triton_sum"]
    assert [record.baseline for record in (baseline, triton)] == [True, False]
    assert [record.latency.timing for record in (baseline, triton)] == ["cpu", "interpreted"]
    assert baseline.accuracy.rms == 0
    assert 0 <= triton.accuracy.rms < 1e-3


def test_our_backends_join_those_of_tritonbenchs_operator_of_that_name(measured: Callable[..., Any]) -> None:
    args = ("--only", "torch_add,triton_add,torch,triton", "--num-inputs", "1", "--warmup", "1", "--rep", "1")
    done, records = measured(*few_inputs("vector_add"), "--op", "vector_add", *HOST, *args)
    assert done.returncode == 0, done.stderr
    assert {record.cell.backend for record in records} == {"torch_add", "triton_add", "torch", "triton"}
    for record in records:
        assert (record.cell.operator, record.cell.host, record.cell.shape) == ("vector_add", "tritonbench", "N=4096")
        assert record.cell.protocol.startswith("tritonbench:")
        assert (record.status, record.message) == ("ok", None)
        assert record.baseline == (record.cell.backend == "torch_add")
        assert record.accuracy is not None  # theirs too, against our reference
        assert 0 <= record.accuracy.rms < 1e-3


def test_a_backend_that_changes_the_inputs_spoils_no_others(measured: Callable[..., Any], faulty: str) -> None:
    """TritonBench gives all backends the same inputs. For our own operator, the next backend has fresh ones."""
    only = ("--only", "torch,adds_in_place,adds", "--plugin", "faulty_backends.ADDERS")
    done, records = measured("--op", "vector_add", *ON_CPU, "--shapes", "N=5", *only)
    assert done.returncode == 1, done.stderr
    assert {r.cell.backend: (r.status, r.message) for r in records} == {
        "torch": ("ok", None),
        "adds_in_place": ("wrong", "the backend changed its input x"),
        "adds": ("ok", None),
    }


def test_a_backend_that_changes_tritonbenchs_inputs_is_named(measured: Callable[..., Any], faulty: str) -> None:
    only = ("--only", "torch_add,adds_in_place,adds", "--plugin", "faulty_backends.ADDERS")
    args = ("--num-inputs", "2", "--warmup", "1", "--rep", "1")
    done, records = measured(*few_inputs("vector_add"), "--op", "vector_add", *HOST, *only, *args)
    assert done.returncode == 1, done.stderr
    blamed = ("wrong", "the backend changed its input [0]")
    spoilt = ("error", "not measured: adds_in_place has changed the inputs, which all backends share")
    assert [(r.status, r.message) for r in records] == [("ok", None), blamed, spoilt] * 2


def test_a_file_that_cannot_be_written_is_reported(measured: Callable[..., Any]) -> None:
    args = ("--shapes", "N=5", "--only", "torch", "--output", "/dev/full")
    done, records = measured("--op", "vector_add", *ON_CPU, *args)
    assert (done.returncode, len(records)) == (3, 1)
    assert "its table and /dev/full: OSError: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "1 cell: 1 ok" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="its swiglu imports here")
def test_an_operator_that_does_not_import_has_a_reason(measured: Callable[..., Any]) -> None:
    done, records = measured("--op", "swiglu", "--device", "cpu", "--host", "tritonbench")
    assert (done.returncode, records) == (2, [])
    assert "operator swiglu does not import here: ModuleNotFoundError: No module named 'transformers'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_operator_without_installed_backends_is_reported(measured: Callable[..., Any]) -> None:
    done, records = measured(*few_inputs("mx4_to_fp32"), "--op", "mx4_to_fp32", *HOST, "--num-inputs", "1")
    assert (done.returncode, records) == (3, [])
    assert "measured nothing: none of the selected backends of mx4_to_fp32 is installed" in done.stderr


def test_latency_is_measured_even_if_the_operator_does_not_select_it(measured: Callable[..., Any]) -> None:
    """TritonBench's launch_latency, which wants a GPU, asks for its wall time; its test_op for a number of its own."""
    done, records = measured("--op", "test_op", *HOST, "--num-inputs", "1")
    assert done.returncode == 0, done.stderr
    assert [(r.status, r.latency is not None) for r in records] == [("ok", True)]


def test_an_interpreted_kernel_has_no_latency(measured: Callable[..., Any]) -> None:
    """TritonBench's table leaves it blank, and the record has the reason."""
    args = ("--op", "vector_add", "--shapes", "N=257", "--csv", "--metrics", "latency,speedup,tflops")
    done, (torchs, tritons) = measured(*args, *ON_CPU)
    assert done.returncode == 0, done.stderr
    head, row = (line.split(";") for line in done.stdout.splitlines() if line.startswith(("x_val;", "N=257;")))
    assert [name for name, cell in zip(head, row, strict=True) if cell][1:] == ["torch-latency", "torch-tflops"]
    assert (torchs.latency.timing, tritons.latency.timing) == ("cpu", "interpreted")
    assert (torchs.status, tritons.status) == ("ok", "ok")
