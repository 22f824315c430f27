"""The input and output of the statistics: a series' history, its findings and its past changes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FindingVerdict = Literal["ok", "suspect", "changed", "drift", "new", "insufficient"]


@dataclass(frozen=True)
class SeriesHistory:
    """The points of one series, oldest first."""

    log_ms: NDArray[np.float64]  # [n] natural log of the latency, or of any positive metric
    error: NDArray[np.float64]  # [n] standard error of log_ms from the point's bursts, NaN where unknown
    environment: NDArray[np.int64]  # [n] equal = comparable; only the newest point's environment is judged
    state: NDArray[np.int64]  # [n] equal = same code
    floor: float = 0.0003  # smallest relative scatter to assume
    min_effect: float = 0.01  # smallest log change that counts
    gross: float = 0.05  # log change large enough to detect from three or four results
    pool: Hashable = 0  # a young series borrows noise estimates from its pool
    worse: Literal[1, -1] = 1  # sign of a change of log_ms for the worse
    doubles: bool = False  # a point beyond a few scattered ones by a factor of two is a record (records.py)


@dataclass(frozen=True)
class Segment:
    """A segment [start, stop) of a history, without points of other environments in between."""

    start: int
    stop: int
    log_ms: float
    error: float


@dataclass(frozen=True)
class SeriesFinding:
    """The statistics' verdict on the newest point of a series."""

    verdict: FindingVerdict
    levels: tuple[Segment, ...] = ()  # of the newest environment, oldest first
    index: int | None = None  # first point of the newest level
    first: int | None = None  # the change is after this point
    last: int | None = None  # and no later than this point
    effect: float | None = None  # log change from the level before to the newest
    low: float | None = None  # its 95 % interval
    high: float | None = None
    before: float | None = None  # log level before the change
    p: float | None = None  # of this series alone
    q: float | None = None  # after false-discovery-rate control
    sigma: float = float("nan")  # log scatter of a point
    n_before: int = 0
    n_after: int = 0
    reason: str = ""
    left: SeriesFinding | None = None  # the rest of an earlier change for the worse that an improvement left

    @property
    def moved(self) -> bool:
        """Return whether the newest level is, or may be, another one than before."""
        return self.verdict in ("changed", "suspect")

    @property
    def nights(self) -> int | None:
        """Number of results on the newest level, including the newest; None without a change."""
        return None if self.effect is None else self.n_after


@dataclass(frozen=True)
class PastChange:
    """A change somewhere in a series' history."""

    index: int  # first point of the new level
    first: int  # the change is after this point
    last: int  # and no later than this point
    effect: float  # log change
    low: float
    high: float
    before: float  # log level before
    after: float
    p: float  # after Bonferroni over all positions
    n_before: int
    n_after: int
    environment: int


def check(histories: Sequence[SeriesHistory]) -> None:
    """Check the arrays of histories. Raises ValueError for different lengths or a value that is not finite."""
    sizes = [len(one.log_ms) for one in histories]
    for name in ("error", "environment", "state"):
        if [len(getattr(one, name)) for one in histories] != sizes:
            raise ValueError("log_ms, error, environment and state of a history differ in length")
    if not np.all(np.isfinite(np.concatenate([np.zeros(0), *(one.log_ms for one in histories)]))):
        raise ValueError("log_ms contains a value that is not finite; leave out missing results")


def newest_environment(environment: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices [m] of the points in the environment of the last one."""
    return np.flatnonzero(environment == environment[-1:])


def newest_environments(histories: Sequence[SeriesHistory]) -> list[NDArray[np.int64]]:
    """Return for each history the indices of the points in its newest point's environment.

    Raises ValueError as `check` does.
    """
    check(histories)  # all at once: arrays for each of 20,000 series would take longer than judging them
    size = np.array([len(one.environment) for one in histories], dtype=np.int64)
    environment = np.concatenate([np.zeros(0, np.int64), *(one.environment for one in histories)])
    owner, stop = np.repeat(np.arange(len(size)), size), np.cumsum(size)
    alike = np.flatnonzero(environment == environment[stop[owner] - 1])
    index, ends = alike - (stop - size)[owner[alike]], np.searchsorted(owner[alike], np.arange(len(size) + 1))
    return [index[a:b] for a, b in pairwise(ends.tolist())]
