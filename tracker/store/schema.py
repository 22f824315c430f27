"""The tables. Each column's `doc` explains it; `docs/reference/schema.md` is generated from them.

A *series* stays the same from commit to commit; a *point* is one run's result for it. All times are UTC. A change
needs a new revision in `REVISIONS`: `upgrade.py` adds new tables and nullable columns to old databases by itself.

There are millions of points, written once and read for years. So a point stores values for filters and sorting as
numbers, and packs the rest (see `packing`). Shared values have a table of their own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    DDL,
    JSON,
    BigInteger,
    Connection,
    DateTime,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    and_,
    event,
    select,
    type_coerce,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Mapper,
    ORMExecuteState,
    Session,
    column_property,
    mapped_column,
)
from sqlalchemy.types import TypeDecorator

from groupbench.tracker.facts.record import TIMED
from groupbench.tracker.store.checksum import checksum_of

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0012")
"""Every revision of the tables, oldest first. `upgrade.py` migrates from each."""

HEAD = REVISIONS[-1]


class UtcDateTime(TypeDecorator[datetime]):
    """A time, written and read as UTC, because SQLite does not store time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PackedTelemetry(TypeDecorator[list[Any]]):
    """Telemetry, written as packed by `packing.pack_telemetry` and read as one dict per burst."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> list[Any] | None:
        from groupbench.tracker.store.packing import unpack_telemetry

        return None if value is None else unpack_telemetry(bytes(value))


class BurstLengths(TypeDecorator[list[int]]):
    """Samples per burst, read from packed samples."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> list[int] | None:
        from groupbench.tracker.store.packing import burst_lengths

        return None if value is None else burst_lengths(bytes(value))


class Base(MappedAsDataclass, DeclarativeBase, kw_only=True):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime,
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }


def _key() -> Any:
    return mapped_column(primary_key=True, init=False, doc="internal key")


def _checksum() -> Any:
    return mapped_column(
        BigInteger, init=False, default=None, doc="48-bit hash of the row's other columns, for `verify` to find damage"
    )


@event.listens_for(Base, "before_insert", propagate=True)
@event.listens_for(Base, "before_update", propagate=True)
def _seal(mapper: Mapper[Any], _: Any, row: Any) -> None:
    """Set the row's checksum before it is written, if the table has one."""
    if "checksum" in mapper.columns:
        row.checksum = checksum_of({name: getattr(row, name) for name in sealed_columns(type(row))})


@event.listens_for(Session, "do_orm_execute")
def _refuse_unsealed(state: ORMExecuteState) -> None:
    """Refuse an UPDATE of whole tables that would leave their rows' checksums behind."""
    mapper = state.bind_mapper
    if state.is_update and mapper is not None and "checksum" in mapper.columns:
        raise TypeError(f"change the rows of {mapper.class_.__name__} one by one: each has a checksum")


def sealed_columns(mapped: type[Base]) -> list[str]:
    """Return the columns under a row's checksum."""
    return [column.name for column in mapped.__table__.columns if column.name not in ("id", "checksum")]


def sealed_tables() -> list[type[Base]]:
    """Return the classes with a checksum column."""
    return [mapper.class_ for mapper in Base.registry.mappers if "checksum" in mapper.columns]


def table_of(mapped: type[Base]) -> Table:
    """Return a class's table, for bulk statements."""
    assert isinstance(mapped.__table__, Table)
    return mapped.__table__


class Commit(Base, kw_only=True):
    """A commit. Only the hash is always known; later records fill in missing facts."""

    __tablename__ = "commit"

    id: Mapped[int] = _key()
    hash: Mapped[str] = mapped_column(unique=True, doc="full hash")
    parents: Mapped[list[Any] | None] = mapped_column(default=None, doc="hashes of the parents, the mainline's first")
    branch: Mapped[str | None] = mapped_column(default=None, doc="branch on which it was first measured")
    time: Mapped[datetime | None] = mapped_column(
        default=None, doc="committer's time, with microseconds that order the commits of one second"
    )
    author: Mapped[str | None] = mapped_column(default=None, doc="author")
    subject: Mapped[str | None] = mapped_column(default=None, doc="first line of the message")
    checksum: Mapped[int | None] = _checksum()


