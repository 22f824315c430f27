"""Check this machine for measuring: a list of checks, each with a command that improves the result.

Facts about GPUs come from NVML (gpu.py). Facts about torch and the kernels come from a process of the operators, since
the tracker imports neither. Nothing is changed, and the database is not migrated.
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
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.doctor.check import Check, unless
from groupbench.tracker.doctor.gpu import gpus
from groupbench.tracker.facts.environment import installed_version
from groupbench.tracker.facts.measured_tree import with_folders
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.project import Project

MODULE = "groupbench.operators.inventory"
IMPORT_LIMIT_S = 300.0
"""Time limit for the first import of torch, triton and helion from a slow disk."""

PACKAGES = {
    "nvidia-ml-py": ("clocks, temperature and throttling for each burst", "nvidia-ml-py"),
    "psutil": ("other processes' share of the machine", "psutil"),
    "plotly": ("`groupbench report`", "'groupbench[report]'"),
}
"""Optional packages: the feature that each provides, and its name for pip."""

FREE_GIB = 5.0
"""Free space to recommend: enough for compiled kernels, records and several years of database."""

SQLITE = (3, 35)
"""The oldest SQLite that can drop columns, as migrations do."""

BUSY = 0.5
"""Load average per CPU above which other processes affect latencies of microseconds."""


@dataclass(frozen=True)
class Checkup:
    """The result of all checks.

    Attributes:
        device: Device that would be measured on: cuda, cpu, or None if nothing can be measured.
        operators: Operator -> backends that run here.
        findings: Checks, in the order in which they are printed.
    """

    device: str | None
    operators: dict[str, tuple[str, ...]]
    findings: tuple[Check, ...]

    @property
    def measures(self) -> bool:
        return any(self.operators.values())

    def flat(self) -> dict[str, Any]:
        return {"measures": self.measures, **asdict(self)}


def examine(database: str, project: Project) -> Checkup:
    """Check the machine. This takes as long as importing torch, triton and helion."""
    inventory, trouble = take_inventory(project)
    cards = list(gpus())
    findings = [*_software(inventory, trouble, cards), *cards, *_host(), *_storage(database)]
    operators = {entry["operator"]: tuple(entry["available"]) for entry in inventory.get("operators", ())}
    device = inventory.get("device") if any(operators.values()) else None
    return Checkup(device, operators, (*_operators(inventory), *findings))


def take_inventory(project: Project) -> tuple[dict[str, Any], str | None]:
    """Return (the operators' inventory of this machine, None), or ({}, the reason why there is no inventory)."""
    if importlib.util.find_spec("torch") is None:  # only looks at folders
        return {}, None
    try:
        command = own_program(MODULE, *project.placed_plugins())
        environment = with_folders(project.python_path(), os.environ)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {}, f"did not finish within {IMPORT_LIMIT_S:.0f} s"
    except OSError as error:
        return {}, str(error.strerror)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    try:
        return msgspec.json.decode(done.stdout), None
    except msgspec.DecodeError:
        return {}, f"ended with exit code {done.returncode}: {last}"


def _operators(inventory: dict[str, Any]) -> Iterator[Check]:
    for entry in inventory.get("operators", ()):
        names = ", ".join(entry["available"]) or "none"
        yield Check("operators", entry["operator"], f"{names} ({entry['dtype']})")
        for backend, reason in entry["unavailable"].items():
            yield Check("operators", f"{entry['operator']} {backend}", f"unavailable: {reason}")


def _software(inventory: dict[str, Any], trouble: str | None, cards: list[Check]) -> Iterator[Check]:
    yield Check("software", "python", f"{platform.python_version()} ({sys.executable})")
    yield Check("software", "groupbench", installed_version("groupbench") or "not installed")
    if trouble is not None:
        command = f"{sys.executable} -m {MODULE}"
        yield Check("software", "operators", "cannot be listed", "broken", trouble, command)
    for name in ("torch", "triton", "helion"):
        yield from _package(name, inventory)
    yield _tritonbench(inventory)
    if inventory.get("error"):
        yield Check(
            "software", "backends", "cannot be listed", "broken", inventory["error"], "tritonbench --list-backends"
        )
    if _has_card(cards) and "packages" in inventory and inventory.get("device") == "cpu":
        why = "this machine has a GPU that torch does not see"
        build = f"built for CUDA {inventory['cuda']}" if inventory.get("cuda") else "built without CUDA"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            yield Check(
                "software", "GPU", "hidden", "broken", "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
            )
        elif inventory.get("cuda"):
            check = f"{sys.executable} -c 'import torch; torch.zeros(1).cuda()'"
            yield Check("software", "GPU", f"torch is {build}", "broken", f"{why}; the command shows why", check)
        else:
            command = (
                "python -m pip install --force-reinstall -c ci/constraints.txt torch    # from an index of CUDA builds"
            )
            yield Check("software", "GPU", f"torch is {build}", "broken", why, command)
    elif inventory.get("device") == "cpu":
        text = "torch backends are timed; Triton and Helion kernels are interpreted, which checks results but not speed"
        yield Check("software", "without a GPU", text)
    for name, (feature, pip) in PACKAGES.items():
        if installed_version(name) is None:
            yield Check("software", name, "missing", "better", f"provides {feature}", f"python -m pip install {pip}")


def _package(name: str, inventory: dict[str, Any]) -> Iterator[Check]:
    """Yield whether a package is installed and can be imported together with the others.

    Incompatible versions fail at that import.
    """
    number, error = _installed(name, inventory)
    pinned = f"python -m pip install -c ci/constraints.txt {name}"
    if number is None:
        why = "nothing can be measured without it" if name == "torch" else f"{name.capitalize()} kernels need it"
        yield Check("software", name, "missing", "broken" if name == "torch" else "better", why, pinned)
    elif error:
        why = f"cannot be imported together with the others: {error}"
        yield Check("software", name, number, "broken", why, f"{pinned} torch triton helion")
    else:
        built = f", CUDA {inventory['cuda']}" if name == "torch" and inventory.get("cuda") else ""
        yield Check("software", name, f"{number}{built}")


def _tritonbench(inventory: dict[str, Any]) -> Check:
    number, error = _installed("tritonbench", inventory)
    if number is None:
        return Check("software", "tritonbench", "not installed: the built-in host is used")
    command = "python -m pip install -e '.[tritonbench]'    # or: tritonbench --host builtin"
    return unless(bool(error), "software", "tritonbench", number, error, command)


def _installed(name: str, inventory: dict[str, Any]) -> tuple[str | None, str]:
    """Return a package's version, and why it cannot be imported."""
    entry: dict[str, Any] = next((p for p in inventory.get("packages", ()) if p["name"] == name), {})
    number = entry["version"] if entry else installed_version(name)
    return None if number is None else str(number), entry.get("error") or ""


def _has_card(cards: list[Check]) -> bool:
    return any(finding.name == "model" for finding in cards)


def _host() -> Iterator[Check]:
    yield Check("host", "system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs")
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is not None:
        why = "the CPU's clock follows its load, which changes launch times and everything timed on the CPU"
        command = "sudo cpupower frequency-set -g performance"
        yield unless(governor != "performance", "host", "CPU governor", governor, why, command)
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads == "1":
        yield Check("host", "CPU threads", "1: groupbench's default, so that no thread waits for another")
    else:
        why = "on a busy machine, threads that wait for each other take up to a thousand times as long"
        yield Check("host", "CPU threads", threads, "better", why, "unset OMP_NUM_THREADS")
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


def _storage(database: str) -> Iterator[Check]:
    if sqlite3.sqlite_version_info < SQLITE:
        why = f"{SQLITE[0]}.{SQLITE[1]} or newer is required"
        command = "use a newer Python, which includes a newer SQLite"
        yield Check("storage", "SQLite", sqlite3.sqlite_version, "broken", why, command)
    else:
        yield Check("storage", "SQLite", sqlite3.sqlite_version)
    yield _database(database)
    folders = {"temporary files": Path(tempfile.gettempdir()), "compiled kernels": _existing(_triton_cache())}
    if "://" not in database:
        folders["database's folder"] = _existing(Path(database).resolve().parent)
    for name, folder in folders.items():
        free = shutil.disk_usage(folder).free / 2**30
        text = f"{free:.1f} GiB free in {folder}"
        if not os.access(folder, os.W_OK):
            yield Check(
                "storage", name, f"{folder} cannot be written", "broken", "files cannot be stored", f"ls -ld {folder}"
            )
        else:
            command = f"du -xh {folder} | sort -h | tail"
            yield unless(free < FREE_GIB, "storage", name, text, f"less than {FREE_GIB:.0f} GiB", command)


def _database(location: str) -> Check:
    from groupbench.tracker.facts.errors import StoreError
    from groupbench.tracker.store import engine, schema

    shown = location if "://" not in location else location.partition("://")[0]
    if "://" not in location and not Path(location).exists():
        return Check("storage", "database", f"{shown}: does not exist yet; `groupbench ingest FILE` creates it")
    try:
        revision = engine.revision_of(location)
    except StoreError as error:
        return Check("storage", "database", shown, "broken", error.message, "groupbench db verify")
    if revision == schema.HEAD:
        return Check("storage", "database", f"{shown}: revision {revision}, the newest")
    if revision is None:
        return Check("storage", "database", f"{shown}: empty; `groupbench ingest FILE` creates its tables")
    if revision in schema.REVISIONS:
        why = f"written by an older groupbench; the next command migrates it to {schema.HEAD}, and copies a file first"
        return Check("storage", "database", f"{shown}: revision {revision}", "better", why, "groupbench list runs")
    why = "written by a newer groupbench than this one"
    return Check("storage", "database", f"{shown}: revision {revision}", "broken", why, "git pull, and install again")


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
