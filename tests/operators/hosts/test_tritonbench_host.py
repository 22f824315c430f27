"""TritonBench as the host. Needs it importable at the tested commit, e.g. its checkout on PYTHONPATH."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import operator as operators
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM
from groupbench.tracker.record import Record, read

pytestmark = [
    pytest.mark.tritonbench,
    pytest.mark.skipif(
        importlib.util.find_spec("tritonbench") is None,
        reason="NOT TESTED: TritonBench as the host. It is not importable; put its checkout on PYTHONPATH",
    ),
]

HERE = Path(__file__).parent
Command = Callable[..., subprocess.CompletedProcess[str]]
HOST = ("--host", "tritonbench", "--device", "cpu")
ON_CPU = (*HOST, "--bursts", "2", "--samples", "2")
BRIEF = ("--num-inputs", "1", "--warmup", "1", "--rep", "1")


def all_of(cases: dict[str, Any], left_out: tuple[str, ...]) -> list[Any]:
    """Return the cases by name as parameters; those left out reach the code that others reach, and are exhaustive."""
    assert cases.keys() >= {*left_out}
    return [
        pytest.param(*case, id=name, marks=pytest.mark.exhaustive if name in left_out else ())
        for name, case in cases.items()
    ]


@pytest.fixture(scope="module")
def warm(
    tmp_path_factory: pytest.TempPathFactory, warm_imports: dict[str, str], warm_python: tuple[str, ...]
) -> Iterator[Command]:
    """Run the command in a fork of one process of this module: see warm.py. It is itself a fork with torch imported."""
    env = {k: v for k, v in os.environ.items() if k != "FORCE_COLOR"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE.parents[1] / "shared"), warm_imports["PYTHONPATH"]])
    main = f"import runpy; runpy.run_path({str(HERE / 'warm.py')!r}, run_name='__main__')"
    program = [*warm_python, "-c", main]
    folder = tmp_path_factory.mktemp("warm")
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(*args: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
            assert server.stdin is not None and server.stdout is not None
            out, err = folder / "out", folder / "err"
            for file in (out, err):
                file.write_bytes(b"")
            server.stdin.write(json.dumps({"args": list(map(str, args)), "out": str(out), "err": str(err)}) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

        yield run
        server.stdin.close()


def _measured(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def run(*args: str) -> tuple[subprocess.CompletedProcess[str], list[Record]]:
        path = tmp_path_factory.mktemp("run") / "r.jsonl"
        done = command(*args, "--records", path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return done, [record for _, record in read(lines)]

    return run


@pytest.fixture(scope="module")
def measured(warm: Command, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that runs a command and returns its process and records."""
    return _measured(warm, tmp_path_factory)


