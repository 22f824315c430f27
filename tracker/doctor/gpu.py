"""What NVML says of the GPUs: what each is, and what about it spoils measurements. Nothing is changed.

NVML's own names and units: clocks in MHz, power in mW, memory in bytes. What a card or a driver does not offer is left
out. Whether clocks are locked cannot be read; that they are held shows in the reasons for their being what they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from groupbench.tracker.doctor.checkup import Finding

HELD = 0x2
"""The reason "application clocks setting": `nvidia-smi -lgc` or `-ac` holds them."""

REASONS = {
    0x4: ("SwPowerCap", "power is at its limit"),
    0x8: ("HwSlowdown", "the hardware slows itself down"),
    0x10: ("SyncBoost", "clocks follow another card's"),
    0x20: ("SwThermalSlowdown", "it is too hot"),
    0x40: ("HwThermalSlowdown", "it is far too hot"),
    0x80: ("HwPowerBrakeSlowdown", "the power supply asks it to brake"),
    0x100: ("DisplayClockSetting", "a display asks for these clocks"),
}
STEADY = 0.8
"""Share of the highest clock that a card holds under load, too: to be locked at. Hopper at 700 W falls to about 0.85
of it in large products."""

CLOCK_SM, CLOCK_MEM, TEMPERATURE, ERRORS_UNCORRECTED, SINCE_BOOT = 1, 2, 0, 1, 0
"""Values of NVML's enumerations."""


class Device:
    """One card; functions that it does not offer answer None."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml = nvml
        self.index = index
        self.handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(self, function: str, *args: Any) -> Any:
        try:
            answer = getattr(self.nvml, function)(self.handle, *args)
        except (self.nvml.NVMLError, AttributeError):
            return None
        return answer.decode() if isinstance(answer, bytes) else answer


def gpus() -> Iterator[Finding]:
    """A finding for each fact of each card; one that says why where NVML cannot be asked."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield Finding(
            "gpu",
            "NVML",
            "its Python package is missing",
            "better",
            "GPUs are not looked at",
            _PIP.format("nvidia-ml-py"),
        )
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield Finding("gpu", "driver", f"none answers ({error})", "fact", "without a GPU, kernels run interpreted")
        return
    driver = nvml.nvmlSystemGetDriverVersion()
    yield Finding("gpu", "driver", driver.decode() if isinstance(driver, bytes) else str(driver))
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    yield Finding("gpu", "CUDA of the driver", f"{cuda // 1000}.{cuda % 1000 // 10}")
    for index in range(nvml.nvmlDeviceGetCount()):
        yield from _device(Device(nvml, index))


_PIP = "python -m pip install {}"


def _device(gpu: Device) -> Iterator[Finding]:
    area = f"gpu {gpu.index}"
    memory = gpu.ask("nvmlDeviceGetMemoryInfo")
    size = "" if memory is None else f", {memory.total / 2**30:.0f} GiB"
    yield Finding(area, "model", f"{gpu.ask('nvmlDeviceGetName')}{size}")
    yield Finding(area, "uuid", str(gpu.ask("nvmlDeviceGetUUID")))
    capability = gpu.ask("nvmlDeviceGetCudaComputeCapability")
    if capability is not None:
        major, minor = capability
        tma = "has TMA" if major >= 9 else "no TMA, which some kernels need"
        fp8 = "fp8" if (major, minor) >= (8, 9) else "no fp8"
        yield Finding(area, "compute capability", f"{major}.{minor}: {tma}, {fp8}")
    yield from _clocks(gpu, area)
    yield from _modes(gpu, area)
    yield from _company(gpu, area)


