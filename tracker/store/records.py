"""Read records back from the store. Only their samples have changed: they are rounded to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import msgspec
from sqlalchemy import ColumnElement, Row, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts import record as records
from groupbench.tracker.facts.loaded import ListsOnce
from groupbench.tracker.store.schema import Commit, Environment, KernelSet, LoadedList, Point, Run, Series
from groupbench.tracker.text.cells import json_for

POINT_COLUMNS = tuple(Point.__table__.columns)
_BATCH = 500


def stored_records(
    session: Session,
    run: int | None = None,  # key; None for all runs
    *,
    series: int | None = None,  # key; None for all series
) -> Iterator[records.Record]:
    """Yield stored records, run by run, in the order in which they were stored."""
    conditions = [] if run is None else [Point.run_id == run]
    if series is not None:
        conditions.append(Point.series_id == series)
    for _, record in numbered_records(session, *conditions):
        yield record


def write_jsonl(session: Session, file: IO[bytes]) -> int:
    """Write every record as a JSON line, and return their number.

    Ingesting the file into an empty database and exporting again gives the same bytes.
    """
    count = 0
    lists_once = ListsOnce()
    for _, record in numbered_records(session):
        file.write(json_for(file, records.encode(lists_once(record))))
        count += 1
    return count


def numbered_records(session: Session, *conditions: ColumnElement[bool]) -> Iterator[tuple[Row[Any], records.Record]]:
    """Yield (`point` row, record) for points under all conditions."""
    read = RecordReader(session)
    query = select(*POINT_COLUMNS).where(*conditions).order_by(Point.run_id, Point.id)
    for row in session.execute(query.execution_options(yield_per=_BATCH)):
        yield row, read.record(row)


class RecordReader:
    """Converts `point` rows to records, and caches shared facts."""

    def __init__(self, session: Session) -> None:
        from groupbench.tracker.store.points import (
            result_of,  # imports numpy, which queries without samples do not need
        )

        self.result_of = result_of
        self.session = session
        self.runs: dict[int, dict[str, Any]] = {}
        self.series: dict[int, dict[str, Any]] = {}
        self.values: dict[tuple[str, int | None], Any] = {}  # by column and key
        self.lists: dict[int, tuple[str, dict[str, str]]] = {}

    def record(self, row: Row[Any]) -> records.Record:
        point = cast("Mapping[str, Any]", row._mapping)
        return msgspec.convert(
            {
                "schema": records.SCHEMA,
                "run": self._run(point["run_id"]),
                "environment": self._json(Environment.facts, point["environment_id"]),
                "cell": {**self._cell(point["series_id"]), **(point["amounts"] or {})},
                **self.result_of(point, self._json(KernelSet.kernels, point["kernels_id"])),
                "loaded": self._loaded(point["code_id"], point["packages_id"]),
            },
            records.Record,
        )

    def _run(self, key: int) -> dict[str, Any]:
        if key not in self.runs:
            run = self.session.get_one(Run, key)
            commit = self.session.get_one(Commit, run.commit_id)
            facts = {name: getattr(commit, name) for name in ("hash", "branch", "time", "author", "subject")}
            self.runs = {
                key: {  # cache only the latest run, since rows are grouped by run
                    "id": run.uuid,
                    "started": run.started,
                    "commit": {**facts, "parents": commit.parents or (), "dirty": run.dirty},
                    "trigger": run.trigger,
                    "plan": run.plan,
                    "command": run.command,
                }
            }
        return self.runs[key]

    def _cell(self, key: int) -> dict[str, Any]:
        if key not in self.series:
            columns = [getattr(Series, name) for name in records.Cell.__struct_fields__]
            query = select(*columns).where(Series.id == key)
            self.series[key] = dict(self.session.execute(query).one()._mapping)
        return self.series[key]

    def _json(self, column: Any, key: int | None) -> Any:
        """Return a row's value in a column of JSON, or None without a row."""
        if key is not None and (column.key, key) not in self.values:
            query = select(column).where(column.class_.id == key)
            self.values[column.key, key] = self.session.execute(query).scalar_one()
        return self.values.get((column.key, key))

    def _loaded(self, code: int | None, packages: int | None) -> dict[str, Any] | None:
        if code is None and packages is None:
            return None
        (code_hash, files), (packages_hash, versions) = self._list(code), self._list(packages)
        return {"code": code_hash, "files": files, "packages": packages_hash, "versions": versions}

    def _list(self, key: int | None) -> tuple[str | None, dict[str, str]]:
        if key is None:
            return None, {}
        if key not in self.lists:
            query = select(LoadedList.content, LoadedList.items).where(LoadedList.id == key)
            content, items = self.session.execute(query).one()
            self.lists[key] = content, items or {}
        return self.lists[key]
