"""Find the commits between two ends with a changed kernel: compare the ends, search first parents, enter merges.

It can find several changes. Like the search, it is a generator of questions without I/O, over a complete history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from groupbench.tracker.bisect.search import (
    AbFinding,
    Change,
    ComparisonRequest,
    GaveUp,
    Line,
    Rates,
    SearchResult,
    Trace,
    compare,
    search,
    side,
)

Outcome = Literal["none", "found", "narrowed", "inaccurate", "undecided"]


@dataclass(frozen=True)
class BisectCommit:
    """A commit, as the search and the report need it. Commits with equal `key` have equal trees in relevant paths."""

    hash: str
    parents: tuple[str, ...] = ()
    key: str = ""
    subject: str = ""
    author: str = ""


def short(name: str) -> str:
    """Return a commit's short hash."""
    return name[:10]


@dataclass(frozen=True)
class History:
    """The commits reachable from `bad` but not from `base`, and their boundary."""

    commits: Mapping[str, BisectCommit]
    good: str
    bad: str
    base: str  # `good`, or the merge base if `good` is not an ancestor of `bad`
    inside: frozenset[str]  # hashes in base..bad
    stored: Mapping[str, float] = field(default_factory=dict)  # log of the stored latency by commit
    restoring: Callable[[str, str, Sequence[str]], str | None] = lambda parent, commit, later: None
    """Returns the last of the later commits that restores a commit's files as the parent had them, or None."""

    def first_parents(self, tip: str, stop: frozenset[str] = frozenset()) -> tuple[str | None, list[str]]:
        """Return (the commit at which `tip`'s first parents leave the range or reach `stop`, the ones before it).

        The path is from oldest to newest.
        """
        path: list[str] = []
        here: str | None = tip
        while here is not None and here in self.inside and here not in stop:
            path.append(here)
            parents = self.commits[here].parents
            here = parents[0] if parents else None
        return here, path[::-1]

    def reach(self, tip: str) -> frozenset[str]:
        """Return a commit's ancestors in the range, including itself."""
        ancestors: set[str] = set()
        left = [tip]
        while left:
            each = left.pop()
            if each in self.inside and each not in ancestors:
                ancestors.add(each)
                left.extend(self.commits[each].parents)
        return frozenset(ancestors)

    def key(self, commit: str) -> str:
        """Return a commit's tree key, or the commit's name if unknown."""
        listed = self.commits.get(commit)
        return listed.key if listed and listed.key else commit

    def line(self, good: str, path: Iterable[str], bad: str) -> Line:
        """Return a path's changes: commits whose tree differs from the parent's in relevant paths."""
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
        return Line(
            good,
            tuple(changes),
            bad,
            frozenset(like_good),
            frozenset(like_bad),
            self._suspected(good, [change.commit for change in changes], bad),
        )

    def _suspected(self, good: str, changes: Sequence[str], bad: str) -> tuple[int, ...]:
        """Return the last change with a stored latency like GOOD's, and the first one after it like BAD's.

        Changes, from 1, that were undone before are thereby left out.
        """
        logs = {self.key(commit): log for commit, log in self.stored.items()}
        levels = [logs.get(self.key(commit)) for commit in (good, *changes, bad)]
        ends = levels[0], levels[-1]
        if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
            return ()
        half, sign = (ends[0] + ends[1]) / 2, math.copysign(1.0, ends[1] - ends[0])
        above = {j: (level - half) * sign > 0 for j, level in enumerate(levels) if level is not None}
        last = max(j for j in above if not above[j])
        return (last, min(j for j in above if j > last))


@dataclass(frozen=True)
class Settings:
    """The settings of a search."""

    all: bool = False  # also search for changes that the first commit does not explain
    confidence: float = 0.95  # probability required to name a commit
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Culprit:
    """A commit with a change, or several inseparable ones."""

    commits: tuple[str, ...]  # oldest first; a single one is named
    parent: str
    finding: AbFinding  # commit against parent, from a separate measurement
    confidence: float
    merges: tuple[str, ...] = ()  # merges that brought it in, outermost first
    note: str = ""

    @property
    def named(self) -> bool:
        return len(self.commits) == 1


