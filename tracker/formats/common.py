"""The part that all formats share: import options, the reader's loop, and turning a result into a record."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from groupbench.tracker.facts.fleeting import settled, settled_machine
from groupbench.tracker.facts.identity import cell_fields
from groupbench.tracker.facts.metrics import Better
from groupbench.tracker.facts.record import (
    LONGEST_NAME,
    MEASURED,
    SCHEMA,
    Accuracy,
    Cell,
    Commit,
    Environment,
    Latency,
    Record,
    Run,
    Status,
    Timing,
    cut,
)
from groupbench.tracker.formats.usual import usual
from groupbench.tracker.formats.values import FormatError, dims_of, from_iso, milliseconds_of, quantity_of

SHORTEST_HASH = 7
"""Fewest digits of a hash's start that identify a commit."""


@dataclass(frozen=True)
class Options:
    """The user's facts about a file. They complete the file's own, and win if both give a value."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    date: datetime | None = None
    gpu: str | None = None
    cpu: str | None = None
    operator: str | None = None
    backend: str | None = None
    mode: str | None = None
    dtype: str | None = None
    plan: str | None = None
    commit_of: str = "tritonbench"  # the dependency of a TritonBench file that is tracked
    unit: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)  # field of the record: column
    device: Literal["cuda", "cpu"] | None = None  # used if neither the file nor `gpu` or `cpu` names one

    def key(self) -> list[Any]:
        """Return the options as part of a run's id: the same file with different options is another run."""
        values = astuple(replace(self, device=None))[:-1]  # `device` is newer than the ids, which must not change
        return [dict(value) if isinstance(value, Mapping) else value for value in values]

    def beyond(self, commit: str | None, branch: str | None, date: datetime | None) -> Options:
        """Return the options that add to the file's own facts."""
        start = self.commit or ""
        same_commit = len(start) >= SHORTEST_HASH and (commit or "").startswith(start)
        return replace(
            self,
            commit=None if same_commit else self.commit,
            branch=None if self.branch == branch else self.branch,
            date=None if self.date == date else self.date,
        )


@dataclass(frozen=True)
class ImportedResult:
    """One result in a file: a cell, samples and a status."""

    cell: Cell
    bursts_ms: Sequence[Sequence[float]] = ()
    status: Status = "ok"
    message: str | None = None  # why the status is not ok
    accuracy: Accuracy | None = None
    baseline: bool = False
    duration_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # other metrics, by name


@dataclass(frozen=True)
class LeftOut:
    """A result of a file that no record can hold."""

    reason: str  # printed after a count: "of unit bytes"
    name: str  # of the benchmark or metric


@dataclass(frozen=True)
class Merged:
    """A column that no field uses, although it differs between rows that became bursts of one cell."""

    column: str


@dataclass(frozen=True)
class Noted:
    """Something a user should know about the whole file."""

    text: str  # the same for all files of which it is true
    example: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.example})" if self.example else self.text


Read = Record | LeftOut | Merged | Noted


