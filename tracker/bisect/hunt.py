"""From two ends to the commits that changed a kernel: ends first, first parents, into merges, several changes.

Pure, like the search it stands on: a generator of questions over a history that is already read.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from groupbench.tracker.bisect.search import (
    Change,
    Finding,
    Found,
    GaveUp,
    Line,
    Question,
    Rates,
    Trace,
    compared,
    search,
    side,
)

Direction = Literal["worse", "better", "either"]
Outcome = Literal["none", "found", "narrowed", "opposite", "inaccurate", "undecided"]


@dataclass(frozen=True)
class Commit:
    """A commit as far as the search and the report go. `key` is equal where trees are, in the paths that matter."""

    hash: str
    parents: tuple[str, ...] = ()
    key: str = ""
    subject: str = ""
    author: str = ""


def short(name: str) -> str:
    """Return a commit's hash as it is shown; a release is shown whole."""
    return name[:10] if len(name) >= 40 else name


@dataclass(frozen=True)
class History:
    """What is reachable from `bad` and not from `base`, and the commits that this rests on."""

    commits: Mapping[str, Commit]
    good: str
    bad: str
    base: str  # `good`, or the merge base where it is no ancestor of `bad`
    inside: frozenset[str]  # hashes in base..bad
    noun: str = "commit"  # what is searched for

    def first_parents(self, tip: str, stop: frozenset[str] = frozenset()) -> tuple[str | None, list[str]]:
        """Where the first parents of `tip` leave the range or reach `stop`, and those before, the oldest first."""
        path: list[str] = []
        here: str | None = tip
        while here is not None and here in self.inside and here not in stop:
            path.append(here)
            parents = self.commits[here].parents
            here = parents[0] if parents else None
        return here, path[::-1]

    def reach(self, tip: str) -> frozenset[str]:
        """The ancestors of a commit in the range, itself included."""
        found: set[str] = set()
        left = [tip]
        while left:
            each = left.pop()
            if each in self.inside and each not in found:
                found.add(each)
                left.extend(self.commits[each].parents)
        return frozenset(found)

    def key(self, commit: str) -> str:
        known = self.commits.get(commit)
        return known.key if known and known.key else commit

    def line(self, good: str, path: Iterable[str], bad: str) -> Line:
        """The changes of a path: commits whose tree differs from the parent's where it matters."""
        changes: list[Change] = []
        for each in path:
            parents = self.commits[each].parents
            parent = parents[0] if parents else good
            before = changes[-1].commit if changes else good
            if self.key(each) != self.key(before):
                changes.append(Change(each, parent))
            elif changes:
                changes[-1] = replace(changes[-1], alike=changes[-1].alike + 1)
        like_good = {j for j, change in enumerate(changes, 1) if self.key(change.commit) == self.key(good)}
        like_bad = {j for j, change in enumerate(changes, 1) if self.key(change.commit) == self.key(bad)}
        return Line(good, tuple(changes), bad, frozenset(like_good), frozenset(like_bad))


@dataclass(frozen=True)
class Settings:
    """How to search."""

    direction: Direction = "worse"
    all: bool = False  # go on with what the first commit does not explain
    confidence: float = 0.95  # at which a commit is named
    least: float = math.log(1.01)  # a rest below this is not looked for
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Culprit:
    """A commit that made a change, or several that could not be told apart."""

    commits: tuple[str, ...]  # oldest first; one where it is named
    parent: str
    finding: Finding  # parent against commit, measured for this alone
    confidence: float
    merges: tuple[str, ...] = ()  # merges that brought it in, outermost first
    note: str = ""

    @property
    def named(self) -> bool:
        return len(self.commits) == 1


@dataclass(frozen=True)
class Answer:
    """What came out. Effects are log(head / base)."""

    outcome: Outcome
    message: str
    total: Finding | None = None
    culprits: tuple[Culprit, ...] = ()  # the largest first
    unexplained: float | None = None  # of the total, by what the culprits do not add up to
    rest_searched: bool = False


Hunting = Generator[Question, Finding, Answer]


def hunt(history: History, settings: Settings, trace: Trace) -> Hunting:
    """Find what changed between the ends of a history."""
    try:
        return (yield from _hunt(history, settings, trace))
    except GaveUp as reason:
        return Answer("undecided", str(reason))


def _hunt(history: History, settings: Settings, trace: Trace) -> Hunting:
    good, bad = history.good, history.bad
    if history.key(good) == history.key(bad):
        return Answer("none", "no regression to be found: nothing that is measured differs between the ends")
    ends = yield from compared(good, bad, "ends", trace)
    early = _without_search(ends, settings, good, bad)
    if early is not None:
        return early
    assert ends.effect is not None
    trace.levels[bad] = ends
    if history.base != good:
        answer = yield from _check_base(history, ends, trace)
        if answer is not None:
            return answer
    good = history.base
    _, path = history.first_parents(bad)
    line = history.line(good, path, bad)
    if not line.changes:
        return Answer("none", f"no {history.noun} in the range changes what is measured", ends)
    hunter = _Hunter(history, settings, trace, math.copysign(1.0, ends.effect))
    found = yield from hunter.line(line, ends)
    return hunter.answer(ends, found)


