"""Profiles: ncu's CSV with its units, the way through a fake ncu, and one clear sentence for each thing in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from measured import measure

from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.measure import confine, profiler
from groupbench.operators.measure.costs import ALL
from groupbench.operators.measure.profiler import COUNTERS, TIME, ProfileError, of_csv
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.metrics import METRICS, NCU
from groupbench.tracker.facts.record import Record

pytestmark = pytest.mark.usefixtures("unaudited")
JOB = Job(
    "grouped_gemm", "torch_loop", "G=2,M_g=16,N=64,K=64", "fp16", "cpu", protocol=Protocol(bursts=1, samples=2),
    costs=(NCU,),
)  # fmt: skip
NAMES = [name for counter in COUNTERS for name in counter.names]
UNITS = ["us", "Mbyte", "Kbyte", "%", "%", "%", "%", "%"]
FACTS = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]

FAKE = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
kind = os.environ["FAKE_NCU"]
if kind == "old":
    sys.exit("==ERROR== unrecognised option '--csv'. Use --help for further details.")
at = arguments.index({python!r})
options, command = arguments[:at], arguments[at:]
values = dict(zip(options, options[1:]))
assert values["--clock-control"] == "none" and values["--cache-control"] == "all", options
assert values["--profile-from-start"] == "off" and values["--page"] == "raw" and "--csv" in options, options
assert values["--metrics"].split(",") == {names!r}, options
assert command[1:3] == ["-m", "groupbench.operators.measure.profiled"], command
open(os.environ["TMPDIR"] + "/nsight-compute-lock", "w").close()
print("==PROF== Connected to process 1", flush=True)
if kind == "hang":
    subprocess.run(["sleep", "600"])
code = subprocess.run(command).returncode if kind == "fine" else 0
if kind == "silent":
    sys.exit(0)
log = open(values["--log-file"], "w")
if kind == "forbidden":
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance", file=log)
    sys.exit(1)
if kind == "busy":
    print("==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other", file=log)
    sys.exit(9)
if kind == "endless":
    with open(values["--log-file"], "w") as log:
        log.truncate(1 << 40)
    os.truncate(1, 1 << 40)
    sys.exit(0)
if kind == "nothing":
    print("==WARNING== No kernels were profiled.", file=log)
    sys.exit(0)
print({csv!r}, file=log)
sys.exit(code)
"""


def page(*kernels: list[str], units: list[str] = UNITS, names: list[str] = NAMES) -> str:
    """Return ncu's raw page for kernels, each given by the values of its metrics."""
    rows = [[*FACTS, *names], [""] * len(FACTS) + units]
    rows += [[str(n), "1", "python", "host", f"k{n}(int, int)", "1", "7", *kernel] for n, kernel in enumerate(kernels)]
    lines = [",".join(f'"{value}"' for value in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1 (/usr/bin/python3.11)", *lines])


ONE = ["30.5", "1,048.576", "524.288", "50", "40", "25.5", "80", "12.5"]
OTHER = ["91.5", "2,097.152", "0", "10", "20", "n/a", "0", "50"]


@pytest.fixture(params=["fine"])
def ncu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fake = tmp_path / "bin" / "ncu"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(python=sys.executable, names=NAMES, csv=page(ONE, OTHER)))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NCU", request.param)
    return str(request.param)


# ---- the CSV


def test_kernels_are_added_up_and_shares_weighted_by_time() -> None:
    metrics = of_csv(page(ONE, OTHER))
    assert metrics == pytest.approx(
        {
            "ncu_ms": 0.122,
            "dram_mib": (1048.576e6 + 524.288e3 + 2097.152e6) / 2**20,
            "dram_share": 0.2,
            "l2_share": 0.25,
            "l2_hit_share": 0.255,  # of the only kernel that has it
            "tensor_share": 0.2,
            "achieved_occupancy": 0.40625,
        }
    )


@pytest.mark.parametrize(("unit", "ms"), [("ns", 30.5e-6), ("nsecond", 30.5e-6), ("msecond", 30.5), ("s", 30500.0)])
def test_a_time_has_the_unit_that_ncu_chose(unit: str, ms: float) -> None:
    assert of_csv(page(ONE, units=[unit, *UNITS[1:]]))["ncu_ms"] == pytest.approx(ms)


@pytest.mark.parametrize("place", range(len(UNITS)))
def test_an_unknown_unit_is_an_error(place: int) -> None:
    units = [*UNITS[:place], "furlong", *UNITS[place + 1 :]]
    with pytest.raises(ProfileError, match=rf"unit of {NAMES[place]} is 'furlong', not one of"):
        of_csv(page(ONE, units=units))


def test_a_metric_that_a_gpu_lacks_is_left_out() -> None:
    metrics = of_csv(page(["30.5", "n/a", *ONE[2:]], OTHER))
    assert "dram_mib" not in metrics and metrics["ncu_ms"] == pytest.approx(0.122)
    assert "dram_mib" not in of_csv(page(["30.5", "n/a", *ONE[2:]], units=["us", "", *UNITS[2:]]))
    assert "tensor_share" not in of_csv(page(ONE[:6], units=UNITS[:6], names=NAMES[:6]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("==WARNING== No kernels were profiled.", "the call launched no kernel"),
        (page(), "no line of units, or a line with other columns"),
        (page(ONE[1:]), "no line of units, or a line with other columns"),
        (page(["1 us", *ONE[1:]]), f"{TIME} is '1 us', not a number"),
        *(
            (page([text, *ONE[1:]]), f"{TIME} is {text!r}, not a number")
            for text in ("30,5", "1.048,576", "1,04", "-5", "1e999", "0x10", "\u0663", "1_0")
        ),
        (page(["9" * 200_000, *ONE[1:]]), "its CSV could not be read: field larger than"),
        (page(["n/a", *ONE[1:]]), f"a kernel without {TIME}"),
    ],
    ids=["empty", "no kernel", "short line", "text", *(f"number {n}" for n in range(8)), "long field", "no time"],
)
def test_a_page_that_does_not_hold_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ProfileError) as raised:
        of_csv(text)
    assert reason in str(raised.value)


