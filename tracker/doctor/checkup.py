"""What this machine can measure, and what would make it measure better: findings, each with the command that mends it.

Facts of GPUs come from NVML (doctor_gpu.py), those of torch and the kernels from a process of the operators, since the
tracker knows neither. Nothing is changed, and the database is not migrated.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

Level = Literal["fact", "better", "broken"]
"""fact: so it is. better: it could be. broken: something cannot be measured or stored because of it."""

MODULE = "groupbench.operators.inventory"
TIMEOUT_S = 300.0
"""For the first import of torch, triton and helion on a slow disk."""

PACKAGES = {
    "nvidia-ml-py": ("clocks, temperature and throttling beside each burst", "nvidia-ml-py"),
    "psutil": ("other processes' share of the machine", "psutil"),
    "plotly": ("`groupbench report`", "'groupbench[report]'"),
}
"""Packages that may be missing: what they give, and what pip calls them."""

FREE_GIB = 5.0
"""Compiled kernels, records and the database of some years fit in it."""

SQLITE = (3, 35)
"""The oldest SQLite that drops columns, as migrations do."""

BUSY = 0.5
"""Load average for each CPU from which others' work shows in latencies of microseconds."""


@dataclass(frozen=True)
class Finding:
    """One fact, and what to do about it: `why` it matters, and the `command` that mends it."""

    area: str
    name: str
    value: str
    level: Level = "fact"
    why: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Checkup:
    """device     what would be measured on: cuda or cpu; None where nothing can be
    operators  operator -> backends that run here
    findings   of the machine, in the order in which they are told
    """

    device: str | None
    operators: dict[str, tuple[str, ...]]
    findings: tuple[Finding, ...]

    @property
    def measures(self) -> bool:
        return any(self.operators.values())

    def flat(self) -> dict[str, Any]:
        return {"measures": self.measures, **asdict(self)}


def examine(database: str) -> Checkup:
    """Look at the machine; takes as long as importing torch, triton and helion."""
    from groupbench.tracker.doctor.gpu import gpus

    inventory, trouble = take_inventory()
    cards = list(gpus())
    findings = [*_software(inventory, trouble, cards), *cards, *_host(), *_storage(database)]
    operators = {found["operator"]: tuple(found["available"]) for found in inventory.get("operators", ())}
    device = inventory.get("device") if any(operators.values()) else None
    return Checkup(device, operators, (*_operators(inventory), *findings))


def take_inventory() -> tuple[dict[str, Any], str | None]:
    """(what the operators say of this machine, why they say nothing)."""
    if importlib.util.find_spec("torch") is None:  # looks at the folders alone
        return {}, None
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {}, f"did not answer within {TIMEOUT_S:.0f} s"
    except OSError as error:
        return {}, str(error.strerror)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    try:
        return msgspec.json.decode(done.stdout), None
    except msgspec.DecodeError:
        return {}, f"ended with {done.returncode}: {last}"


def _operators(inventory: dict[str, Any]) -> Iterator[Finding]:
    for found in inventory.get("operators", ()):
        names = ", ".join(found["available"]) or "none"
        yield Finding("operators", found["operator"], f"{names} ({found['dtype']})")
        for backend, reason in found["unavailable"].items():
            yield Finding("operators", f"{found['operator']} {backend}", f"unavailable: {reason}")


