"""Explain how kernels changed between two sides: groups of cells, and facts side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.compare.kernels import KernelPair, differences, pairs
from groupbench.tracker.compare.sides import ComparedSide
from groupbench.tracker.facts.environment import environment_differences
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.loaded import UNKNOWN, LoadedDifference, difference_of_all
from groupbench.tracker.facts.metrics import LATENCY, METRICS, NCU, Metric
from groupbench.tracker.facts.record import Kernel
from groupbench.tracker.query.loaded import LoadedLists
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import KernelSet, Point
from groupbench.tracker.text.wording import counted, signed_change


@dataclass(frozen=True)
class CellKernels:
    """A cell on both sides, with kernels."""

    before: PointRow
    after: PointRow
    kernels: tuple[tuple[Kernel, ...], tuple[Kernel, ...]]

    @property
    def differences(self) -> tuple[str, ...]:
        return tuple(differences(*self.kernels))

    @property
    def changed(self) -> bool:
        return self.known and any(not pair.same for pair in pairs(*self.kernels))

    @property
    def known(self) -> bool:
        """Return whether the kernels of both sides are known."""
        return all(self.kernels)

    @property
    def log_ratio(self) -> float | None:
        """The log ratio of the latencies, if both are real latencies."""
        if not (self.before.timed and self.after.timed and self.before.median_ms and self.after.median_ms):
            return None
        return math.log(self.after.median_ms / self.before.median_ms)


@dataclass(frozen=True)
class CellGroup:
    """Cells of one operator and backend whose kernels changed in the same way. The first one represents the group."""

    cells: tuple[CellKernels, ...]

    @property
    def first(self) -> CellKernels:
        return self.cells[0]

    @property
    def text(self) -> str:
        """The operator, the backend and the change, in one line."""
        series, after = self.first.before.series, self.first.after.series
        name = f"{series.operator} {series.backend}" + (f" → {after.backend}" if series != after else "")
        return f"{name}: {'; '.join(self.first.differences) or 'code changed, facts unchanged'}"

    @property
    def effect(self) -> str:
        """The mean change of latency, and the number of cells."""
        ratios = [cell.log_ratio for cell in self.cells if cell.log_ratio is not None]
        cells = counted(len(self.cells), "cell")
        return f"{signed_change(math.expm1(statistics.fmean(ratios)))} latency in {cells}" if ratios else cells

    def pairs(self) -> list[KernelPair]:
        """Return the pairs of kernels that differ."""
        return [pair for pair in pairs(*self.first.kernels) if not pair.same]


@dataclass(frozen=True)
class ProfilePair:
    """A cell that was profiled on both sides."""

    before: PointRow
    after: PointRow

    @property
    def metrics(self) -> list[tuple[Metric, float, float]]:
        """The latency, and the metrics of the profiles that both sides have, each with the values of A and B."""
        values = ((metric, self.before.value(metric), self.after.value(metric)) for metric in (LATENCY, *_profiled()))
        return [(metric, a, b) for metric, a, b in values if a is not None and b is not None]

    @property
    def text(self) -> str:
        before, after = self.before.series, self.after.series
        return f"profile of {before}" + (f" → {after.backend}" if before != after else "")


def _profiled() -> list[Metric]:
    return [metric for metric in METRICS.values() if metric.cost == NCU]


@dataclass(frozen=True)
class Explanation:
    """The groups of changed cells, largest change of latency first."""

    a: str
    b: str
    groups: tuple[CellGroup, ...]
    same: int  # cells with the same kernels on both sides
    unknown: int  # cells with unknown kernels on one side
    environment: tuple[str, ...]  # differences between the sides' environments
    on_cpu: int = 0  # cells with unknown kernels that ran on a CPU
    profiles: tuple[ProfilePair, ...] = ()  # cells that were profiled on both sides
    loaded: LoadedDifference = UNKNOWN  # between the files and packages of all cells

    @property
    def loaded_texts(self) -> list[str]:
        """The loaded files and packages that differ, one line each."""
        files = self.loaded.code_text
        packages = self.loaded.packages
        return [*([files] if files else []), *([f"packages: {', '.join(packages)}"] if packages else [])]

    @property
    def reason(self) -> str | None:
        """The reason for an empty explanation with the next step, or None."""
        if self.groups or self.same or self.profiles or self.loaded_texts:
            return None
        if not self.unknown:
            return "nothing to explain: A and B share no correct result; `groupbench compare` lists both"
        if self.on_cpu == self.unknown:
            return "nothing to explain: kernels have no machine code on a CPU; measure both sides on a GPU"
        return "nothing to explain: no kernels are recorded; only Triton and Helion kernels are"

    @property
    def head(self) -> str:
        changed = sum(len(group.cells) for group in self.groups)
        parts = [
            f"{counted(changed, 'cell')} with different kernels",
            f"{self.same} with the same kernels",
        ]
        parts += [f"{self.unknown} with unknown kernels"] if self.unknown else []
        return f"A {self.a}  B {self.b}: {', '.join(parts)}"


def explain(session: Session, a: ComparedSide, b: ComparedSide, against: str | None = None) -> Explanation:
    """Compare the kernels of each cell that both sides have.

    Args:
        against: Name of the only backend of B: compare each cell of A with the same problem in B.
    """
    old, new = ({_key(point, against): point for point in side.points if point.status == "ok"} for side in (a, b))
    shared = [(point, new[key]) for key, point in old.items() if key in new and point.pk != new[key].pk]
    kernels = kernels_of(session, {point.pk for both in shared for point in both})
    cells = [CellKernels(old, new, (kernels.get(old.pk, ()), kernels.get(new.pk, ()))) for old, new in shared]
    unknown = [cell for cell in cells if not cell.known]
    return Explanation(
        a=a.title,
        b=b.title,
        groups=_groups(cells),
        same=sum(not cell.changed for cell in cells) - len(unknown),
        unknown=len(unknown),
        environment=_environment(cells),
        on_cpu=sum(cell.after.timing in ("cpu", "interpreted") for cell in unknown),
        profiles=tuple(_profiles(a, b, against)),
        loaded=_loaded(session, shared),
    )


def _loaded(session: Session, shared: Sequence[tuple[PointRow, PointRow]]) -> LoadedDifference:
    """Return the differences between what the processes of both sides loaded, as far as it is known."""
    lists = LoadedLists(session, (point for both in shared for point in both))
    return difference_of_all((lists.of(before), lists.of(after)) for before, after in shared)


def _environment(cells: Iterable[CellKernels]) -> tuple[str, ...]:
    """Return the differences between the environments of both sides."""
    facts = ((cell.before.environment.facts, cell.after.environment.facts) for cell in cells)
    return tuple(dict.fromkeys(text for both in facts for text in environment_differences(*both)))


def _groups(cells: Iterable[CellKernels]) -> tuple[CellGroup, ...]:
    """Return the cells whose kernels changed in the same way, those with the largest change of latency first."""

    def key(cell: CellKernels) -> tuple[object, ...]:
        return cell.before.series.operator, cell.before.series.backend, cell.differences

    groups = grouped((cell for cell in cells if cell.changed), key)
    return tuple(sorted((CellGroup(tuple(held)) for held in groups.values()), key=_weight, reverse=True))


def _profiles(a: ComparedSide, b: ComparedSide, against: str | None) -> Iterator[ProfilePair]:
    """Yield the cells that were profiled on both sides, each with a side's last profile of those with most counters."""

    def counters(point: PointRow) -> int:
        return sum(point.value(metric) is not None for metric in _profiled())

    old, new = (
        {
            _key(point, against): point
            for point in sorted(side.points, key=lambda point: (counters(point), point.run.started))
            if point.status == "ok" and counters(point)
        }
        for side in (a, b)
    )
    pairs_found = (ProfilePair(point, new[key]) for key, point in old.items() if key in new)
    for pair in pairs_found:
        if pair.before.pk != pair.after.pk and len(pair.metrics) > 1:
            yield pair


