"""What the tuners share: how a candidate is timed, and the file that ships.

What is compared is a cooled burst of each config, the faster of two, so that a difference below half a percent is luck;
it costs nothing to choose either then.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupbench.operators.measure.protocol import GpuTimer, Protocol

PROTOCOL = Protocol(bursts=2, samples=6, warmups=2, idle_s=0.12)


def fastest_burst(run: Callable[[], object]) -> float:
    """Milliseconds of a call: the median of a burst, the faster of two bursts. Raises what the first call raises."""
    timer = GpuTimer(run, PROTOCOL)

    def burst() -> float:
        time.sleep(PROTOCOL.idle_s)
        return statistics.median(timer.burst())

    return min(burst() for _ in range(PROTOCOL.bursts))


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Fields of the config by problem; none where there is no file yet."""
    if not path.exists():
        return {}
    configs: dict[str, dict[str, Any]] = json.loads(path.read_text())["configs"]
    return configs


def write_tuned(path: Path, about: str, configs: dict[str, dict[str, Any]], *packages: str) -> None:
    """Write the file, a config a line, and on what it was tuned: the GPU, torch, Triton and `packages`."""
    from importlib.metadata import version

    import torch
    import triton

    versions = [f"torch {torch.__version__}", f"triton {triton.__version__}", *(f"{p} {version(p)}" for p in packages)]
    measured = ", ".join([torch.cuda.get_device_name(), *versions])
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in configs.items())
    part = path.with_suffix(".part")
    part.write_text(
        f'{{\n "about": {json.dumps(about)},\n "measured": {json.dumps(measured)},\n "configs": {{\n{lines}\n }}\n}}\n'
    )
    part.replace(path)
