"""Find the commit with the change on a line of commits, by a search with tolerance for wrong comparisons.

A line is a good end, changes 1..n and a bad end. Hypothesis i states that change i made the difference, hypothesis
n + 1 that no change did. Each comparison updates the probabilities of all hypotheses by Bayes' rule, with the error
rates of the A/B, and the next commit to test halves the remaining probability. If every comparison is
right, this is binary search. If one was wrong, later ones contradict it, and it is measured again. The idea is
Horstein's probabilistic bisection (1963), as in Waeber, Frazier and Henderson, "Bisection search with noisy responses"
(2013); the pair test at the end, the skips and the hypothesis of no change are our own.

"Above" means beyond half of the difference between the ends. With one change in the line, every commit is at one of two
levels, and half is as far as possible from both. With several, half is crossed at one of the larger changes.

The searches are generators without I/O: they yield a ComparisonRequest and are sent an AbFinding. Their driver gets
findings from a measurement, a log or a simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Literal

from groupbench.tracker.ab.result import LESS_ACCURATE, AbVerdict, AccuracyChange
from groupbench.tracker.text.unchecked import merged

Why = Literal["ends", "merge base", "step", "confirm", "branch", "rest"]
Position = Literal["above", "below", "unclear", "failed"]

MOST_TESTS = 4
"""Most comparisons of a commit before the search gives up on it."""
MOST_CONFIRMATIONS = 3
QUANTILES = (0.5, 0.42, 0.58, 0.3, 0.7, 0.15, 0.85)
"""Quantile to test next, by the number of remaining commits that were skipped, since broken commits are adjacent."""
CERTAIN = 1e-6
"""Probability that equal trees are not equally fast."""


@dataclass(frozen=True)
class AbFinding:
    """The result of one comparison. Effects are log(head / base): 0.02 is 2 % slower."""

    verdict: AbVerdict
    effect: float | None = None
    low: float | None = None  # None where the interval has no end
    high: float | None = None
    base_value: float | None = None  # ms, or relative RMS error
    head_value: float | None = None
    blocks: int = 0
    seconds: float = 0.0
    message: str = ""
    at: str = ""  # side that failed: "base", "head" or "both"
    least: float = 0.0  # smallest effect that is not called "same"
    kernels_differ: bool | None = None  # whether the hashes of the compiled kernels differ
    accuracy: AccuracyChange = "same"  # of head's result, when latency is searched
    unchecked: dict[str, list[str]] = field(default_factory=dict)  # checks that could not be made, by side
    routing: str = ""  # a remark if only one side was prepared for one routing
    hardware: str = ""  # where head was measured; empty if it did not start

    @property
    def is_worse(self) -> bool:
        """Return whether head is slower, less accurate, or wrong while base is right, as for `ab`."""
        return (self.effect or 0.0) > 0 or self.accuracy in LESS_ACCURATE


@dataclass(frozen=True)
class ComparisonRequest:
    """A request for a new comparison of two commits, `budget` times as long as usual."""

    base: str
    head: str
    why: Why
    budget: float = 1.0


Asking = Generator[ComparisonRequest, AbFinding, AbFinding]


@dataclass(frozen=True)
class Rates:
    """Error rates of the A/B."""

    false_different: float = 0.001  # of calling two equal sides different
    missed: float = 0.032  # of calling two different sides the same
    sigmas: float = 2.14  # half the width of its intervals, in standard errors

    def __post_init__(self) -> None:
        if not (0 < self.false_different < 0.5 and 0 < self.missed < 0.5 and self.sigmas > 0):
            raise ValueError(f"invalid error rates: {self}")


@dataclass(frozen=True)
class Change:
    """A commit with changes in relevant paths, and the number of following commits without."""

    commit: str
    parent: str
    alike: int = 0


@dataclass(frozen=True)
class Line:
    """Commits from a good one to a bad one, each the parent of the next."""

    good: str
    changes: tuple[Change, ...]
    bad: str
    same_as_good: frozenset[int] = frozenset()  # changes, from 1, after which the tree equals the good end's
    same_as_bad: frozenset[int] = frozenset()
    suspected: tuple[int, ...] = ()  # the changes next to the step that stored results show, to measure first


class GaveUp(Exception):
    """The search cannot continue; the message is the reason."""


@dataclass
class SearchResult:
    """The change's location: changes first..last on the line, or 0..0 if there is no change."""

    first: int
    last: int
    confidence: float
    finding: AbFinding | None = None  # the last pair test that confirmed it
    note: str = ""
    decided: bool = True