def _key(point: PointRow, against: str | None) -> tuple[str, ...]:
    """Return the key to match points by: the series, or with `against` the problem."""
    return point.series.sort_key if against is None else point.series.problem


def _weight(group: CellGroup) -> float:
    return max((abs(cell.log_ratio or 0.0) for cell in group.cells), default=0.0)


def kernels_of(session: Session, points: set[int]) -> Mapping[int, tuple[Kernel, ...]]:
    """Return the kernels of points by key, without points whose kernels are unknown."""
    by_point = {}
    query = select(Point.id, KernelSet.kernels).join(KernelSet, Point.kernels_id == KernelSet.id)
    for chunk in chunks(points):
        for key, kernels in session.execute(query.where(Point.id.in_(chunk))):
            by_point[key] = msgspec.convert(kernels, tuple[Kernel, ...])
    return by_point


FACTS = ("registers", "spilled_bytes", "shared_bytes", "occupancy", "launches", "arch", "counted_in", "hash")


def side_by_side(pair: KernelPair) -> Iterator[tuple[str, object, object]]:
    """Yield (fact, value in A, value in B) of a kernel: facts, config and instruction counts."""
    sides = [_facts(kernel) for kernel in (pair.before, pair.after)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        before, after = (side.get(name) for side in sides)
        if (before, after) != (None, None):
            yield name, before, after


def _facts(kernel: Kernel | None) -> dict[str, object]:
    if kernel is None:
        return {}
    spilled = None if kernel.spills is None else 4 * kernel.spills
    facts: dict[str, object] = {name: spilled if name == "spilled_bytes" else getattr(kernel, name) for name in FACTS}
    return facts | kernel.config | kernel.counts
