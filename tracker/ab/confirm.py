"""Decide the suspects of a run: measure both commits alternately on this machine, and store the results.

Base is the last commit measured before the change, head the run's own. The budget goes to known causes first: their
searches, then suspects that share one. All other suspects follow by cause, the least likely to be noise first. Suspects
beyond the budget are left out and listed. Consecutive cells at one pair of commits share two worktrees and one bench.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.kept import compared_of, environment_of, software_of
from groupbench.tracker.ab.result import AbCell, AbResult, cell_of_series
from groupbench.tracker.ab.side import AbError, AbSide
from groupbench.tracker.ab.suspects import MOST_AB, Cause, Pair, by_cause, ends_of, plan, with_toolchain
from groupbench.tracker.ab.toolchains import PACKAGES, Interpreters
from groupbench.tracker.ab.worktree import (
    AS_IT_IS,
    CheckoutError,
    Recipe,
    Spares,
    WorktreeError,
    checkouts,
    resolve,
)
from groupbench.tracker.facts.environment import ab_software, hardware_class
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.judge import gate
from groupbench.tracker.judge.toolchain_lines import agree
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, FAILED, UNKNOWN, Compared
from groupbench.tracker.store.engine import Store
from groupbench.tracker.text.wording import duration
from groupbench.tracker.tools import git

Report = Callable[[Judged, Compared], None]


CELL_S = 60.0
"""Longest wall time of one comparison."""
SHARE, LEAST_S = 0.1, 180.0
"""Share of the time of a night that its A/Bs may take, and the time that they may always take."""


LEFT_OUT = "left out because the budget is spent"
ENOUGH = f"left out because {MOST_AB} A/Bs of a cause are enough"
INCONCLUSIVE = "left undecided by an earlier comparison"
ELSEWHERE = "cannot be measured on this machine"
"""Why a suspect was not measured."""
FAILED_AGAIN = f"{DIFFERENT}, but {FAILED} when repeated"
_ADVICE = {
    "run `groupbench confirm` to continue": (LEFT_OUT, ENOUGH),
    "repeat them with --again": (INCONCLUSIVE,),
}


class Outcome(NamedTuple):
    """An A/B's answer about a suspect, or the reason why it was not measured."""

    row: Judged
    word: str  # the A/B's verdict, or why it was not measured
    compared: Compared | None = None

    @property
    def decided(self) -> bool:
        return self.compared is not None and self.compared.decided and self.word != FAILED_AGAIN


