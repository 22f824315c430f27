"""Detect a run's environment: device, hardware, driver and versions, as far as they are known."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators.errors import UsageError
from groupbench.operators.measure import confine
from groupbench.operators.measure.deferred import torch
from groupbench.operators.measure.fingerprint import version_of
from groupbench.operators.measure.telemetry import Nvml
from groupbench.operators.measure.texts import storable
from groupbench.tracker.facts.environment import installed_version
from groupbench.tracker.facts.record import PACKAGE, Environment, cut

# Environment variables that change the compiled code or its execution.
SETTING_PREFIXES = (
    *("TRITON_", "HELION_", "TORCHINDUCTOR_", "PYTORCH_CUDA"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
# ... but for those that only say where things lie.
PLACES = ("_DIR", "_PATH", "_HOME", "_CACHE")


def resolve_device(requested: str) -> str:
    """Return "cuda" or "cpu" for the requested device or "auto", and set up this process to measure on it.

    A CPU gets Triton's interpreter, and one torch thread unless OMP_NUM_THREADS is set: on a busy machine a 0.1 ms
    product took 112 ms with two threads, since each waits for the unscheduled one.

    Raises UsageError if TRITON_INTERPRET contradicts the device.
    """
    device = requested
    if requested == "auto":
        device = "cuda" if _gpu_driver() and _torch_sees_gpu() else "cpu"
    if device == "cpu":
        # Read when kernels are defined, so before anything imports Triton, the fork server included.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    elif interpreted():
        raise UsageError("TRITON_INTERPRET is set: interpreted kernels run with --device cpu; unset it to use the GPU")
    return device


def host_threads() -> int:
    """Return the number of threads on which a backend may compute on a CPU."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(setting) if setting.isdecimal() and int(setting) else len(os.sched_getaffinity(0))


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET is set, by the user or, in a process for a CPU, by resolve_device."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off", "no")


@functools.cache
def interpreter_problem() -> str | None:
    """Return why Triton's interpreter cannot run kernels with these packages, or None if it can.

    Triton before 3.7 calls int() on a one-element array for loop bounds. NumPy 2.4 refuses this.
    """
    from packaging.version import Version

    try:
        triton, numpy = version("triton"), version("numpy")
    except PackageNotFoundError:
        return None
    if Version(triton).release < (3, 7) and Version(numpy).release >= (2, 4):
        return f"the interpreter of triton {triton} needs numpy before 2.4, not {numpy}: pip install 'numpy<2.4'"
    return None


def _gpu_driver() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "" and (
        Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    )


_ASK_DRIVER = """
import ctypes, sys
cuda, count, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or cuda.cuDriverGetVersion(ctypes.byref(version))
sys.exit(bool(failed) or count.value < 1 or version.value < int(sys.argv[1]))
"""


def _torch_sees_gpu() -> bool:
    """Return torch.cuda.is_available(), found out in another process: a process that opens the GPU cannot fork.

    If the driver has a GPU and serves torch's CUDA version, torch need not be imported, which takes seconds. In every
    other case torch is asked.
    """
    cuda = _cuda_of_torch()
    if cuda is not None and _succeeds("-I", "-S", "-c", _ASK_DRIVER, str(1000 * cuda)):
        return True
    return _succeeds("-c", "import sys, torch; sys.exit(not torch.cuda.is_available())")


def _cuda_of_torch() -> int | None:
    """Return the major CUDA version torch was built for, without importing torch; None if unknown."""
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text(errors="replace")
            match = re.search(r"^cuda\b.*= *['\"](\d+)\.", text, re.MULTILINE)
            return int(match[1]) if match else None
    return None


def _succeeds(*arguments: str) -> bool:
    return subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0


def examine(device: str) -> tuple[Environment, tuple[int, int] | None]:
    """Return this process's environment and the GPU's compute capability, None for "cpu".

    Raises UsageError if the device is "cuda" and torch finds no GPU.
    """
    from groupbench.kernels.device import cuda_capability

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA GPU here; use --device cpu to measure without one")
    detected = msgspec.structs.replace(detect(device), confinement=_confinement())
    return detected, cuda_capability() if device == "cuda" else None


def _confinement() -> str | None:
    """Return the means that confine the processes of cells on this machine, found by a process that tries them."""
    command = [sys.executable, "-I", "-S", confine.__file__]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def detect(device: str) -> Environment:
    """Return this process's environment. This imports torch, and opens the GPU if the device is "cuda"."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        uuid = f"GPU-{properties.uuid}"
        nvml = Nvml(uuid)
        limit = nvml.get("nvmlDeviceGetPowerManagementLimit")
        driver = _driver(nvml)
        facts: dict[str, Any] = {
            "gpu": properties.name,
            "gpu_uuid": uuid,
            "gpu_memory_mib": properties.total_memory >> 20,
            "sm_count": properties.multi_processor_count,
            "driver": driver,
            "cuda": torch.version.cuda,
            "power_limit_w": None if limit is None else limit / 1000,
            "max_sm_clock_mhz": nvml.get("nvmlDeviceGetMaxClockInfo", 1),
        }
    else:
        facts = {"cpu_threads": torch.get_num_threads()}
    facts |= {name: installed_version(name) for name in ("torch", "triton", "helion", "groupbench")}
    return Environment(
        device="cuda" if device == "cuda" else "cpu",
        cpu=cpu_model(),
        cpu_count=os.cpu_count(),
        memory_mib=(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20,
        os=f"{platform.system()} {platform.release()}",
        host=storable(platform.node()) or None,
        python=platform.python_version(),
        tritonbench=tritonbench_version(),
        settings={
            storable(key): cut(storable(value))
            for key, value in sorted(os.environ.items())
            if key.startswith(SETTING_PREFIXES) and not key.endswith(PLACES)
        },
        **facts,
    )


def with_packages(detected: Environment, packages: Iterable[str]) -> Environment:
    """Return the environment with the installed further packages' versions in the settings."""
    versions = {f"{PACKAGE}{name}": installed_version(name) for name in packages}
    installed = {name: storable(version) for name, version in versions.items() if version}
    return msgspec.structs.replace(detected, settings=detected.settings | installed) if installed else detected


def with_variables(detected: Environment, variables: Mapping[str, str | None]) -> Environment:
    """Return the environment with the variables that a backend's plugin has changed, in its settings."""
    changed = {storable(name): storable(value or "") for name, value in variables.items()}
    return msgspec.structs.replace(detected, settings=detected.settings | changed) if changed else detected


def without_packages(detected: Environment) -> Environment:
    """Return the environment for backends without further packages."""
    settings = {name: value for name, value in detected.settings.items() if not name.startswith(PACKAGE)}
    return msgspec.structs.replace(detected, settings=settings)


def tritonbench_version() -> str | None:
    """Return the version with the commit installed by pip, since the version never changes; "source" for a path."""
    try:
        return version_of("tritonbench")
    except PackageNotFoundError:
        # Not hosts.has_tritonbench: this code also measures older trees, which lack it.
        return "source" if importlib.util.find_spec("tritonbench") else None


def _driver(nvml: Nvml) -> str | None:
    if not nvml:
        return None
    driver = nvml._nvml.nvmlSystemGetDriverVersion()
    return driver.decode() if isinstance(driver, bytes) else driver


def cpu_model() -> str | None:
    """Return this machine's processor name, or else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None
