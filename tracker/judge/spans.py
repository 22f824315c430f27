"""The runs between which a series changed, and the toolchain or machine change there, if any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupbench.tracker.facts.environment import software_identity
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.store.comparisons import NamedCommits
from groupbench.tracker.text.wording import signed_change, signed_ends


@dataclass(frozen=True)
class Span:
    """The runs between which a series changed, with facts about the commits between them."""

    base: RunRow | None  # the last run before the change, if any
    head: RunRow  # the first run certainly after it
    number: int | None = None  # number of commits after base, up to head; None if unknown
    named: tuple[NamedCommits, ...] = ()  # by a search, the largest change first

    @property
    def text(self) -> str:
        """The commits between which the change is, as far as known: `d92cfe6c31..dc1f6c2312`."""
        if self.named:
            return f"{self.named[0].parent[:10]}..{self.named[0].commits[-1]['hash'][:10]}"
        return f"{'' if self.base is None else self.base.state}..{self.head.state}"

    @property
    def date(self) -> str:
        """The date of the first run after the change, or of the commit if the run was a backfill."""
        return self.head.date

    @property
    def commit(self) -> str:
        """The hash of the commit to show: the one that a search named, or else the head's."""
        return self.named[0].commits[-1]["hash"] if self.named else self.head.commit

    @property
    def label(self) -> str:
        """The short form of that commit, with + for a dirty tree."""
        return self.commit[:10] if self.named else str(self.head.state)

    @property
    def subject(self) -> str | None:
        """The subject, unless the commit is one among several."""
        return self.named[0].commits[-1]["subject"] if self.named else None if self.remark else self.head.subject

    @property
    def author(self) -> str | None:
        """The author, unless the commit is one among several."""
        return self.named[0].commits[-1]["author"] if self.named else None if self.remark else self.head.author

    @property
    def remark(self) -> str:
        """A remark on that commit: `named by bisect`, `one of 4 commits`; empty if it is the only one."""
        if not self.named:
            return f"one of {self.number} commits" if self.number is not None and self.number > 1 else ""
        number = len(self.named[0].commits)
        text = "named by bisect" if number == 1 else f"one of {number} commits left by bisect"
        others = ", ".join(each.commits[-1]["hash"][:10] for each in self.named[1:])
        return f"{text}, which also named {others}" if others else text

    @property
    def in_words(self) -> str:
        """The commits with the subject, if it is that of the only one."""
        return " ".join(filter(None, [self.text, self.remark and f"({self.remark})", self.subject]))

    @property
    def ends(self) -> tuple[RunRow, ...]:
        """The runs at its ends: the head, after the base if there is one."""
        return (self.head,) if self.base is None else (self.base, self.head)

    def overlaps(self, other: Span) -> bool:
        """Return whether both changes may be of one commit: after a base, and by its head."""
        return not (self._ends_before(other) or other._ends_before(self))

    def _ends_before(self, other: Span) -> bool:
        if other.base is None:
            return False
        return max(end.order for end in self.ends) <= min(end.order for end in other.ends)

    @property
    def same_code(self) -> bool:
        return self.base is not None and self.head.state.same_code(self.base.state)


def agreed(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with a run in common with the most frequent one: noise moves some by one run."""
    ends = [(span.base, span.head) for span in spans]
    main = max(spans, key=lambda span: ends.count((span.base, span.head)), default=None)
    return [span for span in spans if main is None or span.overlaps(main)]


@dataclass(frozen=True)
class Transition:
    """A change of a series' toolchain or machine, and the effect. Changes are relative: 0.03 is 3 % slower."""

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
        ends = "" if self.low is None or self.high is None else f" ({signed_ends(self.low, self.high, ' .. ')})"
        return f"{'; '.join(self.differences)}: {signed_change(self.change)}{ends}"
