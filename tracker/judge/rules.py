"""The table that decides every verdict. The first rule that applies to the evidence wins.

Each rule is one comparison of facts of the evidence, or a conjunction of them. No rule calls another one or reads the
history again. `docs/reference/verdicts.md` is made from this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.evidence import OLD, Evidence
from groupbench.tracker.stats.thresholds import BLIND
from groupbench.tracker.stats.walk import AT_ONCE, NIGHTS, RARE, TO_SUSPECT


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        name: As stored with the verdict, and as `gate --why` prints it.
        applies: Whether the rule decides.
        verdict: The verdict.
        meaning: When it applies, for the reference page.
        cause: The cause, if the rule knows one.
        note: The note of the row.
        loud: The row is listed even if its verdict is quiet.
    """

    name: str
    applies: Callable[[Evidence], bool]
    verdict: Verdict
    meaning: str
    cause: str | None = None
    note: str | None = None
    loud: bool = False


def _tonight(e: Evidence) -> bool:
    return e.kind == "tonight"


def _step(e: Evidence) -> bool:
    return e.kind == "step"


RULES: tuple[Rule, ...] = (
    # ---- is there a result?
    Rule("wrong", lambda e: e.status == "wrong", Verdict.WRONG, "the result is outside its tolerance"),
    Rule("muted", lambda e: e.muted, Verdict.OK, "a person muted the series, until a date"),
    Rule(
        "removed",
        lambda e: e.status == "absent" and e.removed,
        Verdict.OK, "the previous night measured the cell, and the plan no longer has it",
        note="removed from the plan", loud=True,
    ),
    Rule(
        "absent", lambda e: e.status in ("absent", "unavailable") and e.had, Verdict.MISSING,
        "the previous night measured the cell, and this one did not",
    ),
    Rule("unavailable", lambda e: e.status == "unavailable", Verdict.UNAVAILABLE, "the backend cannot run here"),
    Rule("failed", lambda e: e.status != "ok", Verdict.MISSING, "the cell failed"),
    Rule(
        "no latency", lambda e: not e.timed and e.had, Verdict.MISSING,
        "the previous night has a latency, and this one does not",
        note="the previous run has a latency, but this run does not",
    ),
    # ---- decisions of people
    Rule(
        "accepted", lambda e: e.accepted, Verdict.OK, "a person expects the level, or closed the incident as invalid",
        loud=True,
    ),
    Rule(
        "pin exceeded", lambda e: e.kind == "pin" and e.certain, Verdict.REGRESSED,
        "slower than a pin allows, by more than three standard errors or by an A/B", cause="pin",
    ),
    Rule(
        "pin in doubt", lambda e: e.kind == "pin", Verdict.SUSPECT,
        "slower than a pin allows, within three standard errors", cause="pin",
    ),
    # ---- the machine
    Rule(
        "canary", lambda e: e.canary and (e.kind in ("step", "gain") or e.nights != 0) and e.since <= OLD,
        Verdict.SUSPECT,
        "the series is a canary, and it is out: the machine is suspect",
    ),
    Rule(
        "another machine", lambda e: e.kind == "machine" and e.ab is None and abs(e.distance) > e.counts,
        Verdict.INCOMPARABLE, "one of the first three results on another machine differs from those before",
        cause="environment",
    ),
    Rule(
        "canary moved",
        lambda e: e.excused == "canary" and e.ab in (None, "undecided") and (_step(e) or e.nights > 0),
        Verdict.UNRESOLVED, "out, but by no more than twice the move of a canary on the machine",
        cause="machine", note="canary moved: the machine, not the code",
    ),
    Rule(
        "all moved",
        lambda e: e.excused == "together" and e.ab in (None, "undecided") and not _step(e) and e.nights > 0,
        Verdict.UNRESOLVED, "out, but the cells of the machine moved together, until the third night",
        cause="machine", note="all cells of the machine moved: the machine, not the code",
    ),
    Rule(
        "A/B outside",
        lambda e: e.outside and e.ab == "same" and e.excused is None and e.alert is None,
        Verdict.UNRESOLVED, "an A/B found no difference, but both commits are off the level",
        cause="environment", note="the A/B measured both commits off the level",
    ),
    Rule(
        "outside", lambda e: e.outside and e.excused is None and e.alert is None, Verdict.UNRESOLVED,
        "off the level, though the same code was on it; until the third night",
        cause="infrastructure", note="changed with no code change",
    ),
    Rule(
        "used to it",
        lambda e: _step(e) and e.alert is None and e.ab is None and
        (e.same_code or e.excused is not None or (e.cause == "infrastructure" and e.scatters and not e.decidable)),
        Verdict.OK, "a step that no change of the code made, after the third night",
        cause="infrastructure", note="changed with no code change", loud=True,
    ),
    # ---- A/Bs and three nights
    Rule(
        "old", lambda e: e.kind in ("step", "gain") and e.since > OLD and e.alert is None and not e.drifts, Verdict.OK,
        f"a change more than {OLD} results ago without an incident", note="old change",
    ),
    Rule(
        "not shown", lambda e: _step(e) and e.distance <= 0 and e.ab != "worse", Verdict.OK,
        "a step in force, though tonight's result does not show it",
    ),
    Rule(
        "A/B worse", lambda e: e.ab == "worse", Verdict.REGRESSED,
        "an A/B of both commits, on one machine, found the head slower",
    ),
    Rule(
        "open incident", lambda e: _step(e) and e.alert is not None, Verdict.REGRESSED, "a step with an open incident",
    ),
    Rule(
        "same kernels", lambda e: _step(e) and e.cause == "infrastructure" and e.decidable, Verdict.SUSPECT,
        "a step of three nights, though the compiled kernels are the same",
    ),
    Rule(
        "hint", lambda e: e.hint and e.distance > 0 and e.ab != "same"
        and (_step(e) or not e.scatters or e.nights >= TO_SUSPECT),
        Verdict.SUSPECT, "a metric that only hints at a slower kernel got worse",
    ),
    Rule(
        "three nights", lambda e: _step(e) and e.ab != "same", Verdict.REGRESSED,
        f"{NIGHTS} nights in a row, each with a chance of at most 1 % on the level and beyond the least that counts, "
        "or a change of a value that does not scatter",
    ),
    Rule(
        "A/B better", lambda e: e.ab == "better", Verdict.IMPROVED, "an A/B of both commits found the head faster",
    ),
    Rule("improved", lambda e: e.kind == "gain", Verdict.IMPROVED, "the same for the better"),
    # ---- tonight
    Rule(
        "A/B same", lambda e: e.ab == "same", Verdict.OK, "an A/B of both commits found no difference",
        cause="infrastructure", note="A/B: no difference", loud=True,
    ),
    Rule(
        "same code", lambda e: e.same_code and e.decidable and e.ab is None and _tonight(e) and e.nights != 0,
        Verdict.OK, "out, but earlier results of the same code were not",
        cause="infrastructure", note="changed with no code change", loud=True,
    ),
    Rule(
        "noisy", lambda e: e.noisy and e.nights == 0, Verdict.NOISY,
        "the bursts vary by more than 20 %, and the latency does not agree with earlier ones",
    ),
    Rule("new", lambda e: e.n == 0, Verdict.NEW, "no earlier result"),
    Rule("back", lambda e: e.back, Verdict.OK, "the first result back on the level before a change", loud=True),
    Rule(
        "error changed", lambda e: _tonight(e) and e.is_error and e.nights > 0 and e.p is not None and e.p <= AT_ONCE,
        Verdict.REGRESSED, "an error with a chance of at most 0.1 %, which no A/B could decide",
    ),
    Rule(
        "undecided",
        lambda e: e.ab == "undecided" and (e.nights >= TO_SUSPECT or (e.nights > 0 and e.beyond)),
        Verdict.UNRESOLVED, "out for two nights, or beyond all results, and an A/B did not decide",
    ),
    Rule(
        "two nights", lambda e: e.nights >= TO_SUSPECT and (e.decidable or e.is_error) and not e.slight,
        Verdict.SUSPECT,
        "two nights in a row, each with a chance of at most 1 % on the level and beyond the least that counts",
    ),
    Rule(
        "nights apart", lambda e: e.far >= TO_SUSPECT and e.rank <= RARE and e.decidable and not e.canary,
        Verdict.SUSPECT,
        "nights in a row beyond the least that counts, farther from all earlier results than those are from each "
        "other, with a chance of at most 0.5 % by their ranks",
    ),
    Rule(
        "unconfirmed", lambda e: e.nights > 0 and e.p is not None and e.p <= (RARE if e.few else AT_ONCE) and e.beyond
        and e.decidable and not e.slight and e.came_back <= RARE, Verdict.UNCONFIRMED,
        "a first night with a chance of at most 0.1 %, farther from all results than they are from each other; or, "
        "with few earlier results, a gross change with a chance of at most 0.5 %; unless at least two, and more "
        "than 0.5 %, of all series' results were about as far and came back",
    ),
    Rule(
        "two nights better", lambda e: -e.nights >= TO_SUSPECT and e.decidable and not e.slight, Verdict.SUSPECT,
        "the same two nights for the better: it may have improved",
    ),
    Rule(
        "too early", lambda e: e.far > 0 and e.decidable and not (e.canary or e.same_code or e.excused),
        Verdict.UNDECIDED,
        "farther from all earlier results than those are from each other, and beyond the least that counts, but too "
        "likely by chance", note="beyond all earlier results, which are too few to tell",
    ),
    Rule(
        "too wide",
        lambda e: _tonight(e) and e.not_excluded > math.log1p(BLIND) and e.n > 0 and not e.canary,
        Verdict.UNDECIDED,
        "the results vary so much that twice the latency may not show, also if an A/B is due",
        note="the results vary too much: twice the latency may not show",
    ),
    Rule(
        "to compare", lambda e: e.asked, Verdict.OK,
        "rare enough on the level for an A/B, which was not made: the next night begins with it",
    ),
    Rule("unchanged", lambda e: True, Verdict.OK, "none of these"),
)  # fmt: skip
"""The rules in order."""


def decide(evidence: Evidence) -> Rule:
    """Return the rule that decides."""
    return next(rule for rule in RULES if rule.applies(evidence))
