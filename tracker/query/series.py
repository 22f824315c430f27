"""Select series by a filter, and read their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from sys import intern
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.identity import EXACT
from groupbench.tracker.query import filters
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.patterns import any_pattern, matches
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import Series
from groupbench.tracker.text.wording import no_such

Test = Callable[[SeriesRow], bool]


def names(session: Session, field_name: str) -> list[str]:
    """Return every value in one series field."""
    return list(session.scalars(select(getattr(Series, field_name)).distinct().order_by(getattr(Series, field_name))))


def find_series(session: Session, where: Filter) -> list[SeriesRow]:
    """Return the series matching a filter's names, shapes, sizes and hardware.

    Raises QueryError for an unknown name or size, since it is probably a typo.
    """
    conditions: list[ColumnElement[bool]] = [
        getattr(Series, name).in_(getattr(where, name)) for name in EXACT if getattr(where, name)
    ]
    for name in filters.PATTERNS:
        patterns = getattr(where, name)
        # Size expressions are not text; `narrowed` applies them below.
        if patterns and not (name == "shape" and any(map(_says_sizes, patterns))):
            column = getattr(Series, name)
            conditions.append(or_(*(matches(session, column, text) for text in patterns)))
    rows = [SeriesRow(**row._mapping) for row in session.execute(series_select().where(*conditions))]
    for name in (*EXACT, *filters.PATTERNS):
        if filters.unknown(name, getattr(where, name), {getattr(series, name) for series in rows}):
            filters.refuse_unknown(name, getattr(where, name), names(session, name))
    return narrowed(rows, where)


def _says_sizes(shape: str) -> bool:
    return filters.is_expression(shape) or filters.unnamed_sizes(shape) is not None


def narrowed(series: Iterable[SeriesRow], where: Filter, *, exact: bool = False) -> list[SeriesRow]:
    """Return the series matching a filter. Raises QueryError for an unknown size.

    With `exact`, also raises QueryError for an unknown name.
    """
    series = list(series)
    for name in (*EXACT, *filters.PATTERNS) if exact else ():
        filters.refuse_unknown(name, getattr(where, name), sorted({getattr(row, name) for row in series}))
    named = _keep(series, _tests_of_names(where))
    _refuse_unknown_sizes(named, where)
    return _keep(named, _tests_of_sizes(where))


def _keep(series: Iterable[SeriesRow], tests: Sequence[Test]) -> list[SeriesRow]:
    return [row for row in series if all(test(row) for test in tests)]


def _tests_of_names(where: Filter) -> list[Test]:
    tests = [_one_of(name, frozenset(getattr(where, name))) for name in EXACT if getattr(where, name)]
    if where.hardware:
        fits = any_pattern(where.hardware)
        tests.append(lambda row: fits(row.hardware))
    return tests


def _one_of(name: str, allowed: frozenset[str]) -> Test:
    value = attrgetter(name)
    return lambda row: value(row) in allowed


def _tests_of_sizes(where: Filter) -> list[Test]:
    tests = [_sizes_hold(filters.sizes(text)) for text in where.where]
    if where.shape:
        tests.append(_shape_fits(where.shape))
    return tests


def _sizes_hold(sizes: Sequence[filters.Size]) -> Test:
    return lambda row: filters.all_hold(sizes, row.dims)


def _shape_fits(shapes: Sequence[str]) -> Test:
    fits = any_pattern(shapes)
    unnamed = {filters.unnamed_sizes(text) for text in shapes}
    by_size = [_sizes_hold(filters.sizes(text)) for text in shapes if filters.is_expression(text)]
    return lambda row: (
        fits(row.shape) or filters.without_letters(row.shape) in unnamed or any(test(row) for test in by_size)
    )


def _refuse_unknown_sizes(series: Sequence[SeriesRow], where: Filter) -> None:
    requested = [*where.where, *(text for text in where.shape if filters.is_expression(text))]
    existing = sorted({name for row in series for name in row.dims})
    for text in requested:
        for size in filters.sizes(text):
            if series and size.name not in existing:
                raise QueryError(no_such("no size", size.name, existing))


def series_select() -> Select[Any]:
    """Return the query for SeriesRow's fields, in order."""
    columns = [getattr(Series, name) for name in SeriesRow.__dataclass_fields__ if name != "pk"]
    return select(Series.id.label("pk"), *columns)


def series_rows(session: Session, keys: Iterable[int]) -> dict[int, SeriesRow]:
    """Return series by key. Their texts are interned: in a large night, most are equal."""
    return {
        row[0]: SeriesRow(*map(_interned, row))
        for chunk in chunks(keys)
        for row in session.execute(series_select().where(Series.id.in_(chunk)))
    }


def _interned(value: Any) -> Any:
    if isinstance(value, str):
        return intern(value)
    return {intern(name): size for name, size in value.items()} if isinstance(value, dict) else value