@dataclass
class Confirmed:
    """The outcomes of a run's suspects: for each series and pair of ends the newest one, so that all count once."""

    outcomes: dict[tuple[int, tuple[str, ...]], Outcome] = field(default_factory=dict)

    def note(self, word: str, rows: Iterable[Judged], ends: tuple[str, ...] = ()) -> None:
        """Note why suspects were not measured."""
        self.outcomes |= {(row.series.pk, ends): Outcome(row, word) for row in rows}

    def answered(self, row: Judged, compared: Compared, word: str) -> None:
        """Note the answer about a suspect."""
        self.outcomes[row.series.pk, ends_of(compared)] = Outcome(row, word, compared)

    @property
    def compared(self) -> list[tuple[Judged, Compared]]:
        """The suspects with an answer."""
        return [(each.row, each.compared) for each in self.outcomes.values() if each.compared is not None]

    @property
    def decided(self) -> bool:
        return all(each.decided for each in self.outcomes.values())

    @property
    def text(self) -> str:
        """The outcome in one line."""
        answers_first = sorted(self.outcomes.values(), key=lambda each: each.compared is None)
        counts = Counter(each.word for each in answers_first)
        advice = [text for text, words in _ADVICE.items() if counts.keys() & words]
        listed = ", ".join(f"{number} {word}" for word, number in counts.items()) or "nothing to confirm"
        return "; ".join([f"CONFIRM {listed}", *advice])


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
    search: Callable[[gate.Gate], None] = lambda judged: None,
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
        search: Searches the commits of known causes. Called with the verdicts before the first comparison, and after
            each cause with a difference.
        clock: Seconds of a steady clock.

    Raises:
        QueryError: There is no such run.
        WorktreeError: `repo` is not a clone.
    """
    tried: set[int] = set()
    outcome = Confirmed()
    end = clock() + budget_s

    def judge() -> gate.Gate:
        with store.read() as session:
            chosen = find_run(session, run)
            return gate.judge_run(session, chosen, first_parents=git.first_parents, between=git.between)

    search(judged := judge())
    with Spares() as spares, ExitStack() as opened:
        confirming = _Confirming(
            store, measuring, measuring.found_by(say), report, say, clock, end, spares, opened, outcome, repeat
        )
        while True:
            with store.read() as session:
                suspects = [row for row in judged.suspects if row.series.pk not in tried]
                earlier = comparisons.of_series(session, [row.series.pk for row in suspects])
                pairs, before = plan(suspects, earlier, again)
                failing = [row for row in judged.rows if row.verdict.fails and row.ab_base is None]
                causes = by_cause(session, pairs, suspects, failing) if pairs else []
            outcome.note(INCONCLUSIVE, before)
            if not causes:
                break
            if not tried:
                # Fail early if `repo` is not a clone, which would look like an unknown commit.
                resolve(measuring.repo, "HEAD")
            tried |= {row.series.pk for row in suspects}
            for cause in causes:
                confirming.decide(cause)
                if cause.differs:
                    confirming.close()  # a search has worktrees and processes of its own
                    search(judged := judge())
            # A difference lets the gate ask about further series: the machine did not move all of them.
            if clock() >= end or not any(cause.differs for cause in causes):
                break
    return outcome


class _Decision(NamedTuple):
    """The answer of one A/B, or of two."""

    compared: Compared
    kept: bool = True  # a failure of both sides is not: it shows nothing about a commit, and may be fixed here
    failed_again: bool = False

    @property
    def word(self) -> str:
        return FAILED_AGAIN if self.failed_again else self.compared.verdict

    def after(self, first: _Decision) -> _Decision:
        """Return the answer that counts of two: this newer one, unless it is undecided after a difference."""
        if self.compared.decided or first.compared.verdict != DIFFERENT:
            return self
        return first._replace(failed_again=self.compared.verdict == FAILED)


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
    opened: ExitStack  # the bench of `_bench`
    outcome: Confirmed
    repeat: bool
    repeated: set[tuple[int, str, str]] = field(default_factory=set)
    failed: dict[tuple[str, ...], WorktreeError | AbError] = field(default_factory=dict)  # by ends
    bench: tuple[tuple[str, ...], Bench] | None = None  # the open one

    def decide(self, cause: Cause) -> None:
        """Measure the suspects of a cause, as long as there is time."""
        if self.clock() >= self.end:
            for pair in cause.pairs:
                self.outcome.note(LEFT_OUT, pair.rows, pair.ends)
            return
        for pair in cause.pairs:
            cause.rows = list(pair.rows)
            self._tried(pair, partial(self._measure, pair, cause))
            if (error := self.failed.get(pair.ends)) is not None:
                self._give_up(pair, cause.rows, error)
                continue
            self._add(*cause.inherited(pair))
            self.outcome.note(ENOUGH if cause.next() is None else LEFT_OUT, cause.rows, pair.ends)
        if self.repeat and (lone := cause.lone) is not None:
            self._tried(lone[0], partial(self._repeat, *lone))

    def _tried(self, pair: Pair, measure: Callable[[], None]) -> None:
        """Measure at a pair, unless that failed before."""
        if pair.ends in self.failed:
            return
        try:
            measure()
        except (WorktreeError, AbError) as error:
            self.close()
            self.failed[pair.ends] = error
            self.say(error.message)

    def close(self) -> None:
        """Close the open bench, if any."""
        self.bench = None
        self.opened.close()

    def _measure(self, pair: Pair, cause: Cause) -> None:
        """Measure suspects of a cause at one pair. Raises WorktreeError, AbError."""
        if self.clock() >= self.end or cause.next() is None:
            return
        longest = duration(min(CELL_S * len(cause.rows), self.end - self.clock()))
        self.say(f"A/B of {pair.text}: {len(cause.rows)} series, at most {longest}")
        bench = self._bench(pair)
        while (row := cause.next()) is not None and self.clock() < self.end:
            if (decision := self._decision(bench, row, pair, cause.alone)) is None:
                return
            self._add((row, decision.compared), kept=decision.kept, word=decision.word)
            cause.answered(row, decision.compared)

    def _repeat(self, pair: Pair, row: Judged) -> None:
        """Repeat a difference. Raises WorktreeError, AbError."""
        if self.clock() >= self.end or (newer := self._decision(self._bench(pair), row, pair, alone=False)) is None:
            return
        first = self.outcome.outcomes[row.series.pk, pair.ends].compared
        assert first is not None
        decision = newer.after(_Decision(first))
        if decision.compared is first:  # it is stored
            self.outcome.answered(row, first, decision.word)
        else:
            self._add((row, decision.compared), kept=decision.kept, word=decision.word)

    def _bench(self, pair: Pair) -> Bench:
        """Return the bench of a pair: the open one if it fits. Raises WorktreeError, AbError."""
        pythons = _pythons(pair, self.interpreters, self.measuring.python, self.measuring.base_python)
        ends = (*pair.ends, *pythons)
        if self.bench is None or self.bench[0] != ends:
            self.close()
            self.bench = ends, self.opened.enter_context(_bench(self.measuring, pair, pythons, self.spares))
        return self.bench[1]

    def _give_up(self, pair: Pair, rows: Sequence[Judged], error: WorktreeError | AbError) -> None:
        """Note the suspects of a pair that cannot be measured."""
        if isinstance(error, AbError | CheckoutError):  # this machine is at fault: another may measure them
            self.outcome.note(ELSEWHERE, rows, pair.ends)
            return
        for row in rows:  # a commit is not available here
            at, details = datetime.now(UTC), pair.details(row)
            self._add((row, Compared(pair.base, pair.head, FAILED, at, message=error.message, details=details)))

    def _decision(self, bench: Bench, row: Judged, pair: Pair, alone: bool) -> _Decision | None:
        """Measure a suspect, and again if in doubt. Returns None if there was no time."""
        first = self._once(bench, row, pair)
        if first is None or not self._is_in_doubt(row, first.compared, alone):
            return first
        second = self._once(bench, row, pair)
        return first if second is None else second.after(first)

    def _once(self, bench: Bench, row: Judged, pair: Pair) -> _Decision | None:
        """Measure a suspect. Returns None if the preparation took the rest of the time."""
        result = bench.compare(_cell(row, self.measuring.plugins), CELL_S, self.end - self.clock())
        if result.ran_out == "budget" and not result.blocks:
            return None
        return _Decision(_compared(row, result, pair), result.failed_side != "both")

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

    def _add(self, *made: tuple[Judged, Compared], kept: bool = True, word: str | None = None) -> None:
        """Report answers, and store them at once if `kept`. Their outcome is `word`, by default the verdict."""
        if made and kept:
            with self.store.write() as session:
                for row, compared in made:
                    comparisons.store(session, row.series.pk, compared)
        for row, compared in made:
            self.outcome.answered(row, compared, word or compared.verdict)
            self.report(row, compared)


def _pythons(pair: Pair, interpreters: Interpreters, python: str, base_python: Path | None) -> tuple[str, str]:
    """Return both sides' interpreters. Raises AbError if no interpreter has a toolchain's packages.

    If the toolchain changed too, a separate A/B measures the effect. An A/B of the commits then uses one
    interpreter, or it would count the effect again.
    """
    if pair.toolchains is None:
        return python if base_python is None or any(map(with_toolchain, pair.rows)) else str(base_python), python
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
def _bench(measuring: Measuring, pair: Pair, pythons: tuple[str, str], spares: Spares) -> Iterator[Bench]:
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
    assert row.point is not None
    device = row.point.environment.facts.device
    return AbCell(**cell_of_series(row.series), device=device, plugins=tuple(plugins))


def _compared(row: Judged, result: AbResult, pair: Pair) -> Compared:
    """Return an A/B result for the database.

    Raises AbError if it ran on other hardware than the series, or if commits were compared with another toolchain.
    """
    if result.head_environment:
        _check(row, environment_of(result.head_environment), pair)
    message = result.note
    if result.failed_side == "both" and result.failed_status == "usage":
        message = f"{message}; backends from a plugin need --plugin here too"
    return compared_of(result, pair.base, pair.head, pair.details(row, software_of(result)), message)


def _check(row: Judged, here: Environment, pair: Pair) -> None:
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
