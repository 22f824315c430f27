"""Modules that the processes of a job import ahead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from groupbench.operators import executor
from groupbench.operators.measure.selection import DYNAMO, GLUON, INDUCTOR, imports_to_count
from groupbench.operators.measure.wire import Job


def job(backend: str, plugins: tuple[str, ...] = ()) -> Job:
    return Job("grouped_gemm", backend, "G=2,M_g=16,N=8,K=8", "fp16", "cpu", plugins=plugins)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (("torch_loop", "torch_grouped_mm"), ()),
        (("torch_loop", "triton_flat"), (GLUON,)),
        (("torch_loop", "helion_worklist"), (GLUON, DYNAMO)),
        (("torch_compile",), (DYNAMO,)),
    ],
    ids=lambda value: "_".join(value) or "nothing",
)
def test_large_modules_are_imported_ahead_where_a_backend_needs_them(
    backends: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert executor.imports([job(backend) for backend in backends]) == expected


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("eager", "lambda x: x.c", ()),
        ("compiled", "lambda x: torch.compile(x.c)", (DYNAMO,)),
        ("helions", "lambda x: importlib.import_module('helion').kernel(x.c)", (DYNAMO,)),
        ("benchs", "lambda x: importlib.import_module('tritonbench.utils.triton_op').BenchmarkOperator", (INDUCTOR,)),
    ],
)
def test_a_plugin_is_searched_for_the_large_modules_that_it_imports(
    name: str, body: str, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import torch\nfrom groupbench.operators.operator import Backend\nB = Backend('{name}', {body}, '')\n"
    text = text.replace("''", "'', operator='grouped_gemm'")
    (tmp_path / f"{name}_file.py").write_text(text)
    (tmp_path / f"{name}_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for plugin in (f"{name}_file.py:B", f"{name}_file.py", f"{name}_module.B", f"{name}_module"):
        imports = executor.imports([job(name, plugins=(plugin,))])
        assert imports == expected, plugin
    assert imports_to_count([str(tmp_path / "none.json")]) == ()


@pytest.mark.parametrize(("module", "expected"), [("torch", (DYNAMO,)), ("numpy", ())])
def test_an_operator_of_tensors_is_counted_with_dynamo(module: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(f"import {module}\n")
    assert imports_to_count([str(tmp_path / "op.py")]) == expected
