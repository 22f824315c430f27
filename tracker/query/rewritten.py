"""The results of commits that a branch no longer has, because its history was rewritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools.counterparts import Counterparts


@dataclass(frozen=True)
class Rewritten:
    """The earlier runs of commits that a branch had once, by their effect on its history.

    Attributes:
        branch: Name of the branch, if known.
        matched: Keys of runs whose commits have a counterpart on the branch, at whose place they count.
        by_time: Keys of runs that count by time, because this repository no longer has their commits.
        left_out: Keys of runs that do not count: the branch has no commit with their change.
    """

    branch: str | None = None
    matched: frozenset[int] = frozenset()
    by_time: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()

    @classmethod
    def of(cls, branch: str, runs: Iterable[tuple[int, str]], matches: Counterparts) -> Rewritten:
        """Sort runs, given as (key, commit), by the counterparts of their commits."""
        runs = tuple(runs)
        fates = {key: matches[commit] for key, commit in runs if commit in matches}
        return cls(
            branch,
            matched=frozenset(key for key, match in fates.items() if match is not None),
            by_time=frozenset(key for key, _ in runs if key not in fates),
            left_out=frozenset(key for key, match in fates.items() if match is None),
        )

    def __bool__(self) -> bool:
        return bool(self.matched or self.by_time or self.left_out)

    @property
    def note(self) -> str:
        """The line that the gate prints."""
        of = counted(len(self.matched | self.by_time | self.left_out), "earlier run")
        fates = (
            (self.matched, "matched by their changes"),
            (self.by_time, "ordered by time, since git no longer has their commits"),
            (self.left_out, "left out, since no commit of the branch has their changes"),
        )
        parts = ", ".join(f"{len(keys)} {fate}" for keys, fate in fates if keys)
        return f"rewritten history: {of} of commits that have left {self.branch}: {parts}"
