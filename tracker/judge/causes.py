"""Why a latency or a result moved: told from what two points say of themselves. Pure functions: nothing is read.

In this order, the first that holds:

    machine         the run's canaries moved, which no code under test can do
    environment     the card, its power limit or a setting is not what it was
    toolchain       torch, Triton, Helion, CUDA, Python or the driver is another; with the code, where that is, too
    infrastructure  the code is the same commit, or the compiled kernels are the same to the last instruction
    tuning          the same kernels by name were compiled from another config, as an autotuner chooses
    code            none of these

An A/B of the two commits in turns on one machine overrules the first four: machine and environment are the same on
both of its sides, so that what differs there is the code, or its tuning. That compiled kernels are the same is said
all the same: it is what an A/A looks like, and tells the noise.

A result, its accuracy or whether it is right, is no matter of the machine's speed, and equal compiled kernels do not
clear the code of it: what launches them, and what torch computes around them, makes it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from groupbench.tracker.compare.kernels import differences
from groupbench.tracker.environment import machine_differences, toolchain_differences
from groupbench.tracker.query.rows import State
from groupbench.tracker.record import Environment, Kernel

Word = Literal["machine", "environment", "toolchain", "code and toolchain", "infrastructure", "tuning", "code"]

OF_TOOLCHAINS = ("toolchain", "code and toolchain")

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
            cause = _surroundings(before, before.environment, after, after.environment)
            if cause is not None:
                return cause
        if before is not None and _same_code(before, after):
            return Cause("infrastructure", "the same commit before and after")
        if same_kernels and not result:
            return Cause("infrastructure", SAME_KERNELS)
    changes = some(differences(before.kernels if before else (), after.kernels))
    if before is not None and _other_config(before.kernels, after.kernels):
        return Cause("tuning", changes)
    if same_kernels:
        return Cause("code", SAME_KERNELS)
    if same_kernels is None:
        return Cause("code", None)
    return Cause("code", f"compiled kernel changed: {changes}" if changes else "compiled kernel changed")


SAME_KERNELS = "compiled kernel as before"
DRIFT = "drift"
"""A cause that needs no finding: many small steps in one direction, none of which is a change."""


def _other_config(before: Sequence[Kernel], after: Sequence[Kernel]) -> bool:
    """Whether the same kernels by name were compiled from another config."""
    old, new = ([kernel for kernel in side if not kernel.external] for side in (before, after))
    if [kernel.name for kernel in old] != [kernel.name for kernel in new]:
        return False
    return any(one.config != other.config for one, other in zip(old, new, strict=True))


def some(texts: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _surroundings(before: Facts, old: Environment, after: Facts, new: Environment) -> Cause | None:
    """Return the machine or the toolchain as the cause, where it is another; the machine first."""
    machine, toolchain = machine_differences(old, new), toolchain_differences(old, new)
    if machine:
        return Cause("environment", some((*machine, *toolchain)))
    if not toolchain:
        return None
    kernels = SAME_KERNELS if _same_kernels(before, after) else None
    note = "; ".join(text for text in (some(toolchain), kernels) if text)
    return Cause("toolchain" if _same_code(before, after) else "code and toolchain", note)


def _same_kernels(before: Facts | None, after: Facts) -> bool | None:
    if before is None or before.kernel_hash is None or after.kernel_hash is None:
        return None
    return before.kernel_hash == after.kernel_hash


def _same_code(before: Facts, after: Facts) -> bool:
    return before.state is not None and before.state == after.state and not after.state.dirty
