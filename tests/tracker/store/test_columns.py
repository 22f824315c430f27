"""The copies of points as arrays: equal to the points, and gone with any change of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import METRICS, Metric
from groupbench.tracker.facts.record import Record
from groupbench.tracker.store import columns, schema
from groupbench.tracker.store.columns import copy_newest, of_points, of_run
from groupbench.tracker.store.engine import Store
from groupbench.tracker.store.ingest import ingest
from groupbench.tracker.store.rename import rename
from groupbench.tracker.store.verify import verify

Make = Callable[..., Record]


@pytest.fixture
def three_nights(opened: Store, make: Make) -> Store:
    odd: dict[int, dict[str, Any]] = {
        0: {"metrics": {"spills": 8.0, "kernels": 1}},
        2: {"ms": None},
        3: {"status": "oom"},
    }
    records = [
        make(night, **{"ms": 1 + night / 10, "backend": f"b{number}", **odd.get(number, {})})
        for night in range(3)
        for number in range(5)
    ]
    ingest(opened, enumerate(records, 1), "file")
    return opened


def copied(session: Session) -> list[int]:
    """The number of each night that has a copy."""
    rows = session.execute(select(schema.Run.id).order_by(schema.Run.started)).scalars().all()
    keys = set(session.scalars(select(schema.RunColumns.id)))
    return [number for number, run in enumerate(rows) if run in keys]


@pytest.mark.both
def test_a_copy_has_what_the_points_have(three_nights: Store) -> None:
    metrics = [METRICS[name] for name in ("enqueue_ms", "spills", "kernels", "occupancy")]
    with three_nights.read() as session:
        assert copied(session) == [0, 1, 2]
        for run in session.scalars(select(schema.Run.id)):
            points, copy = of_points(session, columns.POINT.run_id == run, metrics), of_run(session, run, metrics)
            assert points.keys() - copy.keys() == {"metric occupancy"}  # of no point
            order, of_copy = (np.argsort(each["series"]) for each in (points, copy))
            for name, array in copy.items():
                np.testing.assert_array_equal(array[of_copy], points[name][order], name)


def test_verify_finds_a_damaged_copy(three_nights: Store) -> None:
    with three_nights.write() as session:
        assert list(verify(session)) == []
        first, second = session.scalars(select(schema.RunColumns).order_by(schema.RunColumns.id).limit(2))
        first.data = first.data[:-1] + bytes([first.data[-1] ^ 1])
        second.data = second.data[:40]
        runs = first.id, second.id
    with three_nights.read() as session:
        problems = list(map(str, verify(session)))
    assert problems[0] == f"hash: run_columns {runs[0]} differs from the run's points"
    assert problems[1].startswith(f"hash: run_columns {runs[1]} cannot be read")
    assert len(problems) == 2


def test_a_metric_that_was_not_copied_is_read_from_the_points(three_nights: Store) -> None:
    with three_nights.read() as session:
        (run, *_) = session.scalars(select(schema.Run.id).order_by(schema.Run.started.desc()))
        assert "metric new" in of_run(session, run, [Metric("new", "ms", "of a plugin", rule="scatter")])


@pytest.mark.both
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE point SET median_ms = 2 * median_ms WHERE id = {point}",
        "UPDATE point SET metrics = NULL WHERE id = {point}",
        "DELETE FROM point WHERE id = {point}",
        "INSERT INTO point (run_id, series_id, environment_id, content, status, baseline) "
        "SELECT {run}, max(id), 1, 7, 'ok', false FROM series",
    ],
)
def test_no_copy_outlives_a_change_of_its_points(three_nights: Store, make: Make, statement: str) -> None:
    with three_nights.write() as session:
        session.execute(text("DELETE FROM point WHERE series_id = (SELECT max(id) FROM series)"))
        copy_newest(session)
        assert copied(session) == [0, 1, 2]
        run = session.scalars(select(schema.Run.id).order_by(schema.Run.started)).all()[1]
        point = session.scalars(select(schema.Point.id).where(schema.Point.run_id == run)).first()
        session.execute(text(statement.format(run=run, point=point)))
        assert copied(session) == [0, 2]
    ingest(three_nights, enumerate([make(5, backend="b0")], 1), "file")
    with three_nights.read() as session:
        assert copied(session) == [0, 1, 2, 3]


def test_a_renamed_series_has_no_copy_under_its_old_key(three_nights: Store, make: Make) -> None:
    ingest(three_nights, enumerate([make(4, backend="new")], 1), "file")
    with three_nights.write() as session:
        rename(session, "backend", "b0", "new")  # which hashes all points of the series again
        assert copied(session) == []


def test_copies_are_kept_of_the_newest_runs(three_nights: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "COPIED", 2)
    with three_nights.write() as session:
        copy_newest(session)
        assert copied(session) == [1, 2]


def test_a_point_that_changes_otherwise_keeps_its_copy(three_nights: Store) -> None:
    with three_nights.write() as session:
        session.execute(text("UPDATE point SET message = 'text', amounts = NULL"))
        assert copied(session) == [0, 1, 2]


def test_every_copied_column_is_watched(three_nights: Store) -> None:
    """A copy of a further column must be removed with changes of that too."""
    read: dict[str, Any] = {column.name: column for column in schema.table_of(schema.Point).columns}
    judged = {metric.column for metric in METRICS.values() if metric.rule in ("scatter", "exact") and metric.column}
    assert judged <= set(schema.COPIED) <= set(read)
