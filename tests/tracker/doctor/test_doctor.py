"""`groupbench doctor`: its checks, each problem with the command that fixes it. The GPUs are simulated."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nights import Cli

from groupbench.tracker.doctor import checkup, gpu
from groupbench.tracker.doctor.check import Check
from groupbench.tracker.project import Project
from groupbench.tracker.store import engine

Memory = namedtuple("Memory", "total")


class NVMLError(Exception):
    pass


class Pynvml:
    """NVIDIA's package as far as it is asked; a function without an answer is one that the card does not have."""

    NVMLError = NVMLError

    def __init__(self, cards: list[dict[str, Any]], error: str | None = None) -> None:
        self.cards, self.error = cards, error

    def nvmlInit(self) -> None:
        if self.error:
            raise NVMLError(self.error)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 99:
            raise NVMLError("Insufficient Permissions")
        return "python"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def __getattr__(self, name: str) -> Any:
        def ask(handle: dict[str, Any], *args: Any) -> Any:
            reading = handle.get(name.removeprefix("nvmlDeviceGet"))
            if reading is None:
                raise NVMLError("Not Supported")
            return reading[args] if isinstance(reading, dict) else reading

        if not name.startswith("nvmlDevice"):
            raise AttributeError(name)
        return ask


GOOD: dict[str, Any] = {
    "Name": "NVIDIA H100 80GB HBM3",
    "UUID": b"GPU-1",
    "MemoryInfo": Memory(80 * 2**30),
    "CudaComputeCapability": (9, 0),
    "ClockInfo": {(1,): 1590},
    "MaxClockInfo": {(1,): 1980, (2,): 2619},
    "CurrentClocksEventReasons": 0x2,
    "SupportedGraphicsClocks": [1980, 1590, 1575, 210],
    "Temperature": 31,
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "PersistenceMode": 1,
    "EccMode": (1, 1),
    "TotalEccErrors": 0,
    "MigMode": (0, 0),
    "ComputeRunningProcesses": [],
    "GraphicsRunningProcesses": [],
}
PROCESS = SimpleNamespace(pid=7, usedGpuMemory=3 * 2**30)

# name: (difference from the good card, (finding, its value, a part of its command))
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "free clocks": (
        {"CurrentClocksEventReasons": 0},
        ("SM clock", "free: 1590 MHz now, up to 1980", "0 -lgc 1590,1590"),
    ),
    "an idle card's clocks": ({"CurrentClocksEventReasons": 0x1}, ("SM clock", "free", "-lgc")),
    "hot": ({"CurrentClocksEventReasons": 0x42}, ("throttled", "HwThermalSlowdown", "-q -d PERFORMANCE")),
    "at its power limit": ({"CurrentClocksEventReasons": 0x6}, ("throttled", "SwPowerCap", "POWER")),
    "a lower power limit": ({"PowerManagementLimit": 500_000}, ("power limit", "500 W", "-pl 700")),
    "no persistence": ({"PersistenceMode": 0}, ("persistence", "off", "-pm 1")),
    "ECC about to change": ({"EccMode": (1, 0)}, ("ECC", "on", "-r")),
    "memory errors": ({"TotalEccErrors": 3}, ("memory errors", "3 uncorrected", "ROW_REMAPPER")),
    "slices": ({"MigMode": (1, 1)}, ("MIG", "on", "-mig 0")),
    "company": ({"ComputeRunningProcesses": [PROCESS]}, ("process", "7 python, 3072 MiB", "ps -fp 7")),
    "company of another container": (
        {"ComputeRunningProcesses": [SimpleNamespace(pid=99, usedGpuMemory=None)]},
        ("process", "99 (another container or user)", "ps -fp 99"),
    ),
}


def look(monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any], error: str | None = None) -> list[Check]:
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml(list(cards), error))  # type: ignore[arg-type]
    return list(gpu.gpus())


def test_a_card_that_is_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = look(monkeypatch, GOOD)
    assert {finding.level for finding in checks} == {"fact"}
    facts = {finding.name: finding.value for finding in checks}
    assert facts["driver"] == "580.159.04" and facts["CUDA of the driver"] == "13.0"
    assert facts["model"] == "NVIDIA H100 80GB HBM3, 80 GiB"
    assert facts["compute capability"].startswith("9.0: has TMA")
    assert facts["SM clock"] == "held at 1590 MHz of 1980"


