"""Check the GPUs with NVML: their models, and settings that disturb measurements. Nothing is changed.

Names and units are NVML's: clocks in MHz, power in mW, memory in bytes. Facts that a card or driver does not provide
are left out. NVML does not report whether clocks are locked, but the reasons for the current clocks show it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from groupbench.tracker.doctor.check import Check, unless

HELD = 0x2
"""The reason "application clocks setting": `nvidia-smi -lgc` or `-ac` holds the clocks."""

REASONS = {
    0x4: ("SwPowerCap", "the power limit is reached"),
    0x8: ("HwSlowdown", "the hardware slows down"),
    0x10: ("SyncBoost", "the clocks follow another GPU's"),
    0x20: ("SwThermalSlowdown", "the GPU is too hot"),
    0x40: ("HwThermalSlowdown", "the GPU is far too hot"),
    0x80: ("HwPowerBrakeSlowdown", "the power supply requests less power"),
    0x100: ("DisplayClockSetting", "a display requests these clocks"),
}
STEADY = 0.8
"""Share of the highest clock at which to lock it, so that a card can hold it under load. Hopper at 700 W falls to about
0.85 of the highest clock in large products."""

CLOCK_SM, CLOCK_MEM, TEMPERATURE, ERRORS_UNCORRECTED, SINCE_BOOT = 1, 2, 0, 1, 0
"""Values of NVML's enumerations."""


class GpuDevice:
    """One card. `ask` returns None for a function that it does not support."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml = nvml
        self.index = index
        self.handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(self, function: str, *args: Any) -> Any:
        try:
            value = getattr(self.nvml, function)(self.handle, *args)
        except (self.nvml.NVMLError, AttributeError):
            return None
        return value.decode() if isinstance(value, bytes) else value


def gpus() -> Iterator[Check]:
    """Yield a check for each fact about each card, or one with the reason if NVML is not available."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        command = "python -m pip install nvidia-ml-py"
        yield Check("gpu", "NVML", "its Python package is missing", "better", "GPUs cannot be checked", command)
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield Check("gpu", "driver", f"no response ({error})", "fact", "without a GPU, kernels are interpreted")
        return
    driver = nvml.nvmlSystemGetDriverVersion()
    yield Check("gpu", "driver", driver.decode() if isinstance(driver, bytes) else str(driver))
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    yield Check("gpu", "CUDA of the driver", f"{cuda // 1000}.{cuda % 1000 // 10}")
    for index in range(nvml.nvmlDeviceGetCount()):
        yield from _device(GpuDevice(nvml, index))


def _device(gpu: GpuDevice) -> Iterator[Check]:
    area = f"gpu {gpu.index}"
    memory = gpu.ask("nvmlDeviceGetMemoryInfo")
    size = "" if memory is None else f", {memory.total / 2**30:.0f} GiB"
    yield Check(area, "model", f"{gpu.ask('nvmlDeviceGetName')}{size}")
    yield Check(area, "uuid", str(gpu.ask("nvmlDeviceGetUUID")))
    capability = gpu.ask("nvmlDeviceGetCudaComputeCapability")
    if capability is not None:
        major, minor = capability
        tma = "has TMA" if major >= 9 else "no TMA, which some kernels need"
        fp8 = "fp8" if (major, minor) >= (8, 9) else "no fp8"
        yield Check(area, "compute capability", f"{major}.{minor}: {tma}, {fp8}")
    yield from _clocks(gpu, area)
    yield from _modes(gpu, area)
    yield from _company(gpu, area)


