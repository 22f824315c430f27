"""A search's answer as database rows, by which the gate, the report and alerts name the commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime

from groupbench.tracker.bisect.hunt import BisectResult, Culprit, History
from groupbench.tracker.store.comparisons import NAMED, Compared, NamedCommits


def answers(
    result: BisectResult,
    history: History,
    metric: str,
    at: datetime,
    measured: Collection[str],  # hashes of the commits that have results of the series
) -> list[Compared]:
    """Return a row for each culprit; without a culprit, one with the reason, so the search is not repeated."""
    if result.outcome not in ("found", "narrowed"):
        return [Compared(history.good, history.bad, NAMED, at, message=result.message)]
    return [_answer(culprit, history, metric, at, measured) for culprit in result.culprits]


def _answer(culprit: Culprit, history: History, metric: str, at: datetime, measured: Collection[str]) -> Compared:
    commits = [history.commits[name] for name in culprit.commits]
    named = NamedCommits(
        tuple({"hash": one.hash, "subject": one.subject, "author": one.author} for one in commits),
        culprit.parent,
        metric,
        culprit.confidence,
    )
    base, head = _around(culprit, history, measured)
    finding = culprit.finding
    return Compared(
        base=base, head=head, verdict=NAMED, measured=at, effect=finding.effect, low=finding.low, high=finding.high,
        details={NAMED: asdict(named)},
    )  # fmt: skip


def _around(culprit: Culprit, history: History, measured: Collection[str]) -> tuple[str, str]:
    """Return the measured commits next to a culprit, before and after it, on the first-parent line.

    The gate knows only measured commits, and their order.
    """
    line: Sequence[str] = history.first_parents(history.bad)[1]
    on_line = culprit.merges[:1] or culprit.commits
    first, last = line.index(on_line[0]), line.index(on_line[-1])
    before = [history.good, history.base, *line[:first]]
    base = next((each for each in reversed(before) if each in measured), history.good)
    head = next((each for each in line[last:] if each in measured), history.bad)
    return base, head
