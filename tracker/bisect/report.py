"""Present the result of a search as text and as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from groupbench.tracker.bisect.hunt import BisectResult, Culprit, History, short
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest, Trace
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.text.unchecked import unchecked_lines
from groupbench.tracker.text.wording import FACTOR_FROM, chance, change_in_words, counted, times

_WORDS = {"latency": ("slower", "faster"), "accuracy": ("less accurate", "more accurate")}
_RESULTS = {"same": "", "wrong": "result wrong", "fixed": "result fixed", "both wrong": "results of both wrong"}


def exit_code(result: BisectResult) -> int:
    """Return 0 if nothing was found or BAD is better, 1 for a confirmed regression, 3 if no single commit is named."""
    if result.outcome in ("narrowed", "undecided"):
        return ExitCode.INCOMPLETE
    if result.outcome == "none":
        return ExitCode.OK
    assert result.total is not None
    return ExitCode.FAILED if result.total.is_worse else ExitCode.OK


def change_text(finding: AbFinding, metric: str) -> str:
    """Return a finding's change: `2.0 % slower (1.9 to 2.1), result wrong`."""
    return _with_result(_effect_text(finding, metric), finding)


def _with_result(text: str, finding: AbFinding) -> str:
    result = _RESULTS.get(finding.accuracy, finding.accuracy)
    return f"{text}, {result}" if result else text


def _effect_text(finding: AbFinding, metric: str) -> str:
    if finding.effect is None:
        return finding.verdict
    share = math.expm1(finding.effect)
    digits = _digits(share)
    text = change_in_words(share, _WORDS[metric], f".{digits}f", " %")
    if finding.low is None or finding.high is None:
        return text
    if share + 1 >= FACTOR_FROM:
        return f"{text} ({times(math.exp(finding.low))} to {times(math.exp(finding.high))})"
    ends = [100 * math.expm1(end) * (1 if share > 0 else -1) for end in (finding.low, finding.high)]
    return f"{text} ({min(ends):.{digits}f} to {max(ends):.{digits}f})"


def _digits(share: float) -> int:
    return 0 if abs(share) >= 1 else 1 if abs(share) >= 0.05 else 2


def step_line(question: ComparisonRequest, finding: AbFinding, history: History, metric: str, number: int) -> str:
    """Return a comparison's progress line."""
    titles = {"ends": "BAD against GOOD", "merge base": "merge base against GOOD", "confirm": "to confirm"}
    commit = history.commits.get(question.head)
    subject = f" {commit.subject}" if commit and commit.subject else ""
    outcome = {
        "same": _with_result("the same", finding),
        "different": change_text(finding, metric),
        "unknown": _with_result("not clear", finding),
        "failed": f"fails: {finding.message}",
    }[finding.verdict]
    title = titles.get(question.why, question.why)
    again = ", again and longer" if question.budget > 1 else ""
    blocks = f", {counted(finding.blocks, 'block')}" if finding.blocks else ""
    return f"{number}. {title}{again}: {short(question.head)}{subject}: {outcome}{blocks}, {finding.seconds:.0f} s"


def cause(finding: AbFinding) -> str:
    """Return where the change is, by the compiled kernels' hashes; empty if they are unknown."""
    if finding.kernels_differ is None:
        return ""
    if finding.kernels_differ:
        return "the compiled kernel differs"
    return "the compiled kernels are the same: the change is in the code that launches or surrounds them"


def lines(result: BisectResult, history: History, trace: Trace, metric: str, cell: str) -> Iterator[str]:
    """Yield the result as lines of text. The first line is the conclusion."""
    yield _head(result, metric, cell)
    for culprit in result.culprits:
        yield from _culprit_lines(culprit, history, metric, len(result.culprits) > 1)
    if result.total is not None and result.total.effect is not None:
        yield f"GOOD {short(history.good)} to BAD {short(history.bad)}: {_between(result.total, metric)}"
    if history.base != history.good and result.outcome != "none":
        yield f"GOOD is not an ancestor of BAD: searched from their merge base {short(history.base)}"
    if result.unexplained:
        share = 100 * math.expm1(result.unexplained)
        hint = "" if result.rest_searched else "; --all searches for it too"
        yield f"{share:+.1f} % of the difference is not explained by this{hint}"
    for name, (by, finding) in trace.undone.items():
        yield f"not in force: {short(name)} made it {change_text(finding, metric)}, and {short(by)} undid it"
    for name, why in trace.skipped.items():
        yield f"skipped {short(name)}: {why}"
    yield from unchecked(trace)
    path = history.first_parents(history.bad)[1]
    aside = len(history.inside) - len(path)
    branches = f" and {aside} on merged branches" if aside else ""
    searched = f"{counts(trace)}, {trace.seconds:.0f} s of measuring"
    yield f"{counted(len(path), 'commit')} on the first-parent line{branches}; {searched}"


