"""Profile one call with ncu, in a separate process, after the latency was measured.

ncu runs each kernel several times to count everything, with the caches flushed before each time, which slows the
call down. So its time is a metric separate from the latency, and no profile metric is judged.
"""

from __future__ import annotations

import csv
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.operators.measure import warden
from groupbench.operators.measure.costs import MIB
from groupbench.operators.measure.folders import caches_in, of_party
from groupbench.operators.measure.texts import joined_lines, one_line
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.measured_tree import add_measured_folders
from groupbench.tracker.facts.metrics import NCU
from groupbench.tracker.text.scratch import Scratch

MODULE = "groupbench.operators.measure.profiled"
JOB = "job"
"""File with the job, in the folder of a profile."""

PERMISSION = (
    "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run it as root, or load the driver "
    "with NVreg_RestrictProfilingToAdminUsers=0"
)
_SHORT = 300
PRINTED = 1 << 20
"""Bytes at the end of a tool's output that are searched for its error."""
PROFILE_BYTES = 64 << 20
"""Maximum size of a file of results."""
NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
"""A number as ncu writes it under the C locale, such as 1,234.5. Under another locale, a comma begins the decimals."""


class ProfileError(Exception):
    """A call could not be profiled. The message is one line with the reason and the next step."""


@dataclass(frozen=True)
class Counter:
    """A metric from ncu's counters.

    Attributes:
        names: Ncu's metrics, which are added up.
        units: Factor to the metric's unit by ncu's unit, which depends on the size of the value.
        shared: Combine kernels by the mean, weighted by their time, instead of the sum.
    """

    metric: str
    names: tuple[str, ...]
    units: Mapping[str, float]
    shared: bool = False


_MS = {"nsecond": 1e-6, "usecond": 1e-3, "msecond": 1.0, "second": 1e3}
_MS |= {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}  # newer versions of ncu
_MIB = {"byte": 1 / MIB, "Kbyte": 1e3 / MIB, "Mbyte": 1e6 / MIB, "Gbyte": 1e9 / MIB}
_SHARE = {"%": 0.01}

TIME = "gpu__time_duration.sum"
COUNTERS = (
    Counter("ncu_ms", (TIME,), _MS),
    Counter("dram_mib", ("dram__bytes_read.sum", "dram__bytes_write.sum"), _MIB),
    Counter("dram_share", ("dram__throughput.avg.pct_of_peak_sustained_elapsed",), _SHARE, shared=True),
    Counter("l2_share", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",), _SHARE, shared=True),
    Counter("l2_hit_share", ("lts__t_sector_hit_rate.pct",), _SHARE, shared=True),
    Counter("tensor_share", ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",), _SHARE, shared=True),
    Counter("achieved_occupancy", ("sm__warps_active.avg.pct_of_peak_sustained_active",), _SHARE, shared=True),
)


def check(device: str) -> None:
    """Raise UsageError if ncu cannot profile here, with the remedy."""
    if device != "cuda":
        raise UsageError(f"{NCU} profiles kernels on a GPU, and this measures on a CPU: run it on a machine with one")
    if shutil.which(NCU) is None:
        raise UsageError(
            "ncu is not on the PATH: install Nsight Compute, which is part of the CUDA toolkit, or extend PATH"
        )


def profile(job: Job, timeout_s: float) -> dict[str, float]:
    """Return the metrics of one profiled call. Raises ProfileError."""
    with Scratch("profile") as folder:
        operator = (job.operator, job.plugins, job.mode)
        (folder / JOB).write_bytes(pickle.dumps((operator, pickle.dumps(job))))
        log, output = folder / "log", folder / "output"
        caches = of_party(job.plugins)
        command = [*_ncu(log), sys.executable, "-m", MODULE, str(folder), str(caches)]
        code = _run(command, output, timeout_s, caches_in(caches))
        printed = "\n".join(_end(file) for file in (log, output))
        if code is None:
            raise ProfileError(f"no result within {timeout_s:g} s; a longer --timeout may help")
        if problem := _problem(code, printed):
            raise ProfileError(problem)
        return of_csv(_whole(log))


def _end(file: Path) -> str:
    """Return a file's last PRINTED bytes as text; nothing if it does not exist."""
    if not file.is_file():
        return ""
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - PRINTED))
        return lines.read(PRINTED).decode(errors="replace")