def _software(inventory: dict[str, Any], trouble: str | None, cards: list[Finding]) -> Iterator[Finding]:
    yield Finding("software", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("software", "groupbench", _version("groupbench") or "not installed")
    if trouble is not None:
        command = f"{sys.executable} -m {MODULE}"
        yield Finding("software", "operators", "cannot be asked", "broken", trouble, command)
    for name in ("torch", "triton", "helion"):
        yield from _package(name, inventory)
    yield _tritonbench(inventory)
    if inventory.get("error"):
        yield Finding(
            "software", "backends", "cannot be listed", "broken", inventory["error"], "tritonbench --list-backends"
        )
    if _has_card(cards) and "packages" in inventory and inventory.get("device") == "cpu":
        why = "this machine has a GPU, and torch does not see it"
        build = f"built for CUDA {inventory['cuda']}" if inventory.get("cuda") else "built without CUDA"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            yield Finding(
                "software", "GPU", "hidden", "broken", "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
            )
        elif inventory.get("cuda"):
            check = f"{sys.executable} -c 'import torch; torch.zeros(1).cuda()'"
            yield Finding("software", "GPU", f"torch is {build}", "broken", f"{why}; it says why", check)
        else:
            command = (
                "python -m pip install --force-reinstall -c ci/constraints.txt torch    # from an index with CUDA's"
            )
            yield Finding("software", "GPU", f"torch is {build}", "broken", why, command)
    elif inventory.get("device") == "cpu":
        text = "torch's backends are timed; Triton's and Helion's are interpreted: results are checked, speed is not"
        yield Finding("software", "without a GPU", text)
    for name, (gives, pip) in PACKAGES.items():
        if _version(name) is None:
            yield Finding("software", name, "missing", "better", f"gives {gives}", f"python -m pip install {pip}")


def _package(name: str, inventory: dict[str, Any]) -> Iterator[Finding]:
    """Installed, and can be imported beside the others: versions that do not go together say so then."""
    found = next((p for p in inventory.get("packages", ()) if p["name"] == name), None)
    number = found["version"] if found else _version(name)
    pinned = f"python -m pip install -c ci/constraints.txt {name}"
    if number is None:
        why = "nothing is measured without it" if name == "torch" else f"{name.capitalize()} kernels need it"
        yield Finding("software", name, "missing", "broken" if name == "torch" else "better", why, pinned)
    elif found and found.get("error"):
        why = f"cannot be imported beside the others: {found['error']}"
        yield Finding("software", name, str(number), "broken", why, f"{pinned} torch triton helion")
    else:
        built = f", CUDA {inventory['cuda']}" if name == "torch" and inventory.get("cuda") else ""
        yield Finding("software", name, f"{number}{built}")


def _tritonbench(inventory: dict[str, Any]) -> Finding:
    found = next((p for p in inventory.get("packages", ()) if p["name"] == "tritonbench"), None)
    number = found["version"] if found else _version("tritonbench")
    if number is None:
        return Finding("software", "tritonbench", "not installed: the built-in host measures")
    if found and found.get("error"):
        command = "python -m pip install -e '.[tritonbench]'    # or: tritonbench --host builtin"
        return Finding("software", "tritonbench", str(number), "better", found["error"], command)
    return Finding("software", "tritonbench", str(number))


def _has_card(cards: list[Finding]) -> bool:
    return any(finding.name == "model" for finding in cards)


def _host() -> Iterator[Finding]:
    yield Finding("host", "system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs")
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is not None and governor != "performance":
        why = "the CPU's clock follows its load, which moves launch times and everything timed on the CPU"
        yield Finding("host", "CPU governor", governor, "better", why, "sudo cpupower frequency-set -g performance")
    elif governor is not None:
        yield Finding("host", "CPU governor", governor)
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads == "1":
        yield Finding("host", "CPU threads", "1: torch's default here, so that no thread waits for another")
    else:
        why = "a thread that waits for another on a busy machine takes up to a thousand times as long"
        yield Finding("host", "CPU threads", threads, "better", why, "unset OMP_NUM_THREADS")
    text = f"{load:.1f} on {cpus} CPUs"
    if load > BUSY * cpus:
        why = "others' work shows in launch times and in everything timed on the CPU: wait for it to end"
        yield Finding("host", "load", text, "better", why, "ps -eo pid,user,pcpu,etime,args --sort=-pcpu | head")
    else:
        yield Finding("host", "load", text)
    if shutil.which(os.environ.get("CC") or "cc") is None and not any(map(shutil.which, ("gcc", "clang"))):
        why = "Triton compiles a launcher in C for each kernel on a GPU"
        yield Finding("host", "C compiler", "missing", "better", why, "sudo apt-get install gcc libc6-dev")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        why = "Triton's launchers include it"
        yield Finding("host", "Python.h", "missing", "better", why, "sudo apt-get install python3-dev")
    if shutil.which("git") is None:
        why = "a record names its commit, and `ab`, `confirm` and `bisect` check commits out"
        yield Finding("host", "git", "missing", "better", why, "sudo apt-get install git")


def _storage(database: str) -> Iterator[Finding]:
    if sqlite3.sqlite_version_info < SQLITE:
        why = f"{SQLITE[0]}.{SQLITE[1]} or newer is needed"
        command = "use a newer Python, whose SQLite is newer"
        yield Finding("storage", "SQLite", sqlite3.sqlite_version, "broken", why, command)
    else:
        yield Finding("storage", "SQLite", sqlite3.sqlite_version)
    yield _database(database)
    folders = {"temporary files": Path(tempfile.gettempdir()), "compiled kernels": _existing(_triton_cache())}
    if "://" not in database:
        folders["database's folder"] = _existing(Path(database).resolve().parent)
    for name, folder in folders.items():
        free = shutil.disk_usage(folder).free / 2**30
        text = f"{free:.1f} GiB free in {folder}"
        if not os.access(folder, os.W_OK):
            yield Finding(
                "storage", name, f"{folder} cannot be written", "broken", "nothing can be put there", f"ls -ld {folder}"
            )
        elif free < FREE_GIB:
            yield Finding(
                "storage", name, text, "better", f"less than {FREE_GIB:.0f} GiB", f"du -xh {folder} | sort -h | tail"
            )
        else:
            yield Finding("storage", name, text)


def _database(location: str) -> Finding:
    from groupbench.tracker.errors import StoreError
    from groupbench.tracker.store import engine

    shown = location if "://" not in location else location.partition("://")[0]
    if "://" not in location and not Path(location).exists():
        return Finding("storage", "database", f"{shown}: none yet; `groupbench ingest FILE` makes one")
    try:
        revision = engine.revision_of(location)
    except StoreError as error:
        return Finding("storage", "database", shown, "broken", error.message, "groupbench verify")
    if revision == engine.HEAD:
        return Finding("storage", "database", f"{shown}: revision {revision}, the newest")
    if revision is None:
        return Finding("storage", "database", f"{shown}: empty; `groupbench ingest FILE` makes its tables")
    if revision in engine.REVISIONS:
        why = f"of an older groupbench; the next command migrates it to {engine.HEAD}, and leaves a copy of a file"
        return Finding("storage", "database", f"{shown}: revision {revision}", "better", why, "groupbench runs")
    why = "of a newer groupbench than this one"
    return Finding("storage", "database", f"{shown}: revision {revision}", "broken", why, "git pull, and install again")


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