@pytest.fixture(scope="module")
def measured_apart(tritonbench_apart: Command, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Do the same in processes of the command's own, as users start it."""
    return _measured(tritonbench_apart, tmp_path_factory)


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


# Everything of TritonBench that the adapter touches, by module and attribute.
NAMES = (
    ("tritonbench.components.do_bench", "Latency"),
    ("tritonbench.operators", "__path__"),
    ("tritonbench.operators.op", "_list_opbench_paths"),
    ("tritonbench.utils.run_utils", "tritonbench_run"),
    ("tritonbench.utils.triton_op", "register_benchmark"),
    ("tritonbench.utils.triton_op", "BenchmarkOperatorMetrics"),
    ("tritonbench.utils.triton_op", "REGISTERED_BENCHMARKS"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.get_input_iter"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.get_available_num_inputs"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.get_x_val"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.tflops"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.accuracy"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator._measure_latency"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator._get_bm_func"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator._do_bench"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator._cur_input_id"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.DEFAULT_PRECISION"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.DEFAULT_METRICS"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.FWD_ONLY"),
    ("tritonbench.utils.triton_op", "BenchmarkOperator.get_bwd_fn"),
    ("tritonbench.utils.triton_op", "Mode.FWD"),
    ("tritonbench.utils.triton_op", "Mode.FWD_NO_GRAD"),
)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_every_name_that_the_adapter_touches_exists(module: str, name: str) -> None:
    operators.attrgetter(name)(importlib.import_module(module))


def test_attributes_that_instances_have() -> None:
    """Attributes that methods of TritonBench set are found in its source."""
    source = Path(importlib.import_module("tritonbench.utils.triton_op").__file__ or "").read_text()
    for name in (
        "self._cur_backend_name",
        "self.example_inputs",
        "self.tb_args",
        "self.dtype",
        "self.device",
        "self.mode",
        "self.baseline_fn",
    ):
        assert name in source, name


def test_metrics_have_the_fields_that_records_come_from() -> None:
    from dataclasses import fields

    from tritonbench.components.do_bench import Latency
    from tritonbench.utils.triton_op import BenchmarkOperatorMetrics

    assert {"latency", "accuracy", "error_msg", "extra_metrics"} <= {f.name for f in fields(BenchmarkOperatorMetrics)}
    assert Latency([1.0, 2.0], remove_outliers=False).times == [1.0, 2.0]


def test_mode_bwd_measures_our_backward(measured: Callable[..., Any]) -> None:
    args = ("--op", "grouped_gemm", "--mode", "bwd", "--precision", "fp16", "--only", "torch_loop,triton_pointer")
    done, records = measured(*args, "--shapes", "ragged", *ON_CPU[2:], "--host", "tritonbench")
    assert done.returncode == 0, done.stderr
    assert [(r.cell.backend, r.cell.mode, r.status, r.message) for r in records] == [
        ("torch_loop", "bwd", "ok", None),
        ("triton_pointer", "bwd", "unavailable", "triton_pointer has no backward"),
    ]
    assert records[0].latency is not None
    assert records[0].accuracy is not None
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


@pytest.fixture(scope="module", params=["forked", pytest.param("apart", marks=pytest.mark.exhaustive)])
def both(
    request: pytest.FixtureRequest, measured: Callable[..., Any], measured_apart: Callable[..., Any]
) -> dict[str, list[Record]]:
    """Return the records of the same cells by host."""
    under_tritonbench = measured if request.param == "forked" else measured_apart
    args = (
        "--op",
        "grouped_gemm",
        "--precision",
        "fp16",
        "--only",
        "torch_loop,triton_pointer",
        "--shapes",
        "ragged",
        "single",
    )
    records = {}
    for host, run in (("tritonbench", under_tritonbench), ("builtin", measured)):
        done, records[host] = run(*args, *ON_CPU[2:], "--host", host)
        if done.returncode != 0:
            cells = [(r.cell.shape, r.cell.backend, r.status, r.message) for r in records[host]]
            pytest.fail(
                f"--host {host} ended with {done.returncode}; {cells}\n{done.stdout}\n{done.stderr}", pytrace=False
            )
    return records


@pytest.mark.parametrize(
    "flags", [("--bwd",), pytest.param(("--mode", "fwd", "--bwd"), marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_flag_bwd_is_mode_bwd(flags: tuple[str, ...], measured: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    args = ("--op", "grouped_gemm", "--only", "torch_loop", "--shapes", "ragged", "--output-json", str(output))
    done, (record,) = measured(*args, *flags, *ON_CPU)
    assert done.returncode == 0, done.stderr
    assert (record.cell.mode, record.cell.flops) == ("bwd", 2 * 2 * 99 * 96 * 80)
    assert all(name.startswith("tritonbench_grouped_gemm_bwd[") for name in json.loads(output.read_text()))


# Options of sum, and the names of its first problem and its protocol.
PROBLEMS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "none": ((), "512", ""),
    "dimensions": (("--input-dim", "2", "--reduce-dim", "0", "--M", "2"), "512 [2x512] input_dim=2,reduce_dim=0", ""),
    "a dimension": (("--reduce-dim", "0"), "512 reduce_dim=0", ""),
    "a size": (("--input-dim", "2", "--M", "4"), "512 [4x512] input_dim=2", ""),
    "that which is the default": (("--input-dim", "1", "--repcnt", "3"), "512", "+repcnt=3"),
    "timing": (("--rep", "1", "--skip-cache-clearing"), "512", "+skip_cache_clearing+rep=1"),
    "autotuning": (("--autotune-rep", "3"), "512", "+autotune_rep=3"),
}


# TritonBench makes all inputs of an operator to count them, and these are large.
SQUARES = (("--input-dim", "2", "--reduce-dim", "0"), "512 [512x512] input_dim=2,reduce_dim=0", "")


@pytest.mark.parametrize(
    ("args", "shape", "protocol"),
    all_of(PROBLEMS | {"squares": SQUARES}, ("none", "a dimension", "a size", "autotuning", "squares")),
)
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
    "columns with accuracy": (("--op", "sum", "--only", "torch_sum,off"), "wrong", ""),
    "and without": (("--op", "sum", "--only", "torch_sum,off", "--metrics", "latency"), "wrong", ""),
    "no tolerance was chosen": ((*JAGGED, "--only", "torch_jagged_sum_no_pad,off"), "wrong", ""),
    "one of the user's": (
        (*JAGGED, "--only", "torch_jagged_sum_no_pad,off", "--atol", "1e9", "--rtol", "1"),
        "ok",
        "",
    ),
    "no baseline": (("--op", "sum", "--only", "off", "--metrics", "latency"), "ok", "no baseline was measured"),
}


@pytest.mark.parametrize(("args", "status", "message"), all_of(WRONG, ("columns with accuracy",)))
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


def test_backends_of_an_operator_that_does_not_start_are_unknown(measured: Callable[..., Any]) -> None:
    done, records = measured("--op", "nosuchop,sum", "--only", "torch_sum,theirs", "--num-inputs", "1", *HOST)
    assert [r.cell.backend for r in records] == ["torch_sum"]
    assert done.returncode == 3
    assert "no operator 'nosuchop'" in done.stderr
    assert "has a backend" not in done.stderr


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


def test_our_operator_is_right_under_tritonbench(both: dict[str, list[Record]]) -> None:
    assert [(r.cell.shape, r.cell.backend, r.status) for r in both["tritonbench"]] == [
        (shape, name, "ok")
        for shape in ("G=4,M_g=33|0|1|65,N=96,K=80", "G=1,M_g=17,N=32,K=48")
        for name in ("torch_loop", "triton_pointer")
    ]


def test_records_are_of_the_built_in_hosts_kind(both: dict[str, list[Record]]) -> None:
    """Compare all fields but the times and the host's name."""
    for guest, ours in zip(both["tritonbench"], both["builtin"], strict=True):
        assert (guest.cell.host, ours.cell.host) == ("tritonbench", "builtin")
        for name in ("operator", "backend", "shape", "dtype", "mode", "protocol", "seed", "dims", "flops", "min_bytes"):
            assert getattr(guest.cell, name) == getattr(ours.cell, name), name
        assert guest.accuracy == ours.accuracy
        assert guest.baseline == ours.baseline
        assert guest.latency is not None
        assert ours.latency is not None
        assert guest.latency.timing == ours.latency.timing
        assert [len(b) for b in guest.latency.bursts_ms] == [len(b) for b in ours.latency.bursts_ms]
        assert guest.latency.prepare_ms


FAULTS = {
    "crashes": ("error", "signal SIGSEGV"),
    "exits": ("error", "exit code 7"),
    "hangs": ("timeout", "no answer within"),
    "raises": ("error", "RuntimeError: no such / instruction, at "),
    "eats_memory": ("oom", "can't allocate memory"),
    "half": ("wrong", "50 % of the output was never written"),
    "one_percent": ("wrong", "relative RMS error 0.01"),
    "one_element": ("wrong", "error"),
    "flaky": ("ok", None),
    "wrong_shape": ("error", "shape [3]"),
    "returns_nothing": ("error", "NoneType"),
    "not_here": ("unavailable", "needs a flux / capacitor"),
    "torch_loop": ("ok", None),
}


# test_executor.py has each fault, and test_tritonbench_launcher.py a process that hangs.
FEW_FAULTS = ("crashes", "raises", "half", "one_percent", "not_here", "torch_loop")


@pytest.fixture(scope="module")
def faults(measured: Callable[..., Any], pytestconfig: pytest.Config) -> tuple[int, list[Record]]:
    names = tuple(FAULTS) if pytestconfig.getoption("exhaustive") else FEW_FAULTS
    done, records = measured(
        *("--op", "grouped_gemm", *ON_CPU, "--shapes", "even", "--only", ",".join(names)),
        *("--plugin", "faulty_backends.BACKENDS", "--timeout", "20"),
    )
    assert len(records) == len(names)
    return done.returncode, records


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW_FAULTS else pytest.mark.exhaustive) for name in FAULTS]
)
def test_every_fault_has_its_status_once_and_the_others_go_on(name: str, faults: tuple[int, list[Record]]) -> None:
    (record,) = [r for r in faults[1] if r.cell.backend == name]
    status, message = FAULTS[name]
    assert record.status == status
    assert (record.message is None) if message is None else (message in (record.message or ""))


