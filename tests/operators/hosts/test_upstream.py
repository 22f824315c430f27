"""The patch for TritonBench applies to the commit that we support, and works as documented."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupbench.operators.hosts import supported

PATCH = Path(__file__).parents[3] / "examples/upstream_tritonbench/plugins_and_ragged_inputs.patch"
FILES = (
    "tritonbench/operators/grouped_gemm/operator.py",
    "tritonbench/operators/op.py",
    "tritonbench/utils/plugin_utils.py",
    "tritonbench/utils/path_utils.py",
    "tritonbench/utils/triton_op.py",
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the patched files of TritonBench."""
    spec = importlib.util.find_spec("tritonbench")
    if spec is None or spec.origin is None:
        pytest.skip("TritonBench is not here: set GROUPBENCH_TRITONBENCH for ci/test.sh")
    source = Path(spec.origin).parents[1]
    folder = tmp_path_factory.mktemp("tritonbench")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((source / name).read_bytes())
    done = subprocess.run(["git", "apply", "-v", str(PATCH)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in FILES:
        ast.parse((folder / name).read_text())
    return folder


def functions(path: Path, *names: str) -> Any:
    """Return functions of a module that cannot be imported here."""
    tree = ast.parse(path.read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(chosen) == len(names)
    space: dict[str, Any] = {"math": __import__("math"), "random": __import__("random")}
    exec(compile(ast.Module(chosen, []), str(path), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def test_shapes(patched: Path) -> None:
    module = functions(patched / FILES[0], "parse_cli_shapes", "moe_rows")
    (equal, ragged, moe) = module.parse_cli_shapes(["2,64,8,16", "3,128|0|7,8,16", "moe:100,8,2,8,16"])
    assert equal == ([(64, 16)] * 2, (16, 8), (2, 8, 16), [64, 64])
    assert ragged == ([(128, 16), (0, 16), (7, 16)], (16, 8), (3, 8, 16), [128, 0, 7])
    assert sum(moe[3]) == 200 and len(moe[3]) == 8 and max(moe[3]) <= 100
    assert module.moe_rows(100, 8, 2) == moe[3], "the same in every run"
    assert sum(module.moe_rows(7, 3, 3)) == 21
    for wrong in ("2,64,8", "2,1|2|3,8,16", "moe:10,2,3,8,16"):
        with pytest.raises(ValueError, match=r"shapes|top_k"):
            module.parse_cli_shapes([wrong])


@pytest.fixture
def plugin_utils(patched: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fake = ModuleType("tritonbench.utils.path_utils")
    fake.add_path, fake.REPO_PATH = None, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonbench", ModuleType("tritonbench"))
    monkeypatch.setitem(sys.modules, "tritonbench.utils", ModuleType("tritonbench.utils"))
    monkeypatch.setitem(sys.modules, "tritonbench.utils.path_utils", fake)
    spec = importlib.util.spec_from_file_location("patched_plugin_utils", patched / FILES[2])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_entry_points(plugin_utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    points = {
        "tritonbench.backends": [
            SimpleNamespace(name="grouped_gemm", load=lambda: lambda: called.append("grouped_gemm")),
            SimpleNamespace(name="softmax", load=lambda: lambda: called.append("softmax")),
        ],
        "tritonbench.operators": [SimpleNamespace(name="my_op", load=lambda: int)],
    }
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points[group])
    plugin_utils.load_installed_backends("grouped_gemm")
    assert called == ["grouped_gemm"]
    assert plugin_utils.load_installed_operator("MY_OP") is int
    assert plugin_utils.load_installed_operator("other") is None


def test_another_tritonbench_is_named_with_what_it_lacks() -> None:
    def register_benchmark(
        operator_name: str, func_name: str, baseline: bool, enabled: bool, fwd_only: bool
    ) -> None: ...

    old = SimpleNamespace(register_benchmark=register_benchmark, REGISTERED_BENCHMARKS={})
    text = supported.problem_of(old)
    assert "register_benchmark(cls=)" in text and supported.TESTED in text and "--host builtin" in text
    assert "BenchmarkOperator" in text

    def today(operator_name: str, func_name: str, baseline: bool, enabled: bool, fwd_only: bool, cls: type) -> None: ...

    names = dict.fromkeys(supported.NAMES)
    assert supported.problem_of(SimpleNamespace(**names | {"register_benchmark": today})) is None