@dataclass
class Trace:
    """A log of a search's steps, for the report."""

    comparisons: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # commit: reason
    undone: dict[str, tuple[str, AbFinding]] = field(default_factory=dict)  # commit: the one that undid it, its change
    levels: dict[str, AbFinding] = field(default_factory=dict)  # commit: newest comparison with the good end
    unchecked: dict[str, list[str]] = field(default_factory=dict)  # commit: checks that could not be made
    seconds: float = 0.0
    hardware: str = ""  # where a head was measured; empty if none started


class Posterior:
    """Probabilities of the hypotheses 1..n + 1."""

    def __init__(self, n: int, rates: Rates) -> None:
        self.n = n
        self._rates = rates
        self._log = [0.0] * n + [math.log(n)]  # prior: "no change" is as likely as any change

    def level(self, j: int, above: bool, wrong: float | None = None) -> None:
        """Update with a commit's level: the commit after change j is above half, or not.

        Args:
            wrong: Probability of the opposite; None: from the rates.
        """
        missed = self._rates.missed if wrong is None else wrong
        false = self._rates.false_different if wrong is None else wrong
        if_made = math.log(1 - missed if above else missed)
        if_not = math.log(false if above else 1 - false)
        self._log = [value + (if_made if i <= j else if_not) for i, value in enumerate(self._log, 1)]

    def pair(self, first: int, last: int, differs: bool) -> None:
        """Update with a pair test: the commits before change `first` and after change `last` differ, or not."""
        missed, false = self._rates.missed, self._rates.false_different
        inside = math.log(1 - missed if differs else missed)
        outside = math.log(false if differs else 1 - false)
        self._log = [value + (inside if first <= i <= last else outside) for i, value in enumerate(self._log, 1)]

    def cumulative(self) -> list[float]:
        """Return cumulative probabilities: entry i of n + 2 covers hypotheses 1..i."""
        largest = max(self._log)
        weights = [math.exp(value - largest) for value in self._log]
        whole = math.fsum(weights)
        sums = [0.0]
        for weight in weights:
            sums.append(sums[-1] + weight / whole)
        return sums


def side(finding: AbFinding, total: float) -> Position:
    """Return on which side of half a commit is, from a comparison with the good end.

    Args:
        total: Difference between the ends, as log(bad / good).

    If the interval is on one side of half, it decides. Otherwise "same" is below, and "different" is above if the
    effect is at least half of the total.
    """
    if finding.verdict == "failed":
        return "failed"
    if finding.effect is None:
        return "below" if finding.verdict == "same" else "unclear"
    way = finding.effect / total
    low, high = -math.inf, math.inf
    if finding.low is not None and finding.high is not None:
        low, high = sorted((finding.low / total, finding.high / total))
    if high < 0.5:
        return "below"
    if low > 0.5:
        return "above"
    if finding.verdict == "same":
        return "below"
    if finding.verdict == "different" and (way >= 0.5 or way <= 0):
        return "above" if way > 0 else "below"
    return "unclear"


def pooled(one: AbFinding, two: AbFinding) -> AbFinding:
    """Return both findings as one: effects weighted by their precision, the second's verdict."""
    if None in (one.effect, one.low, one.high, two.effect, two.low, two.high):
        return two
    widths = [max(f.high - f.low, 1e-12) / 2 for f in (one, two)]  # type: ignore[operator]
    weights = [1 / width**2 for width in widths]
    effect = (one.effect * weights[0] + two.effect * weights[1]) / sum(weights)  # type: ignore[operator]
    half = 1 / math.sqrt(sum(weights))
    return replace(
        two,
        effect=effect,
        low=effect - half,
        high=effect + half,
        blocks=one.blocks + two.blocks,
        unchecked=merged([one.unchecked, two.unchecked]),
        seconds=one.seconds + two.seconds,
    )