def test_faults_exit_code(faults: tuple[int, list[Record]]) -> None:
    assert faults[0] == 1


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
        assert (record.cell.operator, record.cell.host, record.cell.shape) == (
            "sum",
            "tritonbench",
            "512",
        )
        assert record.cell.protocol.startswith("tritonbench:")
        assert record.status == "ok"
        assert record.latency is not None
        assert record.accuracy is not None
        assert record.accuracy.repeatable
    baseline, triton = by_name["torch_sum"], by_name["triton_sum"]
    assert [record.baseline for record in (baseline, triton)] == [True, False]
    assert [record.latency.timing for record in (baseline, triton)] == ["cpu", "interpreted"]
    assert baseline.accuracy.rms == 0
    assert 0 <= triton.accuracy.rms < 1e-3
    assert sum(record.baseline for record in records) == 1


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
        assert record.accuracy.rms is not None
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


def test_a_suite_of_ours_runs_our_operator(measured: Callable[..., Any]) -> None:
    done, records = measured("--op", "vector_add", *ON_CPU, "--suite", "tutorial")
    assert done.returncode == 0, done.stderr
    assert [(r.cell.backend, r.cell.shape, r.cell.protocol, r.status) for r in records] == [
        (name, shape, "cooled", "ok") for shape in ("N=1024", "N=257") for name in ("torch", "triton")
    ]


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