@pytest.mark.parametrize(("unlike", "expected"), FAULTS.values(), ids=FAULTS)
def test_what_spoils_measurements(unlike: Any, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, value, command = expected
    (check,) = [finding for finding in look(monkeypatch, GOOD | unlike) if finding.level != "fact"]
    assert check.name == name and value in check.value and command in str(check.command) and check.why


def test_an_older_card_and_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"Name": "Tesla T4", "UUID": "GPU-2", "CudaComputeCapability": (7, 5)}  # and nothing else that it offers
    checks = look(monkeypatch, old, GOOD | {"PersistenceMode": 0})
    capability = next(finding.value for finding in checks if finding.name == "compute capability")
    assert capability == "7.5: no TMA, which some kernels need, no fp8"
    assert [(f.area, "-i 1 " in str(f.command)) for f in checks if f.level == "better"] == [("gpu 1", True)]


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = look(monkeypatch, error="Driver Not Loaded")
    assert check.level == "fact" and "Driver Not Loaded" in check.value


def test_without_nvidias_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (check,) = gpu.gpus()
    assert check.level == "better" and "nvidia-ml-py" in str(check.command)


# ---- software


VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "helion": "1.5.1"}
PACKAGES = [{"name": name, "version": version} for name, version in VERSIONS.items()]
OPERATOR = {"operator": "grouped_gemm", "dtype": "bf16", "available": ["torch_loop"], "unavailable": {"x": "why"}}


def inventory(**unlike: Any) -> dict[str, Any]:
    return {"device": "cuda", "cuda": "13.0", "packages": PACKAGES, "operators": [OPERATOR]} | unlike


CARD = [Check("gpu 0", "model", "H100")]
SOFTWARE: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "no CUDA": (inventory(device="cpu", cuda=None), ("GPU", "built without CUDA", "pip install --force-reinstall")),
    "a torch that does not see the card": (inventory(device="cpu"), ("GPU", "CUDA 13.0", "torch.zeros(1).cuda()")),
    "versions that do not go together": (
        inventory(packages=[*PACKAGES[:2], PACKAGES[2] | {"error": "ImportError: x"}]),
        ("helion", "1.5.1", "-c ci/constraints.txt helion torch triton"),
    ),
    "a lost plugin": (inventory(error="UsageError: p"), ("backends", "cannot be listed", "--list-backends")),
}


@pytest.mark.parametrize(("listing", "expected"), SOFTWARE.values(), ids=SOFTWARE)
def test_software_that_is_broken(listing: Any, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (check,) = broken_in(listing)
    assert (check.name, expected[1] in check.value, expected[2] in str(check.command)) == (expected[0], True, True)


def broken_in(listing: dict[str, Any]) -> list[Check]:
    return [finding for finding in checkup._software(listing, None, CARD) if finding.level == "broken"]


def test_software_that_is_whole_and_a_hidden_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_in(inventory()) == []
    assert any(finding.value == "2.13.0, CUDA 13.0" for finding in checkup._software(inventory(), None, CARD))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [finding.command for finding in broken_in(inventory(device="cpu"))] == ["unset CUDA_VISIBLE_DEVICES"]


ANSWERS = {
    "a crash": ("import os; os.abort()", "ended with exit code -6"),
    "an error": ("raise SystemExit('no such thing')", "no such thing"),
    "no JSON": ("print('hello')", "ended with exit code 0"),
}


@pytest.mark.parametrize(("code", "says"), ANSWERS.values(), ids=ANSWERS)
def test_operators_that_do_not_answer(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: real([sys.executable, "-c", code], **options))
    listing, trouble = checkup.take_inventory(Project())
    assert listing == {} and says in str(trouble)


# ---- host and storage


def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.os, "getloadavg", lambda: (50.0, 1.0, 1.0))
    monkeypatch.setattr(checkup, "_read", lambda path: "powersave")
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    checks = {finding.name: finding for finding in checkup._host() if finding.level == "better"}
    assert {"load", "CPU governor", "C compiler", "git"} <= set(checks)
    assert "cpupower frequency-set -g performance" in str(checks["CPU governor"].command)