def chance_of_wrong_side(finding: AbFinding, total: float, rates: Rates) -> float:
    """Return the probability of the other side of half: the normal tail, at most 0.45."""
    if finding.effect is None or finding.low is None or finding.high is None:
        return 0.45
    error = max((finding.high - finding.low) / 2 / rates.sigmas, 1e-12)
    tail = 0.5 * math.erfc(abs(finding.effect - total / 2) / error / math.sqrt(2))
    return min(0.45, max(tail, rates.false_different, rates.missed))


def ask(question: ComparisonRequest, trace: Trace) -> Asking:
    """Make one comparison. If a side fails, try once more, because a busy machine fails a build or a burst once."""
    for _ in range(2):
        finding = yield question
        trace.comparisons[question.why] += 1
        trace.seconds += finding.seconds
        trace.hardware = finding.hardware or trace.hardware
        by_commit = {getattr(question, side): reasons for side, reasons in finding.unchecked.items()}
        trace.unchecked = merged([trace.unchecked, by_commit])
        if finding.verdict != "failed":
            break
    return finding


def compare(base: str, head: str, why: Why, trace: Trace) -> Asking:
    """Make a comparison; if it is unknown, make it again, twice as long, and pool both."""
    finding = yield from ask(ComparisonRequest(base, head, why), trace)
    if finding.verdict != "unknown":
        return finding
    again = yield from ask(ComparisonRequest(base, head, why, budget=2.0), trace)
    return again if again.verdict == "failed" else pooled(finding, again)


class _Search:
    """The state of the search on one line."""

    def __init__(self, line: Line, total: float, rates: Rates, trace: Trace) -> None:
        self.line, self.total, self.rates, self.trace = line, total, rates, trace
        self.n = len(line.changes)
        self.posterior = Posterior(self.n, rates)
        self.tests: Counter[int] = Counter({self.n: 1})  # the ends were compared
        self.skipped: set[int] = set()
        self.confirmations: Counter[tuple[int, int]] = Counter()
        self.confirmed: dict[tuple[int, int], AbFinding] = {}
        self.first = [j for j in line.suspected if 0 < j < self.n]
        self.posterior.level(self.n, above=True)
        for j in sorted(line.same_as_good | line.same_as_bad):
            if j < self.n:
                self.posterior.level(j, above=j in line.same_as_bad, wrong=CERTAIN)
                self.tests[j] = MOST_TESTS

    def probe(self, j: int) -> str:
        """Return the commit to measure for the state after change j."""
        return self.line.good if j == 0 else self.line.bad if j == self.n else self.line.changes[j - 1].commit

    def groups(self) -> list[tuple[int, int]]:
        """Return the separable groups of changes; skipped commits join their neighbours."""
        groups, first = [], 1
        for j in range(1, self.n + 1):
            if j == self.n or j not in self.skipped:
                groups.append((first, j))
                first = j + 1
        return groups

    def unobserved(self, group: tuple[int, int]) -> list[int]:
        return [j for j in (group[0] - 1, group[1]) if j > 0 and not self.tests[j]]

    def next_test(self, sums: list[float]) -> int | None:
        """Return the commit to halve the remaining probability best, away from skipped commits, or None."""
        left = [j for j in range(1, self.n + 1) if j not in self.skipped and self.tests[j] < MOST_TESTS]
        near = sum(0.02 < sums[s] < 0.98 for s in self.skipped)
        at = QUANTILES[near] if near < len(QUANTILES) else 0.5
        return min(left, key=lambda j: (abs(sums[j] - at), j), default=None)

    def test(self, j: int) -> Generator[ComparisonRequest, AbFinding, None]:
        """Compare the commit after change j with the good end."""
        commit = self.probe(j)
        finding = yield from compare(self.line.good, commit, "step", self.trace)
        position, wrong = side(finding, self.total), None
        if position == "unclear" and finding.verdict == "different":
            more = yield from ask(ComparisonRequest(self.line.good, commit, "step", budget=2.0), self.trace)
            if more.verdict != "failed":
                finding = pooled(finding, more)
                position = side(finding, self.total)
        if position == "unclear" and finding.verdict == "different" and finding.effect is not None:
            position = "above" if finding.effect / self.total >= 0.5 else "below"
            wrong = chance_of_wrong_side(finding, self.total, self.rates)
        if position == "failed" and finding.at in ("base", "both"):
            raise GaveUp(f"{self.line.good[:10]}, which worked before, fails: {finding.message}")
        self.tests[j] += 1
        if position in ("failed", "unclear"):
            if j < self.n:
                self.skipped.add(j)
                self.trace.skipped[commit] = finding.message or "could not be assigned to either level"
            return
        self.trace.levels[commit] = finding
        self.posterior.level(j, position == "above", wrong)

    def confirm(self, group: tuple[int, int]) -> Generator[ComparisonRequest, AbFinding, None]:
        """Compare the commits before and after a group, in a measurement independent of all earlier ones."""
        first, last = group
        direct = (self.line.changes[first - 1].parent, self.line.changes[last - 1].commit)
        pairs = [direct, (self.probe(first - 1), self.probe(last))]
        finding = AbFinding("failed")
        for base, head in dict.fromkeys(pairs if first == last else pairs[1:]):
            finding = yield from compare(base, head, "confirm", self.trace)
            if finding.verdict != "failed":
                break
        self.confirmations[group] += 1
        if finding.verdict in ("same", "different"):
            differs = finding.verdict == "different" and (finding.effect or 0.0) * self.total > 0
            self.posterior.pair(first, last, differs)
            if differs:
                self.confirmed[group] = finding


