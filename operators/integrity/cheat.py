"""Describe a cheat, and find the mechanism that caught it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from groupbench.operators.catalog.grouped_gemm import group_bounds
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.operator import Backend
from groupbench.tracker.facts.record import NOT_CHECKED, Record

CATCHERS = {
    "named calls": r"names a timed call|timed calls were kept|has changed since the burst$",
    "moved inputs": r"^in a timed call: ",
    "own inputs": r"the backend changed its input|shares memory with its input",
    "poisoned memory": r"never (over)?written",
    "reference elsewhere": r"relative RMS error|of the elements are outside the tolerance",
    "seal": r"^the backend's process replaced ",
    "idle": r"of processor time in the .* between its bursts",
    "L2": r"of the L2 cache, which stay unflushed$",
    "parent's clock": r"by the parent's clock|a (timed )?call [a-z ]*takes|times are reported for",
    "physics": r"^implausible: .* is less than",
    "plain tensor": r"returned .*(class of its own|not in memory|without memory|a tensor on|not a tensor)",
    "tolerance table": r"asks for the tolerance",
    "domain": r"^PermissionError",
    "isolation": (
        r"the process( died|, or the one above it, was killed)|could not be read|no answer within"
        r"|^its process reports: |^its answer to |^(Type|Runtime|Attribute)Error|^StopIteration"
    ),
}
"""Mechanisms by the pattern of a record's message. The first pattern that matches names the mechanism."""


ELSEWHERE = ("reference elsewhere",)
MOVED = ("moved inputs",)
PLAIN = ("plain tensor",)
SEAL = ("seal",)


@dataclass(frozen=True)
class Cheat:
    """A backend that cheats."""

    kind: str  # printed in the report
    prepare: Callable[[Any], Any]  # its docstring describes the cheat
    expected: tuple[str, ...]  # mechanisms that may catch it, keys of CATCHERS
    device: str = ""  # the only device it runs on, cpu or cuda
    tolerance: str | None = None

    @property
    def name(self) -> str:
        return self.prepare.__name__


def backends(cheats: Iterable[Cheat]) -> tuple[Backend, ...]:
    """Return the cheats as backends of `grouped_gemm`, for a plugin."""
    return tuple(
        Backend(
            cheat.name, cheat.prepare, " ".join((cheat.prepare.__doc__ or "").split()),
            operator="grouped_gemm", tolerance=cheat.tolerance,
        )
        for cheat in cheats
    )  # fmt: skip


def is_not_checked(record: Record) -> bool:
    """Return whether the machine was too busy to check the times: the backend is neither accused nor ok."""
    return record.status == "error" and (record.message or "").startswith(NOT_CHECKED)


def caught_by(record: Record) -> str | None:
    """Return the mechanism that caught a backend: `something else` for an unknown message, None if none did."""
    if record.status == "ok" or is_not_checked(record):
        return None
    message = record.message or ""
    return next((name for name, pattern in CATCHERS.items() if re.search(pattern, message)), "something else")


def keeper_of_burst() -> Any:
    """Return the harness's object that keeps a burst's outputs, from a caller's frame; None outside bursts."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        watch = frame.f_locals.get("watch")
        if type(watch).__name__ == "Keeper":
            return watch
        frame = frame.f_back
    return None


def product(x: Any) -> Tensor:
    """Compute the honest result [M, N], freshly allocated."""
    out: Tensor = x.a.new_empty(x.a.shape[0], x.b.shape[2])
    for g, start, end in group_bounds(x.rows):
        torch.matmul(x.a[start:end], x.b[g], out=out[start:end])
    return out
