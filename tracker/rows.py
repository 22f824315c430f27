"""What the queries answer with: frozen dataclasses, free of the database."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from groupbench.tracker.record import Environment

MEASURED = ("ok", "wrong")
"""Statuses of cells that ran to their end."""


@dataclass(frozen=True)
class RunRow:
    pk: int
    id: str
    commit: str
    dirty: bool
    branch: str | None
    subject: str | None
    started: datetime
    trigger: str
    plan: str | None

    @property
    def state(self) -> State:
        return State(self.commit, self.dirty)


@dataclass(frozen=True)
class State:
    """What a run measured: a commit, or a tree that differs from it."""

    commit: str
    dirty: bool

    def __str__(self) -> str:
        return self.commit[:10] + ("+" if self.dirty else "")


@dataclass(frozen=True)
class RunSummary:
    run: RunRow
    hardware: tuple[str, ...]
    counts: dict[str, int]  # points by status


@dataclass(frozen=True)
class EnvironmentRow:
    pk: int
    identity: str
    facts: Environment


@dataclass(frozen=True)
class SeriesRow:
    pk: int
    operator: str
    backend: str
    mode: str
    dtype: str
    shape: str
    host: str
    protocol: str
    hardware: str
    seed: int
    dims: dict[str, int]
    flops: int | None
    min_bytes: int | None

    @property
    def problem(self) -> tuple[str, ...]:
        """All but the backend: what backends are compared on."""
        return (
            self.operator,
            self.shape,
            self.dtype,
            self.mode,
            self.host,
            self.protocol,
            self.hardware,
            str(self.seed),
        )

    @property
    def sort_key(self) -> tuple[str, ...]:
        return (*self.problem, self.backend)

    def __str__(self) -> str:
        return f"{self.operator} {self.backend} {self.mode} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class PointRow:
    """A point without its samples."""

    pk: int
    series: SeriesRow
    run: RunRow
    environment: EnvironmentRow
    status: str
    message: str | None
    baseline: bool
    timing: str | None
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    error: float | None
    prepare_ms: float | None
    enqueue_ms: float | None
    rms: float | None
    max_abs: float | None
    worst_block_rms: float | None
    mismatch: float | None
    unwritten: float | None
    repeatable: bool | None
    kernel_hash: str | None
    duration_s: float | None

    @property
    def timed(self) -> bool:
        """Whether its latency is a speed, of a result that is right."""
        return self.status == "ok" and self.median_ms is not None and self.timing in ("gpu", "cpu")

    @property
    def half_spread(self) -> float | None:
        """Half the range of burst medians, relative to the median."""
        if self.median_ms is None or self.low_ms is None or self.high_ms is None:
            return None
        return (self.high_ms - self.low_ms) / 2 / self.median_ms

    @property
    def tflops(self) -> float | None:
        if not self.timed or not self.series.flops or not self.median_ms:
            return None
        return self.series.flops / self.median_ms / 1e9


@dataclass(frozen=True)
class HistoryRow:
    point: PointRow
    change: float | None  # relative, against the latest earlier speed of the series in the same environment
    environment_changed: tuple[str, ...]  # what differs from the series' point before this one


@dataclass(frozen=True)
class Filter:
    """Which points: empty means all; several values of one field are alternatives."""

    operator: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()  # exact, or with * and ?
    host: tuple[str, ...] = ()
    protocol: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()  # exact, or with * and ?
    branch: tuple[str, ...] = ()
    commit: tuple[str, ...] = ()  # as resolve_commit takes them
    since: datetime | None = None
    until: datetime | None = None  # exclusive


@dataclass(frozen=True)
class Earlier:
    """What came before a run's point, of the same series."""

    alike: tuple[PointRow, ...] = field(default=())  # ok, in the same environment and timing; newest first
    elsewhere: PointRow | None = None  # the newest ok one of another environment


def finite(values: Iterable[float | None]) -> list[float]:
    """For arrays: unknown as NaN."""
    return [math.nan if value is None else value for value in values]