class Environment(Base, kw_only=True):
    """The machine and toolchain: one row per distinct set of facts."""

    __tablename__ = "environment"

    id: Mapped[int] = _key()
    content: Mapped[str] = mapped_column(unique=True, doc="hash of every fact")
    identity: Mapped[str] = mapped_column(
        index=True, doc="hash of the declared fields; points with equal identities are comparable"
    )
    device: Mapped[str] = mapped_column(doc="cuda or cpu")
    gpu: Mapped[str | None] = mapped_column(doc="GPU model, as the driver names it")
    gpu_uuid: Mapped[str | None] = mapped_column(doc="which GPU of that model")
    driver: Mapped[str | None] = mapped_column(doc="GPU driver's version")
    cuda: Mapped[str | None] = mapped_column(doc="CUDA version that torch was built for")
    power_limit_w: Mapped[float | None] = mapped_column(doc="enforced power limit")
    cpu: Mapped[str | None] = mapped_column(doc="processor model")
    python: Mapped[str | None] = mapped_column(doc="Python version")
    torch: Mapped[str | None] = mapped_column(doc="torch version")
    triton: Mapped[str | None] = mapped_column(doc="triton version")
    helion: Mapped[str | None] = mapped_column(doc="helion version")
    tritonbench: Mapped[str | None] = mapped_column(doc="TritonBench commit")
    facts: Mapped[dict[str, Any]] = mapped_column(doc="every fact, as the record gave it")


class Run(Base, kw_only=True):
    """One `tritonbench` invocation."""

    __tablename__ = "run"
    __table_args__ = (Index(None, "plan", "started"),)

    id: Mapped[int] = _key()
    uuid: Mapped[str] = mapped_column(unique=True, doc="unique id of the run, from the record")
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"), index=True, doc="commit that was measured")
    dirty: Mapped[bool] = mapped_column(doc="the tree differed from the commit")
    started: Mapped[datetime] = mapped_column(index=True, doc="start of the run; runs are ordered by it")
    trigger: Mapped[str] = mapped_column(doc="manual, nightly, backfill, import, ...")
    plan: Mapped[str | None] = mapped_column(doc="name of the plan; runs of one plan should measure the same cells")
    command: Mapped[str | None] = mapped_column(doc="command line")
    checksum: Mapped[int | None] = _checksum()


OLDEST_FIRST = (Run.started, Run.id)
NEWEST_FIRST = (Run.started.desc(), Run.id.desc())


class Series(Base, kw_only=True):
    """The identity shared by a cell's results while the code changes."""

    __tablename__ = "series"
    __table_args__ = (Index(None, "operator", "backend"),)

    id: Mapped[int] = _key()
    identity: Mapped[str] = mapped_column(
        unique=True, doc="hash of operator, backend, mode, dtype, shape, host, protocol, hardware and seed"
    )
    operator: Mapped[str] = mapped_column(doc="grouped_gemm, ...")
    backend: Mapped[str] = mapped_column(doc="implementation of the operator")
    mode: Mapped[str] = mapped_column(doc="fwd, bwd or fwd_bwd")
    dtype: Mapped[str] = mapped_column(doc="fp16, bf16, fp32, ...")
    shape: Mapped[str] = mapped_column(doc="canonical text of the whole problem")
    host: Mapped[str] = mapped_column(doc="builtin, tritonbench, or the imported benchmark")
    protocol: Mapped[str] = mapped_column(doc="measurement protocol of the latency")
    hardware: Mapped[str] = mapped_column(doc="GPU model, or processor model if the device is the CPU")
    seed: Mapped[int] = mapped_column(BigInteger, doc="seed of the inputs")
    dims: Mapped[dict[str, Any]] = mapped_column(doc="sizes by letter: G, M, N, K; as first recorded")
    flops: Mapped[int | None] = mapped_column(
        BigInteger, doc="floating-point operations of the rows in use, as first recorded"
    )
    min_bytes: Mapped[int | None] = mapped_column(
        BigInteger, doc="bytes if each input is read once and each output written once, as first recorded"
    )
    checksum: Mapped[int | None] = _checksum()