def _without_search(ends: Finding, settings: Settings, good: str, bad: str) -> Answer | None:
    """The answer where the ends leave nothing to search."""
    if ends.verdict == "failed":
        which = {"base": f"GOOD ({short(good)})", "head": f"BAD ({short(bad)})"}.get(
            ends.at, "the comparison of the ends"
        )
        return Answer("undecided", f"{which} fails: {ends.message}", ends)
    slower = ends.verdict == "different" and ends.effect is not None and ends.effect > 0
    inaccurate = None if slower else _inaccurate(ends, settings)
    if inaccurate is not None:
        return inaccurate
    if ends.verdict == "same":
        what = {"worse": "regression", "better": "improvement", "either": "change"}[settings.direction]
        return Answer("none", f"no {what} to be found: the ends measure the same", ends)
    if ends.verdict == "unknown" or not ends.effect:
        return Answer("undecided", "the ends cannot be told apart or equal: raise --budget, or measure again", ends)
    if settings.direction == "worse" and ends.effect < 0:
        return Answer("opposite", "BAD is better than GOOD; --direction better looks for the improvement", ends)
    if settings.direction == "better" and ends.effect > 0:
        return Answer("opposite", "BAD is worse than GOOD; --direction worse looks for the regression", ends)
    return None


def _inaccurate(ends: Finding, settings: Settings) -> Answer | None:
    """The answer where BAD is worse in its result: no speed makes up for a wrong one, but for a less accurate one
    where an improvement is asked for."""
    if ends.accuracy == "wrong":
        what = "wrong where GOOD's is right"
    elif ends.accuracy == "less accurate" and settings.direction == "worse":
        what = "less accurate than GOOD's"
    else:
        return None
    return Answer("inaccurate", f"BAD's result is {what}; --metric accuracy looks for the commit", ends)


def _check_base(history: History, ends: Finding, trace: Trace) -> Generator[Question, Finding, Answer | None]:
    """GOOD is no ancestor of BAD: their merge base must be as GOOD is."""
    assert ends.effect is not None
    if history.key(history.base) == history.key(history.good):
        return None
    finding = yield from compared(history.good, history.base, "merge base", trace)
    where = side(finding, ends.effect)
    name = short(history.base)
    if where == "below":
        return None
    if where == "above":
        text = f"GOOD is no ancestor of BAD, and their merge base {name} is as BAD is: the change was made before it"
        return Answer("undecided", f"{text}, and undone on the way to GOOD", ends)
    return Answer("undecided", f"the merge base {name} cannot be compared with GOOD: {finding.message}", ends)