def unchecked(trace: Trace) -> list[str]:
    """Return a line for each impossible check, with the commits."""
    return unchecked_lines({short(name): reasons for name, reasons in trace.unchecked.items()})


def counts(trace: Trace) -> str:
    """Return `5 steps, 7 comparisons`. Steps exclude the ends' comparison and confirmations."""
    return f"{counted(trace.comparisons['step'], 'step')}, {counted(trace.comparisons.total(), 'comparison')}"


def _head(result: BisectResult, metric: str, cell: str) -> str:
    if result.outcome != "found":
        return f"{result.message}: {cell}" if result.outcome != "narrowed" else f"narrowed to {result.message}: {cell}"
    first = result.culprits[0]
    more = f", and {len(result.culprits) - 1} more" if len(result.culprits) > 1 else ""
    return f"{short(first.commits[0])} made {cell} {change_text(first.finding, metric)}{more}"


def _culprit_lines(culprit: Culprit, history: History, metric: str, several: bool) -> Iterator[str]:
    for name in culprit.commits:
        commit = history.commits[name]
        yield f"  {name} {commit.subject} ({commit.author})"
    if several or not culprit.named:
        yield f"    {change_text(culprit.finding, metric)} than {short(culprit.parent)}"
    yield f"    measured again against its parent {short(culprit.parent)}: {_between(culprit.finding, metric)}"
    which = "this commit" if culprit.named else "one of these"
    yield f"    probability that {which} is the cause: {chance(culprit.confidence)}"
    for text in (cause(culprit.finding), culprit.finding.routing, culprit.note):
        if text:
            yield f"    {text}"
    if culprit.merges:
        yield f"    came with merge {', '.join(short(merge) for merge in culprit.merges)}"


def _between(finding: AbFinding, metric: str) -> str:
    unit = " ms" if metric == "latency" else ""
    text = change_text(finding, metric)
    if finding.base_value is None or finding.head_value is None:
        return text
    return f"{finding.base_value:.4g} to {finding.head_value:.4g}{unit}, {text}"


def as_data(result: BisectResult, history: History, trace: Trace, metric: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the result as data for JSON. Changes are relative: 0.02 is 2 % slower or less accurate."""
    path = history.first_parents(history.bad)[1]
    return {
        "outcome": result.outcome,
        "exit_code": exit_code(result),
        "message": result.message,
        "metric": metric,
        "cell": cell,
        "good": history.good,
        "bad": history.bad,
        "base": history.base,
        "ends": None if result.total is None else finding_data(result.total),
        "culprits": [culprit_data(culprit, history) for culprit in result.culprits],
        "unexplained": relative(result.unexplained),
        "commits": {"first_parents": len(path), "all": len(history.inside)},
        "steps": trace.comparisons["step"],
        "comparisons": dict(trace.comparisons),
        "levels": [{"commit": name, **finding_data(finding)} for name, finding in trace.levels.items()],
        "undone": [{"commit": name, "by": by, **finding_data(finding)} for name, (by, finding) in trace.undone.items()],
        "skipped": [{"commit": name, "why": why} for name, why in trace.skipped.items()],
        "unchecked": trace.unchecked,
        "seconds": trace.seconds,
    }


def culprit_data(culprit: Culprit, history: History) -> dict[str, Any]:
    commits = [history.commits[name] for name in culprit.commits]
    return {
        "commits": [{"hash": c.hash, "subject": c.subject, "author": c.author} for c in commits],
        "named": culprit.named,
        "parent": culprit.parent,
        "confidence": culprit.confidence,
        "cause": cause(culprit.finding) or None,
        "kernels_differ": culprit.finding.kernels_differ,
        "merges": list(culprit.merges),
        "note": culprit.note or None,
        **finding_data(culprit.finding),
    }


def finding_data(finding: AbFinding) -> dict[str, Any]:
    """Return a comparison as data for JSON. Changes are relative."""
    ends = {"change": finding.effect, "low": finding.low, "high": finding.high}
    return {
        "verdict": finding.verdict,
        **{name: relative(value) for name, value in ends.items()},
        "before": finding.base_value,
        "after": finding.head_value,
        "accuracy": finding.accuracy,
        "routing": finding.routing or None,
        "unchecked": finding.unchecked,
        "blocks": finding.blocks,
    }
