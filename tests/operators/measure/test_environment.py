"""Where a run happens, as far as it can be found out here."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from groupbench.operators.measure import environment, selection
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.operator import Target
from groupbench.operators.registry import get_operator
from groupbench.tracker.record import Environment


def test_detect_on_a_cpu() -> None:
    found = environment.detect("cpu")
    assert found.device == "cpu"
    assert found.gpu is None
    assert found.gpu_uuid is None
    assert found.cpu
    assert found.cpu_count == os.cpu_count()
    assert found.cpu_threads == torch.get_num_threads()
    assert found.memory_mib
    assert found.memory_mib > 100
    assert found.python == platform.python_version()
    assert found.torch == version("torch")
    assert found.triton == version("triton")
    assert found.groupbench == version("groupbench")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Environment) == found


def test_settings_are_those_that_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(environment.SETTING_PREFIXES):
            monkeypatch.delenv(name)
    for name, value in {
        "TRITON_INTERPRET": "1",
        "HELION_AUTOTUNE_EFFORT": "none",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": "/somewhere",  # says where, not what
        "TRITON_PTXAS_PATH": "/somewhere",
        "HOME": "/somewhere",
        "SECRET_TOKEN": "x",
    }.items():
        monkeypatch.setenv(name, value)
    assert environment.detect("cpu").settings == {
        "HELION_AUTOTUNE_EFFORT": "none",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_INTERPRET": "1",
    }


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert environment._version("no-such-package-at-all") is None


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def missing(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.is_relative_to("/proc"):
            raise FileNotFoundError
        return read_text(self, *args, **kwargs)  # packages' metadata, say

    monkeypatch.setattr(Path, "read_text", missing)
    assert environment.detect("cpu").cpu


VERSIONS = {
    "old with old": ("3.6.0", "2.4.6", None),
    "old with new": ("3.6.0", "2.5.2", "the interpreter of triton 3.6.0 needs numpy before 2.5, not 2.5.2"),
    "old with a later major": ("3.5.1+git", "3.0.0rc1", "the interpreter of triton 3.5.1+git needs numpy before 2.5"),
    "new with new": ("3.7.1", "2.5.2", None),
    "double digits": ("3.10.0", "2.10.0", None),
    "no triton": (None, "2.5.2", None),
}


@pytest.mark.parametrize(("triton", "numpy", "problem"), VERSIONS.values(), ids=VERSIONS)
def test_an_interpreter_that_numpy_breaks_is_named(
    triton: str | None, numpy: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "triton" and triton is None:
            raise PackageNotFoundError(name)
        return {"triton": str(triton), "numpy": numpy}[name]

    monkeypatch.setattr(environment, "version", version)
    found = environment.interpreter_problem.__wrapped__()
    assert (found is None) == (problem is None)
    assert problem is None or str(found).startswith(problem)


def test_no_kernel_is_interpreted_where_the_interpreter_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "interpreter_problem", lambda: "broken")
    operator = get_operator("grouped_gemm")
    assert why_unavailable(operator, "triton_flat", Target("cpu", "fp16", interpreted=True)) == "broken"
    assert why_unavailable(operator, "torch_loop", Target("cpu", "fp16", interpreted=True)) is None
    assert why_unavailable(operator, "triton_flat", Target("cuda", "fp16", capability=(9, 0))) is None
