"""Which config was found fastest for a problem: the files configs/<kernel>_<gpu>.json, and a problem's key in them.

With GROUPBENCH_TUNE=1, a problem that no file knows is tuned where it is prepared, and what is found is kept for this
GPU and Triton in GROUPBENCH_CONFIGS, else in the user's cache. Not otherwise: a search that comes out another way
tomorrow would look like a change of the kernel.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

Config = TypeVar("Config")

TUNE, FOLDER = "GROUPBENCH_TUNE", "GROUPBENCH_CONFIGS"
ROUNDS = 3  # over all candidates, since clocks drift


def tuning_key(M: int, G: int, N: int, K: int, dtype: torch.dtype, nk: bool) -> str:
    """M is rounded up to a power of two: routing changes it at every step."""
    return problem_key(M, G, N, K, str(dtype).removeprefix("torch."), "nk" if nk else "kn")


def problem_key(M: int, G: int, N: int, K: int, *more: str) -> str:
    """`tuning_key` for whoever tells problems apart by something else than dtype and layout."""
    return ",".join([f"G={G},M<={triton.next_power_of_2(M)},N={N},K={K}", *more])


# The same processor beside another memory: what was tuned on the one suits the other better than what nobody tuned.
STANDS_IN = {"h200": "h100"}


@cache
def tuned_configs(kernel: str, gpu: str) -> dict[str, dict[str, Any]]:
    """Fields of the config by problem, as tuned for a GPU of this name, else for one with the same processor.

    Empty where it was tuned for none such.
    """
    names = [gpu.lower()]
    names += [names[0].replace(asked, tuned) for asked, tuned in STANDS_IN.items() if asked in names[0]]
    for name in names:
        for path in sorted((Path(__file__).parent / "configs").glob(f"{kernel}_*.json")):
            if path.stem.removeprefix(f"{kernel}_").lower() in name:
                configs: dict[str, dict[str, Any]] = json.loads(path.read_text())["configs"]
                return configs
    return {}


def tuned_config(kernel: str, key: str, device: torch.device) -> dict[str, Any] | None:
    """Fields of the config that was tuned for this problem on this GPU, or None."""
    return tuned_configs(kernel, torch.cuda.get_device_name(device)).get(key)


# --- tuning where a problem is prepared -------------------------------------------------------------------------------


def tunes_here(device: torch.device) -> bool:
    """Whether a search is asked for, and can be timed."""
    return device.type == "cuda" and os.environ.get(TUNE) == "1" and not torch.cuda.is_current_stream_capturing()


def tune_here(
    kernel: str,
    key: str,
    device: torch.device,
    candidates: Sequence[Config],  # frozen dataclasses
    prepare: Callable[[Config], Callable[[], object]],
) -> Config | None:
    """The fastest candidate for a problem: kept from an earlier search, else timed now, and kept.

    None where no candidate runs; one that this Triton cannot compile is none.
    """
    path = _kept_file(kernel, torch.cuda.get_device_name(device))
    kept = _kept(path).get(key)
    for config in candidates:
        if asdict(config) == kept:  # type: ignore[call-overload]
            return config
    runs: list[tuple[Config, Callable[[], object]]] = []
    for config in candidates:
        try:
            run = prepare(config)
            run()
        except Exception:  # of whatever kind: the others are tried
            continue
        runs.append((config, run))
    if not runs:
        return None
    times = [
        min(round_) for round_ in zip(*([milliseconds(run) for _, run in runs] for _ in range(ROUNDS)), strict=True)
    ]
    best = runs[times.index(min(times))][0]
    _keep(path, key, asdict(best))  # type: ignore[call-overload]
    return best


def milliseconds(run: Callable[[], object]) -> float:
    """Median of a call on the GPU, L2 flushed."""
    return float(triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median"))


def _kept_file(kernel: str, gpu: str) -> Path:
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupbench"
    name = "-".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())
    return Path(os.environ.get(FOLDER) or cache_folder) / f"{kernel}_{name}_triton-{triton.__version__}.json"


def _kept(path: Path) -> dict[str, dict[str, Any]]:
    """What earlier searches found; nothing where there was none, or the file is no longer what was written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(path: Path, key: str, config: dict[str, Any]) -> None:
    """Two processes that search at once leave both files whole; what one of them loses is searched again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(_kept(path) | {key: config}, file, indent=1)
    Path(file.name).replace(path)
