"""The runs between which a series changed, and the toolchain or machine change there, if any."""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.tracker.environment import software_identity
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.record import Environment


@dataclass(frozen=True)
class Span:
    """The runs between which a series changed."""

    base: RunRow | None  # the last run before the change, if any
    head: RunRow  # the first run certainly after it
    author: str | None = None  # author of the head's commit

    @property
    def text(self) -> str:
        return f"{'' if self.base is None else self.base.state}..{self.head.state}"

    def overlaps(self, other: Span) -> bool:
        """Return whether both changes may have happened at the same time: after a base, and by its head."""
        return not (self._ends_before(other) or other._ends_before(self))

    def _ends_before(self, other: Span) -> bool:
        return other.base is not None and (self.head.started, self.head.pk) <= (other.base.started, other.base.pk)

    @property
    def same_code(self) -> bool:
        return self.base is not None and self.base.state == self.head.state and not self.head.dirty


@dataclass(frozen=True)
class Transition:
    """A change of a series' toolchain or machine, with its effect. Changes are relative: 0.03 is 3 % slower."""

    before: RunRow  # the last run before the transition
    after: RunRow  # the first run after it
    differences: tuple[str, ...]  # `triton 3.7.1 → 3.8.0`
    code_changed: bool
    change: float
    low: float | None  # interval of the change; None with too few results
    high: float | None
    old: Environment
    new: Environment  # environment of the newest result
    machine: bool = False  # the machine changed too

    @property
    def replaceable(self) -> bool:
        """Return whether the old toolchain can run on the new machine by installing the old packages."""
        return software_identity(self.old) != software_identity(self.new)

    @property
    def text(self) -> str:
        """`triton 3.7.1 → 3.8.0: +4.1% (+3.9% .. +4.3%)`."""
        ends = "" if self.low is None or self.high is None else f" ({100 * self.low:+.1f}% .. {100 * self.high:+.1f}%)"
        return f"{'; '.join(self.differences)}: {100 * self.change:+.1f}%{ends}"