def search(
    line: Line, total: float, rates: Rates, confidence: float, trace: Trace
) -> Generator[ComparisonRequest, AbFinding, SearchResult]:
    """Find the change on a line whose ends differ by `total`, as log(bad / good). Raises GaveUp."""
    state = _Search(line, total, rates, trace)
    most = 3 * math.ceil(math.log2(state.n + 1)) + 8
    decisions = 0
    while True:
        sums = state.posterior.cumulative()
        none = 1 - sums[state.n]
        group = max(state.groups(), key=lambda g: sums[g[1]] - sums[g[0] - 1])
        sure = sums[group[1]] - sums[group[0] - 1]
        if none >= confidence:
            return SearchResult(0, 0, none)
        if sure >= confidence and group in state.confirmed:
            return SearchResult(*group, sure, state.confirmed[group])
        unobserved = state.unobserved(group)
        if decisions >= most + len(state.skipped):
            return _undecided(state, group, sure)
        decisions += 1
        if state.first:
            suspected = state.first.pop(0)
            if 0.02 < sums[suspected] < 0.98 and not state.tests[suspected]:
                yield from state.test(suspected)
        elif sure >= 0.5 and unobserved:
            yield from state.test(min(unobserved, key=lambda j: abs(sums[j] - 0.5)))
        elif sure >= 0.5 and state.confirmations[group] < MOST_CONFIRMATIONS:
            yield from state.confirm(group)
        else:
            j = state.next_test(sums)
            if j is None:
                return _undecided(state, group, sure)
            yield from state.test(j)


def _undecided(state: _Search, group: tuple[int, int], sure: float) -> SearchResult:
    if group in state.confirmed:
        note = "comparisons contradict each other"
    elif state.confirmations[group]:
        note = "a direct comparison of the pair does not show it: several small changes may add up to the difference"
    else:
        note = "too many comparisons failed or stayed unknown"
    return SearchResult(*group, sure, state.confirmed.get(group), note, decided=False)
