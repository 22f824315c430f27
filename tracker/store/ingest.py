"""Store records. A file is one transaction: stored completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import environment_identity
from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.identity import series_fields
from groupbench.tracker.facts.loaded import NOTHING
from groupbench.tracker.facts.physics import unusual
from groupbench.tracker.facts.record import SCHEMA, Kernel, Loaded, Record, Run
from groupbench.tracker.facts.spelling import sizes_of
from groupbench.tracker.store import schema
from groupbench.tracker.store.bulk import insert_rows
from groupbench.tracker.store.checked import BATCH, NOT_REACHED, Checked, Numbered, named, prepared
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.columns import copy_newest
from groupbench.tracker.store.engine import Store, cause
from groupbench.tracker.store.packing import unpack_telemetry
from groupbench.tracker.store.points import AMOUNTS, amounts_of, earlier_content, kernels_hash, result_of
from groupbench.tracker.store.renamed import renamed
from groupbench.tracker.text.wording import commit_text, counted

NAMED_RUNS = 5
"""Largest number of runs that a summary names."""

MOST_WARNINGS = 5
"""Largest number of warnings about one file."""

_KERNELS = msgspec.json.Decoder(tuple[Kernel, ...])


@dataclass(frozen=True)
class Ingested:
    """One stored file."""

    source: str
    records: int
    added: int  # new points
    known: int  # points that were already stored
    new_series: int
    runs: tuple[tuple[str, str, bool], ...]  # (run id, commit hash, dirty), in order of appearance
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The result as text: `2 points added, 0 already known, 2 series new; run ... at ...`."""
        nothing = "" if self.added else " (nothing new)"
        runs = [f"run {run} at {commit_text(commit, dirty)}" for run, commit, dirty in self.runs]
        more = [f"and {len(runs) - NAMED_RUNS} more"] if len(runs) > NAMED_RUNS else []
        added = f"{counted(self.added, 'point')} added, {self.known} already known{nothing}"
        return "; ".join([f"{added}, {self.new_series} series new", *runs[:NAMED_RUNS], *more])


def total(source: str, done: Sequence[Ingested], results: int) -> Ingested:
    """Return several stored files as one.

    Args:
        source: What they are part of.
        done: The files that were stored.
        results: Results of all files. Those that no file of `done` has were known.
    """
    return Ingested(
        source=source,
        records=results,
        added=sum(one.added for one in done),
        known=results - sum(one.added for one in done),
        new_series=sum(one.new_series for one in done),
        runs=tuple(dict.fromkeys(run for one in done for run in one.runs)),
        warnings=tuple(dict.fromkeys(text for one in done for text in one.warnings))[:MOST_WARNINGS],
    )


def ingest(store: Store, records: Iterable[Numbered], source: str) -> Ingested:
    """Store storable records in one transaction. Raises IngestError and then stores nothing."""
    return ingest_checked(store, prepared(records, source), source)


def ingest_checked(store: Store, records: Iterable[Checked], source: str) -> Ingested:
    """Store checked records in one transaction. Raises IngestError and then stores nothing."""
    with store.write() as session:
        return ingest_into(session, records, source)


def ingest_into(session: Session, records: Iterable[Checked], source: str) -> Ingested:
    """Store checked records within an open transaction. Roll it back on IngestError."""
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
            reason = cause(error) if isinstance(error, SQLAlchemyError) else error
            where = f"lines {batch[0].number} to {batch[-1].number}" if len(batch) > 1 else f"line {batch[0].number}"
            raise IngestError(f"{source}: {where}: cannot store the records: {reason}") from error
    copy_newest(session)
    note = renamed(session, writer.began, {key for key, _ in writer.series.values()})
    return Ingested(
        source=source,
        records=count,
        added=writer.added,
        known=writer.known,
        new_series=writer.new_series,
        runs=tuple(writer.states),
        warnings=(*writer.warnings, *([note] if note else [])),
    )


class _Stored(NamedTuple):
    """A stored point's fields for comparison with a new result."""

    content: int
    status: str


