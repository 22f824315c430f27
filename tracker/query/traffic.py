"""Count each problem's calls in a model's step, by the [traffic] entries in groupbench.toml."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.project import Calls, Project, ProjectError
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.store.schema import Series
from groupbench.tracker.tools.traces import TraceStep, read

COLUMNS = ("operator", "shape", "calls")
_EQUAL = 1e-9
"""Logarithm by which two problems are equally near to a step of a trace."""


@dataclass(frozen=True)
class Traffic:
    """The entries by `OPERATOR SHAPE`, which may have wildcards, and their routing traces by file."""

    entries: Mapping[str, Calls] = field(default_factory=dict)
    traces: Mapping[str, Sequence[TraceStep]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def resolve(self, session: Session) -> CallsOf:
        """Return each stored problem's calls."""
        if not self:
            return CallsOf()
        rows = session.execute(select(Series.operator, Series.shape, Series.dims))
        problems = {f"{operator} {shape}": dims or {} for operator, shape, dims in rows}
        of_entry: dict[str, list[str]] = {name: [] for name in self.entries}
        for problem in problems:
            entry = self._entry_of(problem)
            if entry is not None:
                of_entry[entry].append(problem)
        calls = {}
        for name, members in of_entry.items():
            entry_calls = self.entries[name]
            shares = dict.fromkeys(members, 1.0)
            if entry_calls.trace is not None:
                shares = _shares({each: problems[each] for each in members}, self.traces[entry_calls.trace])
            for problem, share in shares.items():
                calls[problem] = entry_calls.calls * share, entry_calls.layer or ""
        return CallsOf(calls, tuple(name for name, members in of_entry.items() if not members))

    def _entry_of(self, problem: str) -> str | None:
        """Return a problem's entry: with its name, or else the first one whose wildcards match."""
        if problem in self.entries:
            return problem
        return next((name for name in self.entries if fnmatchcase(problem, name)), None)


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class CallsOf:
    """Each stored problem's calls per step.

    Attributes:
        calls: Number of calls and layer, by `OPERATOR SHAPE`.
        unmatched: Entries without a stored problem.
    """

    calls: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.unmatched)

    def number(self, series: SeriesRow) -> float:
        """Return how often a step calls a series' problem."""
        return self.calls.get(_problem(series), (0.0, ""))[0]

    def layer(self, series: SeriesRow) -> str:
        """Return the layer of a series' problem; "" without one."""
        return self.calls.get(_problem(series), (0.0, ""))[1]

    @property
    def remark(self) -> str:
        """The entries without a problem, as a line; empty without such entries."""
        names = ", ".join(f"'{name}'" for name in self.unmatched)
        return f"[traffic]: no measured problem is {names}; `groupbench list series` prints them" if names else ""


def load(project: Project) -> Traffic:
    """Return a project's traffic. Raises ProjectError."""
    settings = project.settings.traffic
    entries = {name: _entry(name, value) for name, value in settings.calls.items()}
    if settings.file is not None:
        entries |= _of_file(project, settings.file)
    try:
        traces = {entry.trace: read(project.folder / entry.trace) for entry in entries.values() if entry.trace}
    except ValueError as error:
        raise ProjectError(f"[traffic]: {error}") from error
    return Traffic(entries, traces)


def _entry(name: str, value: Any) -> Calls:
    try:
        return _counted(
            msgspec.convert(value if isinstance(value, dict) else {"calls": value}, Calls), f"[traffic]: {name}"
        )
    except msgspec.ValidationError as error:
        wanted = "expected a number, or a table with calls and perhaps layer and trace"
        raise ProjectError(f"[traffic]: {name}: {wanted}: {error}") from error


def _of_file(project: Project, name: str) -> dict[str, Calls]:
    path = project.folder / name
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise ProjectError(f"{path}: line 1 has no column {missing[0]}; give {', '.join(COLUMNS)}")
            return {f"{row['operator']} {row['shape']}": _calls(row, f"{path}: line {rows.line_num}") for row in rows}
    except OSError as error:
        raise ProjectError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ProjectError(f"{path}: not a CSV file: {error}") from error


def _calls(row: Mapping[str | None, Any], place: str) -> Calls:
    """Return a line of the file. Raises ProjectError."""
    if None in row:
        raise ProjectError(f"{place} has too many fields; quote a shape with commas")
    try:
        return _counted(Calls(float(row["calls"] or ""), row.get("layer") or None), place)
    except ValueError:
        raise ProjectError(f"{place}: calls is {row['calls'] or ''!r}, not a number") from None


def _counted(entry: Calls, place: str) -> Calls:
    """Return an entry with a number of calls that is possible. Raises ProjectError."""
    if not 0 <= entry.calls < math.inf:
        what = "negative" if entry.calls < 0 else "not finite"
        raise ProjectError(f"{place}: {entry.calls:g} calls: the number of calls is {what}")
    return entry


def _problem(series: SeriesRow) -> str:
    return f"{series.operator} {series.shape}"


def _shares(problems: Mapping[str, Mapping[str, int]], steps: Sequence[TraceStep]) -> dict[str, float]:
    """Return each problem's part of a trace's steps: those with the nearest number of rows."""
    shares = dict.fromkeys(problems, 0.0)
    for step in steps:
        apart = {name: away for name, dims in problems.items() if (away := _apart(dims, step)) is not None}
        nearest = [name for name, away in apart.items() if away <= min(apart.values()) + _EQUAL]
        for name in nearest:
            shares[name] += 1 / len(nearest) / len(steps)
    return shares


def _apart(dims: Mapping[str, int], step: TraceStep) -> float | None:
    """Return how far a problem is from a step, as a log ratio of rows or tokens; None if the step does not call it."""
    if "M" in dims:  # a product: one rank's experts, as `tritonbench --routing-trace` takes them
        here, there = dims["M"], sum(step.rows[: dims.get("G")])
    else:  # a layer
        here, there = dims.get("T", 0), step.tokens or round(sum(step.rows) / (step.k or dims.get("k") or 1))
    return abs(math.log(here / there)) if here > 0 and there > 0 else None