def _clocks(gpu: GpuDevice, area: str) -> Iterator[Check]:
    now, highest = gpu.ask("nvmlDeviceGetClockInfo", CLOCK_SM), gpu.ask("nvmlDeviceGetMaxClockInfo", CLOCK_SM)
    reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before driver 535
    if now is not None and highest:
        if reasons is not None and reasons & HELD:
            yield Check(area, "SM clock", f"held at {now} MHz of {highest}")
        else:
            steady = _steady(gpu, highest)
            why = "clocks follow load and heat: latencies change by up to 5 %; rests before bursts hide most of it"
            command = f"sudo nvidia-smi -i {gpu.index} -lgc {steady},{steady}    # later: -rgc"
            yield Check(area, "SM clock", f"free: {now} MHz now, up to {highest}", "better", why, command)
    for bit, (name, meaning) in REASONS.items():
        if reasons is not None and reasons & bit:
            command = f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER"
            yield Check(area, "throttled", name, "better", f"{meaning}: wait, or fix its cooling or power", command)
    degrees = gpu.ask("nvmlDeviceGetTemperature", TEMPERATURE)
    if degrees is not None:
        yield Check(area, "temperature", f"{degrees} °C")
    limit = gpu.ask("nvmlDeviceGetPowerManagementLimit")
    if limit is not None:
        usual = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit") or limit
        why = f"below the default of {usual / 1000:.0f} W: under load it slows down earlier than other GPUs"
        command = f"sudo nvidia-smi -i {gpu.index} -pl {usual // 1000}"
        yield unless(limit < usual, area, "power limit", f"{limit / 1000:.0f} W", why, command)


def _steady(gpu: GpuDevice, highest: int) -> int:
    """Return the supported clock nearest to STEADY times the highest, in MHz."""
    memory = gpu.ask("nvmlDeviceGetMaxClockInfo", CLOCK_MEM)
    supported: list[int] | None = gpu.ask("nvmlDeviceGetSupportedGraphicsClocks", memory) if memory else None
    return min(supported or [round(STEADY * highest)], key=lambda clock: abs(clock - STEADY * highest))


def _modes(gpu: GpuDevice, area: str) -> Iterator[Check]:
    persistence = gpu.ask("nvmlDeviceGetPersistenceMode")
    if persistence is not None:
        why = "the driver unloads between processes: each start takes seconds, and clock settings are lost"
        command = f"sudo nvidia-smi -i {gpu.index} -pm 1"
        yield unless(not persistence, area, "persistence", "on" if persistence else "off", why, command)
    ecc = gpu.ask("nvmlDeviceGetEccMode")
    if ecc is not None:
        current, pending = ("on" if mode else "off" for mode in ecc)
        why = f"will be {pending} after a reset, which changes memory-bound latencies"
        yield unless(current != pending, area, "ECC", current, why, f"sudo nvidia-smi -i {gpu.index} -r")
    errors = gpu.ask("nvmlDeviceGetTotalEccErrors", ERRORS_UNCORRECTED, SINCE_BOOT)
    if errors:
        why = "faulty memory makes results wrong; have the GPU checked"
        yield Check(
            area, "memory errors", f"{errors} uncorrected since boot", "better", why,
            f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER",
        )  # fmt: skip
    mig = gpu.ask("nvmlDeviceGetMigMode")
    if mig is not None:
        why = "a process sees a slice of the GPU, so latencies are comparable only within the same slice"
        command = f"sudo nvidia-smi -i {gpu.index} -mig 0"
        yield unless(bool(mig[0]), area, "MIG", "on" if mig[0] else "off", why, command)


def _company(gpu: GpuDevice, area: str) -> Iterator[Check]:
    """Yield the other processes that use the card."""
    others: dict[int, Any] = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in gpu.ask(function) or []:
            others.setdefault(process.pid, process)
    for pid, process in sorted(others.items()):
        name = _process_name(gpu.nvml, pid)
        used = getattr(process, "usedGpuMemory", None)
        memory = f", {used / 2**20:.0f} MiB" if used else ""
        why = "other work on the GPU slows down the measured kernels: wait for it, or end it"
        yield Check(area, "process", f"{pid} {name}{memory}", "better", why, f"ps -fp {pid}")
    if not others:
        yield Check(area, "processes", "none")


def _process_name(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except (nvml.NVMLError, AttributeError):
        return "(another container or user)"
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
