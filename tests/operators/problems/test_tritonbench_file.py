"""Operator files of TritonBench, all written here, outside TritonBench's folders."""

from __future__ import annotations

import importlib.util
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from groupbench.operators import executor, plugins, registry
from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Job
from groupbench.operators.operator import Target
from groupbench.operators.problems.tritonbench_file import is_operator_file, launches_triton
from groupbench.tracker.facts.record import Commit, Environment, Record, Run

needs_tritonbench = pytest.mark.skipif(
    importlib.util.find_spec("tritonbench") is None,
    reason="NOT TESTED: operator files of TritonBench. It is not importable; put its checkout on PYTHONPATH",
)
pytestmark = pytest.mark.usefixtures("unaudited")
RUN = Run(id="r", started=datetime(2026, 1, 1, tzinfo=UTC), commit=Commit(hash="c" * 40))
CPU = Machine(Environment(device="cpu", cpu="a CPU", memory_mib=64_000, torch="2"), None)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

KERNELS = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def twice(x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""

OPERATOR = """
import torch
from tritonbench.utils.triton_op import BenchmarkOperator, register_benchmark

from .kernels import twice

class Operator(BenchmarkOperator):
    FWD_ONLY = True

    @register_benchmark()
    def one_pass(self, x, scale):
        return lambda: twice(x)

    @register_benchmark(baseline=True)
    def eager(self, x, scale):
        '''torch's own product'''
        return lambda: x * scale

    @register_benchmark()
    def packed(self, x, scale):
        copy = x.clone()
        return lambda: (copy * scale, None)

    @register_benchmark()
    def off(self, x, scale):
        return lambda: x * scale * 1.5

    @register_benchmark()
    def picky(self, x, scale):
        return None

    @register_benchmark()
    def later(self, x, scale):
        raise NotImplementedError("not on Tuesdays")

    @register_benchmark()
    def broken(self, x, scale):
        return lambda: x.no_such_thing

    @register_benchmark(enabled=False)
    def disabled(self, x, scale):
        return lambda: x * scale

    def get_x_val(self, example_inputs):
        return len(example_inputs[0])

    def get_input_iter(self):
        for n in (300, 100, 100):
            yield torch.randn(n, device=self.device, dtype=self.dtype), 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "scaled"
    folder.mkdir()
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "operator.py").write_text(OPERATOR)
    return folder / "operator.py"


@needs_tritonbench
@pytest.mark.tritonbench
def test_a_file_is_measured_as_an_operator(file: Path) -> None:
    made = registry.get_operator("scaled", (str(file),))
    assert (made.name, made.baseline, made.dtypes) == ("scaled", "eager", ("fp32", "bf16", "fp16"))
    assert [str(shape) for shape in made.suites["inputs"]] == ["300 [300, 2]", "100 [100, 2]", "100 [100, 2] #2"]
    assert [str(shape) for shape in made.suites["smoke"]] == ["100 [100, 2]"]
    assert {backend.name: backend.kind for backend in made.backends if backend.kind != "torch"} == {
        "one_pass": "triton"
    }
    assert made.backend("eager").source == "torch's own product"
    jobs = [
        Job(
            operator="scaled",
            backend=backend.name,
            shape="100 [100, 2] #2",
            dtype="fp16",
            device=DEVICE,
            interpreted=DEVICE == "cpu",
            protocol=Protocol(bursts=1, samples=2),
            plugins=(str(file),),
        )
        for backend in made.backends
    ]
    machine = CPU if DEVICE == "cpu" else executor.probe(DEVICE)
    records: dict[str, Record] = {r.cell.backend: r for r in executor.execute(jobs, machine, RUN, 60.0, Progress())}
    assert {name: record.status for name, record in records.items()} == {
        "one_pass": "ok",
        "eager": "ok",
        "packed": "ok",
        "off": "wrong",
        "picky": "unavailable",
        "later": "unavailable",
        "broken": "error",
        "disabled": "unavailable",
    }, {name: record.message for name, record in records.items()}
    assert records["eager"].baseline
    timings = [latency.timing for name in ("eager", "one_pass") if (latency := records[name].latency)]
    assert timings == (["gpu", "gpu"] if DEVICE == "cuda" else ["cpu", "interpreted"])
    assert records["later"].message == "not on Tuesdays"
    assert "returned None" in (records["picky"].message or "")
    assert "operator.py" in (records["broken"].message or "") and "no_such_thing" in (records["broken"].message or "")
    assert "enabled=False" in (records["disabled"].message or "")


@needs_tritonbench
@pytest.mark.tritonbench
def test_inputs_follow_the_seed_and_the_precision(file: Path) -> None:
    made = registry.get_operator("scaled", (str(file),))
    shape = made.parse_shape("300 [300, 2]")
    manual_seed = torch.manual_seed
    first, again, other = (made.make_inputs(shape, "bf16", "cpu", seed) for seed in (0, 0, 1))
    assert torch.manual_seed is manual_seed
    assert first.x.dtype == torch.bfloat16 and first.x.equal(again.x) and not first.x.equal(other.x)
    assert made.make_inputs(shape, "fp32", "cpu", 0).x.dtype == torch.float32
    assert made.reference(first).dtype == torch.float32
    assert "bf16" in str(made.backend("one_pass").unavailable(Target("cpu", "bf16", interpreted=True)))
    with pytest.raises(ValueError, match="not one of the 3 inputs"):
        made.parse_shape("7")


@needs_tritonbench
@pytest.mark.tritonbench
def test_a_file_has_its_own_name_and_its_own_registry(file: Path, tmp_path: Path) -> None:
    # TritonBench has an operator of that name.
    renamed = Path(shutil.copytree(file.parent, tmp_path / "copy")) / "softmax.py"
    (tmp_path / "copy" / "operator.py").rename(renamed)
    assert {b.name for b in registry.get_operator("softmax", (str(renamed),)).backends} >= {"eager", "off"}
    assert [operator.name for operator in plugins.operators_in(str(file))] == ["scaled"]
    assert registry.get_operator("scaled", (str(file), str(file.parent / ".." / "scaled" / "operator.py")))


@needs_tritonbench
@pytest.mark.tritonbench
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (OPERATOR.replace("@register_benchmark", "@(lambda **_: lambda f: f)"), "@register_benchmark"),
        (OPERATOR.replace("yield", "return [][1]\n            yield"), "cannot be listed: IndexError"),
        (OPERATOR.replace("(300, 100, 100)", "()"), "yields no input"),
        (OPERATOR.replace("import torch", "import torch, no_such_module"), "no_such_module"),
    ],
    ids=["no benchmark", "inputs that raise", "no inputs", "an import that fails"],
)
def test_a_file_that_is_no_operator_is_one_line(source: str, says: str, file: Path) -> None:
    file.write_text(source)
    with pytest.raises(UsageError, match=says):
        plugins.read(str(file))


@needs_tritonbench
@pytest.mark.tritonbench
def test_inputs_that_read_values_are_listed_on_the_cpu(file: Path) -> None:
    file.write_text(OPERATOR.replace("return len(example_inputs[0])", "return int(example_inputs[0].abs().sum() >= 0)"))
    assert str(registry.get_operator("scaled", (str(file),)).suites["inputs"][0]) == "1 [300, 2]"


def test_without_tritonbench_the_error_names_the_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "tritonbench" else find_spec(name)
    )
    with pytest.raises(UsageError, match=r"groupbench\[tritonbench\]"):
        plugins.read(str(file))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (OPERATOR, True),
        ("import t\nclass Operator(t.BenchmarkOperator): pass", True),
        ("class Operator(Base): '''not a BenchmarkOperator'''", False),
        ("class Other(BenchmarkOperator): pass", False),
        ("class Operator(BenchmarkOperator)", False),
    ],
)
def test_a_file_is_recognised_without_its_import(text: str, is_one: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(text)
    assert is_operator_file(path) is is_one


def test_a_kernel_is_found_behind_helpers_classes_and_closures(file: Path) -> None:
    spec = importlib.util.spec_from_file_location("kernels_of_test", file.parent / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {"__name__": "helpers_of_test", "module": module, "twice": module.twice}
    exec(
        "import torch\n"
        "class Apply(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return twice(x)\n"
        "apply = Apply.apply\n"
        "def direct(x): return lambda: twice(x)\n"
        "def through_a_class(x): return lambda: apply(x)\n"
        "def through_a_module(x): return module.twice(x)\n"
        "def closed(f): return lambda x: f(x)\n"
        "over = closed(twice)\n"
        "def without(x): return lambda: torch.mul(x, 2)\n",
        names,
    )
    launches = {
        name: launches_triton(names[name]) for name in ("direct", "through_a_class", "through_a_module", "over")
    }
    assert launches == dict.fromkeys(launches, True)
    assert not launches_triton(names["without"])
