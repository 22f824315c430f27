"""Helpers that the gathering of evidence shares: cases, notes and intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.judge.causes import OF_TOOLCHAINS
from groupbench.tracker.judge.evidence import AB, Evidence
from groupbench.tracker.judge.rules import decide
from groupbench.tracker.judge.verdicts import Effect, Judged
from groupbench.tracker.stats.predict import Predicted
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared
from groupbench.tracker.store.decisions import Muted
from groupbench.tracker.text.wording import counted, joined, signed_change, signed_ends


@dataclass(frozen=True)
class Case:
    """The evidence about a row, and the row without its verdict."""

    evidence: Evidence
    row: Judged

    def knowing(self, **facts: Any) -> Case:
        """Return the case with further facts."""
        return replace(self, evidence=replace(self.evidence, **facts))

    def showing(self, **fields: Any) -> Case:
        """Return the case with other fields of the row."""
        return replace(self, row=replace(self.row, **fields))

    def unless_muted(self, muted: Muted | None) -> Case:
        """Return the case of a series that may be muted: without an A/B, and with the reason."""
        if muted is None:
            return self
        case = self.knowing(muted=True, asked=False, score=None)
        return case.showing(ab_base=None, note=joined(muted.text, self.row.note))

    def judged(self) -> Judged:
        """Return the row with a verdict."""
        rule, row = decide(self.evidence), self.row
        note = row.note
        if rule.note is not None and rule.note not in (note or ""):
            note = joined(rule.note, note)
        cause = row.cause if row.cause in OF_TOOLCHAINS else rule.cause or row.cause  # the versions say more
        base = row.ab_base if rule.verdict not in (rule.verdict.WRONG, rule.verdict.IMPROVED) else None
        return replace(
            row, verdict=rule.verdict, rule=rule.name, cause=cause, note=note, loud=rule.loud,
            evidence=self.evidence, ab_base=base,
        )  # fmt: skip


def percent(effect: float) -> str:
    """Return a logarithm as `+5.0%`."""
    return signed_change(math.expm1(effect))


def effect_on_latency(before: float, distance: float, predicted: Predicted | None) -> Effect:
    """Return the effect for a distance from a level; both are logarithms. The interval is tonight's result's."""
    half = None if predicted is None else predicted.reach(0.025)
    low, high = (None, None) if half is None else (relative(distance - half), relative(distance + half))
    return Effect(before_ms=math.exp(before), change=math.expm1(distance), low=low, high=high)


def found_by(compared: Compared | None, counts: float) -> AB | None:
    """Return the result of an A/B of a latency; a difference that does not count is `same`."""
    if compared is None:
        return None
    if compared.verdict == SAME:
        return "same"
    if compared.verdict != DIFFERENT or compared.effect is None:
        return "undecided"
    if abs(compared.effect) < counts:
        return "same"
    return "worse" if compared.effect > 0 else "better"


def why_undecided(compared: Compared) -> str:
    """Return why an A/B did not decide."""
    return f"A/B {compared.verdict}" + (f": {compared.message}" if compared.message else "")


def ab_text(compared: Compared) -> str:
    """Return the effect of an A/B as text, with the commits that it compared."""
    assert compared.effect is not None
    commits = ends = ""
    if compared.toolchains is None and compared.base != compared.head:
        commits = f" of {compared.base[:10]}..{compared.head[:10]}"
    if compared.low is not None and compared.high is not None and math.isfinite(compared.low + compared.high):
        ends = f" ({signed_ends(math.expm1(compared.low), math.expm1(compared.high))})"
    blocks = f" in {counted(compared.pairs, 'block')}" if compared.pairs else ""
    near = compared.details.get("inherits")
    how = "measured by an A/B" if near is None else f"fits the A/B of series {near}"
    return f"{how}{commits}: {percent(compared.effect)}{ends}{blocks}"