class KernelSet(Base, kw_only=True):
    """The compiled kernels launched by a call. One row for each distinct set, shared by many points."""

    __tablename__ = "kernel_set"

    id: Mapped[int] = _key()
    content: Mapped[str] = mapped_column(unique=True, doc="hash of all facts of the kernels")
    hash: Mapped[str | None] = mapped_column(doc="hash of all kernels' code; null if any is unknown")
    kernels: Mapped[list[Any]] = mapped_column(doc="each kernel's name, hash, registers, spills, shared memory, config")


class LoadedList(Base, kw_only=True):
    """The files or the packages that measured processes loaded. One row for each distinct list."""

    __tablename__ = "loaded_list"

    id: Mapped[int] = _key()
    content: Mapped[str] = mapped_column(unique=True, doc="hash of the list")
    items: Mapped[dict[str, Any] | None] = mapped_column(
        default=None,
        doc="hash of each file by its path in the repository, or version of each package by its name; null if unknown",
    )


class Point(Base, kw_only=True):
    """One run's result for one series."""

    __tablename__ = "point"
    __table_args__ = (UniqueConstraint("series_id", "run_id"),)

    id: Mapped[int] = _key()
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True, doc="run that measured it")
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"), doc="series that it belongs to")
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), doc="environment of the measurement")
    kernels_id: Mapped[int | None] = mapped_column(
        ForeignKey("kernel_set.id"), doc="compiled kernels that it launched; null if unknown"
    )
    content: Mapped[int] = mapped_column(
        BigInteger, doc="48-bit hash of the result with its samples, to detect duplicates, contradictions and damage"
    )
    status: Mapped[str] = mapped_column(doc="ok, wrong, error, oom, timeout, unavailable or skipped")
    timing: Mapped[str | None] = mapped_column(doc="gpu, cpu or interpreted; null without a latency")
    baseline: Mapped[bool] = mapped_column(doc="this backend is the baseline of speed-ups in this run")
    repeatable: Mapped[bool | None] = mapped_column(doc="two executions were bitwise equal")
    median_ms: Mapped[float | None] = mapped_column(
        doc="median of the bursts' medians, to seven digits, the precision of samples"
    )
    low_ppm: Mapped[int | None] = mapped_column(
        BigInteger, doc="distance of the smallest burst median below median_ms, in millionths of median_ms"
    )
    high_ppm: Mapped[int | None] = mapped_column(
        BigInteger, doc="distance of the largest burst median above median_ms, in millionths of median_ms"
    )
    error_ppm: Mapped[int | None] = mapped_column(
        BigInteger,
        doc="standard error of log(median_ms) from the spread of its bursts, in millionths; null for fewer than two",
    )
    rms: Mapped[float | None] = mapped_column(doc="‖out - ref‖ / ‖ref‖")
    max_abs: Mapped[float | None] = mapped_column(doc="largest absolute error")
    worst_block_rms: Mapped[float | None] = mapped_column(doc="largest relative RMS of any row and any 64 x 64 block")
    mismatch: Mapped[float | None] = mapped_column(doc="share of elements outside the tolerance table")
    unwritten: Mapped[float | None] = mapped_column(doc="share of elements that were never written")
    prepare_ms: Mapped[float | None] = mapped_column(doc="packing, compiling and tuning, before the clock starts")
    enqueue_ms: Mapped[float | None] = mapped_column(doc="host time to launch one call")
    duration_s: Mapped[float | None] = mapped_column(doc="wall time of the cell, without the start of its process")
    samples: Mapped[bytes | None] = mapped_column(
        doc="all samples in ms by burst: float32, packed without loss by `packing.pack_samples`"
    )
    telemetry: Mapped[list[Any] | None] = mapped_column(
        PackedTelemetry, doc="clock, temperature, power and throttling by burst, packed by `packing.pack_telemetry`"
    )
    first_bad: Mapped[list[Any] | None] = mapped_column(doc="coordinates of the first element outside the tolerance")
    message: Mapped[str | None] = mapped_column(doc="reason why the status is not ok")
    metrics: Mapped[dict[str, Any] | None] = mapped_column(
        default=None, doc="values of further metrics by name: `metrics ->> '$.NAME'`; null without any"
    )
    amounts: Mapped[dict[str, Any] | None] = mapped_column(
        default=None, doc="dims, flops and min_bytes in which this record differs from its series; null without any"
    )
    code_id: Mapped[int | None] = mapped_column(
        ForeignKey("loaded_list.id"), default=None, doc="files of the repository that its process ran; null if unknown"
    )
    packages_id: Mapped[int | None] = mapped_column(
        ForeignKey("loaded_list.id"), default=None, doc="packages that its process imported; null if unknown"
    )

    # Not columns: expressions that queries use by these names.
    low_ms: Mapped[float | None] = column_property(type_coerce(median_ms * (1 - low_ppm / 1e6), Double))
    high_ms: Mapped[float | None] = column_property(type_coerce(median_ms * (1 + high_ppm / 1e6), Double))
    error: Mapped[float | None] = column_property(type_coerce(error_ppm / 1e6, Double))
    burst_lengths: Mapped[list[Any] | None] = column_property(type_coerce(samples, BurstLengths))
    kernel_hash: Mapped[str | None] = column_property(
        select(KernelSet.hash).where(KernelSet.id == kernels_id).scalar_subquery()
    )
    code_hash: Mapped[str | None] = column_property(
        select(LoadedList.content).where(LoadedList.id == code_id).scalar_subquery()
    )
    packages_hash: Mapped[str | None] = column_property(
        select(LoadedList.content).where(LoadedList.id == packages_id).scalar_subquery()
    )
    kernels: Mapped[list[Any] | None] = column_property(
        select(KernelSet.kernels).where(KernelSet.id == kernels_id).scalar_subquery()
    )


