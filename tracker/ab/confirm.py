"""Decide the suspects of a run: measure both commits alternately on this machine, and store the results.

Base is the last commit measured before the change, head the run's own. Cells at one pair of commits share two
worktrees and one bench. Suspects beyond the budget are left out and listed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupbench.tracker.ab.bench import AbCell, AbError, AbResult, AbSide, Bench
from groupbench.tracker.ab.kept import compared_of, environment_of, software_of
from groupbench.tracker.ab.result import timing_of
from groupbench.tracker.ab.toolchains import PACKAGES, Interpreters
from groupbench.tracker.ab.worktree import (
    AS_IT_IS,
    CheckoutError,
    Recipe,
    Spares,
    WorktreeError,
    checkouts,
    resolve,
    trees_are_equal,
)
from groupbench.tracker.facts.environment import ab_software, hardware_class, software_identity, toolchain_differences
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.judge import gate
from groupbench.tracker.judge.causes import some
from groupbench.tracker.judge.incident_facts import Causes
from groupbench.tracker.judge.incidents import fits, group
from groupbench.tracker.judge.toolchain_lines import LineSoftware, agree, of_one_toolchain
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.loaded import code_hashes
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, FAILED, UNKNOWN, Compared
from groupbench.tracker.store.engine import Store
from groupbench.tracker.text.wording import counted, duration
from groupbench.tracker.tools import git

Report = Callable[[Judged, Compared], None]


CELL_S = 60.0
"""Longest wall time of one comparison."""
MOST_AB = 4
"""Most comparisons of suspects with one likely cause, once one of them has found a difference."""
SHARE, LEAST_S = 0.1, 180.0
"""Share of the time of a night that its A/Bs may take, and the time that they may always take."""


@dataclass(frozen=True)
class Confirmed:
    """The outcome of a run's suspects."""

    compared: tuple[tuple[Judged, Compared], ...] = field(default=())
    left_out: tuple[Judged, ...] = field(default=())  # the budget was spent
    inconclusive: tuple[Judged, ...] = field(default=())  # compared before, without a decision
    elsewhere: tuple[Judged, ...] = field(default=())  # this machine cannot measure them
    same_code: tuple[Judged, ...] = field(default=())  # the same files ran at both commits, so no A/B was run

    @property
    def decided(self) -> bool:
        undecided = self.left_out or self.inconclusive or self.elsewhere
        return not undecided and all(one.decided for _, one in self.compared)

    @property
    def text(self) -> str:
        """The outcome in one line."""
        counts: dict[str, int] = {}
        for _, one in self.compared:
            counts[one.verdict] = counts.get(one.verdict, 0) + 1
        parts = [f"{number} {verdict}" for verdict, number in counts.items()]
        if self.left_out:
            parts.append(
                f"{len(self.left_out)} left out because the budget is spent; run `groupbench confirm` to continue"
            )
        if self.inconclusive:
            parts.append(
                f"{counted(len(self.inconclusive), 'earlier comparison')} gave no decision; repeat them with --again"
            )
        if self.same_code:
            parts.append(f"{len(self.same_code)} not compared because the same files ran at both commits")
        if self.elsewhere:
            parts.append(f"{len(self.elsewhere)} cannot be measured on this machine")
        return "CONFIRM " + (", ".join(parts) or "nothing to confirm")


@dataclass(frozen=True)
class _Pair:
    """Suspects to decide by comparing two commits, or one commit with two toolchains."""

    base: str
    head: str
    rows: tuple[Judged, ...]
    toolchains: tuple[Environment, Environment] | None = None

    def details(self, row: Judged, software: Sequence[dict[str, str]] | None = None) -> dict[str, Any]:
        """Return the software facts to store with a suspect's comparison.

        Args:
            software: Versions of base and head by package; None if nothing was measured.
        """
        assert row.point is not None
        details: dict[str, Any] = {"software": software or [ab_software(row.point.environment.facts)] * 2}
        if row.point.run.toolchain is not None:
            details["toolchain"] = row.point.run.toolchain
        if self.toolchains is not None:
            details["toolchains"] = [software_identity(each) for each in self.toolchains]
        return details

    @property
    def text(self) -> str:
        if self.toolchains is None:
            return f"{self.base[:10]} and {self.head[:10]}"
        return f"{self.base[:10]} with {some(toolchain_differences(*self.toolchains))}"