def _whole(file: Path) -> str:
    """Return a result file's text. Raises ProfileError if ncu did not write it, or wrote too much."""
    if not file.is_file():
        raise ProfileError("it ended without an error, but wrote no results")
    if file.stat().st_size > PROFILE_BYTES:
        raise ProfileError(f"its results have more than {PROFILE_BYTES >> 20} MiB: the call launches too many kernels")
    return file.read_text(errors="replace")


def _ncu(log: Path) -> list[str]:
    names = ",".join(name for counter in COUNTERS for name in counter.names)
    return [
        shutil.which(NCU) or NCU,
        *("--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--log-file", str(log), "--metrics", names),
    ]


def _run(command: list[str], output: Path, timeout_s: float, variables: dict[str, str]) -> int | None:
    """Return a command's exit code, or None if it did not end in time. Kills the rest of the process group."""
    # ncu keeps its report in TMPDIR, and leaves it there if it is killed.
    environment = {**add_measured_folders(os.environ), "TMPDIR": str(output.parent), "LC_ALL": "C.UTF-8"} | variables
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
                preexec_fn=warden.die_with_parent,
            )  # fmt: skip
    except OSError as error:
        raise ProfileError(f"{command[0]} does not start: {error.strerror}") from None
    try:
        ended = warden.wait_for_group(process.pid, timeout_s)
    finally:
        code = process.wait()
    return code if ended else None


def _problem(code: int, printed: str) -> str | None:
    """Return why a profile failed, from the exit code and all output; None if it did not fail."""
    if "ERR_NVGPUCTRPERM" in printed:
        return PERMISSION
    lines = printed.splitlines()
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    if any("unrecognised option" in error or "unrecognized option" in error for error in errors):
        return f"this ncu is too old ({_short(errors[0])}): install Nsight Compute 2022 or newer"
    if any("driver resource was unavailable" in line for line in lines):
        return "another tool, such as DCGM, holds the GPU's performance counters: stop or pause it"
    if errors and "application returned an error code" not in errors[0]:
        return f"it reports an error: {_short(errors[0])}"
    if errors or code:
        words = [line for line in lines if line.strip() and not line.startswith("==")]
        return f"the profiled process ended with exit code {code}: {_short(words[-1] if words else 'it wrote nothing')}"
    return None


def _short(text: str) -> str:
    return one_line(joined_lines(text))[:_SHORT]


def of_csv(text: str) -> dict[str, float]:
    """Return a call's metrics from ncu's raw page: a column for each metric, a line of units, a row for each kernel.

    Raises ProfileError for anything else, another unit, or an impossible value.
    """
    units, *kernels = _raw_page(text)

    def values(name: str, factors: Mapping[str, float]) -> list[float]:
        numbers = [_number(name, kernel.get(name, "")) for kernel in kernels]
        unit = units.get(name, "")
        if unit not in factors and any(map(math.isfinite, numbers)):
            raise ProfileError(f"its unit of {name} is {unit!r}, not one of {', '.join(factors)}")
        return [number * factors.get(unit, math.nan) for number in numbers]

    times = values(TIME, _MS)
    if not all(time > 0 for time in times):
        raise ProfileError(f"its CSV has a kernel without {TIME}")
    metrics = {}
    for counter in COUNTERS:
        columns = [values(name, counter.units) for name in counter.names]
        each = [sum(of_kernel) for of_kernel in zip(*columns, strict=True)]
        metrics[counter.metric] = _mean(each, times) if counter.shared else sum(each)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _raw_page(text: str) -> list[dict[str, str]]:
    """Parse ncu's output. Raises ProfileError if it has no page, or not a whole one."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ProfileError("the profiler counted nothing, because the call launched no kernel")
    try:
        rows = [*csv.DictReader(lines[start:])]
    except csv.Error as error:
        raise ProfileError(f"its CSV could not be read: {error}") from None
    if len(rows) < 2 or any(None in row or None in row.values() for row in rows):
        raise ProfileError("its CSV has no line of units, or a line with other columns")
    return rows


def _number(name: str, text: str) -> float:
    """Parse 1,234.5; NaN for a metric unknown to the GPU or the kernel."""
    if text.strip().lower() in ("", "n/a", "nan", "inf", "-nan"):
        return math.nan
    number = float(text.replace(",", "")) if NUMBER.fullmatch(text) else math.nan
    if not 0 <= number < math.inf:
        raise ProfileError(f"its {name} is {_short(repr(text))}, not a number of at least 0")
    return number


def _mean(values: list[float], weights: list[float]) -> float:
    """Return the weighted mean over the known values; NaN without any."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else math.nan