TIMED_POINT = and_(Point.status == "ok", Point.median_ms.is_not(None), Point.timing.in_(TIMED))
"""The condition that a point has a correct result and a latency."""


class RunColumns(Base, kw_only=True):
    """A run's point values that the gate compares, as arrays. Triggers remove them when a point changes."""

    __tablename__ = "run_columns"

    id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True, doc="run")
    points: Mapped[int] = mapped_column(doc="number of points")
    data: Mapped[bytes] = mapped_column(doc="arrays, packed by `columns.packed`")


COPIED = ("run_id", "series_id", "environment_id", "content", "status", "timing", "repeatable", "median_ms",
          "error_ppm", "rms", "enqueue_ms", "metrics")  # fmt: skip
"""The point columns that `run_columns` copies."""


_FORGET_OLD = "DELETE FROM run_columns WHERE id = old.run_id;"
_FORGET_NEW = "DELETE FROM run_columns WHERE id = new.run_id;"
TRIGGERS = {
    "columns_insert": ("INSERT", _FORGET_NEW),
    "columns_update": ("UPDATE OF " + ", ".join(COPIED), _FORGET_OLD + _FORGET_NEW),
    "columns_delete": ("DELETE", _FORGET_OLD),
}
"""Triggers that remove a run's copy when a point changes: name to event and statements."""

_MAKE = {
    "sqlite": ["CREATE TRIGGER %(name)s AFTER %(change)s ON point BEGIN %(body)s END"],
    "postgresql": [
        "CREATE FUNCTION %(name)s() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %(body)s RETURN NULL; END $$",
        "CREATE TRIGGER %(name)s AFTER %(change)s ON point FOR EACH ROW EXECUTE FUNCTION %(name)s()",
    ],
}