class Reader(ABC):
    """Reads one run of a file.

    A format's subclass implements `cells`, and `run` and `environment` if the file has their facts. This class handles
    options, statuses, facts under other names (`loose`) and parts of names that change with each run.
    """

    name: ClassVar[str]
    """The format's name in run ids, and the default host and protocol of its cells."""

    timing: ClassVar[Timing | None] = None
    """The clock of the latencies; None for the device's own."""

    dtype: ClassVar[str] = "-"
    """The dtype of cells for which neither the file nor the user names one."""

    part: str | None = None
    """Distinguishes runs of one file with the same commit and date."""

    def __init__(self, data: bytes, options: Options, loose: Mapping[str, Any] | None = None) -> None:
        """Begin to read a run.

        Args:
            data: The file, by which the run is recognised when it is imported again.
            options: The user's facts.
            loose: Facts of the file that its format does not define, such as a benchmark's context.
        """
        self.data, self.options, self.loose = data, options, loose or {}
        self.fleeting: dict[str, str] = {}  # parts of names that were dropped: an example of each kind
        self._settled: Counter[tuple[Any, ...]] = Counter()  # cells whose names lost a part

    def run(self) -> Run:
        """Return the run. Raises FormatError if neither file nor options name a commit and a date."""
        return self.make_run()

    def environment(self) -> Environment:
        """Return the environment in which the run was measured."""
        return self.make_environment(device="cpu" if self.timing == "cpu" else None)

    @abstractmethod
    def cells(self) -> Iterator[ImportedResult | LeftOut | Noted]:
        """Yield the results in the file's order."""

    def records(self) -> Iterator[Read]:
        """Yield the results as records. Raises FormatError, which names the line or the key."""
        run, environment = _all_of(self.run, self.environment)
        timing = self.timing or ("gpu" if environment.device == "cuda" else "cpu")
        for result in self.cells():
            if isinstance(result, ImportedResult):
                cell = self._settle(result.cell, run.started)
                yield make_record(run, environment, cell, result, timing)
            else:
                yield result
        for kind, example in self.fleeting.items():
            yield Noted(f"dropped from names, because it changes with each run: {kind}", example[:60])

    def _settle(self, cell: Cell, when: datetime) -> Cell:
        """Return a cell whose names are the same in the next run. Two that become equal are numbered, never merged."""
        fields = {}
        for name in ("operator", "backend", "shape"):
            before = getattr(cell, name)
            kept, dropped = settled(before, when)
            if dropped:
                self.fleeting |= dropped | self.fleeting
                fields[name] = kept or "-"
        if not fields:
            return cell
        cell = msgspec.structs.replace(cell, **fields)
        key = cell_fields(cell)
        self._settled[key] += 1
        number = self._settled[key]
        return cell if number == 1 else msgspec.structs.replace(cell, shape=f"{cell.shape}#{number}")

    def cell(
        self,
        operator: str,
        backend: str | None,
        shape: str,
        *,
        dtype: str | None = None,
        mode: str | None = None,
        host: str | None = None,
        protocol: str | None = None,
        dims: Mapping[str, int] | None = None,
        facts: Mapping[str, int | None] | None = None,  # seed, flops, min_bytes
    ) -> Cell:
        """Return a cell with the file's names, or those of the options if they name something else."""
        options, shape = self.options, shape or "-"
        cell = _cell(
            options.operator or operator or "-",
            options.backend or backend or "-",
            shape,
            options.dtype or dtype or self.dtype,
            options.mode or mode or "fwd",
            host or self.name,
            protocol or self.name,
        )
        numbers = {name: value for name, value in (facts or {}).items() if value is not None}
        if not dims and not numbers:
            return cell
        return msgspec.structs.replace(cell, dims={**cell.dims, **(dims or {})}, **numbers)

    def measured(
        self, operator: str, backend: str, shape: str, value: float | None, unit: str, better: Better = "neither"
    ) -> ImportedResult | LeftOut:
        """Return a result in any unit: a latency if the unit is a time, else a metric, with the unit in the shape."""
        milliseconds = None if value is None else milliseconds_of(value, unit)
        if milliseconds is not None:
            return ImportedResult(self.cell(operator[:LONGEST_NAME], backend, shape), [[milliseconds]])
        if value is None or not 0 <= value < math.inf:
            return LeftOut("without a number", operator)
        metric, amount = quantity_of(value, unit, better)
        return ImportedResult(
            self.cell(operator[:LONGEST_NAME], backend, with_unit(shape, unit)), metrics={metric: amount}
        )

    def own_date(self, text: str | None, where: str) -> datetime | None:
        """Return the file's date, or None if it is missing or the user names another one.

        Raises FormatError for text that is not a date, unless the user names one.
        """
        try:
            date = from_iso(text, where) if text else None
        except FormatError:
            if self.options.date is None:
                raise
            return None
        return date if self.options.date in (None, date) else None

    def make_run(
        self,
        *,
        commit: str | None = None,
        date: datetime | None = None,
        branch: str | None = None,
        dirty: bool = False,
        subject: str | None = None,
        committed: datetime | None = None,
        options: Options | None = None,
    ) -> Run:
        """Return the run from the file's facts. Raises FormatError if the commit or the date is missing.

        Args:
            options: Used instead of the reader's.

        The run's id is a hash of the content and the options, so that a second import adds nothing.
        """
        named = usual(self.loose)
        if not commit:
            commit, dirty, committed = named.commit, dirty or named.dirty, committed or named.committed
        branch, date = branch or named.branch, date or (named.date if self.options.date is None else None)
        options = options or self.options.beyond(commit, branch, date)
        hash_ = options.commit or commit
        started = options.date or date
        if not hash_ or started is None:
            lacks = {"names no commit; give --commit HASH": hash_, "contains no date; give --date 2026-01-31": started}
            raise FormatError(", and ".join(text for text, value in lacks.items() if not value))
        content = [self.name, _hash(self.data), options.key(), commit, date]
        content += [] if self.part is None else [self.part]
        id_ = hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]
        return Run(
            id=f"import-{id_}",
            started=started.astimezone(UTC),
            commit=Commit(
                hash=hash_,
                branch=options.branch or branch,
                dirty=options.dirty or (dirty and options.commit is None),
                time=committed if options.commit is None else None,
                subject=cut(subject) if subject and options.commit is None else None,
            ),
            trigger="import",
            plan=options.plan,
        )

    def make_environment(self, *, device: Literal["cuda", "cpu"] | None, **facts: Any) -> Environment:
        """Return the environment. A device that the user names wins over `device`, the file's.

        Raises FormatError if neither names one.
        """
        named = usual(self.loose)
        for name, value in (("cpu", named.cpu), ("gpu", named.gpu)):
            facts[name] = facts.get(name) or value
        values = {name: value for name, value in facts.items() if value not in (None, "", "unknown")}
        options = self.options
        if options.gpu:
            device = "cuda"
        elif options.cpu:
            device = "cpu"
        device = device or ("cuda" if values.get("gpu") else "cpu" if values.get("cpu") else options.device)
        if device is None:
            raise FormatError("does not name the device it was measured on; give --gpu NAME or --cpu NAME")
        if device == "cpu" and not options.cpu:
            self._settle_machine(values)
        values |= {name: value for name in ("gpu", "cpu") if (value := getattr(options, name))}
        return Environment(device=device, **values)

    def _settle_machine(self, values: dict[str, Any]) -> None:
        """Replace a processor's name if it changes with each job, such as a container's id."""
        cpu = values.get("cpu")
        kept = settled_machine(cpu)
        if cpu is None or kept == cpu:
            return
        count = values.get("cpu_count")
        values["cpu"] = kept or (f"{count} CPUs" if count else None)
        hardware = values["cpu"] or "unknown cpu"
        self.fleeting[f"machine, now {hardware!r}; name it with --cpu"] = cpu


