"""The first line of the gate's output: the outcome, its reason, and a count of every verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.verdicts import FAINT, Tone, Verdict, tone_of_count
from groupbench.tracker.judge.parts import percent
from groupbench.tracker.judge.verdicts import Judged, count, latencies, measured, outcome, worst
from groupbench.tracker.text.wording import counted

NEWS = 3
"""Number of results on a new level for which an improvement makes the headline; later it is only counted."""


def summary(rows: Sequence[Judged], code: ExitCode, *, strict: bool, same_commit: bool, runs: int = 1) -> str:
    """Return the first line of the output: the outcome, then a count of every verdict. Each series counts once."""
    rows = worst(rows)
    head = _head(rows, count(rows), code, strict)
    if runs > 1:
        head += f" (a night of {runs} runs)"
    if same_commit:
        head += "; same commit as the previous run"
    return f"{head}. " + ", ".join(f"{each.number} {each.text}" for each in verdict_counts(rows))


class VerdictCount(NamedTuple):
    """The number of rows with a verdict, and how many of them are special cases."""

    word: str  # the verdict, or the special case of rows whose verdict is counted elsewhere
    number: int
    special: tuple[str, ...]  # 1 acknowledged, 2 drifting
    tone: Tone

    @property
    def text(self) -> str:
        return f"{self.word} ({', '.join(self.special)})" if self.special else self.word


def verdict_counts(rows: Sequence[Judged]) -> list[VerdictCount]:
    """Return a count of the series with every verdict, the most severe first."""
    rows = worst(rows)
    counts, asides = count(rows), _asides(rows)
    acknowledged = sum(row.acknowledged for row in rows)
    special = {str(Verdict.OK): asides, str(Verdict.REGRESSED): {"acknowledged": acknowledged} if acknowledged else {}}
    listed = []
    for verdict, number in counts.items():
        parts = special.get(verdict, {})
        tone = tone_of_count(verdict, number, parts.get("acknowledged", 0))
        listed.append(VerdictCount(verdict, number, tuple(f"{each} {text}" for text, each in parts.items()), tone))
    alone = {} if Verdict.OK in counts else asides
    return listed + [VerdictCount(text, number, (), FAINT) for text, number in alone.items()]


def _head(rows: Sequence[Judged], counts: dict[str, int], code: ExitCode, strict: bool) -> str:
    """Return `GATE`, the outcome, and its reason."""
    if code is ExitCode.FAILED:
        text = _headlines(rows, code, strict)
    elif code is ExitCode.INCOMPLETE:
        text = _incomplete(rows, strict)
    elif code is ExitCode.INCOMPARABLE:
        text = f"{counts[Verdict.INCOMPARABLE]} series changed on a machine that has not measured them before"
    else:
        text = _passed(rows, counts)
    return f"GATE {outcome(rows, code).word}: {text}"


def _headlines(rows: Sequence[Judged], code: ExitCode, strict: bool) -> str:
    """Return the number of series for each verdict with an exit code."""
    deciding = Counter(row.verdict for row in rows if row.verdict.exit is code and row.exit_code(strict) is code)
    return ", ".join(
        f"{_results(number)} wrong" if verdict is Verdict.WRONG else f"{number} series {verdict.phrase}"
        for verdict, number in sorted(deciding.items(), key=lambda item: item[0].severity)
    )


def _incomplete(rows: Sequence[Judged], strict: bool) -> str:
    if not measured(rows):
        return "nothing was measured"
    headlines = _headlines(rows, ExitCode.INCOMPLETE, strict)
    required = f"--strict requires a verdict on every series ({_not_judged(count(rows))})"
    return (headlines or required) + _advice([row for row in rows if row.exit_code(strict) is not ExitCode.OK])


def _advice(rows: Sequence[Judged]) -> str:
    """Return the command to decide rows, or "" if no A/B comparison can."""
    open_rows = [row for row in rows if row.ab_base]
    if not open_rows:
        return ""
    command = "groupbench confirm --again" if all(row.compared for row in open_rows) else "groupbench confirm"
    sides = "toolchains" if all(row.cause == "toolchain" for row in open_rows) else "commits"
    return f"; run `{command}` to measure both {sides}"


def _passed(rows: Sequence[Judged], counts: Mapping[str, int]) -> str:
    """Return the headline of a run with exit code 0: the most noteworthy reason why it passes."""
    if undecided := [row for row in rows if row.verdict is Verdict.UNDECIDED]:
        return _undecided(undecided)
    if news := _news(rows):
        return news
    if set(counts) <= {Verdict.NEW, Verdict.UNAVAILABLE}:
        return "nothing to compare with yet"
    judged, timed = latencies(rows)
    if timed and not judged:
        return f"no latency was judged ({_not_judged(counts)})"
    if not timed:
        return "no result changed; no latency was measured"
    return no_change_above(rows)


def _undecided(rows: Sequence[Judged]) -> str:
    """Return how many series history alone cannot decide, with the largest change that may be there."""
    most = percent(max(math.log1p(row.change or 0.0) for row in rows))  # a row shows it
    wide = sum(row.rule == "too wide" for row in rows)
    size = f"{'up to ' if len(rows) > 1 else ''}{most}" if wide < len(rows) else "twice the latency could hide"
    return f"history cannot tell whether {len(rows)} series got slower ({size})" + _advice(rows)


MOST = 0.95
"""Share of the latencies whose limit the first line states besides the largest."""
VAGUE = 0.2
"""Relative change that an `ok` should exclude in each latency; the first line names those in which it may hide."""


def no_change_above(rows: Sequence[Judged]) -> str:
    """Return the excluded changes: the smallest change that would have been noticed in every latency.

    Latencies that vary too much for such a statement are counted apart, and the one that varies most is named.
    """
    limits: dict[int, tuple[float, Judged]] = {}
    for row in rows:
        if row.judged_latency and row.what in (None, "latency") and row.evidence.reach is not None:
            limits[row.series.pk] = (_excluded(row, row.evidence.reach), row)
    judged, timed = latencies(rows)
    of = "" if judged == timed else f" in {judged:,} of {timed:,} latencies"
    ordered = sorted(limits.values(), key=lambda each: each[0])
    clear = [each for each in ordered if each[0] <= math.log1p(VAGUE)]
    text = f"no change {'above ' + _percent(clear[-1][0]) if clear else 'found'}{of}"
    if clear and len(ordered) > 1:
        number = max(int(MOST * len(clear)), 1)
        most, largest = clear[number - 1][0], clear[-1][0]
        rest = f"; {number:,} of {len(clear):,} below {_percent(most)}" if most < largest / 1.2 else ""
        text += f" ({_name(clear[-1][1])}{rest})"
    if clear == ordered:
        return text
    limit, row = ordered[-1]
    vague = len(ordered) - len(clear)
    vary = "1 latency varies" if vague == 1 else f"{vague:,} latencies vary"
    return f"{text}, but {vary} too much to tell: a change below {_percent(limit)} may hide in {_name(row)}"


def _name(row: Judged) -> str:
    return f"{row.series.backend} {row.series.shape}"


def _excluded(row: Judged, reach: float) -> float:
    """Return the smallest distance that would have been noticed: by tonight's A/B, or else by history."""
    if row.rule == "A/B same" and row.compared is not None and row.compared.high is not None:
        return max(row.compared.high, row.evidence.counts)
    return max(row.evidence.not_excluded, abs(row.evidence.distance) if row.evidence.kind == "tonight" else 0.0)


