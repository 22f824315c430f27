"""The `tritonbench` command as its users type it, on the built-in host."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from groupbench.operators import cli, executor, table
from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM
from groupbench.operators.errors import GroupbenchError, PlanError
from groupbench.tracker.cli.history import known_metrics
from groupbench.tracker.facts.record import Commit, Record, Run, encode, read

Command = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.usefixtures("warm_imports", "unaudited")
COLD = {"GROUPBENCH_TEST_WARM": ""}
"""Variables with which the command imports torch itself."""
FAST = ("--host", "builtin", "--device", "cpu", "--bursts", "1", "--samples", "2")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run the command in this process, for options that end it before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run(*args: str) -> Result:
        return CliRunner().invoke(cli.command, list(args))

    return run


def test_help_names_every_exit_code(invoke: Callable[..., Result]) -> None:
    for flag in ("--help", "-h"):
        result = invoke(flag)
        assert result.exit_code == 0
        for text in ("0 all cells measured", "1 a result is wrong", "2 usage", "3 a cell", "130 interrupted"):
            assert text in " ".join(result.output.split())


def test_a_command_in_the_help_can_be_pasted(invoke: Callable[..., Result]) -> None:
    (example,) = [line for line in invoke("--help").output.splitlines() if "M_g=" in line and "--op" in line]
    assert shlex.split(example, posix=True)[-1] == "G=3,M_g=0|1|129,N=96,K=64"
    assert "'G=3,M_g=0|1|129,N=96,K=64'" in example


def test_lists(invoke: Callable[..., Result]) -> None:
    operators = invoke("--list-operators").output
    assert "grouped_gemm: modes fwd, bwd; precisions bf16, fp16, fp32" in operators
    assert "suite smoke: 4 shapes" in operators
    backends = invoke("--list-backends", "--op", "grouped_gemm").output
    assert "torch_loop (baseline)" in backends
    assert "aten_grouped_mm (baseline of suite tritonbench)" in backends
    for backend in GROUPED_GEMM.backends:
        assert f"  {backend.name}" in backends
    assert "canary" not in backends
    assert "canary:" in invoke("--list-backends").output
    metrics = invoke("--list-metrics").output
    assert [line.partition(":")[0] for line in metrics.splitlines()] == list(table.metrics_of_tables())
    elsewhere = {
        line.partition(":")[0] for line in metrics.splitlines() if line.endswith("not in `groupbench history`")
    }
    assert set(table.metrics_of_tables()) - elsewhere == set(known_metrics())


OP = ("--op", "grouped_gemm", "--device", "cpu", "--host", "builtin")
USAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "--op NAME (see --list-operators) or --plan FILE"),
    "operator": (("--op", "conv", "--device", "cpu", "--host", "builtin"), "'conv'"),
    "operator of a list": (("--list-backends", "--op", "conv", "--host", "builtin"), "'conv'"),
    "backend": ((*OP, "--only", "cutlass"), "torch_loop"),
    "backend to skip": ((*OP, "--skip", "cutlass"), "torch_loop"),
    "backend of neither": (("--op", "vector_add,canary", *OP[2:], "--skip", "cutlass"), "no backend 'cutlass'"),
    "backends of one alone": (
        ("--op", "vector_add,matmul_outer_k", *OP[2:], "--only", "triton_outer_k"),
        "vector_add does not have the backends in --only; its backends: torch, triton",
    ),
    "baseline": ((*OP, "--baseline", "cutlass"), "torch_loop"),
    "suite": ((*OP, "--suite", "huge"), "smoke"),
    "metric": ((*OP, "--metrics", "latency,beauty"), "'beauty'"),
    "metric of a profile on a cpu": ((*OP, "--metrics", "latency,ncu_ms"), "ncu profiles kernels on a GPU"),
    "precision": ((*OP, "--precision", "fp8"), "bf16"),
    "mode": ((*OP, "--mode", "fwd_bwd"), "fwd, bwd"),
    "every backend skipped": ((*OP, "--only", "torch_loop", "--skip", "torch_loop"), "no backend to measure"),
    "mode of an operator that has the forward alone": (("--op", "canary", *OP[2:], "--mode", "bwd"), "fwd"),
    "shape": ((*OP, "--shapes", "1,2,3"), "G,M,N,K"),
    "shapes without one": ((*OP, "--shapes"), "--shapes"),
    "an empty shape": ((*OP, "--shapes", ""), "a shape is empty"),
    "an empty shape behind the sign": ((*OP, "--shapes="), "a shape is empty"),
    "an empty shape behind another": ((*OP, "--shapes", "1,64,64,64", " "), "a shape is empty"),
    "shapes without one before a flag": ((*OP, "--shapes", "--csv"), "--shapes"),
    "a shape below zero": ((*OP, "--shapes", "-1,64,64,64"), "G=-1"),
    "a shape below zero behind another": ((*OP, "--shapes", "1,64,64,64", "-2,64,64,64"), "G=-2"),
    "whose shape": (("--op", "grouped_gemm,vector_add", *OP[2:], "--shapes", "2,8,8,8"), "vector_add: shape '2,8,8,8'"),
    "flag": ((*OP, "--beauty"), "--beauty"),
    "flag of a list": (("--list-metrics", "--beauty"), "--beauty"),
    "flag with a value": ((*OP, "--beauty=1"), "--beauty"),
    "argument": ((*OP, "smoke"), "smoke"),
    "device": (("--op", "grouped_gemm", "--device", "tpu"), "tpu"),
    "host": (("--op", "grouped_gemm", "--host", "moon"), "moon"),
    "protocol": ((*OP, "--protocol", "hot"), "hot"),
    "input id": ((*OP, "--input-id", "x"), "'x'"),
    "input id past the end": ((*OP, "--input-id", "9999"), "0 to 3"),
    "negative input id": ((*OP, "--input-id", "-1"), "-1"),
    "num inputs": ((*OP, "--num-inputs", "0"), "--num-inputs"),
    "bursts": ((*OP, "--bursts", "0"), "--bursts"),
    "samples": ((*OP, "--samples", "none"), "--samples"),
    "idle": ((*OP, "--idle", "-1"), "--idle"),
    "seed": ((*OP, "--seed", "-1"), "--seed"),
    "rtol": ((*OP, "--rtol", "-0.1"), "--rtol"),
    "rtol of nan": ((*OP, "--rtol", "nan"), "--rtol"),
    "atol of infinity": ((*OP, "--atol", "inf"), "--atol"),
    "timeout": ((*OP, "--timeout", "0"), "--timeout"),
    "plugin": ((*OP, "--plugin", "no_such_module.x"), "no_such_module"),
    "plan and op": (("--plan", "x.toml", "--op", "grouped_gemm"), "--op"),
    "plan and only": (
        ("--plan", "x.toml", "--only", "torch_loop"),
        "x.toml sets the cells and their timing: change them there and remove --only; "
        "to measure other cells, use `tritonbench --op NAME --only ...`",
    ),
    "resume without a file": ((*OP, "--resume"), "--records FILE"),
    "resume with a file": (("--resume", "r.jsonl"), "--resume takes no value: write --records r.jsonl --resume"),
    "resume with a second file": (
        (*OP, "--records", "x", "--resume", "r 1.jsonl"),
        "--resume takes no value: write --records 'r 1.jsonl' --resume",
    ),
    "budget": ((*OP, "--budget", "0"), "--budget"),
    "a previous run that is not a run": ((*OP, "--only", "torch_loop", "--previous", "/proc/version"), "line 1"),
    "plan and bursts": (("--plan", "x.toml", "--bursts", "4"), "--bursts"),
    "plan that is missing": (("--plan", "x.toml", "--device", "cpu"), "x.toml"),
    "plan on tritonbench": (("--plan", "x.toml", "--host", "tritonbench"), "built-in"),
    "commit": ((*OP, "--only", "torch_loop", "--commit", "garbage"), "'garbage'"),
    "a suite without a name": ((*OP, "--suite", ","), "no name given"),
    "steps of no trace": ((*OP, "--trace-steps", "3"), "--trace-steps needs --routing-trace"),
    "cudagraph on a cpu": ((*OP, "--only", "torch_loop", "--cudagraph"), "a CPU has no CUDA graphs"),
    "records that cannot be written": ((*OP, "--only", "torch_loop", "--records", "/proc/none/r"), "cannot write"),
}


@pytest.mark.parametrize(("args", "message"), USAGE.values(), ids=USAGE)
def test_usage_errors_are_one_line_and_exit_code_2(
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["tritonbench", *args])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("tritonbench: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_error_of_a_plan_is_reported_under_the_name_of_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "groupbench.toml").write_text('[[measure]]\noperator = "canary"\n[[measure]]\noperator = "nope"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["tritonbench", "--plan", "groupbench.toml", "--device", "cpu"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith("groupbench: groupbench.toml, [[measure]] 2: no operator 'nope'")


BUILDS = {
    "a plan without": (
        "",
        ["--plan", "groupbench.toml"],
        "for a module in a subfolder, add the folder to `pythonpath`",
    ),
    "a plan with": ("setup = 'make'\n", ["--plan", "groupbench.toml"], "no such file or directory, at bench.py:2"),
    "by hand, without": ("", ["--op", "canary"], "add the folder to `pythonpath`"),
    "by hand, with": ("setup = 'make'\n", ["--op", "canary"], "to build it, run `setup` of groupbench.toml: make"),
}


@pytest.mark.parametrize(("setup", "options", "end"), BUILDS.values(), ids=BUILDS)
def test_a_library_that_does_not_load_may_need_a_build(
    setup: str,
    options: list[str],
    end: str,
    invoke: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bench.py").write_text("import ctypes\nctypes.CDLL('./libk.so')\n")
    (tmp_path / "groupbench.toml").write_text(f"{setup}plugins = ['bench.py']\n[[measure]]\noperator = 'canary'\n")
    monkeypatch.chdir(tmp_path)
    message = str(invoke(*options, "--host", "builtin", "--device", "cpu").exception)
    place = "groupbench.toml: " if "--plan" in options else ""
    assert message.startswith(f"{place}plugin 'bench.py' does not load: OSError: ./libk.so")
    assert message.lower().endswith(end)


@pytest.mark.parametrize("missing", ["from . import _fast", "from . import fast", "from .fast import sums"])
def test_an_extension_that_is_missing_may_need_a_build(
    missing: str, invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unbuilt").mkdir()
    (tmp_path / "unbuilt/__init__.py").write_text(missing)
    (tmp_path / "bench.py").write_text("import unbuilt\n")
    (tmp_path / "groupbench.toml").write_text("plugins = ['bench.py']\n[[measure]]\noperator = 'canary'\n")
    monkeypatch.chdir(tmp_path)
    error = invoke("--plan", "groupbench.toml", "--host", "builtin", "--device", "cpu").exception
    assert "if it needs a build, set `setup` in groupbench.toml to the command that builds it" in str(error)


@pytest.mark.parametrize("plan", ["groupbench.toml", "FILE"])
def test_with_nothing_to_measure_it_names_the_plan_that_exists(
    plan: str, invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if plan != "FILE":
        (tmp_path / plan).write_text("[[measure]]\noperator = 'canary'\n")
    assert str(invoke("--device", "cpu").exception).endswith(f"or --plan {plan}")


def test_a_plugin_that_is_missing_is_an_error_of_the_plan(invoke: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bench.py").touch()
    plan = tmp_path / "groupbench.toml"
    plan.write_text("plugins = ['bnech.py']\n[[measure]]\noperator = 'canary'\n")
    error = invoke("--plan", str(plan), "--device", "cpu").exception
    assert isinstance(error, PlanError)
    assert str(error).startswith("groupbench.toml: plugin 'bnech.py': ")
    assert str(error).endswith("no file bnech.py; did you mean bench.py?")


def test_gpus_that_are_not_there_are_not_the_processor(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupbench.operators.measure.environment.resolve_device", lambda device: "cpu")
    result = invoke("--op", "grouped_gemm", "--host", "builtin", "--gpus", "0,1")
    assert "--gpus 0,1: torch sees no GPU here; to try the command on the CPU, add --device cpu" in str(
        result.exception
    )


def test_records_are_not_appended_to_something_else(invoke: Callable[..., Result], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    result = invoke(*OP, "--only", "torch_loop", "--records", str(other))
    assert "other.jsonl contains a line that is not a record: line 1: " in str(result.exception)
    assert other.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("half", ['{"schema": 1, "ru', "whole"], ids=["half a record", "a record without its end"])
def test_records_are_not_appended_to_half_a_line(
    half: str, invoke: Callable[..., Result], make: Callable[..., Record], tmp_path: Path
) -> None:
    """Both together would be one invalid line, and `ingest` would refuse the file."""
    kept = tmp_path / "kept.jsonl"
    options = ("--op", "grouped_gemm", *FAST, "--only", "torch_loop", "--shapes", "1,16,64,64", "--records", str(kept))
    line = encode(make()).decode()
    kept.write_text(line + (line.rstrip("\n") if half == "whole" else half))
    before = kept.read_bytes()
    result = invoke(*options)
    assert "ends in the middle of a line" in str(result.exception)
    assert "--resume" in str(result.exception)
    assert kept.read_bytes() == before


@pytest.mark.parametrize("unmeasured", [(), ("--unmeasured", "it does not build")], ids=["measured", "unmeasured"])
def test_a_run_of_other_cells_is_not_resumed(
    unmeasured: tuple[str, ...], invoke: Callable[..., Result], make: Callable[..., Record], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    commit = "abcdef0123456789"
    run = Run(id="r", started=datetime.now(UTC), commit=Commit(hash=commit), command="--op grouped_gemm")
    there = executor.probe("cpu").environment
    kept.write_bytes(encode(msgspec.structs.replace(make(shape="another"), run=run, environment=there)))
    options = ("--op", "grouped_gemm", *FAST, "--only", "torch_loop", "--shapes", "1,16,64,64", "--commit", commit)
    result = invoke(*options, *unmeasured, "--records", str(kept), "--resume")
    assert "1 cell that this command does not select" in str(result.exception)
    assert "(it began as: tritonbench --op grouped_gemm); select them too" in str(result.exception)


def test_an_error_of_many_lines_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(options: object) -> int:
        raise GroupbenchError("first\n  second")

    monkeypatch.setattr(cli, "_run", fails)
    monkeypatch.setattr(sys, "argv", ["tritonbench"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "tritonbench: first second\n"


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_the_interpreter_on_a_gpu_is_a_usage_error(value: str, forked: Command) -> None:
    args = ("--op", "grouped_gemm", "--device", "cuda", "--host", "builtin")
    done = forked("groupbench.operators.cli:main", *args, env=os.environ | {"TRITON_INTERPRET": value})
    assert done.returncode == 2
    assert done.stderr.startswith("tritonbench: TRITON_INTERPRET is set")
    assert done.stderr.count("\n") == 1


LIGHT = (
    ["--help"],
    ["--version"],
    ["--list-backends"],
    ["--list-operators"],
    ["--list-metrics"],
    ["--op", "conv", "--host", "builtin"],
    ["--op", "grouped_gemm", "--host", "builtin", "--device", "cpu", "--shapes", "1,-2,3,4"],
)


IMPORTED = """
import os, sys
from groupbench.operators import cli
from groupbench.operators.hosts import tritonbench
for args in {light!r}:
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        continue
    sys.argv = ["tritonbench", *args]
    try:
        cli.main()
    except SystemExit:
        pass
    heavy = {{"torch", "triton", "helion", "numpy", "sqlalchemy"}} & {{*sys.modules}}
    print("imported by", *args, sorted(heavy), flush=True)
    os._exit(0)