class _Writer:
    """Adds records within one transaction, with cached look-ups."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.added = self.known = self.new_series = 0
        self.states: dict[tuple[str, str, bool], None] = {}
        self.warnings: dict[str, None] = {}
        self.latest: tuple[Run, int] | None = None  # records of a run are contiguous
        self.runs: dict[str, tuple[schema.Run, schema.Commit]] = {}
        self.points: dict[int, dict[int, _Stored]] = {}  # by run and series
        self.series: dict[str, tuple[int, dict[str, Any]]] = {}  # identity to key and facts
        self.began: list[int] = []  # keys of new series
        self.environments: dict[str, int] = {}  # hash of all facts to key
        self.kernels: dict[str, int] = {}  # hash to key
        self.lists: dict[str | None, int] = {}  # hash of a list of loaded files or packages to key
        self.whole: set[str] = set()  # hashes of lists that are stored with their items
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}  # rows of the batch, by run and series

    def add(self, batch: list[Checked], source: str) -> None:
        self._look_up_runs(batch)
        self._look_up_series(batch)
        self._look_up_kernels(batch)
        self._look_up_lists(batch)
        self.rows = rows = {}  # by run and series, since a later line may replace a skipped result
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
        """Return a new point's columns, or None if it is already stored."""
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
                raise IngestError(
                    f"run {checked.run.id} is already stored with a different result for {named(checked.cell)}"
                )
            # The run continued and has now measured the cell.
            this_point = (schema.Point.run_id == run, schema.Point.series_id == series)
            self.session.execute(delete(schema.Point).where(*this_point))
        self.points[run][series] = _Stored(values["content"], values["status"])
        self._warn(checked)
        amounts = self._amounts(series, facts, amounts_of(checked.cell))
        kernels = None if checked.kernels is None else self.kernels[checked.kernels[0]]
        keys = {"run_id": run, "series_id": series, "environment_id": environment}
        loaded = checked.loaded or Loaded()
        lists = {"code_id": self.lists.get(loaded.code), "packages_id": self.lists.get(loaded.packages)}
        return {**keys, **lists, "kernels_id": kernels, "amounts": amounts, **values}

    def _warn(self, checked: Checked) -> None:
        """Keep the first warnings about implausible results, which are stored all the same."""
        cell, values = checked.cell, checked.values
        if values["status"] == "ok" and values["timing"] == "gpu" and len(self.warnings) < MOST_WARNINGS:
            amounts = (cell.flops, cell.min_bytes, cell.dtype)
            warning = unusual(values.get("median_ms"), *amounts, values.get("timing"), checked.environment.gpu)
            if warning is not None:
                self.warnings[f"{named(cell)}: {warning}"] = None

    def _amounts(self, series: int, series_amounts: dict[str, Any], amounts: dict[str, Any]) -> dict[str, Any] | None:
        """Return the amounts in which a point differs from the series, or None.

        A series takes a missing value from the first record with one, for filters by size; earlier points keep the
        missing value. Existing values stay: a record with another value overrides it for one point only.
        """
        if amounts == series_amounts:
            return None
        filled = {name: value for name, value in amounts.items() if _adds(series_amounts[name], value)}
        if filled:
            before = {name: series_amounts[name] for name in filled}
            self._keep_amounts(series, before)
            series_amounts.update(filled)
            row = self.session.get_one(schema.Series, series)
            for name, value in filled.items():
                setattr(row, name, value)
            self.session.flush()
        return {name: value for name, value in amounts.items() if value != series_amounts[name]} or None

    def _keep_amounts(self, series: int, amounts: dict[str, Any]) -> None:
        """Copy a series' current amounts to stored points, before the series changes."""
        points = schema.table_of(schema.Point)
        of_series = points.c.series_id == series
        for row in self.rows.values():
            if row["series_id"] == series:
                row["amounts"] = {**amounts, **(row["amounts"] or {})}
        statement = update(points).where(of_series, points.c.amounts.is_(None)).values(amounts=amounts)
        self.session.execute(statement)
        for key, stored in self.session.execute(select(points.c.id, points.c.amounts).where(of_series)).all():
            if stored.keys() < amounts.keys() | stored.keys():
                self.session.execute(update(points).where(points.c.id == key).values(amounts={**amounts, **stored}))

    def _run(self, run_record: Run) -> int:
        """Return a run's key. Commit facts are only added, never changed.

        Raises IngestError if the run is stored with other facts.
        """
        if self.latest is not None and self.latest[0] is run_record:
            return self.latest[1]
        run, commit = self.runs[run_record.id]
        if commit.hash != run_record.commit.hash:
            raise IngestError(
                f"run {run_record.id} has commit {commit.hash}, but this record has {run_record.commit.hash}"
            )
        for field, value in _run_fields(run_record).items():
            if getattr(run, field) != value:
                raise IngestError(f"run {run_record.id} has {field} {getattr(run, field)}, but this record has {value}")
        for field, value in _commit_fields(run_record).items():
            if getattr(commit, field) is None:
                setattr(commit, field, value)
        self.states[run_record.id, commit.hash, run.dirty] = None
        self.latest = (run_record, run.id)
        return run.id

    def _look_up_runs(self, batch: list[Checked]) -> None:
        """Look up the batch's runs with commits and points, inserting new runs and commits."""
        wanted: dict[str, Run] = {}  # in the file's order
        for one in batch:
            if one.run.id not in self.runs:
                wanted.setdefault(one.run.id, one.run)
        if not wanted:
            return
        runs = list(self.session.scalars(select(schema.Run).where(schema.Run.uuid.in_(list(wanted)))))
        stored = {run.uuid for run in runs}
        new = [record for name, record in wanted.items() if name not in stored]
        of_stored = schema.Commit.id.in_({run.commit_id for run in runs})
        of_new = schema.Commit.hash.in_({record.commit.hash for record in new})
        query = select(schema.Commit).where(or_(of_stored, of_new))
        commits = {commit.hash: commit for commit in self.session.scalars(query)}
        for record in new:
            if record.commit.hash not in commits:
                commits[record.commit.hash] = schema.Commit(hash=record.commit.hash, **_commit_fields(record))
        self.session.add_all(commits.values())
        self.session.flush()  # gives the commits their keys
        for record in new:
            commit = commits[record.commit.hash]
            runs.append(schema.Run(uuid=record.id, commit_id=commit.id, **_run_fields(record)))
        self.session.add_all(runs)
        self.session.flush()
        by_key = {commit.id: commit for commit in commits.values()}
        self.runs.update((run.uuid, (run, by_key[run.commit_id])) for run in runs)
        self.points.update((run.id, {}) for run in runs)
        self._look_up_points([run.id for run in runs if run.uuid in stored])

    def _look_up_points(self, runs: list[int]) -> None:
        """Look up the points of stored runs, by key."""
        columns = (schema.Point.run_id, schema.Point.series_id, schema.Point.content, schema.Point.status)
        points = select(*columns).where(schema.Point.run_id.in_(runs)) if runs else None
        for run, series, content, status in () if points is None else self.session.execute(points):
            self.points[run][series] = _Stored(content, status)

    def _look_up_series(self, batch: list[Checked]) -> None:
        """Look up key and facts for each series in the batch, inserting new ones."""
        wanted = {one.identity: one for one in reversed(batch) if one.identity not in self.series}
        if not wanted:
            return
        table = schema.table_of(schema.Series)  # the session and the mapped class would double the time
        columns = [table.c[name] for name in ("id", "identity", *AMOUNTS)]
        query = select(*columns).where(table.c.identity.in_(list(wanted)))
        for key, identity, *amounts in self.session.connection().execute(query):
            self.series[identity] = (key, dict(zip(AMOUNTS, amounts, strict=True)))
        missing = [identity for identity in reversed(wanted) if identity not in self.series]  # in the file's order
        if missing:
            self._check_spellings([wanted[identity] for identity in missing])
            insert_rows(self.session, schema.Series, [_series_values(wanted[identity]) for identity in missing])
            self.new_series += len(missing)
            keys = select(schema.Series.identity, schema.Series.id).where(schema.Series.identity.in_(missing))
            for identity, key in self.session.execute(keys):
                self.began.append(key)
                self.series[identity] = (key, amounts_of(wanted[identity].cell))

    def _check_spellings(self, new: list[Checked]) -> None:
        """Raise IngestError if a new series differs from another only in the order of the sizes of its shape."""
        sized = [(one, sizes) for one in new if (sizes := sizes_of(one.cell.shape)) is not None]
        if not sized:
            return
        query = select(schema.Series.operator, schema.Series.shape).where(
            schema.Series.operator.in_({one.cell.operator for one, _ in sized}),
            func.length(schema.Series.shape).in_({len(one.cell.shape) for one, _ in sized}),
        )
        spellings = {(operator, sizes_of(shape)): shape for operator, shape in self.session.execute(query)}
        for one, sizes in sized:
            other = spellings.setdefault((one.cell.operator, sizes), one.cell.shape)
            if other != one.cell.shape:
                raise IngestError(
                    f"line {one.number}: the shape {one.cell.shape} is {other} in another order, under which "
                    f"{one.cell.operator} is stored: use this spelling"
                )

    def _environment(self, checked: Checked) -> int:
        """Return the environment's key, inserting a new one."""
        content, facts = checked.environment_content, checked.environment
        if content not in self.environments:
            key = self.session.scalar(select(schema.Environment.id).where(schema.Environment.content == content))
            if key is None:
                columns = schema.Environment.__table__.columns.keys()
                environment = schema.Environment(
                    content=content,
                    identity=environment_identity(facts),
                    facts=msgspec.to_builtins(facts),
                    **{name: getattr(facts, name) for name in facts.__struct_fields__ if name in columns},
                )
                self.session.add(environment)
                self.session.flush()
                key = environment.id
            self.environments[content] = key
        return self.environments[content]

    def _look_up_kernels(self, batch: list[Checked]) -> None:
        """Look up keys for the batch's kernel sets, inserting new ones."""
        new = (one.kernels for one in batch if one.kernels is not None and one.kernels[0] not in self.kernels)
        wanted = dict(new)  # in the file's order
        if not wanted:
            return
        table = schema.KernelSet
        query = select(table.content, table.id).where(table.content.in_(list(wanted)))
        key_of = dict(self.session.execute(query).all())
        missing = []
        for content, encoded in wanted.items():
            if content not in key_of:
                kernels = _KERNELS.decode(encoded)
                plain = msgspec.to_builtins(kernels)
                missing.append({"content": content, "hash": kernels_hash(kernels), "kernels": plain})
        if missing:
            insert_rows(self.session, table, missing)
            key_of = dict(self.session.execute(query).all())
        self.kernels.update(key_of)

    def _look_up_lists(self, batch: list[Checked]) -> None:
        """Look up the key of every list of loaded files and packages, inserting new ones and adding missing items."""
        wanted: dict[str, dict[str, str]] = {}  # in the file's order
        for loaded in (one.loaded for one in batch if one.loaded is not None):
            for content, items in ((loaded.code, loaded.files), (loaded.packages, loaded.versions)):
                if content is not None and content not in self.whole and not wanted.get(content):
                    wanted[content] = items
        if not wanted:
            return
        table = schema.LoadedList
        query = select(table.content, table.id, table.items.is_not(None)).where(table.content.in_(list(wanted)))
        stored = {content: (key, whole) for content, key, whole in self.session.execute(query)}
        complete = {content: items if items or content == NOTHING else None for content, items in wanted.items()}
        missing = [{"content": each, "items": items} for each, items in complete.items() if each not in stored]
        if missing:
            insert_rows(self.session, table, missing)
        for content, (key, whole) in stored.items():
            if not whole and complete[content] is not None:
                self.session.execute(update(table).where(table.id == key).values(items=complete[content]))
        for content, key, whole in self.session.execute(query):
            self.lists[content] = key
            self.whole |= {content} if whole else set()


