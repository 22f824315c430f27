"""Query results as tables: row lists with conversion to pandas data frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from groupbench.tracker.facts.errors import QueryError

if TYPE_CHECKING:
    import pandas


class Flat(Protocol):
    """A table row: `columns` are the keys, `flat` returns the values by key."""

    @classmethod
    def columns(cls) -> tuple[str, ...]: ...

    def flat(self) -> dict[str, Any]: ...


class FlatRow:
    """A row whose columns are attributes of it, or of its parts. Tuples become lists."""

    COLUMNS: ClassVar[Mapping[str, str]]  # attribute by column, such as `series.backend`

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return tuple(cls.COLUMNS)

    def flat(self) -> dict[str, Any]:
        values = ((name, attrgetter(place)(self)) for name, place in self.COLUMNS.items())
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def of_part(part: str, names: Iterable[str]) -> dict[str, str]:
    """Return columns of a row that are attributes of one part of it."""
    return {name: f"{part}.{name}" for name in names}


def of_row(*names: str) -> dict[str, str]:
    """Return columns of a row that are attributes of the same name."""
    return dict(zip(names, names, strict=True))


RowT = TypeVar("RowT", bound=Flat)


class Rows(list[RowT]):
    """A list of frozen dataclasses with conversion to a table. The columns match `--format json`."""

    def __init__(self, kind: type[RowT], rows: Iterable[RowT] = ()) -> None:
        super().__init__(rows)
        self.kind = kind

    def flat(self) -> list[dict[str, Any]]:
        return [row.flat() for row in self]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame. Raises QueryError without pandas."""
        return to_pandas(self.kind.columns(), self.flat())


def to_pandas(keys: Sequence[str], lines: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise QueryError("to_pandas() needs pandas, which is not installed; run `pip install pandas`") from error
    return pandas.DataFrame({key: [line[key] for line in lines] for key in keys})


def finite(values: Iterable[float | None]) -> list[float]:
    """Return values with NaN for None, for arrays."""
    return [math.nan if value is None else value for value in values]