"""


def test_no_torch_where_none_is_needed() -> None:
    """Each command runs in a fork of one process that has imported their modules."""
    done = subprocess.run([sys.executable, "-c", IMPORTED.format(light=LIGHT)], capture_output=True, text=True)
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported by")]
    numpy_alone = ["--list-operators"]  # it draws the loads of published models' suites
    assert imported == [f"imported by {' '.join(args)} {['numpy'] * (args == numpy_alone)}" for args in LIGHT]


def test_backends_are_named_for_the_operators_that_have_them(tritonbench: Command) -> None:
    done = tritonbench(
        *("--op", "vector_add,matmul_outer_k", "--suite", "smoke", *FAST, "--csv"),
        *("--skip", "triton_outer_k,triton", "--num-inputs", "1"),
    )
    assert done.returncode == 0, done.stderr
    head = done.stdout.splitlines()[0].split(";")
    assert {name.rpartition("-")[0] for name in head[1:]} == {"torch", "torch_mm"}


def test_csv_alone_is_on_standard_output(tritonbench: Command, tmp_path: Path) -> None:
    records, output, output_json = tmp_path / "r.jsonl", tmp_path / "o.csv", tmp_path / "o.json"
    shapes, names = ("G=4,M_g=16,N=64,K=64", "G=1,M_g=17,N=32,K=48"), ("torch_loop", "torch_grouped_mm")
    done = tritonbench(
        *("--op", "grouped_gemm", *FAST, "--only", ",".join(names), "--shapes", "4,16,64,64", "single", "--csv"),
        *("--metrics", "latency,speedup,accuracy", "--records", records, "--output", output, "--seed", "3"),
        *("--output-json", output_json, "--commit", "abcdef0123", "--branch", "side", "--trigger", "test"),
    )
    assert done.returncode == 0, done.stderr
    head, *lines = (line.split(";") for line in done.stdout.splitlines())
    assert head == ["x_val", *(f"{b}-{m}" for b in names for m in ("latency", "speedup", "accuracy"))]
    assert [line[0] for line in lines] == [*shapes, "average"]
    assert [line[6] for line in lines] == ["1.0", "1.0", "1.0"]
    assert output.read_text() == done.stdout
    assert len(json.loads(output_json.read_text())) == 12
    assert done.stderr.startswith("groupbench: built-in host")
    stored = [record for _, record in read(records.read_bytes().splitlines(keepends=True))]
    assert [(r.cell.shape, r.cell.backend, r.status) for r in stored] == [(s, n, "ok") for s in shapes for n in names]
    assert len({record.run.id for record in stored}) == 1
    for record in stored:
        assert (record.run.commit.hash, record.run.commit.branch, record.run.trigger) == ("abcdef0123", "side", "test")
        assert (record.cell.dtype, record.cell.seed, record.cell.host) == ("fp16", 3, "builtin")
        assert (record.latency.timing, record.environment.device) == ("cpu", "cpu")


def test_tolerances_of_the_user(tritonbench: Command, faulty: str) -> None:
    args = ("--op", "grouped_gemm", *FAST, "--shapes", "single", "--only", "torch_loop,one_percent", "--plugin", faulty)
    assert tritonbench(*args).returncode == 1
    assert tritonbench(*args, "--rtol", "0.05", "--atol", "0.05").returncode == 0


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_bytes_that_are_not_utf_8(encoding: str, tritonbench_apart: Command, tmp_path: Path) -> None:
    """They are in the message of an exception, a file's name, an option and a setting."""
    records, odd = tmp_path / os.fsdecode(b"a\xff.jsonl"), os.fsdecode(b"a\xff")
    done = tritonbench_apart(
        *("--op", "grouped_gemm", *FAST, "--shapes", "1,16,64,64", "--only", "raises_bytes,torch_loop"),
        *("--plugin", "faulty_backends.BACKENDS", "--records", records, "--branch", odd, "--trigger", odd),
        PYTHONIOENCODING=encoding,
        TRITON_ODD=odd,
    )
    assert done.returncode == 3, done.stderr
    assert r"error RuntimeError: cannot open caf\udce9: \x00" in done.stdout
    assert "a\\udcff.jsonl" in done.stdout
    first, second = [record for _, record in read(records.read_bytes().splitlines(keepends=True))]
    assert [first.status, second.status] == ["error", "ok"]
    assert (first.run.commit.branch, first.run.trigger) == (r"a\udcff", r"a\udcff")
    assert r"a\udcff.jsonl" in (first.run.command or "")
    assert first.environment.settings["TRITON_ODD"] == r"a\udcff"


