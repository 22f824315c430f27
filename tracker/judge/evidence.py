"""Everything that bears on one row of the verdict, gathered and frozen before any rule looks at it.

Distances are logarithms, positive for the worse. The facts are data, so that latency, accuracy and every
further metric are judged by the same table (`rules.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

Kind = Literal["result", "tonight", "step", "gain", "machine", "pin"]
"""The subject of a row:

result   whether there is a result, and a right one
tonight  tonight's value, compared with the level that it should belong to
step     a change for the worse that is in force
gain     a recent change for the better
machine  the first results on another machine, compared with the last ones before
pin      tonight's value, compared with a pinned commit
"""

AB = Literal["same", "worse", "better", "undecided"]

OLD = 20
"""Number of results on a new level for which a change is news.

An older change counts only if it has an alert. So a regression stays until its alert is resolved, while changes from
before the alerts began, and improvements, do not fail or fill reports forever."""


T = TypeVar("T")


def fact(default: T, words: str) -> T:
    """Return a field of Evidence with the words by which `gate --why` prints it."""
    value: T = field(default=default, metadata={"words": words})
    return value


@dataclass(frozen=True, slots=True)  # a fifth of the memory
class Evidence:
    """The facts of one row, each with the words by which `gate --why` prints it."""

    kind: Kind = fact("tonight", "subject of the row: {}")  # noqa: RUF009
    status: str = fact("ok", "the cell ended as {}")
    had: bool = fact(False, "the previous night had a result")
    removed: bool = fact(False, "the plan no longer has the cell")
    muted: bool = fact(False, "a person muted the series")
    timed: bool = fact(True, "no latency")
    canary: bool = fact(False, "a canary, which does not run the code under test")
    n: int = fact(0, "earlier results: {}")
    sigma: float | None = fact(None, "scatter: one result has a standard deviation of {:%}")
    reach: float | None = fact(None, "a first night is out beyond {:+-%}")
    counts: float = fact(0.0, "changes of less than {:+-%} do not count")
    distance: float = fact(0.0, "change from the level, for the worse if positive: {:+%}")
    p: float | None = fact(None, "chance of such a change on the level: {:.2g}")
    nights: int = fact(0, "nights in a row that are out, negative for the better: {}")
    beyond: bool = fact(False, "farther from all results of the level than those are from each other")
    far: int = fact(0, "of these, for the worse by more than counts: {}")
    rank: float = fact(1.0, "chance of as many by the order of the results alone: {:.2g}")
    came_back: float = fact(0.0, "share of all series' results that were about as far outside and came back: {:.2g}")
    few: bool = fact(False, "few earlier results, so that history alone shows gross changes only")
    slight: bool = fact(False, "the change is not gross")
    back: bool = fact(False, "the first result back on the level before a change")
    since: int = fact(0, "results since the change: {}")
    drifts: bool = fact(False, "no single night shows the change")
    scatters: bool = fact(True, "the value is the same whenever the code is")
    is_error: bool = fact(False, "an error of the result, which hardly scatters")
    decidable: bool = fact(False, "an A/B can decide")
    hint: bool = fact(False, "the metric only hints at a slower kernel")
    noisy: bool = fact(False, "the bursts vary too much")
    score: float | None = fact(None, "chance of tonight and the nights before, by which A/Bs are ranked: {:.2g}")
    asked: bool = fact(False, "worth an A/B, and one is possible")
    ab: AB | None = fact(None, "A/B of both commits: {}")  # noqa: RUF009
    outside: bool = fact(False, "the same code is off the level: by an A/B, or as loaded before")
    cause: str | None = fact(None, "cause by other facts than an A/B: {}")
    same_code: bool = fact(False, "no code changed")
    excused: Literal["canary", "together"] | None = fact(None, "no more than the machine moved: {}")
    alert: str | None = fact(None, "the incident of the change is {}")
    accepted: bool = fact(False, "a person accepted the level")
    certain: bool = fact(False, "beyond the limit of the pin for certain")

    @property
    def not_excluded(self) -> float:
        """The largest change not excluded by tonight's result: the reach, on top of a distance with an A/B due."""
        due = self.distance if self.asked and self.kind == "tonight" else 0.0
        return (self.reach or 0.0) + max(due, 0.0)

    @property
    def lines(self) -> list[str]:
        """The known facts, a fact a line, as `gate --why` prints them."""
        given = [each for each in fields(self) if getattr(self, each.name) not in (None, each.default)]
        given = [each for each in given if each.name != "distance" or self.scatters]  # a count has no percentage
        return [each.metadata["words"].format(_Shown(getattr(self, each.name))) for each in given]


class _Shown:
    """A value that prints a logarithm as a change by `{:%}`, and both ways by `{:+-%}` if a fall is smaller."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        if spec == "+-%":
            rise, fall = math.expm1(self.value), -math.expm1(-self.value)
            return f"{100 * rise:.3g} %" + (f" up or {100 * fall:.3g} % down" if fall < 0.9 * rise else "")
        if spec.endswith("%"):
            return f"{100 * math.expm1(self.value):{spec[:-1]}.3g} %"
        return format(self.value, spec)