def make_triggers(connection: Connection) -> None:
    """Make TRIGGERS."""
    for name, (change, body) in TRIGGERS.items():
        for statement in _MAKE[connection.dialect.name]:
            facts = {"name": name, "change": change, "body": body}
            connection.execute(DDL(statement, context=facts))  # type: ignore[no-untyped-call]


@event.listens_for(Base.metadata, "after_create")
def _triggers(_: Any, connection: Connection, **__: Any) -> None:
    make_triggers(connection)


class ABComparison(Base, kw_only=True):
    """One series' A/B comparison: two commits measured alternately on one machine.

    A row with the verdict `named` is a search's answer: the commit between base and head.
    """

    __tablename__ = "comparison"

    id: Mapped[int] = _key()
    content: Mapped[str] = mapped_column(unique=True, doc="hash of the whole comparison with its series")
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"), index=True, doc="series whose cell was measured")
    base: Mapped[str] = mapped_column(doc="hash of the commit before")
    head: Mapped[str] = mapped_column(doc="hash of the commit after")
    verdict: Mapped[str] = mapped_column(doc="same, different, unknown, failed, or named by a search")
    effect: Mapped[float | None] = mapped_column(doc="log(head / base) of the latencies")
    low: Mapped[float | None] = mapped_column(doc="lower end of the effect's interval")
    high: Mapped[float | None] = mapped_column(doc="upper end of the effect's interval")
    base_ms: Mapped[float | None] = mapped_column(doc="latency of the base")
    head_ms: Mapped[float | None] = mapped_column(doc="latency of the head")
    pairs: Mapped[int | None] = mapped_column(doc="number of blocks")
    seconds: Mapped[float | None] = mapped_column(doc="wall time of the comparison")
    measured: Mapped[datetime] = mapped_column(doc="time of the measurement")
    message: Mapped[str | None] = mapped_column(doc="reason for the verdict failed or unknown")
    details: Mapped[dict[str, Any]] = mapped_column(
        doc="both sides' accuracies, kernel hashes, software, and checks that could not be made; or the named commit"
    )


class Incident(Base, kw_only=True):
    """Changes with one likely cause, with a state, an owner and the decisions of people."""

    __tablename__ = "incident"

    id: Mapped[int] = _key()
    identity: Mapped[str] = mapped_column(unique=True, doc="hash of its first member, which marks its issue at a forge")
    state: Mapped[str] = mapped_column(doc="new, confirmed, acknowledged, expected, fixed or invalid")
    owner: Mapped[str | None] = mapped_column(default=None, doc="code owner of the changed files, or the plan's owner")
    opened: Mapped[datetime] = mapped_column(doc="time of its first event")
    until_time: Mapped[datetime | None] = mapped_column(
        default=None, doc="time at which an expected incident becomes new again"
    )
    until_commit: Mapped[str | None] = mapped_column(
        default=None, doc="commit with whose measurement an expected incident becomes new again"
    )
    link: Mapped[str | None] = mapped_column(default=None, doc="address of its issue")
    posted: Mapped[str | None] = mapped_column(default=None, doc="state of its issue when last posted: open or closed")
    checksum: Mapped[int | None] = _checksum()


class IncidentEvent(Base, kw_only=True):
    """A change of an incident's state, or a note about it."""

    __tablename__ = "incident_event"

    id: Mapped[int] = _key()
    incident_id: Mapped[int] = mapped_column(ForeignKey("incident.id"), index=True, doc="incident")
    at: Mapped[datetime] = mapped_column(doc="when")
    who: Mapped[str] = mapped_column(doc="a person, or groupbench for automatic changes")
    state: Mapped[str] = mapped_column(doc="new state, or the present one for a note")
    reason: Mapped[str | None] = mapped_column(doc="reason, or the note")
    checksum: Mapped[int | None] = _checksum()


