"""Detection of the environment, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from groupbench.operators.measure import confine, environment, selection, worker
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.operator import Target
from groupbench.operators.registry import get_operator
from groupbench.tracker.facts.environment import environment_identity, installed_version
from groupbench.tracker.facts.record import Environment


def test_detect_on_a_cpu() -> None:
    detected = environment.detect("cpu")
    assert detected.device == "cpu"
    assert detected.gpu is None
    assert detected.gpu_uuid is None
    assert detected.cpu
    assert detected.cpu_count == os.cpu_count()
    assert detected.cpu_threads == torch.get_num_threads()
    assert detected.memory_mib
    assert detected.memory_mib > 100
    assert detected.python == platform.python_version()
    assert detected.torch == version("torch")
    assert detected.triton == version("triton")
    assert detected.groupbench == version("groupbench")
    assert msgspec.json.decode(msgspec.json.encode(detected), type=Environment) == detected


def test_the_environment_names_what_confines_a_cell() -> None:
    detected, _ = environment.examine("cpu")
    in_a_cell = worker.call(confine.confine, timeout_s=60)  # a second time, when it can mount nothing any more
    assert [means for means in (detected.confinement or "").split(", ") if means != "mounts"] == [*in_a_cell]
    assert detected.confinement or platform.system() != "Linux"
    assert environment_identity(detected) == environment_identity(msgspec.structs.replace(detected, confinement=None))


def test_a_cpu_is_measured_with_one_thread_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    environment.resolve_device("cpu")
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    environment.resolve_device("cpu")
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_settings_are_the_variables_that_change_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(environment.SETTING_PREFIXES):
            monkeypatch.delenv(name)
    for name, value in {
        "TRITON_INTERPRET": "1",
        "HELION_AUTOTUNE_EFFORT": "none",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": "/somewhere",  # a location does not change the measurement
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
    assert installed_version("no-such-package-at-all") is None


def test_detection_works_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def missing(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.is_relative_to("/proc"):
            raise FileNotFoundError
        return read_text(self, *args, **kwargs)  # packages' metadata, say

    monkeypatch.setattr(Path, "read_text", missing)
    assert environment.detect("cpu").cpu


VERSIONS = {
    "old with old": ("3.6.0", "2.3.5", None),
    "old with new": ("3.6.0", "2.4.0", "the interpreter of triton 3.6.0 needs numpy before 2.4, not 2.4.0"),
    "old with a later major": ("3.5.1+git", "3.0.0rc1", "the interpreter of triton 3.5.1+git needs numpy before 2.4"),
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
    reason = environment.interpreter_problem.__wrapped__()
    assert (reason is None) == (problem is None)
    assert problem is None or str(reason).startswith(problem)


def test_triton_backends_are_unavailable_if_the_interpreter_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "interpreter_problem", lambda: "broken")
    operator = get_operator("grouped_gemm")
    assert why_unavailable(operator, "triton_flat", Target("cpu", "fp16", interpreted=True)) == "broken"
    assert why_unavailable(operator, "torch_loop", Target("cpu", "fp16", interpreted=True)) is None
    assert why_unavailable(operator, "triton_flat", Target("cuda", "fp16", capability=(9, 0))) is None


DRIVER = """
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int *count) {{ *count = {gpus}; return 0; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
"""
# ((cuInit, GPUs, CUDA version) of the driver or None, torch's CUDA, torch sees a GPU, result, torch is imported)
DRIVERS = {
    "a GPU": ((0, 1, 13000), "'13.0'", False, True, False),
    "a newer driver": ((0, 8, 13010), '"12.8"', False, True, False),
    "a driver too old for torch": ((0, 1, 12080), "'13.0'", False, False, True),
    "no GPU": ((0, 0, 13000), "'13.0'", False, False, True),
    "a driver that fails": ((100, 1, 13000), "'13.0'", True, True, True),
    "no driver": (None, "'13.0'", False, False, True),
    "torch for CPUs": ((0, 1, 13000), "None", False, False, True),
    "torch for ROCm": (None, "None", True, True, True),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="NOT TESTED: the CUDA driver's answers. It needs a C compiler")
@pytest.mark.parametrize(("driver", "cuda", "visible", "result", "imported"), DRIVERS.values(), ids=DRIVERS)
def test_torch_is_imported_only_if_the_driver_is_not_conclusive(
    driver: tuple[int, int, int] | None,
    cuda: str,
    visible: bool,
    result: bool,
    imported: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    (folder / "__init__.py").write_text(
        f"""open({str(tmp_path / "imported")!r}, "w").close()
class cuda:
    is_available = staticmethod(lambda: {visible})
"""
    )
    library = tmp_path / "libcuda.so.1"
    if driver is None:
        library.write_text("")  # precedes this machine's own driver, and cannot be loaded
    else:
        init, gpus, version = driver
        (tmp_path / "driver.c").write_text(DRIVER.format(init=init, gpus=gpus, version=version))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[folder]))
    assert environment._torch_sees_gpu() is result
    assert (tmp_path / "imported").exists() is imported


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    built_for = torch.version.cuda
    assert environment._cuda_of_torch() == (int(built_for.split(".")[0]) if built_for else None)
