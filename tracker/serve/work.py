"""The functions that `jobs` runs in other processes. Their arguments and results can be pickled."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from groupbench.tracker.query.filters import Filter

if TYPE_CHECKING:
    from groupbench.tracker.compare.sides import StoredSide
    from groupbench.tracker.judge.verdicts import Judged


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run, as pages show it."""

    run: str
    word: str
    blind: bool  # the run passed although no latency could be judged
    summary: str
    exit_code: int
    counts: dict[str, int]
    acknowledged: dict[str, int]  # of the counts
    folded: tuple[str, ...]  # a line for each reason that several series share
    rows: tuple[dict[str, Any], ...]  # other rows that changed or have a note, the most severe first
    unmeasured: tuple[dict[str, Any], ...]  # expected series without a result, with the reason
    by_series: dict[int, str] = field(repr=False)  # the verdict on each series, by key
    seconds: float = 0.0


@dataclass(frozen=True)
class SideBySide:
    """The comparison of two sides, as pages show it."""

    a: str
    b: str
    counts: dict[str, int]
    geometric_mean: float | None
    geometric_means: tuple[dict[str, Any], ...]  # of each backend: its series and the 95 % interval
    overall: dict[str, Any] | None  # the same of all series
    differences: tuple[str, ...]
    rows: tuple[dict[str, Any], ...] = field(repr=False)  # each series, the most severe first
    seconds: float = 0.0


def judge(location: str, run: str) -> RunVerdict:
    """Return the verdict on the run with this id. Raises TrackerError."""
    from groupbench.tracker.judge.gate import judge_run
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.serve.database import open_to_read

    began = time.perf_counter()
    database = open_to_read(location)
    try:
        with database.read() as session:
            gate = judge_run(session, find_run(session, run))
    finally:
        database.close()
    lines, rest = gate.folded
    return RunVerdict(
        run=gate.run.id,
        word=gate.word,
        blind=gate.blind,
        summary=gate.summary,
        exit_code=gate.exit_code,
        counts=gate.counts,
        acknowledged=dict(Counter(row.verdict for row in gate.rows if row.acknowledged)),
        folded=tuple(lines),
        rows=tuple(map(_changed, rest)),
        unmeasured=tuple(
            {
                "series": row.series.pk,
                **{name: getattr(row.series, name) for name in ("operator", "backend", "mode", "shape", "dtype")},
                "status": "absent" if row.point is None else row.point.status,
                "verdict": row.verdict,
                "reason": row.note,
            }
            for row in gate.unmeasured
        ),
        by_series=gate.by_series,
        seconds=time.perf_counter() - began,
    )


def _changed(row: Judged) -> dict[str, Any]:
    """Return a row of the table of changes."""
    return {
        "series": row.series.pk,
        **row.flat(),
        "level_now": row.shown.now,
        "shown": _shown(row),
        "latency_now": row.latency_now,
        "since": row.news.since,
        "head": _head(row),
        "base": _base(row),
        "label": None if row.span is None else row.span.label,
        "remark": None if row.span is None else row.span.remark,
        "head_run": None if row.span is None else row.span.head.id,
    }


def _shown(row: Judged) -> dict[str, Any]:
    """Return the levels and the change of a row, as values to sort by and as texts."""
    shown = row.shown
    texts = {"before_text": shown.before_text, "now_text": shown.now_text, "change_text": shown.change_text}
    return {
        "before": shown.before,
        "now": shown.now,
        "change": shown.change,
        "interval": shown.interval(" to "),
        **texts,
    }


def _head(row: Judged) -> str | None:
    return None if row.span is None else row.span.head.commit_text


def _base(row: Judged) -> str | None:
    return None if row.span is None or row.span.base is None else row.span.base.commit_text


def damage(location: str) -> str | None:
    """Return the first damage found in a database, as one line, or None."""
    from groupbench.tracker.store.failures import damage_of

    return damage_of(location)


def compare(location: str, a: StoredSide, b: StoredSide, force: bool, where: Filter) -> SideBySide:
    """Compare two sides in every series of either. Raises TrackerError."""
    from groupbench.tracker.compare.comparison import compare_sides
    from groupbench.tracker.compare.sides import stored_side
    from groupbench.tracker.serve.database import open_to_read

    began = time.perf_counter()
    database = open_to_read(location)
    try:
        with database.read() as session:
            sides = [stored_side(session, place) for place in (a, b)]
    finally:
        database.close()
    whole = compare_sides(*sides, force=force, where=where)
    return SideBySide(
        a=a.title,
        b=b.title,
        counts=whole.counts,
        geometric_mean=whole.geometric_mean,
        geometric_means=tuple(whole.means()),
        overall=None if whole.overall is None else asdict(whole.overall),
        differences=whole.differences,
        rows=tuple({"series": pair.series.pk, **pair.flat()} for pair in whole.pairs),
        seconds=time.perf_counter() - began,
    )