def _percent(distance: float) -> str:
    """Return a distance as a change: `2.1 %`, `140 %`."""
    share = 100 * math.expm1(distance)
    return f"{share:.2g} %" if share < 100 else f"{share:,.0f} %"


def _news(rows: Sequence[Judged]) -> str | None:
    """Return the acknowledged regressions or the improvements of a run that passed; None without any."""
    acknowledged = sum(row.acknowledged for row in rows)
    improved = [row for row in rows if row.verdict is Verdict.IMPROVED and row.since <= NEWS]
    maybe = [row for row in rows if row.verdict is Verdict.SUSPECT and row.better]
    if acknowledged:
        return f"nothing new; {counted(acknowledged, 'acknowledged regression')}"
    if improved:
        return f"{len(improved)} series {Verdict.IMPROVED}"
    if maybe:
        return f"{len(maybe)} series may have improved"
    return None


def _not_judged(counts: Mapping[str, int]) -> str:
    """Return how many series were not judged, and why."""
    return ", ".join(f"{counts[v]} {v.unjudged}" for v in Verdict if v.unjudged and v in counts)


def _asides(rows: Sequence[Judged]) -> dict[str, int]:
    """Return how many unchanged rows are special cases: {"drifting": 1, "on an expected level": 2}."""
    unchanged = [row for row in rows if row.verdict is Verdict.OK]
    numbers = {
        "changed long ago": sum(row.rule == "old" for row in unchanged),
        "drifting": sum(row.cause == "drift" for row in unchanged),
        "changed with no code change": sum(row.cause == "infrastructure" for row in unchanged),
        "muted": sum(row.evidence.muted for row in unchanged),
        "to compare": sum(row.rule == "to compare" for row in unchanged),
        "on an expected level": sum(
            row.alert is not None and row.alert.state == "expected" for row in rows if row.verdict.quiet
        ),
    }
    return {text: number for text, number in numbers.items() if number}


def _results(number: int) -> str:
    return "1 result is" if number == 1 else f"{number} results are"