class Alert(Base, kw_only=True):
    """A member of an incident: the change of one metric of a series."""

    __tablename__ = "alert"

    id: Mapped[int] = _key()
    identity: Mapped[str] = mapped_column(
        unique=True, doc="hash of series, metric and the runs between which it changed"
    )
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"), index=True, doc="series that changed")
    metric: Mapped[str] = mapped_column(doc="latency, accuracy, repeatability, result (a wrong one) or another metric")
    cause: Mapped[str | None] = mapped_column(
        doc="code, toolchain, code and toolchain, tuning, infrastructure, environment or machine"
    )
    base_run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), doc="last run before the change")
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), doc="first run after it")
    comparison_id: Mapped[int | None] = mapped_column(
        ForeignKey("comparison.id"), doc="A/B comparison that confirmed it"
    )
    before: Mapped[float | None] = mapped_column(doc="level before, in the metric's unit")
    after: Mapped[float | None] = mapped_column(doc="level after")
    effect: Mapped[float | None] = mapped_column(doc="log(after / before); null if either is zero")
    low: Mapped[float | None] = mapped_column(doc="lower end of the effect's interval")
    high: Mapped[float | None] = mapped_column(doc="upper end of the effect's interval")
    opened: Mapped[datetime] = mapped_column(doc="time at which it was first seen")
    checksum: Mapped[int | None] = _checksum()
    incident_id: Mapped[int] = mapped_column(ForeignKey("incident.id"), index=True, doc="incident that it belongs to")
    ended: Mapped[datetime | None] = mapped_column(default=None, doc="time at which the level was back")


class Pin(Base, kw_only=True):
    """A commit compared with every later run, besides the history."""

    __tablename__ = "pin"

    id: Mapped[int] = _key()
    name: Mapped[str] = mapped_column(doc="name of the pin; only one pin of a name is in force")
    commit: Mapped[str] = mapped_column(doc="hash of the commit")
    max_slowdown: Mapped[float] = mapped_column(doc="largest allowed relative slowdown: 0.03 is 3 %")
    created: Mapped[datetime] = mapped_column(doc="time of creation")
    who: Mapped[str] = mapped_column(doc="creator")
    ended: Mapped[datetime | None] = mapped_column(default=None, doc="time at which it was removed or replaced")
    checksum: Mapped[int | None] = _checksum()


class Decision(Base, kw_only=True):
    """A decision of a person or of the plan about a run or a series."""

    __tablename__ = "decision"

    id: Mapped[int] = _key()
    kind: Mapped[str] = mapped_column(
        doc="rejected, muted, removed (from the plan), or limit (smallest change that counts)"
    )
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), default=None, doc="rejected run")
    series_id: Mapped[int | None] = mapped_column(ForeignKey("series.id"), default=None, doc="series of the others")
    value: Mapped[float | None] = mapped_column(default=None, doc="relative limit: 0.03 is 3 %")
    until: Mapped[datetime | None] = mapped_column(default=None, doc="end of a mute")
    at: Mapped[datetime] = mapped_column(doc="time of the decision")
    who: Mapped[str] = mapped_column(doc="person, or groupbench for the plan")
    reason: Mapped[str | None] = mapped_column(default=None, doc="why")
    ended: Mapped[datetime | None] = mapped_column(default=None, doc="time at which it was withdrawn")
    checksum: Mapped[int | None] = _checksum()


class ImportedFile(Base, kw_only=True):
    """An imported file. While its runs are stored, it is not read again."""

    __tablename__ = "imported_file"

    id: Mapped[int] = _key()
    content: Mapped[str] = mapped_column(unique=True, doc="hash of file, name and options")
    title: Mapped[str] = mapped_column(doc="format of the file")
    failed: Mapped[int] = mapped_column(doc="results without a correct value")
    runs: Mapped[dict[str, Any]] = mapped_column(doc="results by run")