@dataclass(frozen=True)
class Measuring:
    """The sources and interpreters for measuring suspects' commits.

    Attributes:
        repo: A clone with the commits.
        recipe: Steps to make a checkout measurable.
        python: Interpreter of the run's commit.
        base_python: Interpreter of the earlier commits; None: `python`.
        interpreters: Finds interpreters with the packages of an earlier toolchain.
        plugins: Plugins with operators and backends.
    """

    repo: Path
    recipe: Recipe = AS_IT_IS
    python: str = sys.executable
    base_python: Path | None = None
    interpreters: Interpreters | None = None
    plugins: tuple[str, ...] = ()

    def found_by(self, say: Callable[[str], None]) -> Interpreters:
        """Return `interpreters`, by default the ones named here."""
        others = [Path(self.python), *([] if self.base_python is None else [self.base_python])]
        return self.interpreters or Interpreters({}, self.repo, others, say=say)


def enough(night_s: float) -> float:
    """Return the seconds for the A/Bs of a night whose measuring took `night_s`."""
    return max(LEAST_S, SHARE * night_s)


def confirm(
    store: Store,
    measuring: Measuring,
    *,
    run: str | None = None,
    budget_s: float,
    again: bool = False,
    repeat: bool = False,
    report: Report = lambda row, compared: None,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmed:
    """Measure the suspects of a run, and store each comparison at once, unless both sides fail.

    If a change came with another toolchain, both commits are measured with `python`, and the base also with both
    toolchains, by interpreters with their packages.

    Args:
        store: The database.
        measuring: Where and how the commits are measured.
        run: Start of the run's id; None: the newest.
        budget_s: Time in s after which no further suspect is measured.
        again: Also measure suspects whose earlier A/B was inconclusive.
        repeat: Repeat a comparison that is undecided, or finds a difference. The second answer counts, unless it is
            undecided after a difference.
        report: Called with each suspect and comparison.
        say: Called with lines for the user.
        clock: Seconds of a steady clock.

    Raises:
        QueryError: There is no such run.
        WorktreeError: `repo` is not a clone.
    """
    tried: set[int] = set()
    inconclusive: list[Judged] = []
    with Spares() as spares:
        confirming = _Confirming(
            store, measuring, measuring.found_by(say), report, say, clock, clock() + budget_s, spares, repeat=repeat
        )
        # A difference lets the gate ask about further series: the machine did not move all of them.
        while not tried or (confirming.differs and clock() < confirming.end):
            with store.read() as session:
                judged = gate.judge_run(session, find_run(session, run), first_parents=git.first_parents)
                suspects = [row for row in judged.suspects if row.series.pk not in tried]
                earlier = comparisons.of_series(session, [row.series.pk for row in suspects])
            pairs, before = _plan(suspects, earlier, again)
            inconclusive += before
            if not pairs:
                break
            if not tried:
                # Fail early if `repo` is not a clone, which would look like an unknown commit.
                resolve(measuring.repo, "HEAD")
            tried |= {row.series.pk for row in suspects}
            confirming.differs = False
            for pair in pairs:
                confirming.decide(pair)
    return Confirmed(
        tuple(confirming.done),
        tuple(confirming.left_out),
        tuple(inconclusive),
        tuple(confirming.elsewhere),
        tuple(confirming.same_code),
    )


@dataclass
class _Confirming:
    """Decides pairs, one after another, until the time `end` of the clock."""

    store: Store
    measuring: Measuring
    interpreters: Interpreters
    report: Report
    say: Callable[[str], None]
    clock: Callable[[], float]
    end: float
    spares: Spares
    done: list[tuple[Judged, Compared]] = field(default_factory=list)
    left_out: list[Judged] = field(default_factory=list)
    elsewhere: list[Judged] = field(default_factory=list)
    same_code: list[Judged] = field(default_factory=list)
    repeat: bool = False
    differs: bool = False  # a difference was found since it was last reset
    repeated: set[tuple[int, str, str]] = field(default_factory=set)

    def decide(self, pair: _Pair) -> None:
        """Measure the suspects of a pair, as long as there is time."""
        if self.clock() >= self.end:
            self.left_out += pair.rows
            return
        remaining = [row for row in pair.rows if not self._is_same_code(row, pair)]
        if not remaining:
            return
        longest = duration(min(CELL_S * len(remaining), self.end - self.clock()))
        self.say(f"A/B of {pair.text}: {len(remaining)} series, at most {longest}")
        try:
            pythons = _pythons(pair, self.interpreters, self.measuring.python, self.measuring.base_python)
            with _bench(self.measuring, pair, pythons, self.spares) as bench:
                for cause in self._causes(remaining):
                    while (row := cause.next()) is not None and self.clock() < self.end:
                        compared, kept = self._compared(bench, row, pair, cause.alone)
                        # A failure of both sides is not stored: it shows nothing about a commit, and may be fixed here.
                        self._add(row, compared, kept)
                        remaining.remove(row)
                        cause.answered(row, compared)
                    if self.repeat and (lone := cause.lone) is not None and self.clock() < self.end:
                        self._add(lone, *self._compared(bench, lone, pair, alone=False))  # the newer answer counts
                    for row, compared in cause.inherited(pair):
                        self._add(row, compared)
                        remaining.remove(row)
            self.left_out += remaining
        except CheckoutError as error:  # this machine is at fault: the next confirm tries again
            self.say(error.message)
            self.elsewhere += remaining
        except WorktreeError as error:  # a commit is not available here, which holds for all of its suspects
            for row in remaining:
                at, details = datetime.now(UTC), pair.details(row)
                self._add(row, Compared(pair.base, pair.head, FAILED, at, message=error.message, details=details))
        except AbError as error:  # this machine cannot compare; another may
            self.say(error.message)
            self.elsewhere += remaining

    def _causes(self, rows: Sequence[Judged]) -> list[_Cause]:
        """Return the suspects by their likely cause, the most severe first."""
        with self.store.read() as session:
            facts = Causes(session, rows)
            groups = group(replace(each, surroundings="") for each in facts.changes())  # an A/B excludes them
        keys = sorted(sorted(int(str(each.key)) for each in of_cause) for of_cause in groups)
        return [_Cause([facts.rows[key] for key in of_cause]) for of_cause in keys]

    def _compared(self, bench: Bench, row: Judged, pair: _Pair, alone: bool) -> tuple[Compared, bool]:
        """Measure a suspect, again if in doubt; return the answer, and whether to store it."""
        result = bench.compare(_cell(row, self.measuring.plugins), min(CELL_S, self.end - self.clock()))
        compared = _compared(row, result, pair)
        if self._is_in_doubt(row, compared, alone):
            second = bench.compare(_cell(row, self.measuring.plugins), min(CELL_S, self.end - self.clock()))
            repeated = _compared(row, second, pair)
            if repeated.decided or compared.verdict != DIFFERENT:  # the second answer counts, if it is one
                result, compared = second, repeated
        return compared, result.failed_side != "both"

    def _is_same_code(self, row: Judged, pair: _Pair) -> bool:
        """Return whether the commits cannot differ in a suspect's latency, so that no A/B is run.

        An A/B would find them equal, and hide that something else, such as a package, changed between the runs.
        """
        why = None if pair.toolchains is not None else same_files(self.store, self.measuring.repo, row, pair)
        if why is not None:
            self.say(f"no A/B of {pair.text} for {row.series}: {why}")
            self.same_code.append(row)
        return why is not None

    def _is_in_doubt(self, row: Judged, compared: Compared, alone: bool) -> bool:
        """Return whether to repeat a comparison: it did not decide, or no other suspect can repeat the difference.

        A false difference would stay red for weeks, since later nights rely on it.
        """
        doubtful = (UNKNOWN, DIFFERENT) if alone else (UNKNOWN,)
        if not self.repeat or compared.verdict not in doubtful or self.clock() >= self.end:
            return False
        ends = row.series.pk, compared.base, compared.head
        first = ends not in self.repeated
        self.repeated.add(ends)
        return first

    def _add(self, row: Judged, compared: Compared, kept: bool = True) -> None:
        if kept:
            with self.store.write() as session:
                comparisons.store(session, row.series.pk, compared)
        self.differs |= compared.verdict == DIFFERENT
        self.done.append((row, compared))
        self.report(row, compared)


class _Cause:
    """Suspects with one likely cause. A few are measured, and those between two measured changes inherit the answer.

    The least likely suspect comes first, then those with the largest and the smallest change.
    Without a difference, every suspect is measured; with one, at most `MOST_AB`.
    """

    def __init__(self, rows: Sequence[Judged]) -> None:
        self.rows = list(rows)
        self.measured: list[tuple[Judged, Compared]] = []
        self.different: list[float] = []

    def next(self) -> Judged | None:
        """Return the next suspect to measure, or None."""
        rest = [row for row in self.rows if not self._fits(row)]
        if not rest or (self.different and len(self.measured) >= MOST_AB):
            return None
        if not self.different:
            return rest[0]
        by_size = sorted(rest, key=lambda row: row.change or 0.0)
        turn = len(self.measured) % 3
        return by_size[-1] if turn == 1 else by_size[0] if turn == 2 else by_size[len(by_size) // 2]

    @property
    def alone(self) -> bool:
        """Whether the next suspect is the only one."""
        return len(self.rows) + len(self.measured) == 1

    @property
    def lone(self) -> Judged | None:
        """The only suspect with a difference among several, which another comparison has to repeat."""
        different = [row for row, one in self.measured if one.verdict == DIFFERENT]
        return different[0] if len(different) == 1 and len(self.measured) > 1 else None

    def answered(self, row: Judged, compared: Compared) -> None:
        """Note the answer about a suspect."""
        self.rows.remove(row)
        self.measured.append((row, compared))
        if row.change is None or compared.effect is None:
            return
        if compared.verdict == DIFFERENT and (compared.effect > 0) == (row.change > 0):
            self.different.append(row.change)

    def _fits(self, row: Judged) -> bool:
        return row.what in (None, "latency") and fits(row.change, self.different)

    def inherited(self, pair: _Pair) -> Iterator[tuple[Judged, Compared]]:
        """Yield the suspects that fit, with the answer that they inherit."""
        different = [(row, one) for row, one in self.measured if one.verdict == DIFFERENT]
        for row in filter(self._fits, list(self.rows)):
            near, one = min(different, key=lambda each: abs((each[0].change or 0.0) - (row.change or 0.0)))
            ends = (row.change, row.effect.low, row.effect.high)
            effect, low, high = (None if end is None or end <= -1 else math.log1p(end) for end in ends)
            before = row.effect.before_ms
            yield row, replace(
                one,
                effect=effect, low=low, high=high, base_ms=before, head_ms=row.latency_now, pairs=None, seconds=0.0,
                message=f"not measured: fits the A/B of series {near.series.pk}", pk=None,
                details={**pair.details(row), "inherits": near.series.pk},
            )  # fmt: skip
            self.rows.remove(row)


def same_files(store: Store, repo: Path, row: Judged, pair: _Pair) -> str | None:
    """Return why a pair's commits cannot differ in a suspect's latency, or None if they can."""
    if trees_are_equal(repo, pair.base, pair.head):
        return "both commits have the same files"
    with store.read() as session:
        hashes = [code_hashes(session, row.series.pk, commit) for commit in (pair.base, pair.head)]
    return "its process ran the same files at both commits" if hashes[0] & hashes[1] else None


def _plan(
    suspects: Sequence[Judged], earlier: dict[int, list[Compared]], again: bool
) -> tuple[list[_Pair], list[Judged]]:
    """Return (pairs to measure, the one with the most severe change first; suspects measured before)."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    toolchains: dict[tuple[str, ...], tuple[Environment, Environment]] = {}
    before = []
    for row in suspects:
        assert row.ab_base is not None and row.point is not None
        base, head = row.ab_base.commit, row.point.run.commit
        needed: list[tuple[str, ...]] = [] if base == head else [(base, head)]
        if row.transition is not None and _with_toolchain(row):
            sides = row.transition.old, row.transition.new
            needed.insert(0, (base, base, *map(software_identity, sides)))
            toolchains[needed[0]] = sides
        measured = _measured(row, earlier.get(row.series.pk, ()))
        new = [ends for ends in needed if again or ends not in measured]
        for ends in new:
            groups.setdefault(ends, []).append(row)
        if not new:
            before.append(row)
    return [_Pair(ends[0], ends[1], tuple(rows), toolchains.get(ends)) for ends, rows in groups.items()], before


def _measured(row: Judged, earlier: Iterable[Compared]) -> set[tuple[str, ...]]:
    """Return the ends in a suspect's earlier comparisons, as far as they are evidence."""
    assert row.point is not None
    line = LineSoftware(row.point.run.toolchain, [ab_software(row.point.environment.facts)])
    stored = [each for each in earlier if line.includes(each)]
    return {_ends(each) for each in (of_one_toolchain(stored) if _with_toolchain(row) else stored)}


def _with_toolchain(row: Judged) -> bool:
    """Return whether a suspect's toolchain changed too: one commit is measured with both toolchains."""
    return row.transition is not None and row.transition.replaceable and not row.transition.machine


def _ends(compared: Compared) -> tuple[str, ...]:
    """Return a comparison's commits and toolchains, as `_plan` names them."""
    return (compared.base, compared.head, *(compared.toolchains or ()))


def _pythons(pair: _Pair, interpreters: Interpreters, python: str, base_python: Path | None) -> tuple[str, str]:
    """Return both sides' interpreters. Raises AbError if no interpreter has a toolchain's packages.

    If the toolchain changed too, a separate A/B measures the effect. An A/B of the commits then uses one
    interpreter, or it would count the effect again.
    """
    if pair.toolchains is None:
        return python if base_python is None or any(map(_with_toolchain, pair.rows)) else str(base_python), python
    pythons = [interpreters.find(each) for each in pair.toolchains]
    for which, interpreter, wanted in zip(("old", "new"), pythons, pair.toolchains, strict=True):
        if interpreter is None:
            versions = [f"{name} {getattr(wanted, name)}" for name in PACKAGES if getattr(wanted, name)]
            raise AbError(
                f"no interpreter has the packages of the {which} toolchain ({', '.join(versions)}): name one in "
                "[toolchains] of groupbench.toml, or install them with --install"
            )
    return str(pythons[0]), str(pythons[1])


@contextmanager
def _bench(measuring: Measuring, pair: _Pair, pythons: tuple[str, str], spares: Spares) -> Iterator[Bench]:
    """Check out both commits and yield a bench with both sides. Raises WorktreeError."""
    recipe = measuring.recipe
    wanted = list(zip((pair.base, pair.head), pythons, strict=True))
    different = list(dict.fromkeys(wanted))
    with checkouts(measuring.repo, different, recipe, spares) as folders:
        trees = dict(zip(different, folders, strict=True))
        base, head = (
            AbSide(commit[:10], trees[commit, python], python, commit, recipe.pythonpath) for commit, python in wanted
        )
        with Bench(base, head) as bench:
            yield bench


def _cell(row: Judged, plugins: Sequence[str]) -> AbCell:
    series = row.series
    assert row.point is not None
    return AbCell(
        operator=series.operator,
        backend=series.backend,
        shape=series.shape,
        dtype=series.dtype,
        mode=series.mode,
        seed=series.seed,
        device=row.point.environment.facts.device,
        plugins=tuple(plugins),
        **timing_of(series.protocol),
    )


def _compared(row: Judged, result: AbResult, pair: _Pair) -> Compared:
    """Return an A/B result for the database.

    Raises AbError if it ran on other hardware than the series, or if commits were compared with another toolchain.
    """
    if result.head_environment:
        _check(row, environment_of(result.head_environment), pair)
    message = result.note
    if result.failed_side == "both" and result.failed_status == "usage":
        message = f"{message}; backends from a plugin need --plugin here too"
    return compared_of(result, pair.base, pair.head, pair.details(row, software_of(result)), message)


def _check(row: Judged, here: Environment, pair: _Pair) -> None:
    """Raise AbError if an environment cannot decide a suspect."""
    assert row.point is not None
    if hardware_class(here) != row.series.hardware:
        raise AbError(
            f"this machine has {hardware_class(here)}, but the suspects ran on {row.series.hardware}: confirm there"
        )
    sides = ab_software(row.point.environment.facts), ab_software(here)
    if pair.toolchains is None and not agree(*sides):
        packages = sorted(name for name in sides[0].keys() & sides[1].keys() if sides[0][name] != sides[1][name])
        wanted, present = (", ".join(f"{name} {side[name]}" for name in packages) for side in sides)
        raise AbError(
            f"the suspects ran with {wanted}, this interpreter has {present}: name their toolchain with --toolchain, "
            "or run `confirm` with their interpreter"
        )
