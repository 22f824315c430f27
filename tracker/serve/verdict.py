"""The verdict on a run, in the compact form shown on pages and kept by the server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.serve.database import LIMITS, Database


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


def judge(database: Database, run: str) -> RunVerdict:
    """Return the verdict on the run with this id. Raises TrackerError."""
    began = time.perf_counter()
    with database.read(LIMITS.background_s) as session:
        gate = judge_run(session, find_run(session, run))
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
    """Return a row for the change table."""
    return {
        "series": row.series.pk,
        **row.flat(),
        "level_now": row.shown.now,
        "shown": _shown(row),
        "latency_now": row.latency_now,
        "since": row.since,
        **_span_data(row),
    }


def _shown(row: Judged) -> dict[str, Any]:
    """Return a row's levels and change, as values to sort by and as texts."""
    shown = row.shown
    texts = {"before_text": shown.before_text, "now_text": shown.now_text, "change_text": shown.change_text}
    return {
        "before": shown.before,
        "now": shown.now,
        "change": shown.change,
        "interval": shown.interval(" to "),
        **texts,
    }


def _span_data(row: Judged) -> dict[str, Any]:
    """Return a change's commits."""
    span = row.span
    if span is None:
        return dict.fromkeys(("head", "base", "label", "remark", "head_run"))
    return {
        "head": span.head.commit_text,
        "base": None if span.base is None else span.base.commit_text,
        "label": span.label,
        "remark": span.remark,
        "head_run": span.head.id,
    }
