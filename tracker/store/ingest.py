"""Records into the store: a file is one transaction, so that it is stored whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.environment import digest, environment_identity
from groupbench.tracker.errors import IngestError
from groupbench.tracker.identity import series_fields
from groupbench.tracker.record import SCHEMA, Kernel, Record, Run
from groupbench.tracker.store import schema
from groupbench.tracker.store.bulk import insert_rows
from groupbench.tracker.store.checked import BATCH, NOT_REACHED, Checked, Numbered, named, prepared
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.engine import Store, cause
from groupbench.tracker.store.packing import unpack_telemetry
from groupbench.tracker.store.points import AMOUNTS, amounts_of, earlier_content, kernels_hash, result_of
from groupbench.tracker.text.wording import counted

NAMED_RUNS = 5
"""Of the runs in a file, those that are named."""

_RUN_FIELDS = ("dirty", "started", "trigger", "plan", "command")
_COMMIT_FIELDS = ("parents", "branch", "time", "author", "subject")
_KERNELS = msgspec.json.Decoder(tuple[Kernel, ...])


@dataclass(frozen=True)
class Ingested:
    """What became of one file."""

    source: str
    records: int
    added: int  # points that were not there before
    known: int  # points that were there already, the same
    new_series: int
    runs: tuple[tuple[str, str, bool], ...]  # (run id, commit hash, dirty), in order of appearance

    @property
    def summary(self) -> str:
        """`2 points added, 0 already known, 2 series new; run ... at ...`; of many runs the first are named."""
        nothing = "" if self.added else " (nothing new)"
        runs = [f"run {run} at {commit[:10]}{'+' if dirty else ''}" for run, commit, dirty in self.runs]
        more = [f"and {len(runs) - NAMED_RUNS} more"] if len(runs) > NAMED_RUNS else []
        return (
            f"{counted(self.added, 'point')} added, {self.known} already known{nothing}, {self.new_series} series new; "
            f"{'; '.join([*runs[:NAMED_RUNS], *more])}"
        )


def ingest(store: Store, records: Iterable[Numbered], source: str) -> Ingested:
    """Store records that are known to be storable, in one transaction. Raises IngestError; nothing is stored then."""
    return ingest_checked(store, prepared(records, source), source)


def ingest_checked(store: Store, records: Iterable[Checked], source: str) -> Ingested:
    """Store records that were checked, in one transaction. Raises IngestError; nothing is stored then."""
    with store.write() as session:
        return ingest_into(session, records, source)


def ingest_into(session: Session, records: Iterable[Checked], source: str) -> Ingested:
    """`ingest_checked` within a transaction that is open already. Raises IngestError; it must be undone then."""
    count = 0
    remaining = iter(records)
    writer = _Writer(session)
    while batch := list(islice(remaining, BATCH)):
        count += len(batch)
        try:
            writer.add(batch, source)
        except (IntegrityError, OperationalError):
            raise  # another writer or the disk, not these lines
        except (SQLAlchemyError, RecursionError, OverflowError, ValueError) as error:
            said = cause(error) if isinstance(error, SQLAlchemyError) else error
            where = f"lines {batch[0].number} to {batch[-1].number}" if len(batch) > 1 else f"line {batch[0].number}"
            raise IngestError(f"{source}: {where}: cannot be stored: {said}") from error
    return Ingested(
        source=source,
        records=count,
        added=writer.added,
        known=writer.known,
        new_series=writer.new_series,
        runs=tuple(writer.states),
    )


class _Stored(NamedTuple):
    """A point of a run, as far as another result of its cell is compared with it."""

    content: int
    status: str


class _Writer:
    """Adds records within one transaction, remembering what it has looked up."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.added = self.known = self.new_series = 0
        self.states: dict[tuple[str, str, bool], None] = {}
        self.latest: tuple[Run, int] | None = None  # runs come in blocks
        self.runs: dict[str, tuple[schema.Run, schema.Commit]] = {}
        self.points: dict[int, dict[int, _Stored]] = {}  # of each run, by series
        self.series: dict[str, tuple[int, dict[str, Any]]] = {}  # identity to key and facts
        self.environments: dict[str, int] = {}  # key by the hash of all facts
        self.kernels: dict[bytes, int] = {}
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}  # of the batch, by run and series

    def add(self, batch: list[Checked], source: str) -> None:
        self._look_up_series(batch)
        self._look_up_kernels(batch)
        self.rows = rows = {}  # by run and series: a file may hold what took its place
        for checked in batch:
            try:
                row = self._point(checked)
            except IngestError as error:
                raise IngestError(f"{source}: line {checked.number}: {error}") from error
            if row is not None:
                rows[row["run_id"], row["series_id"]] = row
        insert_rows(self.session, schema.Point, list(rows.values()))
        self.added += len(rows)

    def _point(self, checked: Checked) -> dict[str, Any] | None:
        """Columns of a new point; None where it is stored already."""
        run = self._run(checked.run)
        series, facts = self.series[checked.identity]
        environment = self._environment(checked)
        values = checked.values
        before = self.points[run].get(series)
        if before is not None:
            if before.content == values["content"] or values["status"] == NOT_REACHED:
                self.known += 1
                return None
            if before.content == _earlier_content(checked):
                self.known += 1
                return None
            if before.status != NOT_REACHED:
                raise IngestError(f"run {checked.run.id} is stored with another result for {named(checked.cell)}")
            # The run went on since and measured it.
            own = (schema.Point.run_id == run, schema.Point.series_id == series)
            self.session.execute(delete(schema.Point).where(*own))
        self.points[run][series] = _Stored(values["content"], values["status"])
        amounts = self._amounts(series, facts, amounts_of(checked.cell))
        kernels = None if checked.kernels is None else self.kernels[checked.kernels]
        keys = {"run_id": run, "series_id": series, "environment_id": environment}
        return {**keys, "kernels_id": kernels, "amounts": amounts, **values}

    def _amounts(self, series: int, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any] | None:
        """Return what a point says of its problem otherwise than its series, or None.

        A series that lacked a value takes the first that a record brings, for filters by size; its points so far keep
        that they had none. What it has stays: a record that contradicts it is right for its own point alone.
        """
        if given == known:
            return None
        filled = {name: value for name, value in given.items() if _adds(known[name], value)}
        if filled:
            before = {name: known[name] for name in filled}
            self._keep_amounts(series, before)
            known.update(filled)
            row = self.session.get_one(schema.Series, series)
            for name, value in filled.items():
                setattr(row, name, value)
            self.session.flush()
        return {name: value for name, value in given.items() if value != known[name]} or None

    def _keep_amounts(self, series: int, amounts: dict[str, Any]) -> None:
        """Have the stored points of a series say what the series said of them until now."""
        points = schema.table_of(schema.Point)
        own = points.c.series_id == series
        for row in self.rows.values():
            if row["series_id"] == series:
                row["amounts"] = {**amounts, **(row["amounts"] or {})}
        statement = update(points).where(own, points.c.amounts.is_(None)).values(amounts=amounts)
        self.session.execute(statement)
        for key, said in self.session.execute(select(points.c.id, points.c.amounts).where(own)).all():
            if said.keys() < amounts.keys() | said.keys():
                self.session.execute(update(points).where(points.c.id == key).values(amounts={**amounts, **said}))

    def _run(self, given: Run) -> int:
        """Key of the run, made or found. A run is of one commit; what is known of a commit is only added to."""
        if self.latest is not None and self.latest[0] is given:
            return self.latest[1]
        if given.id not in self.runs:
            self.runs[given.id] = self._find_run(given)
        run, commit = self.runs[given.id]
        if commit.hash != given.commit.hash:
            raise IngestError(f"run {given.id} is of commit {commit.hash}, but this record says {given.commit.hash}")
        for field in _RUN_FIELDS:
            value = given.commit.dirty if field == "dirty" else getattr(given, field)
            if getattr(run, field) != value:
                raise IngestError(f"run {given.id} has {field} {getattr(run, field)}, but this record says {value}")
        for field in _COMMIT_FIELDS:
            value = getattr(given.commit, field)
            if value not in (None, ()) and getattr(commit, field) is None:
                setattr(commit, field, list(value) if field == "parents" else value)
        self.states[given.id, commit.hash, run.dirty] = None
        self.latest = (given, run.id)
        return run.id

    def _find_run(self, given: Run) -> tuple[schema.Run, schema.Commit]:
        run = self.session.scalar(select(schema.Run).where(schema.Run.uuid == given.id))
        if run is not None:
            columns = (schema.Point.series_id, schema.Point.content, schema.Point.status)
            points = self.session.execute(select(*columns).where(schema.Point.run_id == run.id))
            self.points[run.id] = {series: _Stored(content, status) for series, content, status in points}
            return run, self.session.get_one(schema.Commit, run.commit_id)
        known = self.session.scalar(select(schema.Commit).where(schema.Commit.hash == given.commit.hash))
        commit = known or schema.Commit(hash=given.commit.hash)
        self.session.add(commit)
        self.session.flush()
        run = schema.Run(
            uuid=given.id,
            commit_id=commit.id,
            dirty=given.commit.dirty,
            started=given.started,
            trigger=given.trigger,
            plan=given.plan,
            command=given.command,
        )
        self.session.add(run)
        self.session.flush()
        self.points[run.id] = {}
        return run, commit

    def _look_up_series(self, batch: list[Checked]) -> None:
        """Key and facts of every series of the batch, made where it is new."""
        wanted = {one.identity: one for one in reversed(batch) if one.identity not in self.series}
        if not wanted:
            return
        columns = [getattr(schema.Series, name) for name in ("id", "identity", *AMOUNTS)]
        for row in self.session.execute(select(*columns).where(schema.Series.identity.in_(list(wanted)))):
            self.series[row.identity] = (row.id, {name: getattr(row, name) for name in AMOUNTS})
        missing = [identity for identity in reversed(wanted) if identity not in self.series]  # in the file's order
        if missing:
            insert_rows(self.session, schema.Series, [_series_values(wanted[identity]) for identity in missing])
            self.new_series += len(missing)
            keys = select(schema.Series.identity, schema.Series.id).where(schema.Series.identity.in_(missing))
            for identity, key in self.session.execute(keys):
                self.series[identity] = (key, amounts_of(wanted[identity].cell))

    def _environment(self, checked: Checked) -> int:
        """Key of the environment, made where it is new."""
        content, facts = checked.environment_content, checked.environment
        if content not in self.environments:
            known = self.session.scalar(select(schema.Environment.id).where(schema.Environment.content == content))
            if known is None:
                columns = schema.Environment.__table__.columns.keys()
                environment = schema.Environment(
                    content=content,
                    identity=environment_identity(facts),
                    facts=msgspec.to_builtins(facts),
                    **{name: getattr(facts, name) for name in facts.__struct_fields__ if name in columns},
                )
                self.session.add(environment)
                self.session.flush()
                known = environment.id
            self.environments[content] = known
        return self.environments[content]

    def _look_up_kernels(self, batch: list[Checked]) -> None:
        """Key of every set of kernels of the batch, made where it is new."""
        new = (one.kernels for one in batch if one.kernels is not None and one.kernels not in self.kernels)
        wanted = list(dict.fromkeys(new))  # in the file's order
        if not wanted:
            return
        rows = {}
        for encoded in wanted:
            kernels = _KERNELS.decode(encoded)
            plain = msgspec.to_builtins(kernels)
            rows[encoded] = {"content": digest(plain), "hash": kernels_hash(kernels), "kernels": plain}
        unlike = {row["content"]: row for row in rows.values()}
        table = schema.KernelSet
        query = select(table.content, table.id).where(table.content.in_(list(unlike)))
        known = dict(self.session.execute(query).all())
        missing = [row for content, row in unlike.items() if content not in known]
        if missing:
            insert_rows(self.session, table, missing)
            known = dict(self.session.execute(query).all())
        self.kernels.update((encoded, known[row["content"]]) for encoded, row in rows.items())


def _adds(known: Any, given: Any) -> bool:
    """Whether a value adds to what is known and contradicts none of it: a first value, or further sizes."""
    if isinstance(known, dict) and isinstance(given, dict):
        return known != given and known.items() <= given.items()
    return known is None and given is not None


def _earlier_content(checked: Checked) -> int:
    """The hash that an earlier revision stored of the same result."""
    values = {**checked.values}
    if values["telemetry"] is not None:
        values["telemetry"] = unpack_telemetry(values["telemetry"])
    kernels = () if checked.kernels is None else msgspec.json.decode(checked.kernels)
    where = {"schema": SCHEMA, "run": checked.run, "environment": checked.environment, "cell": checked.cell}
    plain = msgspec.to_builtins(where) | result_of(values, kernels)
    return earlier_content(msgspec.convert(plain, Record), checked.environment_content, checked.identity)


def _series_values(checked: Checked) -> dict[str, Any]:
    fields = series_fields(checked.cell, checked.environment)
    values = {"identity": checked.identity, **fields, **amounts_of(checked.cell)}
    return {**values, "checksum": checksum_of(values)}