@dataclass(frozen=True)
class BisectResult:
    """The result of a search. Effects are log(head / base)."""

    outcome: Outcome
    message: str
    total: AbFinding | None = None
    culprits: tuple[Culprit, ...] = ()  # the largest first
    unexplained: float | None = None  # part of the total that the culprits do not explain
    rest_searched: bool = False


Hunting = Generator[ComparisonRequest, AbFinding, BisectResult]


def hunt(history: History, settings: Settings, trace: Trace) -> Hunting:
    """Find what changed between the ends of a history."""
    try:
        return (yield from _hunt(history, settings, trace))
    except GaveUp as reason:
        return BisectResult("undecided", str(reason))


def _hunt(history: History, settings: Settings, trace: Trace) -> Hunting:
    good, bad = history.good, history.bad
    if history.key(good) == history.key(bad):
        return BisectResult("none", "no regression to find: GOOD and BAD have the same files in the relevant paths")
    ends = yield from compare(good, bad, "ends", trace)
    early = _without_search(ends, good, bad)
    if early is not None:
        return early
    assert ends.effect is not None
    trace.levels[bad] = ends
    if history.base != good:
        stopped = yield from _check_base(history, ends, trace)
        if stopped is not None:
            return stopped
    good = history.base
    _, path = history.first_parents(bad)
    line = history.line(good, path, bad)
    if not line.changes:
        return BisectResult("none", "no commit in the range changes the relevant paths", ends)
    hunter = _Hunter(history, settings, trace, math.copysign(1.0, ends.effect))
    culprits = yield from hunter.line(line, ends)
    return hunter.result(ends, culprits)


def _without_search(ends: AbFinding, good: str, bad: str) -> BisectResult | None:
    """Return the result if the ends leave nothing to search, else None."""
    if ends.verdict == "failed":
        which = {"base": f"GOOD ({short(good)})", "head": f"BAD ({short(bad)})"}.get(
            ends.at, "the comparison of the ends"
        )
        return BisectResult("undecided", f"{which} fails: {ends.message}", ends)
    slower = ends.verdict == "different" and ends.effect is not None and ends.effect > 0
    inaccurate = None if slower else _inaccurate(ends)
    if inaccurate is not None:
        return inaccurate
    if ends.verdict == "same":
        return BisectResult("none", "no regression to find: GOOD and BAD measure the same", ends)
    if ends.verdict == "unknown" or not ends.effect:
        return BisectResult(
            "undecided", "it is not clear whether GOOD and BAD differ: raise --budget, or measure again", ends
        )
    return None


def _inaccurate(ends: AbFinding) -> BisectResult | None:
    """Return the result if BAD's result is wrong or less accurate, for which no speed-up makes up, else None."""
    what = {"wrong": "wrong, and GOOD's is right", "less accurate": "less accurate than GOOD's"}.get(ends.accuracy)
    if what is None:
        return None
    return BisectResult("inaccurate", f"BAD's result is {what}; --metric accuracy finds the commit", ends)


def _check_base(
    history: History, ends: AbFinding, trace: Trace
) -> Generator[ComparisonRequest, AbFinding, BisectResult | None]:
    """Compare the merge base with GOOD, if GOOD is not an ancestor of BAD. Returns a result if they differ."""
    assert ends.effect is not None
    if history.key(history.base) == history.key(history.good):
        return None
    finding = yield from compare(history.good, history.base, "merge base", trace)
    where = side(finding, ends.effect)
    name = short(history.base)
    if where == "below":
        return None
    if where == "above":
        text = f"GOOD is not an ancestor of BAD, and their merge base {name} measures like BAD: the change is older"
        return BisectResult("undecided", f"{text}, and was undone on the way to GOOD", ends)
    return BisectResult("undecided", f"the merge base {name} cannot be compared with GOOD: {finding.message}", ends)


