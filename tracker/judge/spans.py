"""Between which runs a series changed, and what else changed between them."""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.tracker.environment import software_identity
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.record import Environment


@dataclass(frozen=True)
class Span:
    """Between which runs a series changed, and what else changed between them."""

    base: RunRow | None  # the last one before; None where there is none
    head: RunRow  # the first one that is certainly after
    author: str | None = None  # of the head's commit

    @property
    def text(self) -> str:
        return f"{'' if self.base is None else self.base.state}..{self.head.state}"

    def overlaps(self, other: Span) -> bool:
        """Return whether both may be of one moment: each is after its base, up to and with its head."""
        return not (self._ends_before(other) or other._ends_before(self))

    def _ends_before(self, other: Span) -> bool:
        return other.base is not None and (self.head.started, self.head.pk) <= (other.base.started, other.base.pk)

    @property
    def same_code(self) -> bool:
        return self.base is not None and self.base.state == self.head.state and not self.head.dirty


@dataclass(frozen=True)
class Transition:
    """A series across a change of its toolchain or machine. Changes are relative: 0.03 is three per cent slower."""

    before: RunRow  # the last run before it
    after: RunRow  # the first run after it
    differences: tuple[str, ...]  # `triton 3.7.1 → 3.8.0`
    code_changed: bool
    change: float
    low: float | None  # interval of the change; None where few results tell none
    high: float | None
    old: Environment
    new: Environment  # of the newest result
    machine: bool = False  # the machine is another, too

    @property
    def replaceable(self) -> bool:
        """Whether an interpreter with the old packages would be another toolchain on the machine of the new one."""
        return software_identity(self.old) != software_identity(self.new)

    @property
    def text(self) -> str:
        """`triton 3.7.1 → 3.8.0: +4.1% (+3.9% .. +4.3%)`."""
        ends = "" if self.low is None or self.high is None else f" ({100 * self.low:+.1f}% .. {100 * self.high:+.1f}%)"
        return f"{'; '.join(self.differences)}: {100 * self.change:+.1f}%{ends}"