@lru_cache(maxsize=1)
def _hash(data: bytes) -> str:
    """Return a file's hash, which all runs share."""
    return hashlib.sha256(data).hexdigest()


T = TypeVar("T")


class _Repeats(Counter[tuple[str, str]]):
    def shape(self, operator: str, shape: str) -> str:
        """Return the shape of a result. A second result of an operator and shape gets `#2`: it is not a repetition."""
        self[operator, shape] += 1
        number = self[operator, shape]
        return shape if number == 1 else f"{shape or '-'}#{number}"


def numbered(results: Iterable[tuple[T, str, str]]) -> Iterator[tuple[T, str, str]]:
    """Yield results with their operators and shapes, in which equal ones are numbered."""
    repeats = _Repeats()
    for result, operator, shape in results:
        yield result, operator, repeats.shape(operator, shape)


def distinct(results: Iterable[ImportedResult | LeftOut]) -> Iterator[ImportedResult | LeftOut]:
    """Yield results, in which equal cells are numbered."""
    repeats = _Repeats()
    for one in results:
        if isinstance(one, LeftOut):
            yield one
        else:
            shape = repeats.shape(one.cell.operator, one.cell.shape)
            yield replace(one, cell=msgspec.structs.replace(one.cell, shape=shape))


def with_unit(shape: str, unit: str) -> str:
    """Return the shape for a value other than a time, which may have the same name."""
    return ",".join(part for part in (shape, f"unit={unit}" if unit else "") if part not in ("", "-"))


def _all_of(run: Callable[[], Run], environment: Callable[[], Environment]) -> tuple[Run, Environment]:
    """Return both. Raises FormatError with everything that both lack, so that one further try is enough."""
    lacks = []
    for make in (run, environment):
        try:
            make()
        except FormatError as error:
            lacks.append(error.message)
    if lacks:
        raise FormatError(", and ".join(lacks))
    return run(), environment()


@lru_cache(maxsize=1 << 15)  # files have the same cells, and what follows from a cell is computed once
def _cell(operator: str, backend: str, shape: str, dtype: str, mode: str, host: str, protocol: str) -> Cell:
    return Cell(
        operator=operator, backend=backend, shape=shape, dtype=dtype, mode=mode, host=host, protocol=protocol,
        dims=dims_of(shape),
    )  # fmt: skip


def read_runs(readers: Iterable[Reader]) -> Iterator[Read]:
    """Yield the results of several runs, one run after another."""
    for reader in readers:
        yield from reader.records()


def make_record(run: Run, environment: Environment, cell: Cell, result: ImportedResult, timing: Timing) -> Record:
    """Return a result as a record. A sample must be a positive number, else it makes an error, never a latency."""
    status, message, latency = result.status, result.message, None
    if status in MEASURED:
        bursts = result.bursts_ms
        invalid = [ms for burst in bursts for ms in burst if not (math.isfinite(ms) and ms > 0)]
        if invalid:
            status, message = "error", f"latency is {invalid[0]:g}, which is not a valid duration"
        elif bursts and all(bursts):
            latency = Latency(timing=timing, bursts_ms=tuple(tuple(burst) for burst in bursts))
        elif status == "ok" and result.accuracy in (None, Accuracy()) and not result.metrics:
            status, message = "skipped", "no latency"
    return Record(
        schema=SCHEMA,
        run=run,
        environment=environment,
        cell=cell,
        status=status,
        message=None if message is None else cut(message),
        baseline=result.baseline,
        latency=latency,
        accuracy=result.accuracy,
        duration_s=result.duration_s if math.isfinite(result.duration_s or 0) else None,
        metrics=dict(result.metrics),
    )
