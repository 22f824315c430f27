"""Which commit of a line made the change: a search that counts on wrong answers. Nothing here reads, writes or waits.

A line is a good end, changes 1..n and a bad end. Hypothesis i says that change i made the difference, hypothesis
n + 1 that there is none. Each comparison moves the probabilities of all of them by Bayes' rule with the error rates
that the A/B states, and the next commit is the one that halves what is left. Where all answers are right, that is
binary search; where one was wrong, later answers contradict it and it is measured again. The idea is that of
Horstein's probabilistic bisection (1963), as in Waeber, Frazier and Henderson, "Bisection search with noisy
responses" (2013); the pair test at the end, the skips and the hypothesis of no change are ours.

"Above" means beyond half of the difference between the ends. With one change in the line, every commit is at one of
two levels, and half is as far from either as can be. With several, half is crossed at one of the larger ones.

The searches are generators: they yield a Question and are sent its Finding. Whoever drives them decides where
findings come from: a measurement, a log, a simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Literal

from groupbench.tracker.ab.result import AccuracyChange

Verdict = Literal["same", "different", "unknown", "failed"]
Why = Literal["ends", "merge base", "step", "confirm", "branch", "rest"]
Side = Literal["above", "below", "unclear", "failed"]

MOST_TESTS = 4
"""How often a commit is compared before the search gives up on it."""
MOST_CONFIRMATIONS = 3
QUANTILES = (0.5, 0.42, 0.58, 0.3, 0.7, 0.15, 0.85)
"""Where to test next, by how many commits of what is left could not be: broken ones stand together."""
CERTAIN = 1e-6
"""Chance that equal trees are not equally fast."""


@dataclass(frozen=True)
class Finding:
    """What one comparison of two commits said. Effects are log(head / base): 0.02 is 2 % slower, or less accurate."""

    verdict: Verdict
    effect: float | None = None
    low: float | None = None  # None where the interval has no end
    high: float | None = None
    base_value: float | None = None  # ms, or relative RMS error
    head_value: float | None = None
    pairs: int = 0
    seconds: float = 0.0
    message: str = ""
    at: str = ""  # of a failure: "base", "head" or "both"
    least: float = 0.0  # what differs by less than this is called the same
    kernels_differ: bool | None = None  # whether the compiled kernels' hashes do
    accuracy: AccuracyChange = "same"  # of head's result, where latency is searched

    @property
    def is_worse(self) -> bool:
        """As for `ab`: slower, less accurate, or wrong where the base was right."""
        return (self.effect or 0.0) > 0 or self.accuracy in ("wrong", "less accurate")


@dataclass(frozen=True)
class Question:
    """Compare two commits, afresh; `budget` times as long as usual."""

    base: str
    head: str
    why: Why
    budget: float = 1.0


Asking = Generator[Question, Finding, Finding]


@dataclass(frozen=True)
class Rates:
    """How often the A/B is wrong."""

    false_different: float = 0.001  # says that two equal sides differ
    missed: float = 0.032  # says that two sides that differ are the same
    sigmas: float = 2.14  # half the width of its intervals, in standard errors

    def __post_init__(self) -> None:
        if not (0 < self.false_different < 0.5 and 0 < self.missed < 0.5 and self.sigmas > 0):
            raise ValueError(f"not error rates: {self}")


@dataclass(frozen=True)
class Change:
    """A commit that differs from its parent where it matters, and how many follow that do not."""

    commit: str
    parent: str
    alike: int = 0


@dataclass(frozen=True)
class Line:
    """Commits from a good one to a bad one, each the parent of the next."""

    good: str
    changes: tuple[Change, ...]
    bad: str
    same_as_good: frozenset[int] = frozenset()  # changes, from 1, after which the tree is the good end's
    same_as_bad: frozenset[int] = frozenset()


class GaveUp(Exception):
    """The search cannot go on; says why."""


@dataclass
class Found:
    """Where the change is: changes first..last of the line, 0..0 for nowhere."""

    first: int
    last: int
    confidence: float
    finding: Finding | None = None  # the last pair test that confirmed it
    note: str = ""
    decided: bool = True


@dataclass
class Trace:
    """What a search did, for the report."""

    asked: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # commit: why
    levels: dict[str, Finding] = field(default_factory=dict)  # commit: newest comparison with the good end
    seconds: float = 0.0


class Posterior:
    """Probabilities of the hypotheses 1..n + 1."""

    def __init__(self, n: int, rates: Rates) -> None:
        self.n = n
        self._rates = rates
        self._log = [0.0] * n + [math.log(n)]  # before anything is measured, none is as likely as any

    def level(self, j: int, above: bool, wrong: float | None = None) -> None:
        """The commit after change j is above or not. `wrong`: chance of the opposite, where the rates do not say."""
        missed = self._rates.missed if wrong is None else wrong
        false = self._rates.false_different if wrong is None else wrong
        if_made = math.log(1 - missed if above else missed)
        if_not = math.log(false if above else 1 - false)
        self._log = [value + (if_made if i <= j else if_not) for i, value in enumerate(self._log, 1)]

    def pair(self, first: int, last: int, differs: bool) -> None:
        """The commit before change `first` and the one after change `last` differ, or not."""
        missed, false = self._rates.missed, self._rates.false_different
        inside = math.log(1 - missed if differs else missed)
        outside = math.log(false if differs else 1 - false)
        self._log = [value + (inside if first <= i <= last else outside) for i, value in enumerate(self._log, 1)]

    def cumulative(self) -> list[float]:
        """[n + 2]: entry i is the probability of hypotheses 1..i."""
        largest = max(self._log)
        weights = [math.exp(value - largest) for value in self._log]
        whole = math.fsum(weights)
        sums = [0.0]
        for weight in weights:
            sums.append(sums[-1] + weight / whole)
        return sums


def side(finding: Finding, total: float) -> Side:
    """Where a commit stands, given its comparison with the good end and the ends' difference.

    The interval decides where it lies on one side of half; else "same" is below, and "different" is above where it
    is at least half the way.
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


