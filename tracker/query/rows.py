"""Query results: frozen dataclasses without the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

from groupbench.tracker.facts.environment import machine_identity, toolchain_identity
from groupbench.tracker.facts.identity import PROBLEM, SHOWN, toolchain_of
from groupbench.tracker.facts.loaded import LoadedDifference
from groupbench.tracker.facts.metrics import GBPS, TFLOPS, Metric, carried, rate
from groupbench.tracker.facts.record import BACKFILL, TIMED, UNKNOWN_COMMIT, Environment, Kernel, Loaded, Telemetry
from groupbench.tracker.query.tables import FlatRow, of_part, of_row
from groupbench.tracker.text.wording import commit_text

_problem = attrgetter(*PROBLEM)


@dataclass(frozen=True)
class RunRow(FlatRow):
    pk: int
    id: str
    commit: str
    dirty: bool
    branch: str | None
    subject: str | None
    started: datetime
    trigger: str
    plan: str | None
    committed: datetime | None = None  # committer's time
    rejected: str | None = None  # why a person rejected it
    author: str | None = None

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "run": "id",
        **of_row("started"),
        "commit": "commit_text",
        **of_row("branch", "subject", "trigger", "plan", "rejected"),
    }

    @property
    def date(self) -> str:
        """The date of the measurement; after a backfill, the date of the commit, with that of the measurement."""
        started = f"{self.started:%Y-%m-%d}"
        committed = started if self.committed is None else f"{self.committed:%Y-%m-%d}"
        return started if self.trigger != BACKFILL or committed == started else f"{committed} (measured {started})"

    @property
    def when(self) -> tuple[datetime, int]:
        """The run's place in time order."""
        return self.started, self.pk

    @property
    def order(self) -> tuple[datetime, datetime, int]:
        """The run's place among others of a commit line, as far as times tell. A backfill measures old commits late."""
        return self.committed or self.started, self.started, self.pk

    @property
    def state(self) -> State:
        return State(self.commit, self.dirty)

    @property
    def toolchain(self) -> str | None:
        """The toolchain named in the run's plan, empty for the night's own interpreter; None for a run without plan.

        Two toolchains in a plan may report the same versions. A run without a plan goes with any toolchain.
        """
        return None if self.plan is None else toolchain_of(self.plan)

    @property
    def commit_text(self) -> str:
        """The hash, followed by + for a dirty tree."""
        return self.commit + ("+" if self.dirty else "")


def named_difference(before: RunRow, after: RunRow) -> list[str]:
    """Return the difference between the toolchains named in two runs' plans, if both have a plan."""
    names = before.toolchain, after.toolchain
    if None in names or names[0] == names[1]:
        return []
    return [" → ".join(f"toolchain {name}" if name else "the plan's own toolchain" for name in names)]


@dataclass(frozen=True)
class State:
    """The code state measured by a run: a commit, or a dirty tree."""

    commit: str
    dirty: bool

    @property
    def has_commit(self) -> bool:
        """Whether the commit is known. It is not if git had none where the run was measured."""
        return self.commit != UNKNOWN_COMMIT

    @property
    def clean(self) -> bool:
        """Whether the commit alone is the code, so it can be measured again."""
        return self.has_commit and not self.dirty

    def same_code(self, other: State | None) -> bool:
        """Return whether both are certainly the same code."""
        return self.clean and self == other

    def __str__(self) -> str:
        return commit_text(self.commit, self.dirty)


@dataclass(frozen=True)
class RunSummary(FlatRow):
    run: RunRow
    hardware: tuple[str, ...]
    counts: dict[str, int]  # points by status

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "run": "run.id",
        "started": "run.started",
        "commit": "run.commit_text",
        **of_part("run", ("branch", "plan", "trigger")),
        **of_row("hardware", "counts"),
        **of_part("run", ("rejected", "subject")),
    }


@dataclass(frozen=True)
class EnvironmentRow:
    pk: int
    identity: str
    facts: Environment

    @cached_property
    def machine(self) -> str:
        """The machine's identity. Results on one machine are comparable across toolchains."""
        return machine_identity(self.facts)

    @cached_property
    def toolchain(self) -> str:
        return toolchain_identity(self.facts)


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
        """All identity fields but the backend. Backends are compared on equal problems."""
        return tuple(map(str, _problem(self)))

    def with_amounts(self, amounts: dict[str, Any] | None) -> SeriesRow:
        """Return the series with a point's own amounts."""
        return replace(self, **amounts) if amounts else self

    @cached_property
    def sort_key(self) -> tuple[str, ...]:
        return (*self.problem, self.backend)

    def __str__(self) -> str:
        return f"{self.operator} {self.backend} {self.mode} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class PointRow:
    """A point without samples."""

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
    metrics: dict[str, float] | None = None  # further metrics by name
    code_hash: str | None = None  # of the files that its process ran; None if unknown
    packages_hash: str | None = None  # of the packages that its process imported

    def value(self, metric: Metric) -> float | None:
        """Return the point's value for a metric, or None."""
        if metric.column is not None:
            value: float | None = getattr(self, metric.column)
            return value
        return (self.metrics or {}).get(metric.name)

    @property
    def id(self) -> str:
        """The id for `groupbench show`: series and run key."""
        return f"{self.series.pk}.{self.run.pk}"

    @property
    def timed(self) -> bool:
        """Return whether the point has a correct result and a real latency."""
        return is_timed(self.status, self.median_ms, self.timing)

    @property
    def half_spread(self) -> float | None:
        """Half the burst medians' range, relative to the median; None for a single burst."""
        if self.median_ms is None or self.low_ms is None or self.high_ms is None or self.error is None:
            return None
        return (self.high_ms - self.low_ms) / 2 / self.median_ms

    @property
    def tflops(self) -> float | None:
        return rate(self.series.flops, self.median_ms, TFLOPS) if self.timed else None

    @property
    def gbps(self) -> float | None:
        """GB/s if each input is read once and each output written once."""
        return rate(self.series.min_bytes, self.median_ms, GBPS) if self.timed else None

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return (*_POINT_COLUMNS, *(metric.name for metric in carried()))

    def flat(self) -> dict[str, Any]:
        columns = dict(zip(_POINT_COLUMNS, _point_values(self), strict=True))
        return columns | {metric.name: self.value(metric) for metric in carried()}


