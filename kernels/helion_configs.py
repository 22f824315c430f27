"""Fit a Helion kernel's config to the GPU, and choose between the tuned one and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import helion
import torch

from groupbench.kernels.device import Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.support import illegal_tile
from groupbench.kernels.grouped_gemm.tuned import configs_in_order
from groupbench.kernels.variants import Variant, first_that_runs

T = TypeVar("T")


@dataclass(frozen=True)
class _Blocks:
    first: int
    second: int
    depth: int
    num_stages: int


def illegal(config: helion.Config, dtype: torch.dtype, device: Device) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can.

    Its first three block sizes are the tile's two sides and a step along K.
    """
    first, second, depth, *_ = config.block_sizes
    return illegal_tile(first, second, depth, config.num_stages, dtype, device)


def fit(config: helion.Config, dtype: torch.dtype, device: Device) -> helion.Config:
    """Return the config, or the nearest one that fits the GPU's shared memory."""
    first, second, depth, *others = config.block_sizes
    blocks = fitted(
        _Blocks(first, second, depth, config.num_stages),
        lambda b: illegal_tile(b.first, b.second, b.depth, b.num_stages, dtype, device),
        "first",
        "second",
    )
    sizes = [blocks.first, blocks.second, blocks.depth, *others]
    return helion.Config(**{**config.config, "block_sizes": sizes, "num_stages": blocks.num_stages})


def first_that_compiles(
    kernel: str,
    key: str,  # of the problem, in files of tuned configs
    default: helion.Config,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Callable[[helion.Config], Callable[[], T]],
) -> Callable[[], T]:
    """Return the callable of the first config that compiles: the tuned one, the default, then a small one.

    The tuned config comes from a file, if one has it. The first call compiles, and raises the last config's exception
    if none compiles.
    """
    facts = device_of(device)
    if facts.vendor == "cpu":
        return prepare(default)
    configs = configs_in_order(kernel, key, facts, fit(default, dtype, facts), lambda c: illegal(c, dtype, facts))
    configs.append(("small", fit(default, dtype, halved(facts)), None))
    return first_that_runs(
        kernel,
        [
            Variant(f"{name} config", lambda config=config: prepare(config), reason, (repr(config), key))  # type: ignore[misc]
            for name, config, reason in configs
        ],
    )
