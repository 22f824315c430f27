"""Find a change's cause from two points' facts. Pure functions, without I/O.

The first cause that applies, in this order:

    machine         the run's canaries moved, and they do not run the code under test
    environment     the GPU, its power limit or a setting changed
    toolchain       torch, Triton, Helion, CUDA, Python, the driver, or a package that the process imported changed;
                    "code and toolchain" if both did
    infrastructure  the commit, the loaded files or the compiled kernels are the same
    tuning          the same kernels were compiled from another config, such as an autotuner's choice
    code            none of these

An A/B comparison of the two commits on one machine overrules the first four: both sides share the machine and the
environment, so only the code or its tuning can differ. If `confirm --base-python` measured them with different
software, the cause is "code and toolchain". The note still mentions identical kernels, because such a comparison is an
A/A comparison and shows the noise.

A change of accuracy or correctness does not depend on the machine's speed. Identical kernels do not rule out the code
either: the code that launches them and the operations of torch around them affect the result too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from groupbench.tracker.compare.kernels import differences
from groupbench.tracker.facts.environment import machine_differences, toolchain_differences
from groupbench.tracker.facts.loaded import changed_packages
from groupbench.tracker.facts.record import Environment, Kernel
from groupbench.tracker.query.rows import State

Word = Literal["machine", "environment", "toolchain", "code and toolchain", "infrastructure", "tuning", "code"]

OF_TOOLCHAINS = ("toolchain", "code and toolchain")

_SHOWN = 4
"""Number of differences to list."""


@dataclass(frozen=True)
class Facts:
    """The facts of a point besides its results."""

    state: State | None = None
    environment: Environment | None = None
    kernel_hash: str | None = None  # of all its kernels' code; None if any is unknown
    kernels: tuple[Kernel, ...] = field(default=())
    code_hash: str | None = None  # of the repository's files that its process ran; None if unknown
    packages: Mapping[str, str] = field(default_factory=dict)  # versions of those that its process imported


@dataclass(frozen=True)
class Cause:
    """The cause of a change."""

    word: Word
    note: str | None = None  # the evidence


def find_cause(
    before: Facts | None,  # of the last point before the change, if any
    after: Facts,
    *,
    canaries_moved: bool = False,
    confirmed: bool = False,  # an A/B comparison on one machine found a difference
    result: bool = False,  # the result changed, not the latency
    metric: str | None = None,  # the metric that changed, whose values the note need not repeat
) -> Cause:
    """Return the cause of a change between two points."""
    same_kernels = _same_kernels(before, after)
    if not confirmed:
        if canaries_moved:
            return Cause("machine", "canary moved: the machine, not the code")
        cause = None if before is None else _besides_code(before, after)
        if cause is None and same_kernels and not result:
            cause = Cause("infrastructure", some((SAME_KERNELS, *_packages(before, after))))
        if cause is not None:
            return cause
    changes = some(differences(before.kernels if before else (), after.kernels, without=metric))
    if before is not None and _other_config(before.kernels, after.kernels):
        return Cause("tuning", changes)
    if same_kernels:
        return Cause("code", SAME_KERNELS)
    if same_kernels is None:
        return Cause("code", None)
    return Cause("code", f"compiled kernel changed: {changes}" if changes else "compiled kernel changed")


def _besides_code(before: Facts, after: Facts) -> Cause | None:
    """Return the cause if the environment changed, or the code did not; else None."""
    if before.environment is not None and after.environment is not None:
        cause = _surroundings(before, before.environment, after, after.environment)
        if cause is not None:
            return cause
    if not same_code(before, after):
        return None
    same_commit = after.state is not None and after.state.same_code(before.state)
    return Cause("infrastructure", "same commit before and after" if same_commit else SAME_FILES)


SAME_KERNELS = "compiled kernel unchanged"
SAME_FILES = "the loaded files are the same"


def _other_config(before: Sequence[Kernel], after: Sequence[Kernel]) -> bool:
    """Return whether kernels of the same names were compiled from another config."""
    old, new = ([kernel for kernel in side if not kernel.external] for side in (before, after))
    if [kernel.name for kernel in old] != [kernel.name for kernel in new]:
        return False
    return any(one.config != other.config for one, other in zip(old, new, strict=True))


def some(texts: Sequence[str]) -> str:
    """Return the first few texts joined by semicolons, with the number of the others."""
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _surroundings(before: Facts, old: Environment, after: Facts, new: Environment) -> Cause | None:
    """Return the machine's change, or else the toolchain's, as the cause; None if both are the same."""
    machine, toolchain = machine_differences(old, new), toolchain_differences(old, new)
    if toolchain or not _same_kernels(before, after):  # packages change how a kernel is made, not what it does
        toolchain = (*toolchain, *(text for text in _packages(before, after) if text not in toolchain))
    if machine:
        return Cause("environment", some((*machine, *toolchain)))
    if not toolchain:
        return None
    kernels = SAME_KERNELS if _same_kernels(before, after) else None
    note = "; ".join(text for text in (some(toolchain), kernels) if text)
    return Cause("toolchain" if same_code(before, after) else "code and toolchain", note)


def _packages(before: Facts | None, after: Facts) -> tuple[str, ...]:
    return () if before is None else changed_packages(before.packages, after.packages)


def _same_kernels(before: Facts | None, after: Facts) -> bool | None:
    """Return whether the compiled kernels are identical; None if either side's are unknown."""
    if before is None or before.kernel_hash is None or after.kernel_hash is None:
        return None
    return before.kernel_hash == after.kernel_hash


def same_code(before: Facts, after: Facts) -> bool:
    """Return whether both ran the same files, or are of one known commit without uncommitted changes."""
    if before.code_hash is not None and before.code_hash == after.code_hash:
        return True
    return after.state is not None and after.state.same_code(before.state)