def test_the_threads_asked_for_are_measured_with_and_recorded(tritonbench_apart: Command, tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    args = ("--shapes", "N=5", "--only", "says_threads", "--plugin", "faulty_backends.THREADS", "--records", records)
    tritonbench_apart("--op", "vector_add", *FAST, *args, OMP_NUM_THREADS="2", **COLD)
    ((_, record),) = read(records.read_bytes().splitlines(keepends=True))
    assert (record.message or "").startswith("RuntimeError: 2 threads")
    assert record.environment.cpu_threads == 2


def test_a_reader_that_leaves_before_the_table(tmp_path: Path) -> None:
    """Rich then exits with 1, which means a wrong result here."""
    command = f"{sys.executable} -m groupbench.operators --op vector_add --shapes N=5 -q {' '.join(FAST)} --only torch"
    script = f"set -o pipefail; {command} | (head -1 >/dev/null)"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("args", [["--list-metrics"], ["--op", "vector_add", "--shapes", "N=5", *FAST, "--csv"]])
def test_standard_output_that_takes_no_more(args: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "groupbench.operators", *args])
    done = subprocess.run(["bash", "-c", f"{command} -q > /dev/full"], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "tritonbench: standard output: No space left on device"
    assert "Traceback" not in done.stderr
    assert done.returncode == 3


def test_a_terminal_of_few_letters() -> None:
    """A ± is printed as ? if the encoding does not have it, and no result is called wrong."""
    command = [sys.executable, "-m", "groupbench.operators", "--op", "vector_add", "--shapes", "N=5", *FAST]
    ascii_alone = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--only", "torch"], capture_output=True, text=True, env=ascii_alone)
    assert done.returncode == 0, done.stderr
    assert "1 cell: 1 ok" in done.stdout


@pytest.mark.parametrize(("name", "heeded"), [("SIGINT", True), ("SIGTERM", True), ("SIGHUP", True), ("SIGHUP", False)])
def test_signals_that_end_the_command_act_as_an_interrupt(name: str, heeded: bool) -> None:
    """Also before there is anything, while modules are imported. `groupbench night` passes Ctrl-C on as SIGTERM.

    A hangup ignored by nohup does not end the command.
    """
    code = f"""
import os, signal, time
from groupbench.operators import cli
if not {heeded}:
    signal.signal(signal.{name}, signal.SIG_IGN)
def run(options):
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.1)
    return 0
cli._run = run
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    reported = "tritonbench: interrupted; nothing was measured yet" if heeded else ""
    assert (done.returncode, done.stderr.strip()) == (130 if heeded else 0, reported)


SPELLINGS = {
    "an operator": (["--op", "a,b"], ["--operator", "a", "--operator", "b"]),
    "backends": (["--only", "a,b"], ["--backend", "a", "--only", "b"]),
    "shapes": (["--shapes", "1,2,3,4", "x", "--quiet"], ["--shape", "1,2,3,4", "x", "--quiet"]),
    "a precision": (["--precision", "fp16"], ["--dtype", "fp16"]),
    "a budget": (["--budget", "90"], ["--budget", "1.5m"]),
    "a timeout": (["--timeout", "90"], ["--timeout", "1.5m"]),
}


@pytest.mark.parametrize(("one", "other"), SPELLINGS.values(), ids=SPELLINGS)
def test_both_spellings_are_the_same(one: list[str], other: list[str]) -> None:
    first, second = (cli.command.make_context("tritonbench", [*args]).params for args in (one, other))
    assert first == second
    assert first != cli.command.make_context("tritonbench", []).params
