"""Everything that bears on one row of the verdict, gathered and frozen before any rule looks at it.

Distances are logarithms, positive for the worse. The facts are data, so that latency, accuracy and every
further metric are judged by the same table (`rules.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

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


@dataclass(frozen=True)
class Evidence:
    """The known facts of one row.

    Attributes:
        kind: The subject of the row.
        status: Of tonight's point, or `absent`.
        had: The previous night had a result, or a latency if `timed` is False.
        removed: The plan no longer has the cell.
        muted: A person muted the series.
        timed: Tonight's point has a latency, or needs none.
        canary: The series monitors the machine and does not run the code under test.
        n: Number of earlier results.
        sigma: Standard deviation of one result that was to be expected.
        reach: Distance from which a first night is out: no smaller change would be noticed.
        counts: Smallest distance that counts.
        distance: Of tonight's value from the level, or from the reference if kind is `step`.
        p: Chance of such a distance on the level.
        nights: Number of nights in a row that are out; negative if they are for the better.
        beyond: Tonight's value is farther from all results of the level than they are from each other.
        far: Number of nights in a row that are so for the worse, by more than counts.
        rank: Chance of as many if nothing changed, by their ranks alone.
        few: Few earlier results, so that history alone shows gross changes only.
        slight: Few earlier results, and the distance is not gross: history alone shows nothing.
        back: Tonight's value is the first back on the level before a change.
        since: Number of results since the change.
        drifts: No single night shows the change.
        scatters: The value varies from run to run. Otherwise, each change of it is one.
        is_error: The value is an error of the result, which hardly scatters.
        decidable: An A/B can decide it.
        hint: The metric only hints at a slower kernel.
        noisy: The bursts vary too much.
        score: Chance of tonight's result and the nights before it, by which A/Bs are ranked; None if not worth one.
        asked: The chance is small enough for an A/B, with which one is possible.
        ab: The result of the A/B about tonight's commit, or about the step.
        ab_outside: That A/B measured both sides off the level, so the code did not change.
        cause: The cause by other facts than an A/B, a word of `causes`.
        same_code: No code changed.
        excused: The machine's own move explains the distance: `canary`, or `together` if all cells moved.
        alert: State of the alert about the step, if it has one.
        accepted: A person accepted the level.
        certain: The limit of the pin is exceeded for certain.
    """

    kind: Kind = "tonight"
    status: str = "ok"
    had: bool = False
    removed: bool = False
    muted: bool = False
    timed: bool = True
    canary: bool = False
    n: int = 0
    sigma: float | None = None
    reach: float | None = None
    counts: float = 0.0
    distance: float = 0.0
    p: float | None = None
    nights: int = 0
    beyond: bool = False
    far: int = 0
    rank: float = 1.0
    few: bool = False
    slight: bool = False
    back: bool = False
    since: int = 0
    drifts: bool = False
    scatters: bool = True
    is_error: bool = False
    decidable: bool = False
    hint: bool = False
    noisy: bool = False
    score: float | None = None
    asked: bool = False
    ab: AB | None = None
    ab_outside: bool = False
    cause: str | None = None
    same_code: bool = False
    excused: Literal["canary", "together"] | None = None
    alert: str | None = None
    accepted: bool = False
    certain: bool = False

    @property
    def lines(self) -> list[str]:
        """The known facts, a fact a line, as `gate --why` prints them."""
        return [
            f"{field.name}: {_text(field.name, getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) not in (None, field.default)
        ]


def _text(name: str, value: Any) -> str:
    if name in ("sigma", "reach", "counts", "distance"):  # logarithms
        return f"{100 * math.expm1(value):.3g} %"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
