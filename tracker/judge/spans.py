"""Between which runs a series changed."""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.tracker.query.rows import RunRow


@dataclass(frozen=True)
class Span:
    """Between which runs a series changed."""

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
