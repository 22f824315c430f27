"""Drive a search: answer each question from the log, or by an A/B of two checkouts."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from groupbench.tracker.ab.kept import hardware_of
from groupbench.tracker.ab.result import LESS_ACCURATE, MORE_ACCURATE, AbCell, AbSettings
from groupbench.tracker.ab.worktree import Recipe, Spares, checkout
from groupbench.tracker.bisect.history import BisectError
from groupbench.tracker.bisect.hunt import BisectResult, Hunting, Settings, short
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest, Rates
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.metrics import RMS, finite_or_none
from groupbench.tracker.text.unchecked import merged

if TYPE_CHECKING:
    from groupbench.tracker.ab.bench import Bench
    from groupbench.tracker.ab.result import AbResult, SideAccuracy
    from groupbench.tracker.ab.side import AbSide
    from groupbench.tracker.bisect.log import Header, Log

logger = logging.getLogger(__name__)

Comparator = Callable[[ComparisonRequest], AbFinding]
Keep = Callable[["AbResult", str, str], object]
"""Called with each A/B of two commits, and their hashes."""

MOST_CHECKOUTS = 4
MOST_BUILDS = 2
"""Attempts to build a commit. The second one finds out whether the first failed by chance."""
COMPARISON_S = 120.0
"""Default for one comparison: enough for the largest number of blocks of a 1 ms kernel."""
LEAST_ACCURACY = math.log1p(RMS.least)
"""Smallest log ratio of errors that counts as a change, as for `gate`."""
ACCURACY_HALF = math.log(1.1)
"""Half width of the interval assumed around a log ratio of errors, which hardly scatter."""


def drive(
    hunting: Hunting, compare: Comparator, log: Log | None, report: Callable[[ComparisonRequest, AbFinding], None]
) -> BisectResult:
    """Run a search to the end and return the result.

    Args:
        log: Findings in it are not measured again; new ones are added.
        report: Called with each new question and finding.
    """
    try:
        question = next(hunting)
        while True:
            finding = log.replay(question) if log else None
            if finding is None:
                logger.info("%s: compare %s with %s", question.why, short(question.head), short(question.base))
                finding = compare(question)
                if log:
                    log.add(question, finding)
                report(question, finding)
            question = hunting.send(finding)
    except StopIteration as done:
        result: BisectResult = done.value
        return result


class AbComparator(AbstractContextManager["AbComparator"]):
    """Compares commits by an A/B of their checkouts. The most recently used checkouts are kept."""

    def __init__(self, repository: Path, header: Header, keep: Keep | None = None) -> None:
        self._keep = keep
        self._repository = repository
        self._header = header
        bench = header.bench
        self._recipe = Recipe(
            bench.get("setup"),
            tuple(bench.get("benchmarks", ())),
            tuple(bench.get("pythonpath", ())),
            bench.get("by_option", False),
        )
        self._python: str = bench.get("python") or sys.executable
        self._checkouts: OrderedDict[str, tuple[ExitStack, Path]] = OrderedDict()
        self._spares = Spares()
        self._broken: dict[str, list[str]] = {}  # commit: why it did not build, for each attempt
        self._cell: AbCell | None = None
        self._count = 0

    def __call__(self, question: ComparisonRequest) -> AbFinding:
        sides = {}
        for at, name in (("base", question.base), ("head", question.head)):
            try:
                sides[at] = self._side(name)
            except TrackerError as error:
                return AbFinding("failed", message=error.message, at=at)
        return self._compare(question, sides["base"], sides["head"])

    def _side(self, name: str) -> AbSide:
        """Return a commit's checkout as a side. Raises TrackerError."""
        from groupbench.tracker.ab.side import AbSide

        return AbSide(short(name), self._checkout(name), self._python, name, self._recipe.pythonpath)

    def _compare(self, question: ComparisonRequest, base: AbSide, head: AbSide) -> AbFinding:
        from groupbench.tracker.ab.bench import Bench

        bench = self._header.bench
        only_latency = self._header.metric == "latency"
        self._count += 1
        with Bench(
            base,
            head,
            AbSettings(
                budget_s=bench.get("budget", COMPARISON_S) * question.budget if only_latency else 0.0,
                min_effect=bench.get("min_effect"),
                only_changed=bench.get("only_changed", False),
            ),
            seed=zlib.crc32(f"{question} {self._count}".encode()),  # a repeated pair gets other placements
        ) as running:
            if self._cell is None:
                self._cell = self._resolved(running)
            result = running.compare(self._cell)
        finding = finding_of_latency(result) if only_latency else finding_of_accuracy(result)
        if self._keep is not None:
            self._keep(result, question.base, question.head)
        return finding

    def _resolved(self, running: Bench) -> AbCell:
        """Return the cell. The default dtype is that of both sides."""
        if (known := cell_of(self._header)) is not None:
            return known
        cell = self._header.cell
        cells, notes = running.cells(
            cell["device"],
            operator=cell["operator"],
            backends=[cell["backend"]],
            shapes=[cell["shape"]],
            mode=cell["mode"],
            plugins=list(cell["plugins"]),
        )
        if len(cells) != 1:
            reason = "; ".join(notes) or f"{len(cells)} cells have that name"
            raise BisectError(f"no single cell to compare: {reason}; give --dtype")
        return dataclasses.replace(cells[0], seed=cell["seed"])

    def _checkout(self, commit: str) -> Path:
        """Return a commit's checkout. Raises TrackerError."""
        self._check_builds(commit)
        if commit not in self._checkouts:
            while len(self._checkouts) >= MOST_CHECKOUTS:
                _, (stack, _) = self._checkouts.popitem(last=False)
                stack.close()
            stack = ExitStack()
            try:
                path = stack.enter_context(checkout(self._repository, commit, self._recipe, self._python, self._spares))
            except TrackerError as error:
                self._broken.setdefault(commit, []).append(error.message)
                raise
            self._checkouts[commit] = (stack, path)
        self._checkouts.move_to_end(commit)
        return self._checkouts[commit][1]

    def _check_builds(self, name: str) -> None:
        """Raise BisectError if a commit failed to build twice."""
        reasons = self._broken.get(name, [])
        if len(reasons) >= MOST_BUILDS:
            raise BisectError(reasons[-1])

    def __exit__(self, *_: object) -> None:
        with self._spares, ExitStack() as every:
            for stack, _path in self._checkouts.values():
                every.push(stack)


