"""One series as it is judged, and what is found of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FindingVerdict = Literal["ok", "suspect", "changed", "drift", "new", "insufficient"]


@dataclass(frozen=True)
class SeriesHistory:
    """One series, oldest first; the last point is the newest."""

    log_ms: NDArray[np.float64]  # [n] natural log of the latency, or of any positive metric
    error: NDArray[np.float64]  # [n] standard error of log_ms from the point's bursts, NaN where unknown
    environment: NDArray[np.int64]  # [n] equal = comparable; only points like the newest are looked at
    state: NDArray[np.int64]  # [n] equal = the same code was measured
    floor: float = 0.0003  # relative scatter assumed at least
    min_effect: float = 0.01  # log change that is worth a verdict
    gross: float = 0.05  # log change that three or four results are enough for
    pool: Hashable = 0  # series with equal pool are alike: a young one borrows their noise
    worse: Literal[1, -1] = 1  # the direction of log_ms that is worse


@dataclass(frozen=True)
class Segment:
    """A segment [start, stop) of the history; points of other environments between them do not belong to it."""

    start: int
    stop: int
    log_ms: float
    error: float


@dataclass(frozen=True)
class SeriesFinding:
    verdict: FindingVerdict
    levels: tuple[Segment, ...] = ()  # of the newest environment, oldest first
    index: int | None = None  # first point of the newest level
    first: int | None = None  # the change lies after this point
    last: int | None = None  # and not later than this one
    effect: float | None = None  # log change of the newest level against the one before
    low: float | None = None  # its 95 % interval
    high: float | None = None
    before: float | None = None  # log level before
    p: float | None = None  # of this series by itself
    q: float | None = None  # after false-discovery control
    sigma: float = float("nan")  # log scatter of a point
    n_before: int = 0
    n_after: int = 0
    reason: str = ""

    @property
    def nights(self) -> int | None:
        """Results on the newest level, tonight's included; None where no change was found."""
        return None if self.effect is None else self.n_after

    @property
    def only_better(self) -> bool:
        """Whether the whole interval of a change lies on the side of lower values: it can only be an improvement."""
        return self.high is not None and self.high < 0


@dataclass(frozen=True)
class PastChange:
    """A change of the past."""

    index: int  # first point of the new level
    first: int  # it lies after this point
    last: int  # and not later than this one
    effect: float  # log change
    low: float
    high: float
    before: float  # log level before
    after: float
    p: float  # after Bonferroni over all positions
    n_before: int
    n_after: int
    environment: int


def check(history: SeriesHistory) -> None:
    sizes = {len(part) for part in (history.log_ms, history.error, history.environment, history.state)}
    if len(sizes) > 1:
        raise ValueError("a history's log_ms, error, environment and state differ in length")
    if not np.all(np.isfinite(history.log_ms)):
        raise ValueError("log_ms holds a value that is not finite: leave out results that are missing")


def newest_environment(history: SeriesHistory) -> NDArray[np.int64]:
    check(history)
    if len(history.log_ms) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(history.environment == history.environment[-1])