def _run_fields(record: Run) -> dict[str, Any]:
    return {
        "dirty": record.commit.dirty,
        "started": record.started,
        "trigger": record.trigger,
        "plan": record.plan,
        "command": record.command,
    }


def _commit_fields(record: Run) -> dict[str, Any]:
    commit = record.commit
    # A commit whose author's clock was wrong would otherwise stay the newest for years.
    time = None if commit.time is None else min(commit.time, record.started)
    facts = {"parents": list(commit.parents), "branch": commit.branch, "time": time}
    facts |= {"author": commit.author, "subject": commit.subject}
    return {name: value for name, value in facts.items() if value not in (None, [])}


def _adds(known: Any, new: Any) -> bool:
    """Return whether a value only adds to the known one: a first value, or further sizes."""
    if isinstance(known, dict) and isinstance(new, dict):
        return known != new and known.items() <= new.items()
    return known is None and new is not None


def _earlier_content(checked: Checked) -> int:
    """Return the content hash from an earlier revision for the same result."""
    values = {**checked.values}
    if values["telemetry"] is not None:
        values["telemetry"] = unpack_telemetry(values["telemetry"])
    kernels = () if checked.kernels is None else msgspec.json.decode(checked.kernels[1])
    where = {"schema": SCHEMA, "run": checked.run, "environment": checked.environment, "cell": checked.cell}
    plain = msgspec.to_builtins(where) | result_of(values, kernels)
    return earlier_content(msgspec.convert(plain, Record), checked.environment_content, checked.identity)


def _series_values(checked: Checked) -> dict[str, Any]:
    fields = series_fields(checked.cell, checked.environment)
    values = {"identity": checked.identity, **fields, **amounts_of(checked.cell)}
    return {**values, "checksum": checksum_of(values)}