def cell_of(header: Header) -> AbCell | None:
    """Return a search's cell, or None if it has no dtype: the default dtype is that of both sides."""
    cell = header.cell
    return AbCell(**{**cell, "plugins": tuple(cell["plugins"])}) if cell.get("dtype") else None


def finding_of_latency(result: AbResult) -> AbFinding:
    """Return an A/B's latency as a finding. Raises BisectError if it was not timed, or does not exist."""
    if result.timing == "interpreted":
        raise BisectError("interpreted kernels have no latency: use --metric accuracy, or a GPU")
    return dataclasses.replace(
        _facts(result),
        verdict=result.verdict,
        effect=finite_or_none(result.effect),
        low=finite_or_none(result.low),
        high=finite_or_none(result.high),
        base_value=result.base_ms,
        head_value=result.head_level_ms,
        least=math.log1p(result.min_effect or 0.0),
        accuracy=result.accuracy_change,
    )


def finding_of_accuracy(result: AbResult) -> AbFinding:
    """Return an A/B's accuracy as a finding: the log ratio of relative errors.

    A wrong result is worse than any correct one.
    """
    facts = _facts(result)
    base, head = result.base_accuracy, result.head_accuracy
    if result.verdict == "failed" or base is None or head is None:
        return dataclasses.replace(facts, verdict="failed", message=facts.message or "no accuracy was measured")
    effect = _level(head) - _level(base)
    change = result.accuracy_change
    sign = (change in LESS_ACCURATE) - (change in MORE_ACCURATE)
    if sign:
        effect = sign * max(LEAST_ACCURACY, sign * effect)
    differs = bool(sign) or (change == "both wrong" and abs(effect) > LEAST_ACCURACY)
    return dataclasses.replace(
        facts,
        verdict="different" if differs else "same",
        effect=effect,
        low=effect - ACCURACY_HALF,
        high=effect + ACCURACY_HALF,
        base_value=base.rms,
        head_value=head.rms,
        least=LEAST_ACCURACY,
        blocks=1,
        message=head.problem or "",
    )


def _level(accuracy: SideAccuracy) -> float:
    """Return the logarithm for judging errors; a non-finite error counts as 1000."""
    return RMS.log(1e3 if accuracy.rms is None else accuracy.rms)


def _facts(result: AbResult) -> AbFinding:
    if result.failed_status == "usage" and result.failed_side == "both":
        raise BisectError(result.message or "no such cell")
    hashed = result.base_hash is not None and result.head_hash is not None
    return AbFinding(
        result.verdict,
        blocks=result.blocks,
        seconds=result.seconds,
        message=result.message or "",
        at=result.failed_side or "",
        kernels_differ=result.base_hash != result.head_hash if hashed else None,
        unchecked=merged([result.unchecked]),
        routing=result.routing() or "",
        hardware=hardware_of(result),
    )


def settings_of(header: Header) -> Settings:
    """Return the settings for a log's search. The same settings ask the same questions."""
    return Settings(header.all, header.confidence, Rates())
