"""Find the commit that a search named for a change: one between the runs of the change, in the same series."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.lines import CommitLine, CommitsBetween
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import Compared, NamedCommits
from groupbench.tracker.store.schema import Commit, Run
from groupbench.tracker.text.repro import SEARCH_OF


def named_in(
    session: Session,
    stored: Sequence[Compared],  # answers of searches in the series, newest first
    span: Span,
    metric: str | None,  # that changed
    change: float | None,  # whose sign the named change has; None if unknown
    line: CommitLine,  # of the span's runs
) -> tuple[NamedCommits, ...]:
    """Return the commits that the newest search in the span named, the largest change first."""
    if span.base is None or not any(_is_of(one, metric, change) for one in stored):
        return ()
    place = {commit: number for number, commit in enumerate(_commits(session, line))}
    inside = [one for one in stored if _is_of(one, metric, change) and _is_inside(one, span, place)]
    together = [one for one in inside if one.measured == inside[0].measured]
    together.sort(key=lambda one: -abs(one.effect or 0.0))
    return tuple(one.named for one in together if one.named is not None)


def number_of_commits(span: Span, between: CommitsBetween) -> int | None:
    """Return the number of commits among which a change is, or None if unknown."""
    if span.base is None or not all(end.state.clean for end in span.ends):
        return None
    commits = between(span.base.commit, span.head.commit)
    return None if commits is None else len(commits)


def _is_of(one: Compared, metric: str | None, change: float | None) -> bool:
    """Return whether a search looked for a change of this metric and found one in this direction."""
    if one.named is None or one.named.metric != SEARCH_OF.get(metric or ""):
        return False
    return change is None or one.effect is None or change * one.effect > 0


def _is_inside(one: Compared, span: Span, place: dict[str, int]) -> bool:
    """Return whether the commits that a search named are between the runs of a span.

    Often none of them was measured. Then the measured commits around them decide.
    """
    assert span.base is not None and one.named is not None
    base, head = span.base.commit, span.head.commit
    if (one.base, one.head) == (base, head):
        return True
    first, last = place.get(base), place.get(head)
    if first is None or last is None:
        return False
    if place.get(one.named.commits[-1]["hash"], -1) in range(first + 1, last + 1):
        return True
    return first <= place.get(one.base, -1) < place.get(one.head, -1) <= last


def _commits(session: Session, line: CommitLine) -> list[str]:
    """Return the commits of a line's runs, oldest first."""
    of_run: dict[int, str] = {}
    for chunk in chunks(line.runs):
        query = select(Run.id, Commit.hash).join(Commit, Run.commit_id == Commit.id).where(Run.id.in_(chunk))
        of_run.update((run, commit) for run, commit in session.execute(query))
    return list(dict.fromkeys(of_run[run] for run in reversed(line.runs) if run in of_run))