def test_the_metrics_of_a_profile_are_registered_and_not_judged() -> None:
    made = [METRICS[counter.metric] for counter in COUNTERS]
    assert all(metric.rule is None and metric.cost == NCU for metric in made)
    assert {metric.name for metric in METRICS.values() if metric.cost == NCU} == {m.name for m in made}
    assert NCU not in ALL


# ---- the way through a process


def left() -> list[Path]:
    """Return the folders of profiles of this process that are left."""
    return list(Path(tempfile.gettempdir()).glob(f"groupbench-profile-{os.getpid()}-*"))


def measured(job: Job) -> tuple[Record, list[str]]:
    missed: list[str] = []
    (record,) = measure([job], progress=Progress(missed=missed.append))
    return record, missed


@pytest.mark.parametrize("content", [b"\x7fELF garbage", b"#!/no/such/interpreter\n", b""])
def test_a_profiler_that_does_not_start_is_an_error(content: bytes, ncu: str, tmp_path: Path) -> None:
    (tmp_path / "bin" / "ncu").write_bytes(content)
    with pytest.raises(ProfileError, match="bin/ncu does not start: "):
        profiler.profile(JOB, 60)
    assert not left()


def test_a_record_gets_the_counters_beside_its_latency(ncu: str) -> None:
    record, missed = measured(JOB)
    assert (record.status, missed) == ("ok", [])
    assert record.metrics["ncu_ms"] == pytest.approx(0.122) and record.latency is not None
    assert not left()


@pytest.mark.parametrize(
    ("ncu", "reason"),
    [
        ("forbidden", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("old", "this ncu is too old (unrecognised option '--csv'"),
        ("busy", "another tool, such as DCGM,"),
        ("nothing", "the call launched no kernel"),
        ("silent", "it ended without an error, but wrote no results"),
        ("endless", "its results have more than 64 MiB"),
    ],
    indirect=["ncu"],
)
def test_a_reason_names_the_remedy(ncu: str, reason: str) -> None:
    with pytest.raises(ProfileError) as raised:
        profiler.profile(JOB, 60)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert not left()


@pytest.mark.parametrize("ncu", ["forbidden"], indirect=True)
def test_a_record_without_counters_is_kept_and_reported(ncu: str) -> None:
    record, missed = measured(JOB)
    assert record.status == "ok" and "ncu_ms" not in record.metrics
    assert missed == [f"grouped_gemm/torch_loop {JOB.shape} fp16 has no profile. ncu: {profiler.PERMISSION}"]


@pytest.mark.parametrize("ncu", ["hang"], indirect=True)
def test_a_profile_that_hangs_is_ended(ncu: str) -> None:
    before = _sleepers()
    with pytest.raises(ProfileError, match=r"no result within 1.5 s; a longer --timeout"):
        profiler.profile(JOB, 1.5)
    until = time.monotonic() + 60  # a killed process is still listed until the kernel has ended it
    while _sleepers() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert _sleepers() == before
    assert not left()


def test_a_profiled_process_reaches_no_other(ncu: str, tmp_path: Path) -> None:
    if "landlock" not in (means := _means()) or int(means.split()[1].rstrip(",")) < 6:
        pytest.skip("this Linux cannot keep a process from sending signals")
    prying = tmp_path / "prying.py"
    prying.write_text("import os\nos.kill(os.getppid(), 0)\n")
    with pytest.raises(ProfileError, match="PermissionError"):
        profiler.profile(replace(JOB, plugins=(str(prying),)), 60)


def _means() -> str:
    command = [sys.executable, "-I", "-S", confine.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _sleepers() -> set[str]:
    """Return the processes that the fake leaves if it is not ended."""
    sleepers = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if text.split(b"\0")[:2] == [b"sleep", b"600"]:
            sleepers.add(process.name)
    return sleepers


def test_the_last_words_of_a_profiled_process_are_the_reason(ncu: str) -> None:
    with pytest.raises(ProfileError, match=r"ended with exit code 1: .*no_such"):
        profiler.profile(replace(JOB, operator="no_such"), 60)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cpu", "profiles kernels on a GPU"), ("cuda", "ncu is not on the PATH: install Nsight Compute")],
)
def test_what_cannot_run_is_named_before_anything_is_measured(
    device: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=reason):
        profiler.check(device)