def test_operators_after_a_failure_are_measured(measured: Callable[..., Any]) -> None:
    """One measures nothing and one does not exist. Each operator runs once, however often it is named."""
    done, records = measured(
        *few_inputs("mx4_to_fp32"), "--op", "mx4_to_fp32,test_op,no_such,test_op", *HOST, "--num-inputs", "1"
    )
    assert done.returncode == 3, done.stderr
    assert [r.cell.operator for r in records] == ["test_op"]
    counts, path = done.stdout.splitlines()[-2:]
    assert (counts, path.split(":")[0]) == ("1 cell: 1 ok", "records")
    nothing, no_such = done.stderr.splitlines()[-2:]
    assert nothing.startswith(
        "tritonbench: mx4_to_fp32: TritonBench measured nothing: none of the selected backends of mx4_to_fp32"
    )
    assert no_such.startswith("tritonbench: no_such: no operator 'no_such'; known: grouped_gemm, ")


def test_latency_is_measured_even_if_the_operator_does_not_select_it(measured: Callable[..., Any]) -> None:
    """TritonBench's launch_latency, which wants a GPU, asks for its wall time; its test_op for a number of its own."""
    done, records = measured("--op", "test_op", *HOST, "--num-inputs", "1")
    assert done.returncode == 0, done.stderr
    assert [(r.status, r.latency is not None) for r in records] == [("ok", True)]


OURS = ("--op", "grouped_gemm", "--suite", "smoke")

