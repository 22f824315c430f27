"""Answers of a side to the driver's requests. `groupbench.operators.measure.side` sends them as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from groupbench.tracker.facts.record import Accuracy, Kernel, Loaded


class Greeting(msgspec.Struct, frozen=True):
    """Device and environment of a side that has started."""

    device: str = ""
    environment: dict[str, Any] = {}

    @property
    def gpu_uuid(self) -> str | None:
        uuid = self.environment.get("gpu_uuid")
        return None if uuid is None else str(uuid)


class ListedCell(msgspec.Struct, frozen=True):
    """A cell that a side knows, with the reason if it cannot run there."""

    operator: str
    backend: str
    shape: str
    dtype: str
    mode: str
    unavailable: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.operator, self.backend, self.shape, self.dtype, self.mode


class Offer(msgspec.Struct, frozen=True):
    """A candidate's backend.

    Attributes:
        baseline: Backend to compare with by default.
        own: Whether the candidate also defines the operator.
    """

    operator: str
    backend: str
    baseline: str
    own: bool


class Prepared(msgspec.Struct, frozen=True):
    """A side's facts about a cell, from before timing.

    Attributes:
        problem: Why the result is wrong.
        suspicious: Whether the result looks forged.
        dynamic: Whether the callable follows another routing; None if untested.
        loaded: Fingerprint of the side's process; None if unknown.
    """

    timing: str
    accuracy: Accuracy | None = None
    problem: str | None = None
    suspicious: bool = False
    dynamic: bool | None = None
    prepare_ms: float | None = None
    kernels: tuple[Kernel, ...] = ()
    loaded: Loaded | None = None

    @property
    def kernel_hash(self) -> str | None:
        """One name for all compiled kernels; None without kernels, or if one has no hash."""
        hashes = [kernel.hash for kernel in self.kernels]
        return "+".join(sorted(map(str, hashes))) if hashes and all(hashes) else None

    def has_same_code(self, other: Prepared) -> bool:
        """Return whether both sides launch the same kernels with the same configs."""
        return None not in (self.kernel_hash, other.kernel_hash) and self._identity == other._identity

    @property
    def _identity(self) -> list[tuple[str, ...]]:
        return sorted((k.name, str(k.hash), repr(sorted(k.config.items()))) for k in self.kernels)


class Failure(msgspec.Struct, frozen=True):
    """The reason why a side could not carry out a request; `status` is error, oom, timeout, unavailable or usage."""

    status: str
    message: str


class Answer(msgspec.Struct, frozen=True):
    """One line of a side's output."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
