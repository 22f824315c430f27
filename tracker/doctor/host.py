"""Check the host: its CPU, its load, and the tools that measuring needs. Nothing is changed."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker.doctor.check import Check, unless
from groupbench.tracker.facts.environment import installed_version

PACKAGES = {
    "torch": "nothing but NumPy benchmarks can be measured without it",
    "triton": "Triton kernels need it",
    "helion": "Helion kernels need it",
    "psutil": "it shows other processes' share of the machine",
    "plotly": "`groupbench report` needs it",
}
"""Packages, and why each is needed."""

BUSY = 0.5
"""Load average per CPU above which other processes affect latencies of microseconds."""


def host() -> Iterator[Check]:
    """Yield the checks of the host."""
    yield Check("host", "system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs")
    yield Check("host", "python", f"{platform.python_version()} ({sys.executable})")
    for name, why in PACKAGES.items():
        version = installed_version(name)
        yield unless(version is None, "host", name, version or "missing", why, f"python -m pip install {name}")
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is not None:
        why = "the CPU's clock follows its load, which changes launch times and everything timed on the CPU"
        command = "sudo cpupower frequency-set -g performance"
        yield unless(governor != "performance", "host", "CPU governor", governor, why, command)
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    why = "on a busy machine, threads that wait for each other take up to a thousand times as long"
    yield unless(threads != "1", "host", "CPU threads", threads, why, "unset OMP_NUM_THREADS")
    why = "other processes slow down launches and everything timed on the CPU: wait until they end"
    command = "ps -eo pid,user,pcpu,etime,args --sort=-pcpu | head"
    yield unless(load > BUSY * cpus, "host", "load", f"{load:.1f} on {cpus} CPUs", why, command)
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    for name, exists, why, packages in (
        ("C compiler", any(map(shutil.which, compilers)), "Triton compiles a C launcher for each kernel on a GPU",
         "gcc libc6-dev"),
        ("Python.h", header.exists(), "Triton's C launchers include it", "python3-dev"),
        ("git", shutil.which("git"), "records name their commit, and `ab`, `confirm` and `bisect` check out commits",
         "git"),
    ):  # fmt: skip
        if not exists:
            yield Check("host", name, "missing", "better", why, f"sudo apt-get install {packages}")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