class _Hunter:
    def __init__(self, history: History, settings: Settings, trace: Trace, sign: float) -> None:
        self.history, self.settings, self.trace, self.sign = history, settings, trace, sign
        self.undecided: SearchResult | None = None
        self.unexplained = 0.0
        self.searched_rest = False
        self.no_change = False

    def line(
        self, line: Line, ends: AbFinding, merges: tuple[str, ...] = (), sure: float = 1.0
    ) -> Generator[ComparisonRequest, AbFinding, list[Culprit]]:
        """Return the culprits on a line with different ends: the first, or those in the merge, and the rest's."""
        assert ends.effect is not None
        result = yield from search(line, ends.effect, self.settings.rates, self.settings.confidence, self.trace)
        if not result.decided:
            self.undecided = self.undecided or result
            if not result.finding:
                self.unexplained += ends.effect
                return []
        if result.finding is None:
            self.no_change = True
            return []
        span = line.changes[result.first - 1 : result.last]
        culprit = Culprit(
            tuple(change.commit for change in span),
            span[0].parent,
            result.finding,
            result.confidence * sure,
            merges,
            result.note,
        )
        undone = yield from self.undone(line, ends, result, culprit)
        if undone is not None:
            return (yield from self._rest(undone, ends.effect, merges, sure))
        inner = [culprit] if not result.decided else (yield from self.merged(culprit))
        if inner != [culprit] and not inner:
            inner = [culprit]
        rests = yield from self.rests(line, ends, result, merges, sure)
        return inner + rests

    def undone(
        self, line: Line, ends: AbFinding, result: SearchResult, culprit: Culprit
    ) -> Generator[ComparisonRequest, AbFinding, Line | None]:
        """Return the line after the commit that undid a culprit, so that the culprit does not explain BAD, or None.

        Candidates are later commits that measured like GOOD, and one that restores the culprit's files.
        """
        assert ends.effect is not None
        later = [change.commit for change in line.changes[result.last : -1]]
        levels = ((commit, self.trace.levels.get(commit)) for commit in later)
        like_good = [commit for commit, level in levels if level and side(level, ends.effect) == "below"]
        restoring = self.history.restoring(culprit.parent, culprit.commits[-1], later)
        candidates = {commit for commit in (*like_good[-1:], restoring) if commit is not None}
        for commit in sorted(candidates, key=later.index, reverse=True):
            finding = yield from compare(line.good, commit, "step", self.trace)
            if side(finding, ends.effect) == "below":
                self.trace.undone |= dict.fromkeys(culprit.commits, (commit, culprit.finding))
                at = result.last + later.index(commit) + 1
                return Line(commit, line.changes[at:], line.bad)
        return None

    def merged(self, culprit: Culprit) -> Generator[ComparisonRequest, AbFinding, list[Culprit]]:
        """Return the culprits in a merged branch, or the culprit itself if it is not a merge."""
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
            ends = yield from compare(fork, tip, "branch", self.trace)
            where = side(ends, culprit.finding.effect or self.sign)
            if ends.verdict == "different" and ends.effect and ends.effect * self.sign > 0:
                before_branch = self.undecided, self.no_change, self.unexplained
                inner = yield from self.line(line, ends, (*culprit.merges, merge), culprit.confidence)
                if inner:
                    return inner
                self.undecided, self.no_change, self.unexplained = before_branch
                notes.append(f"no single commit of the branch {short(tip)} shows it")
            elif where in ("failed", "unclear"):
                notes.append(
                    f"the branch {short(tip)} could not be compared with its start: {ends.message or 'unclear'}"
                )
            else:
                notes.append(f"the branch {short(tip)} alone does not show it: the merge itself made the change")
        return [replace(culprit, note="; ".join(notes))]

    def rests(
        self, line: Line, ends: AbFinding, result: SearchResult, merges: tuple[str, ...], sure: float
    ) -> Generator[ComparisonRequest, AbFinding, list[Culprit]]:
        """Return the culprits before and after `result`'s.

        A part is searched if it may contain a larger change, or if all changes are requested.
        """
        assert ends.effect is not None
        assert result.finding is not None
        explained = result.finding.effect or 0.0
        before = Line(line.good, line.changes[: result.first - 1], line.changes[result.first - 1].parent)
        after = Line(line.changes[result.last - 1].commit, line.changes[result.last :], line.bad)
        level = self.trace.levels.get(line.changes[result.first - 2].commit) if result.first > 1 else None
        reached = 0.0 if level is None or level.verdict == "same" else level.effect or 0.0
        slack = math.hypot(_half(ends), _half(result.finding)) + ends.least
        unchanged = level is None or level.verdict == "same"
        certain = 0.0 if level is not None and level.verdict == "different" else slack  # an A/B measured it
        rest = ends.effect - reached - explained
        culprits: list[Culprit] = []
        for part, effect, limit, quiet in ((before, reached, certain, unchanged), (after, rest, slack, False)):
            if part.changes and self._is_worth_searching(effect, explained, limit, quiet):
                culprits += yield from self._rest(part, effect, merges, sure)
        return culprits

    def _is_worth_searching(self, effect: float, explained: float, slack: float, quiet: bool) -> bool:
        """Return whether to search a part: the change may be larger than the culprit's, or all are requested.

        Otherwise, count a significant effect as unexplained.
        """
        significant = effect * self.sign > slack
        larger = significant and effect * self.sign > explained * self.sign
        if larger or (self.settings.all and not quiet):
            return True
        self.unexplained += effect if significant else 0.0
        return False

    def _rest(
        self, part: Line, effect: float, merges: tuple[str, ...], sure: float
    ) -> Generator[ComparisonRequest, AbFinding, list[Culprit]]:
        self.searched_rest = True
        ends = yield from compare(part.good, part.bad, "rest", self.trace)
        if ends.verdict == "different" and ends.effect and ends.effect * self.sign > 0:
            return (yield from self.line(self._again(part), ends, merges, sure))
        if ends.verdict not in ("same", "different"):
            self.unexplained += effect
        return []

    def _again(self, part: Line) -> Line:
        """Return a line's part, with the trees equal to the ends."""
        return self.history.line(part.good, [change.commit for change in part.changes], part.bad)

    def result(self, ends: AbFinding, culprits: list[Culprit]) -> BisectResult:
        culprits = sorted(culprits, key=lambda c: -abs(c.finding.effect or 0.0))
        rest = self.unexplained or None
        what = "regression" if self.sign > 0 else "improvement"
        if not culprits and self.no_change and self.undecided is None:
            none = BisectResult(
                "none", f"no {what} to find: the difference between GOOD and BAD did not appear again", ends
            )
            return _inaccurate(ends) or none
        if not culprits:
            note = self.undecided.note if self.undecided else ""
            return BisectResult("undecided", f"the {what} exists, but no commit could be named: {note}", ends, (), rest)
        largest = culprits[0]
        if self.undecided is not None and largest.note == self.undecided.note:
            text = f"most likely one of {len(largest.commits)} commits" if not largest.named else "most likely this one"
            return BisectResult(
                "undecided", f"{text}, but {largest.note}", ends, tuple(culprits), rest, self.searched_rest
            )
        if not largest.named:
            text = f"one of {len(largest.commits)} commits: those between could not be compared"
            return BisectResult("narrowed", text, ends, tuple(culprits), rest, self.searched_rest)
        number = "the commit" if len(culprits) == 1 else f"{len(culprits)} commits"
        text = f"{number} that made the change"
        return BisectResult("found", text, ends, tuple(culprits), rest, self.searched_rest)


def _half(finding: AbFinding) -> float:
    if finding.low is None or finding.high is None:
        return 0.0
    return (finding.high - finding.low) / 2
