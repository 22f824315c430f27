"""The adapter to TritonBench: the names that it uses exist, and groupbench's backends join its operators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cases import TRITONBENCH

from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM

pytestmark = TRITONBENCH

Command = Callable[..., subprocess.CompletedProcess[str]]


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
