"""Why a latency or a result moved: told from what two points say of themselves. Pure functions: nothing is read.

In this order, the first that holds:

    machine         the run's canaries moved, which no code under test can do
    environment     a package, the driver, the card or a setting is not what it was
    infrastructure  the code is the same commit, or the compiled kernels are the same to the last instruction
    tuning          the same kernels by name were compiled from another config, as an autotuner chooses
    code            none of these

An A/B of the two commits in turns on one machine overrules the first three: machine and environment are the same on
both of its sides, so that what differs there is the code, or its tuning. That compiled kernels are the same is said
all the same: it is what an A/A looks like, and tells the noise.

A result, its accuracy or whether it is right, is no matter of the machine's speed, and equal compiled kernels do not
clear the code of it: what launches them, and what torch computes around them, makes it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.query.rows import State
from groupbench.tracker.record import Environment, Kernel

Word = Literal["machine", "environment", "infrastructure", "tuning", "code"]

_SHOWN = 4
"""Differences that are named one by one."""


@dataclass(frozen=True)
class Facts:
    """What a point says beside its results."""

    state: State | None = None
    environment: Environment | None = None
    kernel_hash: str | None = None  # of all its kernels' code; None where one is unknown
    kernels: tuple[Kernel, ...] = field(default=())


@dataclass(frozen=True)
class Cause:
    word: Word
    note: str | None = None  # what it was seen by


def find_cause(
    before: Facts | None,  # of the last point before the change; None where there is none
    after: Facts,
    *,
    canaries_moved: bool = False,
    confirmed: bool = False,  # an A/B on one machine said that the two differ
    result: bool = False,  # it is the result that moved, no latency
) -> Cause:
    """The cause of a change between two points."""
    same_kernels = _same_kernels(before, after)
    if not confirmed:
        if canaries_moved:
            return Cause("machine", "canary moved: the machine, not the code")
        if before is not None and before.environment is not None and after.environment is not None:
            changed = environment_differences(before.environment, after.environment)
            if changed:
                return Cause("environment", some(changed))
        if before is not None and _same_code(before, after):
            return Cause("infrastructure", "the same commit before and after")
        if same_kernels and not result:
            return Cause("infrastructure", SAME_KERNELS)
    configs = config_differences(before.kernels if before else (), after.kernels)
    if configs:
        return Cause("tuning", some(configs))
    if same_kernels:
        return Cause("code", SAME_KERNELS)
    return Cause("code", "compiled kernel changed" if same_kernels is False else None)


SAME_KERNELS = "compiled kernel as before"
DRIFT = "drift"
"""A cause that needs no finding: many small steps in one direction, none of which is a change."""


def config_differences(before: Sequence[Kernel], after: Sequence[Kernel]) -> list[str]:
    """What the configs of kernels of one name differ in: `BLOCK_M 64 → 128`. Empty where their names differ."""
    if not before or [kernel.name for kernel in before] != [kernel.name for kernel in after]:
        return []
    told: list[str] = []
    for old, new in zip(before, after, strict=True):
        told += (text for text in _differences(old.config, new.config) if text not in told)
    return told


def some(texts: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _same_kernels(before: Facts | None, after: Facts) -> bool | None:
    if before is None or before.kernel_hash is None or after.kernel_hash is None:
        return None
    return before.kernel_hash == after.kernel_hash


def _same_code(before: Facts, after: Facts) -> bool:
    return before.state is not None and before.state == after.state and not after.state.dirty


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name} {_shown(before, name)} → {_shown(after, name)}"
        for name in names
        if before.get(name, ...) != after.get(name, ...)
    ]


def _shown(config: Mapping[str, Any], name: str) -> str:
    return "absent" if name not in config else str(config[name])[:60]