@pytest.mark.parametrize(("threads", "level"), [(None, "fact"), ("1", "fact"), ("8", "better")])
def test_torch_threads_of_a_cpu(threads: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    (finding,) = (finding for finding in checkup._host() if finding.name == "CPU threads")
    assert (finding.level, finding.value[0]) == (level, threads or "1")


def test_the_database_as_it_lies_there(stored: Any, make: Any, tmp_path: Path) -> None:
    path = stored([make()])
    assert checkup._database(str(path)).level == "fact" and engine.HEAD in checkup._database(str(path)).value
    none = checkup._database(str(tmp_path / "none.db"))
    assert none.level == "fact" and not (tmp_path / "none.db").exists()
    broken = tmp_path / "broken.db"
    broken.write_text("no database at all")
    assert checkup._database(str(broken)).level == "broken"


@pytest.mark.sqlite
def test_an_old_database_is_not_migrated_by_looking(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((Path(__file__).parents[1] / "data" / "revision_0001.db.gz").read_bytes()))
    check = checkup._database(str(path))
    assert check.level == "better" and "0001" in check.value
    assert engine.revision_of(path) == "0001"


# ---- the command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    def be(listing: dict[str, Any]) -> None:
        monkeypatch.setattr(checkup, "take_inventory", lambda project: (listing, None))
        monkeypatch.setitem(sys.modules, "pynvml", Pynvml([GOOD | {"PersistenceMode": 0}]))  # type: ignore[arg-type]

    return be


def test_the_answer_comes_first_and_each_command_after_its_fault(cli: Cli, machine: Any) -> None:
    machine(inventory())
    result = cli("doctor")
    assert result.exit_code == 0
    assert result.stdout.startswith("DOCTOR 1 backend of 1 operator can be measured on NVIDIA H100 80GB HBM3, 80 GiB\n")
    assert "    sudo nvidia-smi -i 0 -pm 1\n" in result.stdout and "unavailable: why" in result.stdout


def test_json_has_all(cli: Cli, machine: Any) -> None:
    machine(inventory())
    facts = json.loads(cli("doctor", "--format=json").stdout)
    assert facts["measures"] is True and facts["device"] == "cuda"
    assert facts["operators"] == {"grouped_gemm": ["torch_loop"]}
    (finding,) = (finding for finding in facts["findings"] if finding["name"] == "persistence")
    assert (finding["area"], finding["value"]) == ("gpu 0", "off")
    for form in ("--format=csv", "--format=md"):
        assert "sudo nvidia-smi -i 0 -pm 1" in cli("doctor", form).stdout


NOTHING: dict[str, dict[str, Any]] = {
    "no torch": {},
    "no backend": inventory(operators=[OPERATOR | {"available": []}]),
}


@pytest.mark.parametrize("listing", NOTHING.values(), ids=NOTHING)
def test_where_nothing_can_be_measured(listing: dict[str, Any], cli: Cli, machine: Any) -> None:
    machine(listing)
    result = cli("doctor")
    assert result.exit_code == 1 and result.stdout.startswith("DOCTOR nothing can be measured here")


OURS = """
from groupbench.operators.define import operator

@operator({"smoke": ["M=4"]})
def ours(M, dtype, device):
    return None

@ours.reference
@ours.backend(name="mine")
def reference(x):
    return x
"""


@pytest.mark.sqlite
def test_on_this_machine(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: tuple[str, ...]
) -> None:
    """For real: the operators, also the project's, are asked by a Python that has imported torch already."""
    python = tmp_path / "python"
    code = "import runpy; runpy.run_module('$module', run_name='__main__')"
    python.write_text(f'#!/bin/sh\nmodule=$3\nshift 3\nexec {shlex.join(warm_python)} -c "{code}" "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "groupbench.toml").write_text('plugins = ["ours.py"]\n')
    (tmp_path / "ours.py").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    result = cli("doctor", "--format=json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "torch_loop" in facts["operators"]["grouped_gemm"]
    assert facts["operators"]["ours"] == ["mine"]
    assert {"torch", "triton", "helion", "SQLite", "load"} <= {finding["name"] for finding in facts["findings"]}
