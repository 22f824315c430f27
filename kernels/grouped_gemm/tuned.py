"""Which config was found fastest for a problem: the files configs/<kernel>_<gpu>.json, and a problem's key in them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton


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
