"""The verdict on a run, in the compact form shown on pages and kept by the server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.serve.database import Database
from groupbench.tracker.serve.limits import LIMITS


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run, as pages show it."""

    facts: dict[str, Any]
    rows: tuple[dict[str, Any], ...]  # rows that changed or have a note, the most severe first
    unmeasured: tuple[dict[str, Any], ...]  # expected series without a result, with the reason
    by_series: dict[int, str] = field(repr=False)  # the verdict on each series, by key


def judge(database: Database, run: str) -> RunVerdict:
    """Return the verdict on the run with this id. Raises TrackerError."""
    began = time.perf_counter()
    with database.read(LIMITS.background_s) as session:
        gate = judge_run(session, find_run(session, run))
    lines, rest = gate.folded
    facts = {
        "run": gate.run.id,
        **{name: getattr(gate, name) for name in ("word", "blind", "summary", "exit_code", "counts")},
        "acknowledged": dict(Counter(row.verdict for row in gate.rows if row.acknowledged)),
        "folded": lines,  # one for each reason that several series share
        "seconds": round(time.perf_counter() - began, 2),
    }
    return RunVerdict(facts, tuple(map(_changed, rest)), tuple(map(_unmeasured, gate.unmeasured)), gate.by_series)


def _unmeasured(row: Judged) -> dict[str, Any]:
    return {
        "series": row.series.pk,
        **{name: getattr(row.series, name) for name in ("operator", "backend", "mode", "shape", "dtype")},
        "status": "absent" if row.point is None else row.point.status,
        "verdict": row.verdict,
        "reason": row.note,
    }


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
    names = ("before", "now", "change", "before_text", "now_text", "change_text")
    return {name: getattr(row.shown, name) for name in names} | {"interval": row.shown.interval(" to ")}


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
