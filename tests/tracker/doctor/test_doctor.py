"""`groupbench doctor`: its checks, each problem with the command that fixes it. The GPUs are simulated."""

from __future__ import annotations

import json
import re
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
from nights import Cli

from groupbench.tracker.doctor import gpu, host
from groupbench.tracker.doctor.check import Check

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


# ---- the host


def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "getloadavg", lambda: (50.0, 1.0, 1.0))
    monkeypatch.setattr(host, "_read", lambda path: "powersave")
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.setattr(host, "installed_version", lambda name: None if name == "helion" else "1")
    checks = {finding.name: finding for finding in host.host() if finding.level == "better"}
    assert {"load", "CPU governor", "C compiler", "git", "helion"} <= set(checks)
    assert not {"torch", "system"} & set(checks)
    assert "cpupower frequency-set -g performance" in str(checks["CPU governor"].command)


@pytest.mark.parametrize(("threads", "level"), [(None, "fact"), ("1", "fact"), ("8", "better")])
def test_torch_threads_of_a_cpu(threads: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    (finding,) = (finding for finding in host.host() if finding.name == "CPU threads")
    assert (finding.level, finding.value[0]) == (level, threads or "1")


# ---- the command


def test_improvements_come_first_each_with_a_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml([GOOD | {"PersistenceMode": 0}]))  # type: ignore[arg-type]
    result = cli("doctor")
    assert result.exit_code == 0
    assert re.match(r"DOCTOR \d+ possible improvements? in \d+ checks\n- ", result.stdout)
    assert "    sudo nvidia-smi -i 0 -pm 1\n" in result.stdout and "NVIDIA H100 80GB HBM3, 80 GiB" in result.stdout
    (finding,) = (row for row in json.loads(cli("doctor", "--format=json").stdout) if row["name"] == "persistence")
    assert (finding["area"], finding["value"], finding["level"]) == ("gpu 0", "off", "better")
    for form in ("--format=csv", "--format=md"):
        assert "sudo nvidia-smi -i 0 -pm 1" in cli("doctor", form).stdout
