"""The scatter between runs, from a series' changes between successive runs in the database."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.identity import toolchain_of
from groupbench.tracker.facts.record import STATUSES, TIMED
from groupbench.tracker.stats.predict import ENOUGH, LAST, MAD_WORTH, predict
from groupbench.tracker.stats.thresholds import MAD_SD, POOL_FLOOR, prior_scatter
from groupbench.tracker.store import columns
from groupbench.tracker.store.columns import CODES, TIMINGS
from groupbench.tracker.store.decisions import rejected
from groupbench.tracker.store.schema import NEWEST_FIRST, Commit, Environment, Run, Series

Changes: TypeAlias = Mapping[tuple[str, str], Sequence[float]]
"""A series' changes of log(latency) between successive runs, oldest first, by environment identity and timing."""

MOST = 4 * LAST
"""Most runs to read: a rarely measured series must not make a comparison read the whole database."""


@dataclass(frozen=True)
class Scatter:
    """The standard deviation between runs, and the degrees of freedom that show it: 0 for a prior."""

    deviation: float
    freedom: float = 0.0


def scatter_of(changes: Sequence[float], timing: str, ms: float) -> Scatter:
    """Return the scatter between runs that some changes show, or the prior if they are too few.

    A step or a drift is a few changes at most, which the median ignores. A prior below the scatter does not count: it
    would make the p values of few changes too small.
    """
    prior = prior_scatter(timing, ms)
    if len(changes) < ENOUGH:
        return Scatter(prior)
    newest = [change / math.sqrt(2) for change in changes[-LAST:]]
    seen = MAD_SD * float(np.median(np.abs(newest)))
    predicted = predict((), newest, max(prior, seen), POOL_FLOOR[timing], centre=0.0)
    return Scatter(predicted.deviation / math.sqrt(predicted.uncertain), 1 + MAD_WORTH * (len(newest) - 1))


def changes_between_runs(session: Session, series: Collection[int], without: Collection[int]) -> dict[int, Changes]:
    """Return some series' changes between their newest runs, by key. Rejected runs and those in `without` do not count.

    Only runs on one branch with one toolchain follow each other. A copied run shows nothing.
    """
    wanted = np.zeros((session.scalar(select(func.max(Series.id))) or 0) + 1, dtype=bool)
    wanted[list(series)] = True
    missing = np.where(wanted, LAST + 1, 0)
    identity = {row.id: row.identity for row in session.execute(select(Environment.id, Environment.identity))}
    names = sorted(set(identity.values()))
    code = np.zeros(max(identity, default=0) + 1, dtype=np.int64)
    code[list(identity)] = [names.index(name) for name in identity.values()]
    ok, skipped = STATUSES.index("ok"), {*without, *rejected(session)}
    lines: dict[tuple[str | None, str], int] = {}
    parts: list[list[np.ndarray]] = []
    runs = select(Run.id, Commit.branch, Run.plan).join(Commit).order_by(*NEWEST_FIRST)
    for run, branch, plan in session.execute(runs).all():
        if len(parts) == MOST or not (missing > 0).any():
            break
        if run in skipped:
            continue
        block = columns.of_run(session, run)
        status, timing = np.divmod(block["code"] // CODES[1], CODES[0])
        keep = wanted[block["series"]] & (status == ok) & np.isin(timing, [TIMINGS.index(name) for name in TIMED])
        if keep.any():
            line = lines.setdefault((branch, toolchain_of(plan or "")), len(lines))
            keys = [block["series"], code[block["environment"]], timing, np.full(len(keep), line)]
            parts.append([each[keep] for each in (*keys, block["content"], np.log(block["median_ms"]))])
            missing[parts[-1][0]] -= 1
    if not parts:
        return {}
    *keys, content, log = (np.concatenate(each)[::-1] for each in zip(*parts, strict=True))
    order = np.lexsort(keys[::-1])  # stable: the oldest of a series comes first
    follows = np.diff(content[order]) != 0
    for each in keys:
        follows &= np.diff(each[order]) == 0
    changes: dict[int, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    which = [each[order][1:][follows].tolist() for each in keys[:3]]
    for key, environment, timing, change in zip(*which, np.diff(log[order])[follows].tolist(), strict=True):
        changes[key][names[environment], str(TIMINGS[timing])].append(change)
    return dict(changes)
