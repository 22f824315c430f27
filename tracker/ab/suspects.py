"""Arrange the suspects of a run for A/Bs: by pair of commits, and by likely cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import ab_software, software_identity, toolchain_differences
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.judge.causes import some
from groupbench.tracker.judge.incident_facts import causes_of
from groupbench.tracker.judge.incidents import fits
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.toolchain_lines import LineSoftware, of_one_toolchain
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.store.comparisons import DIFFERENT, Compared

MOST_AB = 4
"""Most comparisons of a cause's suspects, once one of them has found a difference."""


@dataclass(frozen=True)
class Pair:
    """Suspects to decide by comparing two commits, or one commit with two toolchains."""

    base: str
    head: str
    rows: tuple[Judged, ...]
    toolchains: tuple[Environment, Environment] | None = None

    def details(self, row: Judged, software: Sequence[dict[str, str]] | None = None) -> dict[str, Any]:
        """Return the software facts to store with a suspect's comparison.

        Args:
            software: Versions of base and head by package; None if nothing was measured.
        """
        assert row.point is not None
        details: dict[str, Any] = {"software": software or [ab_software(row.point.environment.facts)] * 2}
        if row.point.run.toolchain is not None:
            details["toolchain"] = row.point.run.toolchain
        if self.toolchains is not None:
            details["toolchains"] = [software_identity(each) for each in self.toolchains]
        return details

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.base, self.head, *map(software_identity, self.toolchains or ()))

    @property
    def text(self) -> str:
        if self.toolchains is None:
            return f"{self.base[:10]} and {self.head[:10]}"
        return f"{self.base[:10]} with {some(toolchain_differences(*self.toolchains))}"


def plan(
    suspects: Sequence[Judged], earlier: dict[int, list[Compared]], again: bool
) -> tuple[list[Pair], list[Judged]]:
    """Return (pairs to measure, the one with the most severe change first; suspects measured before)."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    toolchains: dict[tuple[str, ...], tuple[Environment, Environment]] = {}
    before = []
    for row in suspects:
        assert row.ab_base is not None and row.point is not None
        base, head = row.ab_base.commit, (row.ab_head or row.point.run).commit
        needed: list[tuple[str, ...]] = [] if base == head else [(base, head)]
        if row.transition is not None and with_toolchain(row):
            sides = row.transition.old, row.transition.new
            needed.insert(0, (base, base, *map(software_identity, sides)))
            toolchains[needed[0]] = sides
        measured = _measured(row, earlier.get(row.series.pk, ()))
        new = [ends for ends in needed if again or ends not in measured]
        for ends in new:
            groups.setdefault(ends, []).append(row)
        if not new:
            before.append(row)
    return [Pair(ends[0], ends[1], tuple(rows), toolchains.get(ends)) for ends, rows in groups.items()], before


def _measured(row: Judged, earlier: Iterable[Compared]) -> set[tuple[str, ...]]:
    """Return the ends in a suspect's earlier comparisons, as far as they are evidence."""
    assert row.point is not None
    line = LineSoftware(row.point.run.toolchain, [ab_software(row.point.environment.facts)])
    stored = [each for each in earlier if line.includes(each)]
    return {ends_of(each) for each in (of_one_toolchain(stored) if with_toolchain(row) else stored)}


def with_toolchain(row: Judged) -> bool:
    """Return whether a suspect's toolchain changed too: one commit is measured with both toolchains."""
    return row.transition is not None and row.transition.replaceable and not row.transition.machine


def ends_of(compared: Compared) -> tuple[str, ...]:
    """Return a comparison's commits and toolchains, as `plan` names them."""
    return (compared.base, compared.head, *(compared.toolchains or ()))


def _span(row: Judged) -> Span:
    """Return the runs between which a suspect is compared, or a known change is."""
    assert row.point is not None
    return Span(row.ab_base, row.ab_head or row.point.run) if row.ab_base is not None or row.span is None else row.span


