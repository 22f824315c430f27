"""Read the GPU's state from NVML during a burst; no data without NVML and the Python package."""

from __future__ import annotations

import contextlib
from typing import Any

from groupbench.tracker.facts.record import Telemetry

# Bits of nvmlDeviceGetCurrentClocksEventReasons, by NVML's names without their prefix.
THROTTLE_REASONS = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocksSetting",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}


class Nvml:
    """A GPU's state, read through NVML. The GPU is selected by UUID; by default it is the first one."""

    def __init__(self, uuid: str | None = None) -> None:
        self._handle: Any = None
        with contextlib.suppress(Exception):  # no package, no driver, no such card: measuring goes on without it
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)

    def __bool__(self) -> bool:
        return self._handle is not None

    def get(self, function: str, *args: Any) -> Any:
        """Return the value of an NVML function for the device, or None if the card does not support it."""
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def joules(self) -> float | None:
        """Return the energy in J used by the GPU since the driver was loaded; None if it does not count it."""
        millijoules = self.get("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def telemetry(self) -> Telemetry | None:
        """Return the current state of the GPU, or None without NVML."""
        if self._handle is None:
            return None
        power = self.get("nvmlDeviceGetPowerUsage")
        reasons = self.get("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return Telemetry(
            sm_clock_mhz=self.get("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            temperature_c=self.get("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            throttle=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit and bit != 0x1),
        )
