"""Default configs for Helion kernels, fitted to the GPU, and the choice between the tuned config and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import helion
import torch
from torch import Tensor

from groupbench.kernels.device import Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.support import (
    group_ends,
    illegal_tile,
    require_runnable,
    require_within_int32,
    stored_weights,
)
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, tuning_key
from groupbench.kernels.variants import Variant, first_that_runs

T = TypeVar("T")
Bound = tuple[Any, tuple[Any, ...]]  # a kernel that was bound to arguments, and these

_bound: ContextVar[list[Bound] | None] = ContextVar("bound", default=None)


@contextmanager
def bindings() -> Iterator[list[Bound]]:
    """Collect the kernels that are compiled within this context, for Helion's autotuner."""
    collected: list[Bound] = []
    token = _bound.set(collected)
    try:
        yield collected
    finally:
        _bound.reset(token)


def compile_for(kernel: Any, arguments: tuple[Any, ...], config: helion.Config) -> Callable[..., Any]:
    """Bind a kernel to arguments and compile it with a config."""
    bound = kernel.bind(arguments)
    if (collected := _bound.get()) is not None:
        collected.append((bound, arguments))
    run: Callable[..., Any] = bound.compile_config(config)
    return run


@dataclass(frozen=True)
class Choices:
    """A kernel's configs without a tuned one. The first three `block_sizes` are the tile's sides and a step."""

    large: helion.Config  # 16-bit dtypes, groups of at least `large_rows` rows on average
    small: helion.Config
    large_rows: int = 0
    every: Mapping[str, Any] = field(default_factory=dict)  # further settings of `fp32` and `cpu`

    @property
    def fp32(self) -> helion.Config:
        """IEEE fp32 runs on FMA units, not tensor cores. Registers hold the operands too, so tiles are smaller."""
        return helion.Config(block_sizes=[64, 64, 32], num_warps=4, num_stages=3, **self.every)

    @property
    def cpu(self) -> helion.Config:
        """The interpreter's cost depends on the number of operations, not elements."""
        return helion.Config(block_sizes=[32, 32, 32], num_warps=4, num_stages=1, **self.every)

    def default(self, a: Tensor, mean_rows: float) -> helion.Config:
        """Return the config for an operand's device and dtype, and the mean rows per group."""
        if a.device.type != "cuda":
            return self.cpu
        if a.dtype == torch.float32:
            return self.fp32
        return self.large if mean_rows >= self.large_rows else self.small


@dataclass(frozen=True)
class _Blocks:
    first: int
    second: int
    depth: int
    num_stages: int


def illegal(config: helion.Config, dtype: torch.dtype, device: Device) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can.

    The first three block sizes are the tile's two sides and a step along K.
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
    a: Tensor,  # an operand
    prepare: Callable[[helion.Config], Callable[[], T]],
) -> Callable[[], T]:
    """Return the callable for the first config to compile: the tuned one, the default, then a small one.

    The tuned config comes from a file, if one has it. The first call compiles, and raises the last config's exception
    if none compiles.
    """
    dtype, facts = a.dtype, device_of(a.device)
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


def prepare_forward(
    kernel: str,
    choices: Choices,
    prepare: Callable[[Tensor, Tensor, Tensor, helion.Config], Callable[[], Tensor]],  # for operands that were checked
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G]
    config: helion.Config | None,
) -> Callable[[], Tensor]:  # [M, N]
    """Check a grouped GEMM's operands and prepare it with a config, or with the first to compile."""
    require_runnable(a, b)
    group_ends(a, b, offs)
    (M, K), (G, _, N) = a.shape, b.shape
    if M == 0 or N == 0 or K == 0:  # Helion cannot trace a tile over zero columns
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    require_within_int32(a=a, b=b)
    by_config = partial(prepare, a, b, offs.to(a.device))
    if config is not None:
        return by_config(config)
    key = tuning_key(M, G, N, K, a.dtype, stored_weights(b)[1])
    return first_that_compiles(kernel, key, choices.default(a, M / G), a, by_config)