def _clocks(gpu: Device, area: str) -> Iterator[Finding]:
    now, highest = gpu.ask("nvmlDeviceGetClockInfo", CLOCK_SM), gpu.ask("nvmlDeviceGetMaxClockInfo", CLOCK_SM)
    reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before driver 535
    if now is not None and highest:
        if reasons is not None and reasons & HELD:
            yield Finding(area, "SM clock", f"held at {now} MHz of {highest}")
        else:
            steady = _steady(gpu, highest)
            why = "they follow load and heat, which moves latencies by up to 5 %; rests before bursts hide most of it"
            command = f"sudo nvidia-smi -i {gpu.index} -lgc {steady},{steady}    # later: -rgc"
            yield Finding(area, "SM clock", f"free: {now} MHz now, up to {highest}", "better", why, command)
    for bit, (name, meaning) in REASONS.items():
        if reasons is not None and reasons & bit:
            command = f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER"
            yield Finding(area, "throttled", name, "better", f"{meaning}: wait, or mend its cooling or power", command)
    degrees = gpu.ask("nvmlDeviceGetTemperature", TEMPERATURE)
    if degrees is not None:
        yield Finding(area, "temperature", f"{degrees} °C")
    limit, usual = (
        gpu.ask("nvmlDeviceGetPowerManagementLimit"),
        gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit"),
    )
    if limit is not None:
        text = f"{limit / 1000:.0f} W"
        if usual is not None and limit < usual:
            command = f"sudo nvidia-smi -i {gpu.index} -pl {usual // 1000}"
            why = f"below the card's own {usual / 1000:.0f} W: it slows down under load earlier than others of its kind"
            yield Finding(area, "power limit", text, "better", why, command)
        else:
            yield Finding(area, "power limit", text)


def _steady(gpu: Device, highest: int) -> int:
    """The clock that the card offers nearest to STEADY of its highest."""
    memory = gpu.ask("nvmlDeviceGetMaxClockInfo", CLOCK_MEM)
    offered = gpu.ask("nvmlDeviceGetSupportedGraphicsClocks", memory) if memory else None
    return min(offered or [round(STEADY * highest)], key=lambda clock: abs(clock - STEADY * highest))


def _modes(gpu: Device, area: str) -> Iterator[Finding]:
    persistence = gpu.ask("nvmlDeviceGetPersistenceMode")
    if persistence == 0:
        why = "the driver unloads between processes: each start takes seconds, and clocks that were set are forgotten"
        yield Finding(area, "persistence", "off", "better", why, f"sudo nvidia-smi -i {gpu.index} -pm 1")
    elif persistence is not None:
        yield Finding(area, "persistence", "on")
    ecc = gpu.ask("nvmlDeviceGetEccMode")
    if ecc is not None:
        current, pending = ("on" if mode else "off" for mode in ecc)
        if current != pending:
            why = f"will be {pending} after a reset, which shifts memory-bound latencies"
            command = f"sudo nvidia-smi -i {gpu.index} -r"
            yield Finding(area, "ECC", current, "better", why, command)
        else:
            yield Finding(area, "ECC", current)
    errors = gpu.ask("nvmlDeviceGetTotalEccErrors", ERRORS_UNCORRECTED, SINCE_BOOT)
    if errors:
        why = "memory that cannot be trusted makes results wrong; have the card looked at"
        yield Finding(
            area, "memory errors", f"{errors} uncorrected since it was started", "better", why,
            f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER",
        )  # fmt: skip
    mig = gpu.ask("nvmlDeviceGetMigMode")
    if mig is not None and mig[0]:
        why = "a process sees a slice of the card: latencies compare with those of the same slice alone"
        yield Finding(area, "MIG", "on", "better", why, f"sudo nvidia-smi -i {gpu.index} -mig 0")
    elif mig is not None:
        yield Finding(area, "MIG", "off")


def _company(gpu: Device, area: str) -> Iterator[Finding]:
    """Who else is on the card."""
    others: dict[int, Any] = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in gpu.ask(function) or []:
            others.setdefault(process.pid, process)
    for pid, process in sorted(others.items()):
        name = _process_name(gpu.nvml, pid)
        used = getattr(process, "usedGpuMemory", None)
        memory = f", {used / 2**20:.0f} MiB" if used else ""
        why = "whatever else runs on the card takes time from what is measured: wait for it, or end it"
        yield Finding(area, "process", f"{pid} {name}{memory}", "better", why, f"ps -fp {pid}")
    if not others:
        yield Finding(area, "processes", "none")


def _process_name(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except (nvml.NVMLError, AttributeError):
        return "of another container or user"
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