class Cause:
    """Suspects with one likely cause. A few are measured, and those between two measured changes inherit the answer.

    The least likely suspect comes first, then those with the largest and the smallest change. Without a difference,
    every suspect is measured; with one, at most `MOST_AB` rows of the cause, counted over all rounds and nights.

    Args:
        pairs: The suspects, by pair of commits.
        failing: Rows with the same cause that changed for certain.
    """

    def __init__(self, pairs: Sequence[Pair], failing: Sequence[Judged]) -> None:
        self.pairs, self.is_known = pairs, bool(failing)
        self.rows: list[Judged] = []  # of the present pair, without an answer
        self.measured: list[tuple[Judged, Compared]] = []
        self.different: list[tuple[Judged, Compared, float]] = []  # with the change of the row
        of_toolchains = any(pair.toolchains is not None for pair in pairs)
        for row in failing:  # earlier nights' commits may differ from the suspects'
            one = row.compared
            if one is not None and bool(one.toolchains) == of_toolchains and not one.details.get("inherits"):
                self.answered(row, one)
        self.begun = len(self.measured)

    @property
    def alone(self) -> bool:
        """Whether there is only one suspect."""
        return self.begun + sum(len(pair.rows) for pair in self.pairs) == 1

    @property
    def differs(self) -> bool:
        """Whether an A/B of a suspect found a difference."""
        return any(one.verdict == DIFFERENT for _, one in self.measured[self.begun :])

    def next(self) -> Judged | None:
        """Return the next suspect to measure, or None."""
        rest = [row for row in self.rows if not self._fits(row)]
        if not rest or (self.different and len(self.measured) >= MOST_AB):
            return None
        if not self.different:
            return rest[0]
        by_size = sorted(rest, key=lambda row: row.change or 0.0)
        turn = len(self.measured) % 3
        return by_size[-1] if turn == 1 else by_size[0] if turn == 2 else by_size[len(by_size) // 2]

    @property
    def lone(self) -> tuple[Pair, Judged] | None:
        """The only suspect with a difference among several, and the pair, which another comparison has to repeat."""
        different = [each for each in self.measured if each[1].verdict == DIFFERENT]
        if self.alone or not self.differs or len(different) > 1:
            return None
        ((row, one),) = different
        return next(pair for pair in self.pairs if pair.ends == ends_of(one)), row

    def answered(self, row: Judged, compared: Compared) -> None:
        """Note the answer about a suspect, or about another row with the cause."""
        self.rows = [each for each in self.rows if each is not row]
        self.measured.append((row, compared))
        if row.change is None or compared.effect is None:
            return
        if compared.verdict == DIFFERENT and (compared.effect > 0) == (row.change > 0):
            self.different.append((row, compared, row.change))

    def _fits(self, row: Judged) -> bool:
        if row.change is None or row.what not in (None, "latency"):
            return False
        low, high = (row.change if end is None else end for end in (row.effect.low, row.effect.high))
        return fits((low, high), [change for _, _, change in self._near(row)])

    def _near(self, row: Judged) -> list[tuple[Judged, Compared, float]]:
        """Return the differences of which one commit can explain the row too."""
        return [each for each in self.different if _span(row).overlaps(_span(each[0]))]

    def inherited(self, pair: Pair) -> Iterator[tuple[Judged, Compared]]:
        """Yield the suspects that fit, with the answer that they inherit: less what the A/B did not find of the change.

        The history also shows what the machine or the toolchain contributed.
        """
        for row in filter(self._fits, list(self.rows)):
            near, one, change = min(self._near(row), key=lambda each: abs(each[2] - (row.change or 0.0)))
            rest = math.log1p(change) - (one.effect or 0.0)
            ends = (row.change, row.effect.low, row.effect.high)
            effect, low, high = (None if end is None or end <= -1 else math.log1p(end) - rest for end in ends)
            now = row.latency_now
            before = None if now is None or effect is None else now * math.exp(-effect)
            yield row, replace(
                one, base=pair.base, head=pair.head,
                effect=effect, low=low, high=high, base_ms=before, head_ms=now, pairs=None, seconds=0.0,
                message=f"not measured: fits the A/B of series {near.series.pk}", pk=None,
                details={**pair.details(row), "inherits": near.series.pk},
            )  # fmt: skip
            self.rows.remove(row)


def by_cause(
    session: Session, pairs: Sequence[Pair], suspects: Sequence[Judged], failing: Sequence[Judged]
) -> list[Cause]:
    """Return the suspects by likely cause: causes of known changes first, then those least likely to be noise.

    Args:
        session: The database.
        pairs: The suspects, by pair of commits.
        suspects: All of them, the least likely first.
        failing: Rows that changed for certain.
    """
    place = {id(row): number for number, row in enumerate(suspects)}
    causes = []
    for with_toolchains in (True, False):  # an A/B of toolchains is no evidence about the commits
        alike = [pair for pair in pairs if (pair.toolchains is not None) == with_toolchains]
        changed = [*(row for pair in alike for row in pair.rows), *failing]
        for each in causes_of(session, changed, by_surroundings=False):  # an A/B excludes them
            of_cause = {id(row) for row in each.rows}
            of_pairs = [
                replace(pair, rows=rows) for pair in alike if (rows := tuple(r for r in pair.rows if id(r) in of_cause))
            ]
            if of_pairs:
                causes.append(Cause(of_pairs, [row for row in failing if id(row) in of_cause]))
    return sorted(
        causes, key=lambda cause: (not cause.is_known, min(place[id(r)] for p in cause.pairs for r in p.rows))
    )
