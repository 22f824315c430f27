"""Rename an operator, a backend or a shape, so that the series continue under the new name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Literal, get_args

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.identity import IDENTITY, identity_of
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.points import content_of
from groupbench.tracker.store.records import numbered_records
from groupbench.tracker.store.schema import ABComparison, Alert, Decision, Point, Run, Series

Field = Literal["operator", "backend", "shape"]
FIELDS: tuple[Field, ...] = get_args(Field)


def rename(session: Session, field: Field, old: str, new: str, operator: str | None = None) -> int:
    """Rename a field's value in every series, and return the number of series.

    A series that has results under the new name already gets those of the old one.

    Args:
        session: A session that writes.
        field: The field.
        old: Its value so far.
        new: Its value from now on.
        operator: Only the series of this operator.

    Raises:
        QueryError: No series has the old value, or one run has results under both names.
    """
    query = select(Series).where(getattr(Series, field) == old)
    if operator is not None:
        query = query.where(Series.operator == operator)
    rows = list(session.scalars(query))
    if not rows or old == new:
        raise QueryError(f"no series with {field} {old!r} to rename; `groupbench list series` lists them")
    for row in rows:
        _hash_again(session, _renamed(session, row, {field: new}))
    return len(rows)


def rename_to(session: Session, series: Collection[int], names: Mapping[str, str]) -> None:
    """Let measured series continue those that had other names.

    A series is left alone if a run has results under both names.

    Args:
        session: A session that writes.
        series: Keys of the series that are measured now.
        names: The new name of an operator, a backend or a shape, by its old one.
    """
    for key in series:
        row = session.get_one(Series, key)
        facts = {name: getattr(row, name) for name in IDENTITY}
        former = [[facts[field], *(old for old, new in names.items() if new == facts[field])] for field in FIELDS]
        for values in product(*former):
            identity = identity_of(facts | dict(zip(FIELDS, values, strict=True)))
            old = session.scalar(select(Series).where(Series.identity == identity))
            if old is None or old.id in series:
                continue
            try:
                _hash_again(session, _renamed(session, old, {field: facts[field] for field in FIELDS}))
            except QueryError:
                continue


def _renamed(session: Session, row: Series, names: Mapping[Field, str]) -> Series:
    """Return a series under the new names, with everything that was about the old ones."""
    identity = identity_of({name: getattr(row, name) for name in IDENTITY} | dict(names))
    target = session.scalar(select(Series).where(Series.identity == identity))
    if target is None:
        for field, new in names.items():
            setattr(row, field, new)
        row.identity = identity
        session.flush()
        return row
    runs = select(Point.run_id).where(Point.series_id == target.id)
    both = session.scalar(
        select(Run.uuid).join(Point, Point.run_id == Run.id).where(Point.series_id == row.id, Run.id.in_(runs)).limit(1)
    )
    if both is not None:
        pairs = ((field, getattr(row, field), new) for field, new in names.items())
        field, old, new = next(pair for pair in pairs if pair[1] != pair[2])
        raise QueryError(f"run {both[:12]} has results of {field} {old!r} and of {new!r}")
    decisions = session.scalars(select(Decision).where(Decision.series_id == row.id)).all()
    for each in (*decisions, *session.scalars(select(Alert).where(Alert.series_id == row.id))):
        each.series_id = target.id
    session.flush()
    for table in (Point, ABComparison):
        session.execute(
            update(table).where(table.series_id == row.id).values(series_id=target.id),
            execution_options={"synchronize_session": False},
        )
    session.expire_all()
    session.delete(row)
    session.flush()
    return target


def _hash_again(session: Session, series: Series) -> None:
    """Compute the hashes that contain the identity of a series again."""
    hashes = [(row.id, content_of(record)) for row, record in numbered_records(session, Point.series_id == series.id)]
    for key, content in hashes:
        session.execute(update(Point).where(Point.id == key).values(content=content))
    for compared in session.scalars(select(ABComparison).where(ABComparison.series_id == series.id)):
        compared.content = comparisons.content_of(series.identity, comparisons.from_row(compared))
    names = dict(session.execute(select(Run.id, Run.uuid)).all())
    for alert in session.scalars(select(Alert).where(Alert.series_id == series.id)):
        base = None if alert.base_run_id is None else names[alert.base_run_id]
        alert.identity = digest([series.identity, alert.metric, base, names[alert.run_id]])
    session.flush()