# Arguments that are refused, and the start of the last line.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown operator": (
        ("--op", "moe_permut"),
        "moe_permut: no operator 'moe_permut' (did you mean 'moe_permute'?); known: grouped_gemm, ",
    ),
    "an operator that a plugin has under another name": (
        ("--op", "row_softmx", "--plugin", "examples/operators/row_softmax.py"),
        "row_softmx: no operator 'row_softmx' (did you mean 'row_softmax'?); known: grouped_gemm, ",
    ),
    "a mode that ours lacks": (
        (*OURS, "--fwd-bwd"),
        "grouped_gemm has no mode 'fwd_bwd' (did you mean 'fwd'?); known: fwd, bwd",
    ),
    "an option of ours": ((*OURS, "--numinputs", "2"), "grouped_gemm: unknown option or argument: --numinputs 2"),
    "an option": (("--op", "sum", "--input-dimm", "2"), "sum: unrecognized arguments: --input-dimm 2"),
    "an option of an operator without options": (
        ("--op", "vector_add", "--size", "2"),
        "vector_add: unknown option or argument: --size 2",
    ),
    "an option's value": (("--op", "sum", "--input-dim", "x"), "sum: argument --input-dim: invalid int value: 'x'"),
    "an option of its host": (("--op", "sum", "--rep", "x"), "sum: argument --rep: invalid int value: 'x'"),
    "its timing of ours": ((*OURS, "--rep", "5"), "grouped_gemm: --rep works only with TritonBench's own operators"),
    "our timing of its": (("--op", "sum", "--bursts", "2"), "--bursts works only with groupbench's operators; sum is"),
    "a backend": (("--op", "sum", "--only", "torch_sum,summ"), "sum: no backend 'summ'; known: triton_sum, "),
    "a backend to skip": (("--op", "sum", "--skip", "summ"), "sum: no backend 'summ'; known: triton_sum, "),
    "a baseline of ours": ((*OURS, "--baseline", "no"), "grouped_gemm: no backend 'no'; known: torch_loop, "),
    "backends of neither": (
        ("--op", "sum,test_op", "--only", "no", "--num-inputs", "1"),
        "sum: none of the backends of --only; known: triton_sum, torch_sum, torch_compile_sum; test_op: none",
    ),
    "an input": (("--op", "sum", "--input-id", "99"), "sum: --input-id 99: there are inputs 0 to 13"),
    "an input of ours": ((*OURS, "--input-id", "9"), "grouped_gemm: --input-id 9: there are inputs 0 to 3"),
    "an input's number": (("--op", "sum", "--input-id", "abc"), "--input-id 'abc' is not a number"),
    "inputs twice": (
        ("--op", "sum", "--input-id", "0,1", "--num-inputs", "1"),
        "--num-inputs must be at least 1, with",
    ),
    "inputs of a missing file": (
        ("--op", "sum", "--input-loader", "no.json"),
        "sum: --input-loader no.json: ",
    ),
    "a plugin": (("--op", "sum", "--plugin", "nomod.x"), "plugin 'nomod.x' does not load: ModuleNotFoundError"),
    "graphs on a CPU": (("--op", "sum", "--cudagraph"), "--cudagraph needs a GPU: a CPU has no CUDA graphs"),
    "processes of its own": (
        ("--op", "sum", "--isolate"),
        "--isolate cannot be combined with records: each operator has",
    ),
    "an A/B": (("--op", "sum", "--side-a", "x", "--side-b=y"), "--side-a cannot be combined with records: "),
    "a file of several operators": (("--op", "sum,softmax", "--output", "x.csv"), "--output takes one operator on "),
    "a suite of an operator that is not ours": (("--op", "sum", "--suite", "smoke"), "sum is not an operator of"),
    "a metric": (("--op", "sum", "--metrics", "latency,beauty"), "sum: TritonBench has no metric 'beauty'; it has: "),
    "a metric that the other host has": (
        ("--op", "moe_permute", "--shapes", "T=3,k=1,G=2,H=5", "--metrics", "rms"),
        "moe_permute: TritonBench has no metric 'rms'; it has: accuracy, ",
    ),
    "a Backend for an operator that is not ours": (
        ("--op", "sum", "--plugin", "faulty_backends.BACKENDS"),
        "sum: plugin 'faulty_backends.BACKENDS': sum is TritonBench's, for which a plugin is a function",
    ),
}


# Several names, options, values and operators are checked in one place.
REFUSED_ALIKE = (
    *("an operator that a plugin has under another name", "an option of an operator without options"),
    *("an option's value", "a backend to skip", "an input of ours", "a metric that the other host has"),
)


@pytest.mark.parametrize(("args", "message"), all_of(REFUSED, REFUSED_ALIKE))
def test_refused(args: tuple[str, ...], message: str, measured: Callable[..., Any], faulty: str) -> None:
    done, records = measured(*args, *HOST)
    assert (done.returncode, records) == (2, [])
    assert done.stderr.splitlines()[-1].startswith(f"tritonbench: {message}")
    assert "Traceback" not in done.stderr


