"""Find the fastest known config for a problem on a GPU: files of configs, and the problem's key in them.

Two places are read, the first before the second:

    folder/<kernel>_<gpu>_triton-<version>.json  the user's: the folder that GROUPBENCH_CONFIGS names, such as a
                                                 team's, else ~/.cache/groupbench. <gpu> is the GPU's whole name, such
                                                 as nvidia-h100-80gb-hbm3. Files of this Triton come before others.
    configs/<kernel>_<model>.json                shipped files. <model> is one whole word of the GPU's name: h100

`groupbench tune` writes the user's files. With GROUPBENCH_TUNE=1, preparing a problem that is in no file tunes it too.
This is off by default: if a search finds another config tomorrow, the difference would look like a change of the
kernel.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from groupbench.kernels.device import Device
from groupbench.kernels.variants import describe

Config = TypeVar("Config")

TUNE, FOLDER = "GROUPBENCH_TUNE", "GROUPBENCH_CONFIGS"
ROUNDS = 3  # over all candidates, since clocks drift
# GPUs with the same processor and another memory. Their files are read for problems that the GPU's own files lack.
STANDS_IN = {"h100": ("h200",), "h200": ("h100",), "gh200": ("h200", "h100")}


def tuning_key(M: int, G: int, N: int, K: int, dtype: torch.dtype, nk: bool) -> str:
    """Return a problem's key in the files. M is rounded up to a power of two: routing changes it at every step."""
    return problem_key(M, G, N, K, str(dtype).removeprefix("torch."), "nk" if nk else "kn")


def problem_key(M: int, G: int, N: int, K: int, *more: str) -> str:
    """Return the key for kernels whose problems differ by something other than dtype and layout."""
    return ",".join([f"G={G},M<={triton.next_power_of_2(M)},N={N},K={K}", *more])


def tuned_config(kernel: str, key: str, device: Device) -> dict[str, Any] | None:
    """Return the fields of the config that was tuned for this problem on this GPU, or None."""
    return tuned_configs(kernel, device.name).get(key)


@cache
def tuned_configs(kernel: str, gpu: str, any_triton: bool = True) -> dict[str, dict[str, Any]]:
    """Return the fields of every config tuned for a GPU of this name, by problem; empty without a file.

    Args:
        any_triton: Also take configs that the user tuned with another Triton than this one.
    """
    configs: dict[str, dict[str, Any]] = {}
    for path in [*_user_files(kernel, gpu, any_triton), *_shipped_files(kernel, gpu)]:
        configs = read_configs(path) | configs
    return configs


def configs_in_order(
    kernel: str,
    key: str,
    device: Device,
    default: Config,  # a frozen dataclass
    illegal: Callable[[Config], str | None],
    make: Callable[..., Config] | None = None,  # from a mapping of fields; None: the default's class
) -> list[tuple[str, Config, str | None]]:
    """Return (name, config, why it is illegal here) of the tuned config, if a file has one, and of the default."""
    tuned: list[tuple[str, Config, str | None]] = []
    fields = tuned_config(kernel, key, device)
    if fields is not None:
        try:
            config = type(default)(**fields) if make is None else make(fields)
            tuned.append(("tuned", config, illegal(config)))
        except Exception as error:  # a file of another version of this package, or one that was edited
            tuned.append(("tuned", default, f"its file does not fit this version: {describe(error)}"))
    return [*tuned, ("default", default, illegal(default))]


def first_legal(configs: Sequence[tuple[str, Config, str | None]]) -> Config:
    """Return the first config that is legal, or the last one."""
    return next((config for _, config, reason in configs if reason is None), configs[-1][1])


# --- files ------------------------------------------------------------------------------------------------------------


def slug(gpu: str) -> str:
    """Return a GPU's name for a file name: nvidia-h100-80gb-hbm3."""
    return "-".join(_words(gpu))


def user_folder() -> Path:
    """Return the folder of the user's configs, which need not exist yet."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupbench"
    return Path(os.environ.get(FOLDER) or cache_folder)


def user_file(kernel: str, gpu: str) -> Path:
    """Return the file of this kernel's configs for this GPU and this Triton."""
    return user_folder() / f"{kernel}_{slug(gpu)}_triton-{triton.__version__}.json"


def read_configs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of each config by problem; empty if the file is missing or contains no such JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    configs = content.get("configs", content) if isinstance(content, dict) else {}
    return {key: fields for key, fields in configs.items() if isinstance(fields, dict)}


def _user_files(kernel: str, gpu: str, any_triton: bool) -> Iterator[Path]:
    this = user_file(kernel, gpu)
    yield this
    if any_triton:
        others = (path for path in this.parent.glob(f"{kernel}_{slug(gpu)}_triton-*.json") if path != this)
        yield from sorted(others, key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)], reverse=True)


def _shipped_files(kernel: str, gpu: str) -> list[Path]:
    """Return the files of the GPU's own model, and then of those with the same processor."""
    words = _words(gpu)
    models = [*words, *(model for word in words for model in STANDS_IN.get(word, ()))]
    paths = (Path(__file__).parent / "configs" / f"{kernel}_{model}.json" for model in models)
    return [path for path in paths if path.is_file()]


def _words(gpu: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", gpu.lower())


# --- tuning while a problem is prepared -------------------------------------------------------------------------------


def tunes_here(device: torch.device) -> bool:
    """Return whether the user requested tuning and the device can time it."""
    return device.type == "cuda" and os.environ.get(TUNE) == "1" and not torch.cuda.is_current_stream_capturing()


def tune_here(
    kernel: str,
    key: str,
    device: Device,
    candidates: Sequence[Config],  # frozen dataclasses
    prepare: Callable[[Config], Callable[[], object]],
) -> Config | None:
    """Return the fastest candidate for a problem: from the user's file, else timed now and written to it.

    Candidates that this Triton cannot compile are skipped. Returns None if no candidate runs.
    """
    path = user_file(kernel, device.name)
    kept = read_configs(path).get(key)
    for config in candidates:
        if asdict(config) == kept:  # type: ignore[call-overload]
            return config
    runs: list[tuple[Config, Callable[[], object]]] = []
    for config in candidates:
        try:
            run = prepare(config)
            run()
        except Exception:  # noqa: S112 # of any kind: the others are tried
            continue
        runs.append((config, run))
    if not runs:
        return None
    times = [
        min(round_) for round_ in zip(*([milliseconds(run) for _, run in runs] for _ in range(ROUNDS)), strict=True)
    ]
    best = runs[times.index(min(times))][0]
    keep(path, device.name, {key: asdict(best)})  # type: ignore[call-overload]
    return best


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU in milliseconds, with L2 flushed before each call."""
    return float(triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median"))


def keep(
    path: Path,
    gpu: str,
    configs: dict[str, dict[str, Any]],
    margins: dict[str, dict[str, float]] | None = None,
) -> None:
    """Add configs to a file, with the measured `ms` of each and the `default_ms` of the default config.

    If two processes write at once, the file stays valid, but one process's configs are lost and must be tuned again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = json.loads(path.read_text())["margins"]
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    facts = {
        "gpu": gpu,
        "triton": triton.__version__,
        "measured": f"{gpu}, torch {torch.__version__}, triton {triton.__version__}",
        "configs": read_configs(path) | configs,
        "margins": before | (margins or {}),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(
        "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in facts.items()) + "\n}\n"
    )
    temporary.replace(path)
    tuned_configs.cache_clear()


def _lines(value: str | dict[str, Any]) -> str:
    """Return JSON with one entry per line."""
    if isinstance(value, str):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n }"