def pooled(one: Finding, two: Finding) -> Finding:
    """Both findings as one: effects weighted by their precision; the verdict is the second one's."""
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
        pairs=one.pairs + two.pairs,
        seconds=one.seconds + two.seconds,
    )


def chance_of_wrong_side(finding: Finding, total: float, rates: Rates) -> float:
    """That a commit at the effect found stands on the other side of half: the normal tail, at most 0.45."""
    if finding.effect is None or finding.low is None or finding.high is None:
        return 0.45
    error = max((finding.high - finding.low) / 2 / rates.sigmas, 1e-12)
    tail = 0.5 * math.erfc(abs(finding.effect - total / 2) / error / math.sqrt(2))
    return min(0.45, max(tail, rates.false_different, rates.missed))


def asked(question: Question, trace: Trace) -> Asking:
    """One comparison; a base that fails, which has worked before, is tried once more."""
    for _ in range(2):
        finding = yield question
        trace.asked[question.why] += 1
        trace.seconds += finding.seconds
        if finding.verdict != "failed" or finding.at not in ("base", "both"):
            return finding
    return finding


def compared(base: str, head: str, why: Why, trace: Trace) -> Asking:
    """A comparison that is made once more, twice as long, where it is unknown; pooled where it was."""
    finding = yield from asked(Question(base, head, why), trace)
    if finding.verdict != "unknown":
        return finding
    again = yield from asked(Question(base, head, why, budget=2.0), trace)
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
        self.confirmed: dict[tuple[int, int], Finding] = {}
        self.posterior.level(self.n, above=True)
        for j in sorted(line.same_as_good | line.same_as_bad):
            if j < self.n:
                self.posterior.level(j, above=j in line.same_as_bad, wrong=CERTAIN)
                self.tests[j] = MOST_TESTS

    def probe(self, j: int) -> str:
        """The commit that stands for what is after change j."""
        return self.line.good if j == 0 else self.line.bad if j == self.n else self.line.changes[j - 1].commit

    def groups(self) -> list[tuple[int, int]]:
        """Changes that comparisons can tell apart: those between which commits are skipped stay together."""
        found, first = [], 1
        for j in range(1, self.n + 1):
            if j == self.n or j not in self.skipped:
                found.append((first, j))
                first = j + 1
        return found

    def unobserved(self, group: tuple[int, int]) -> list[int]:
        return [j for j in (group[0] - 1, group[1]) if j > 0 and not self.tests[j]]

    def next_test(self, sums: list[float]) -> int | None:
        """The commit that comes nearest to halving what is left; away from several that could not be compared."""
        left = [j for j in range(1, self.n + 1) if j not in self.skipped and self.tests[j] < MOST_TESTS]
        near = sum(0.02 < sums[s] < 0.98 for s in self.skipped)
        at = QUANTILES[near] if near < len(QUANTILES) else 0.5
        return min(left, key=lambda j: (abs(sums[j] - at), j), default=None)

    def test(self, j: int) -> Generator[Question, Finding, None]:
        """Compare the commit after change j with the good end."""
        commit = self.probe(j)
        finding = yield from compared(self.line.good, commit, "step", self.trace)
        found, wrong = side(finding, self.total), None
        if found == "unclear" and finding.verdict == "different":
            more = yield from asked(Question(self.line.good, commit, "step", budget=2.0), self.trace)
            if more.verdict != "failed":
                finding = pooled(finding, more)
                found = side(finding, self.total)
        if found == "unclear" and finding.verdict == "different" and finding.effect is not None:
            found = "above" if finding.effect / self.total >= 0.5 else "below"
            wrong = chance_of_wrong_side(finding, self.total, self.rates)
        if found == "failed" and finding.at in ("base", "both"):
            raise GaveUp(f"{self.line.good[:10]}, which worked before, fails: {finding.message}")
        self.tests[j] += 1
        if found in ("failed", "unclear"):
            if j < self.n:
                self.skipped.add(j)
                self.trace.skipped[commit] = finding.message or "could not be told from either level"
            return
        self.trace.levels[commit] = finding
        self.posterior.level(j, found == "above", wrong)

    def confirm(self, group: tuple[int, int]) -> Generator[Question, Finding, None]:
        """Compare what is before a group with what is after it, apart from all that was measured before."""
        first, last = group
        own = (self.line.changes[first - 1].parent, self.line.changes[last - 1].commit)
        pairs = [own, (self.probe(first - 1), self.probe(last))]
        finding = Finding("failed")
        for base, head in dict.fromkeys(pairs if first == last else pairs[1:]):
            finding = yield from compared(base, head, "confirm", self.trace)
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
) -> Generator[Question, Finding, Found]:
    """Find the change on a line whose ends were found to differ by `total`. Raises GaveUp."""
    state = _Search(line, total, rates, trace)
    most = 3 * math.ceil(math.log2(state.n + 1)) + 8
    decisions = 0
    while True:
        sums = state.posterior.cumulative()
        none = 1 - sums[state.n]
        group = max(state.groups(), key=lambda g: sums[g[1]] - sums[g[0] - 1])
        sure = sums[group[1]] - sums[group[0] - 1]
        if none >= confidence:
            return Found(0, 0, none)
        if sure >= confidence and group in state.confirmed:
            return Found(*group, sure, state.confirmed[group])
        unobserved = state.unobserved(group)
        if decisions >= most + len(state.skipped):
            return _undecided(state, group, sure)
        decisions += 1
        if sure >= 0.5 and unobserved:
            yield from state.test(min(unobserved, key=lambda j: abs(sums[j] - 0.5)))
        elif sure >= 0.5 and state.confirmations[group] < MOST_CONFIRMATIONS:
            yield from state.confirm(group)
        else:
            j = state.next_test(sums)
            if j is None:
                return _undecided(state, group, sure)
            yield from state.test(j)


def _undecided(state: _Search, group: tuple[int, int], sure: float) -> Found:
    if group in state.confirmed:
        note = "comparisons contradict each other"
    elif state.confirmations[group]:
        note = "the pair compared by itself does not show it: several small changes may add up to the difference"
    else:
        note = "too many comparisons failed, or stayed unknown"
    return Found(*group, sure, state.confirmed.get(group), note, decided=False)