def test_an_interpreted_kernel_has_no_latency(measured: Callable[..., Any]) -> None:
    """TritonBench's table leaves it blank, and the record has the reason."""
    args = ("--op", "vector_add", "--shapes", "N=257", "--csv", "--metrics", "latency,speedup,tflops")
    done, (torchs, tritons) = measured(*args, *ON_CPU)
    assert done.returncode == 0, done.stderr
    head, row = (line.split(";") for line in done.stdout.splitlines() if line.startswith(("x_val;", "N=257;")))
    assert [name for name, cell in zip(head, row, strict=True) if cell][1:] == ["torch-latency", "torch-tflops"]
    assert (torchs.latency.timing, tritons.latency.timing) == ("cpu", "interpreted")
    assert (torchs.status, tritons.status) == ("ok", "ok")


def test_a_tritonbench_without_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "tritonbench").mkdir()
    (tmp_path / "tritonbench" / "__init__.py").write_text("import no_such_yaml\n")
    code = "import groupbench.operators.hosts.tritonbench_adapter"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("TritonBench does not import here: No module named 'no_such_yaml'; install its")
    assert done.stderr.count("\n") == 1


def test_plugin_adds_our_backends_to_tritonbenchs_operator(warm: Command) -> None:
    """TritonBench's own --plugin calls it like this. Its grouped_gemm asks CUDA at import, so a class replaces it."""
    code = """
import sys, types
from tritonbench.utils import triton_op
from groupbench.operators.hosts import tritonbench_adapter as adapter
adapter.plugin()  # nothing of ours is loaded: nothing to do
assert not triton_op.REGISTERED_BENCHMARKS.get("grouped_gemm")
module = types.ModuleType("tritonbench.operators.grouped_gemm")
class Operator(triton_op.BenchmarkOperator): pass
Operator.__module__ = module.__name__
module.Operator = Operator
sys.modules[module.__name__] = module
adapter.plugin()
print(*triton_op.REGISTERED_BENCHMARKS["grouped_gemm"])
"""
    done = warm("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [backend.name for backend in GROUPED_GEMM.backends]


def test_a_cell_on_the_cpu_of_a_machine_with_a_gpu_is_the_cpus(warm: Command) -> None:
    """Backends are asked about the device of --device, even if torch sees a GPU."""
    code = """
from types import SimpleNamespace
import torch
from groupbench.operators.hosts.adapter import own
from groupbench.operators.operator import Example
from groupbench.operators.registry import get_operator
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
operator = get_operator("grouped_gemm")
prepare = own._method(operator, operator.backend("torch_compile"))
try:
    prepare(SimpleNamespace(device="cpu"), lambda: Example(None, "fp16", None))
except NotImplementedError as unavailable:
    print(unavailable)
"""
    done = warm("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs an NVIDIA GPU" in done.stdout


def test_both_hosts_have_one_baseline_for_suite_tritonbench(warm: Command) -> None:
    """TritonBench's class keeps its own method of that name, and groupbench's registers it as the baseline."""
    code = """
import sys
from groupbench.operators.hosts.adapter.internals import triton_op
from groupbench.operators.hosts.adapter.own import add_backends
from groupbench.operators.registry import get_operator

operator = get_operator("grouped_gemm")
for key, shapes in (("host", None), ("suite", ["G=4,M_g=1024,N=1024,K=1024,B=shared"]), ("other", ["1,4,4,4"])):
    class Operator(triton_op.BenchmarkOperator):
        @triton_op.register_benchmark(operator_name=key, baseline=shapes is None)
        def aten_grouped_mm(self, *x): return "TritonBench's"
    add_backends(Operator, key, operator, shapes)
    enabled = triton_op.REGISTERED_BENCHMARKS[key]["aten_grouped_mm"].enabled
    kept = shapes is None and Operator.aten_grouped_mm(None)
    print(key, *triton_op.BASELINE_BENCHMARKS[key], enabled, kept, sep=";")
"""
    done = warm("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "host;aten_grouped_mm;True;TritonBench's",
        "suite;aten_grouped_mm;True;False",
        "other;torch_loop;False;False",
    ]
