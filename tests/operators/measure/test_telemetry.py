"""Telemetry from a fake NVML module."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from groupbench.operators.measure.telemetry import Nvml
from groupbench.tracker.facts.record import Telemetry


class NVMLError(Exception):
    pass


def fake(**functions: Any) -> Any:
    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.NVML_CLOCK_SM = 1
    module.NVML_TEMPERATURE_GPU = 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: ("uuid", uuid)
    module.nvmlDeviceGetHandleByIndex = lambda index: ("index", index)
    module.nvmlDeviceGetPowerUsage = lambda handle: 123_456
    module.nvmlDeviceGetClockInfo = lambda handle, clock: {1: 1980}[clock]
    module.nvmlDeviceGetTemperature = lambda handle, sensor: {0: 41}[sensor]
    module.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0
    for name, function in functions.items():
        if function is None:
            delattr(module, name)
        else:
            setattr(module, name, function)
    return module


def raises(*args: Any) -> Any:
    raise NVMLError("Not Supported")


def test_the_state_of_the_card_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    nvml = Nvml("GPU-1")
    assert nvml
    assert nvml._handle == ("uuid", "GPU-1")
    assert Nvml()._handle == ("index", 0)
    assert nvml.telemetry() == Telemetry(sm_clock_mhz=1980, temperature_c=41, power_w=123.456, throttle=())


REASONS = {
    "none": (0, ()),
    "idle is not throttling": (1, ()),
    "power": (4, ("SwPowerCap",)),
    "heat, hardware and software": (0x60, ("SwThermalSlowdown", "HwThermalSlowdown")),
    "all": (
        0x1FF,
        (
            "ApplicationsClocksSetting",
            "SwPowerCap",
            "HwSlowdown",
            "SyncBoost",
            "SwThermalSlowdown",
            "HwThermalSlowdown",
            "HwPowerBrakeSlowdown",
            "DisplayClockSetting",
        ),
    ),
    "an unknown bit": (1 << 40, ()),
}


@pytest.mark.parametrize(("bits", "names"), REASONS.values(), ids=REASONS)
def test_throttle_reasons(bits: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: bits))
    telemetry = Nvml().telemetry()
    assert telemetry.throttle == names


def test_unsupported_values_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        fake(
            nvmlDeviceGetPowerUsage=raises,
            nvmlDeviceGetClockInfo=raises,
            nvmlDeviceGetCurrentClocksEventReasons=None,  # an older package lacks it
        ),
    )
    assert Nvml().telemetry() == Telemetry(temperature_c=41)
    assert Nvml().get("nvmlDeviceGetNothing") is None


NOT_THERE = {
    "no package": None,
    "no driver": fake(nvmlInit=raises),
    "no such card": fake(nvmlDeviceGetHandleByUUID=raises),
}


@pytest.mark.parametrize("module", NOT_THERE.values(), ids=NOT_THERE)
def test_measuring_works_without_nvml(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    nvml = Nvml("GPU-1")
    assert not nvml
    assert nvml.telemetry() is None
    assert nvml.get("nvmlDeviceGetPowerUsage") is None
