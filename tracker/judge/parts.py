"""Helpers that the gate's rules share: notes, intervals, and input for the statistics."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Literal, TypeGuard

from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.verdicts import Effect, Judged, News
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.text.wording import counted, signed_change

Q = 0.05
"""False-discovery rate of the changes that history reports."""

OLD = scans.RECENT
"""Number of results on a new level for which a change is news.

An older change counts only if it has an alert. So a regression stays until its alert is resolved, while changes from
before the alerts began, and improvements, do not fail or fill reports forever."""


def joined(*texts: str | None) -> str | None:
    """Return the non-empty texts as one note."""
    return "; ".join(text for text in texts if text) or None


def percent(effect: float) -> str:
    """Return a logarithm as `+5.0%`."""
    return signed_change(math.expm1(effect))


def moved(finding: scans.SeriesFinding | None) -> TypeGuard[scans.SeriesFinding]:
    """Return whether a finding is a change or a suspect."""
    return finding is not None and finding.moved and finding.effect is not None


def history(
    past: Past,
    floor: float,
    least: float,
    pool: Hashable,
    *,
    gross: float = scans.SeriesHistory.gross,
    worse: Literal[1, -1] = 1,
) -> scans.SeriesHistory:
    """Return a past as input for the statistics; `least` and `gross` are logarithms."""
    return scans.SeriesHistory(
        log_ms=past.log, error=past.error, environment=past.environment, state=past.state,
        floor=floor, min_effect=least, gross=gross, pool=pool, worse=worse,
    )  # fmt: skip


def changes(point: PointRow, finding: scans.SeriesFinding) -> Effect:
    """Return the effect of a finding on a latency."""
    if finding.effect is None or point.median_ms is None:
        return Effect()
    change = math.expm1(finding.effect)
    before = math.exp(finding.before) if finding.before is not None else point.median_ms / (1 + change)
    return Effect(before_ms=before, change=change, low=relative(finding.low), high=relative(finding.high))


def loud_while_new(news: News) -> News:
    """Return the news, marked to be shown while the level is new."""
    return replace(news, loud=news.since <= OLD)


def confirmed(row: Judged) -> Judged:
    """Return a row with the verdict of the A/B comparison that found a difference.

    The row's numbers stay those of the points that were judged, so that they agree with each other and with the plots.
    The A/B, which may be of an earlier run, is in the note, which tells the two apart if they disagree. If the points
    alone show no change, the A/B's effect is the row's.
    """
    compared = row.compared
    assert compared is not None and compared.effect is not None and row.point is not None
    note = joined(ab_text(compared), row.note)
    if row.change is not None and row.change * compared.effect < 0:
        note = joined("history and A/B contradict each other", note)
        return replace(row, verdict=Verdict.UNRESOLVED, note=note)
    effect = row.effect
    if effect.change is None:
        change = math.expm1(compared.effect)
        before = (row.point.median_ms or math.nan) / (1 + change)
        effect = replace(
            effect, before_ms=before, change=change, low=relative(compared.low), high=relative(compared.high)
        )
    elif _is_outside(effect.change, compared):
        note = joined(ab_text(compared), f"estimated from the history: {signed_change(effect.change)}", row.note)
    verdict = Verdict.REGRESSED if compared.effect > 0 else Verdict.IMPROVED
    return replace(row, verdict=verdict, effect=effect, note=note, ab_base=None)


def _is_outside(change: float, compared: Compared) -> bool:
    """Return whether a relative change is outside the interval of an A/B."""
    low = -math.inf if compared.low is None else compared.low
    high = math.inf if compared.high is None else compared.high
    return not low <= math.log1p(change) <= high


def ab_text(compared: Compared) -> str:
    """Return the effect of an A/B as text, with the commits that it compared."""
    assert compared.effect is not None
    commits = ends = ""
    if compared.toolchains is None and compared.base != compared.head:
        commits = f" of {compared.base[:10]}..{compared.head[:10]}"
    if compared.low is not None and compared.high is not None and math.isfinite(compared.low + compared.high):
        ends = f" ({percent(compared.low)} to {percent(compared.high)})"
    blocks = f" in {counted(compared.pairs, 'block')}" if compared.pairs else ""
    return f"measured by an A/B{commits}: {percent(compared.effect)}{ends}{blocks}"