_POINT_COLUMNS = {
    "started": "run.started",
    "commit": "run.commit_text",
    **of_part("series", ("operator", "backend", "mode", "shape", "dtype")),
    "latency_ms": "median_ms",
    "spread": "half_spread",
    **of_row("tflops", "gbps", "rms", "max_abs", "worst_block_rms", "mismatch", "unwritten"),
    **of_row("repeatable", "status", "timing", "message", "low_ms", "high_ms"),
    **of_row("prepare_ms", "enqueue_ms", "kernel_hash", "code_hash", "packages_hash"),
    "environment": "environment.identity",
    **of_part("series", ("hardware", "host", "protocol", "seed")),
    "run": "run.id",
    **of_part("run", ("dirty", "branch", "subject")),
    "id": "id",
}
"""The attribute of each column of a point."""

_point_values = attrgetter(*_POINT_COLUMNS.values())


def measured_alike(point: PointRow, other: PointRow) -> bool:
    """Return whether two points were measured in the same run, environment and timing."""
    conditions, others = ((one.run.pk, one.timing, one.environment.identity) for one in (point, other))
    return conditions == others


def speedup_over(point: PointRow, baseline: PointRow | None) -> float | None:
    """Return the baseline's latency over the point's; None unless both are timed and `measured_alike`."""
    if baseline is None or not (point.timed and baseline.timed and measured_alike(point, baseline)):
        return None
    return baseline.median_ms / point.median_ms if baseline.median_ms and point.median_ms else None


def is_timed(status: str, median_ms: float | None, timing: str | None) -> bool:
    """Return whether a point has a correct result and a latency."""
    return status == "ok" and median_ms is not None and timing in TIMED


@dataclass(frozen=True)
class PointOutcome:
    """A point's outcome."""

    status: str
    timed: bool  # it has a correct result and a latency


@dataclass(frozen=True)
class PointDetail:
    """A point with the whole record."""

    point: PointRow
    bursts_ms: tuple[tuple[float, ...], ...]  # samples, rounded to float32
    telemetry: tuple[Telemetry, ...]  # one for each burst, or empty
    kernels: tuple[Kernel, ...]
    first_bad: tuple[int, ...] | None
    command: str | None  # of its run
    parents: tuple[str, ...]  # of its commit
    author: str | None
    committed: datetime | None
    loaded: Loaded | None = None
    since_before: LoadedDifference | None = None  # from the series' point before; None for its first


@dataclass(frozen=True)
class HistoryRow:
    point: PointRow
    change: float | None  # relative to the latest earlier latency in the same environment
    environment_changed: tuple[str, ...]  # differences from the environment of the series' point before
    loaded_changed: tuple[str, ...] = ()  # files and packages that differ from those of the series' point before
    speedup: float | None = None  # the baseline's latency over this one's, in the same run

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return (*PointRow.columns(), "change", "speedup", "environment_changed", "loaded_changed")

    def flat(self) -> dict[str, Any]:
        relative = {"change": self.change, "speedup": self.speedup}
        changed = {name: list(getattr(self, name)) for name in ("environment_changed", "loaded_changed")}
        return self.point.flat() | relative | changed


@dataclass(frozen=True)
class SeriesSummary(FlatRow):
    """A series with stored-point counts."""

    series: SeriesRow
    points: int
    ok: int  # points with status ok
    first: datetime | None  # start of its oldest run
    last: datetime | None

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "series": "series.pk",
        **of_part("series", (*SHOWN, "dims", "flops", "min_bytes")),
        **of_row("points", "ok", "first", "last"),
    }


@dataclass(frozen=True)
class CommitSummary(FlatRow):
    """A commit with run and point counts."""

    hash: str
    parents: tuple[str, ...]
    branch: str | None
    time: datetime | None  # committer's
    author: str | None
    subject: str | None
    runs: int
    dirty_runs: int  # runs of a dirty tree
    points: int
    first: datetime | None  # start of its first run
    last: datetime | None

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "commit": "hash",
        "parents": "parents",
        **of_row("branch", "time", "author", "subject", "runs", "dirty_runs", "points", "first", "last"),
    }


@dataclass(frozen=True)
class EnvironmentSummary(FlatRow):
    """The comparable environments under one identity."""

    identity: str
    hardware: str
    facts: Environment  # of the newest point
    variants: int  # distinct sets of facts that share the identity
    runs: int
    points: int
    first: datetime | None
    last: datetime | None
    differs: tuple[str, ...]  # differences from the environment before on this hardware

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "environment": "identity",
        **of_row("hardware", "first", "last", "runs", "points", "variants"),
        **of_part("facts", ("device", "gpu", "gpu_uuid", "driver", "cuda", "power_limit_w", "cpu", "cpu_threads")),
        **of_part("facts", ("os", "host", "python", "torch", "triton", "helion", "tritonbench", "settings")),
        "differs": "differs",
    }