class _Hunter:
    def __init__(self, history: History, settings: Settings, trace: Trace, sign: float) -> None:
        self.history, self.settings, self.trace, self.sign = history, settings, trace, sign
        self.undecided: Found | None = None
        self.unexplained = 0.0
        self.searched_rest = False
        self.nothing = False

    def line(
        self, line: Line, ends: Finding, merges: tuple[str, ...] = (), sure: float = 1.0
    ) -> Generator[Question, Finding, list[Culprit]]:
        """The culprits of a line whose ends differ: the one found first, what is in its merge, and the rests."""
        assert ends.effect is not None
        found = yield from search(line, ends.effect, self.settings.rates, self.settings.confidence, self.trace)
        if not found.decided:
            self.undecided = self.undecided or found
            if not found.finding:
                self.unexplained += ends.effect
                return []
        if found.finding is None:
            self.nothing = True
            return []
        span = line.changes[found.first - 1 : found.last]
        culprit = Culprit(
            tuple(change.commit for change in span),
            span[0].parent,
            found.finding,
            found.confidence * sure,
            merges,
            found.note,
        )
        inner = [culprit] if not found.decided else (yield from self.merged(culprit))
        if inner != [culprit] and not inner:
            inner = [culprit]
        rests = yield from self.rests(line, ends, found, merges, sure)
        return inner + rests

    def merged(self, culprit: Culprit) -> Generator[Question, Finding, list[Culprit]]:
        """Where the culprit is a merge: the commits of the branch that it brought in."""
        if not culprit.named:
            return [culprit]
        (merge,) = culprit.commits
        parents = self.history.commits[merge].parents
        if len(parents) < 2:
            return [culprit]
        notes = []
        before = self.history.reach(parents[0])
        for tip in parents[1:]:
            fork, path = self.history.first_parents(tip, before)
            line = self.history.line(fork, path, tip) if fork is not None else None
            if line is None or fork is None or not line.changes:
                continue
            ends = yield from compared(fork, tip, "branch", self.trace)
            where = side(ends, culprit.finding.effect or self.sign)
            if ends.verdict == "different" and ends.effect and ends.effect * self.sign > 0:
                undecided, nothing, left = self.undecided, self.nothing, self.unexplained
                inner = yield from self.line(line, ends, (*culprit.merges, merge), culprit.confidence)
                if inner:
                    return inner
                self.undecided, self.nothing, self.unexplained = undecided, nothing, left
                notes.append(f"no single commit of the branch {short(tip)} shows it")
            elif where in ("failed", "unclear"):
                notes.append(
                    f"the branch {short(tip)} could not be compared with its start: {ends.message or 'unclear'}"
                )
            else:
                notes.append(f"the branch {short(tip)} alone does not show it: it is the merge itself")
        return [replace(culprit, note="; ".join(notes))]

    def rests(
        self, line: Line, ends: Finding, found: Found, merges: tuple[str, ...], sure: float
    ) -> Generator[Question, Finding, list[Culprit]]:
        """What the culprit does not explain, before and after it: searched where it may hold a larger change, or
        where all are asked for."""
        assert ends.effect is not None
        assert found.finding is not None
        own = found.finding.effect or 0.0
        before = Line(line.good, line.changes[: found.first - 1], line.changes[found.first - 1].parent)
        after = Line(line.changes[found.last - 1].commit, line.changes[found.last :], line.bad)
        known = self.trace.levels.get(line.changes[found.first - 2].commit) if found.first > 1 else None
        reached = 0.0 if known is None or known.verdict == "same" else known.effect or 0.0
        slack = math.hypot(_half(ends), _half(found.finding)) + max(self.settings.least, ends.least)
        quiet = known is None or known.verdict == "same"
        culprits: list[Culprit] = []
        for part, effect, still in ((before, reached, quiet), (after, ends.effect - reached - own, False)):
            if part.changes and self._is_asked(effect, own, slack, still):
                culprits += yield from self._rest(part, effect, merges, sure)
        return culprits

    def _is_asked(self, effect: float, own: float, slack: float, quiet: bool) -> bool:
        """Return whether a part may hold a larger change than the culprit's, or all are asked for; count it if not."""
        significant = effect * self.sign > slack
        larger = significant and effect * self.sign > own * self.sign
        if larger or (self.settings.all and not quiet):
            return True
        self.unexplained += effect if significant else 0.0
        return False

    def _rest(
        self, part: Line, effect: float, merges: tuple[str, ...], sure: float
    ) -> Generator[Question, Finding, list[Culprit]]:
        self.searched_rest = True
        ends = yield from compared(part.good, part.bad, "rest", self.trace)
        if ends.verdict == "different" and ends.effect and ends.effect * self.sign > 0:
            return (yield from self.line(self._again(part), ends, merges, sure))
        if ends.verdict not in ("same", "different"):
            self.unexplained += effect
        return []

    def _again(self, part: Line) -> Line:
        """A part of a line with what is known of its trees."""
        return self.history.line(part.good, [change.commit for change in part.changes], part.bad)

    def answer(self, ends: Finding, culprits: list[Culprit]) -> Answer:
        culprits = sorted(culprits, key=lambda c: -abs(c.finding.effect or 0.0))
        rest = self.unexplained or None
        what, noun = "regression" if self.sign > 0 else "improvement", self.history.noun
        if not culprits and self.nothing and self.undecided is None:
            none = Answer("none", f"no {what} to be found: the difference of the ends did not come again", ends)
            return _inaccurate(ends, self.settings) or none
        if not culprits:
            note = self.undecided.note if self.undecided else ""
            return Answer("undecided", f"the {what} is there, but no {noun} could be named: {note}", ends, (), rest)
        largest = culprits[0]
        if self.undecided is not None and largest.note == self.undecided.note:
            text = f"most likely one of {len(largest.commits)} {noun}s" if not largest.named else "most likely this one"
            return Answer("undecided", f"{text}, but {largest.note}", ends, tuple(culprits), rest, self.searched_rest)
        if not largest.named:
            text = f"one of {len(largest.commits)} {noun}s: those between could not be compared"
            return Answer("narrowed", text, ends, tuple(culprits), rest, self.searched_rest)
        number = f"the {noun}" if len(culprits) == 1 else f"{len(culprits)} {noun}s"
        return Answer("found", f"{number} that made it", ends, tuple(culprits), rest, self.searched_rest)


def _half(finding: Finding) -> float:
    if finding.low is None or finding.high is None:
        return 0.0
    return (finding.high - finding.low) / 2
