"""Compare two sides: every series of either side, each within comparable environments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy.orm import Session

from groupbench.tracker.compare import sides
from groupbench.tracker.compare.between import Changes, Scatter, changes_between_runs, scatter_of
from groupbench.tracker.compare.ratios import GeometricMean, geometric_mean, judge_pools, ratio_interval
from groupbench.tracker.compare.sides import ComparedSide
from groupbench.tracker.facts.bursts import median
from groupbench.tracker.facts.environment import environment_differences
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.metrics import RMS, relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import PointRow, SeriesRow, named_difference
from groupbench.tracker.query.series import narrowed
from groupbench.tracker.query.tables import FlatRow, Rows, finite, of_part, of_row
from groupbench.tracker.stats.thresholds import BLIND
from groupbench.tracker.text.wording import joined, rms_text

if TYPE_CHECKING:
    import pandas

    from groupbench.tracker.formats import Options

ORDER = tuple(verdict for verdict in Verdict if verdict.of_sides)
COMPARING = (Verdict.WRONG, Verdict.REGRESSED, Verdict.IMPROVED, Verdict.OK)
"""Verdicts that compare B with A."""
UNREPEATED = "no p: one run each, and too few others; measure again, or use ab"
"""Why a pair has neither an interval nor a p value."""
SAME_FILES = "both ran the same files: the machine, not the code"
"""Why a pair has no verdict, though the latencies differ."""


@dataclass(frozen=True)
class SeriesPair(FlatRow):
    """A series on both sides. Latencies are medians over a side's runs."""

    series: SeriesRow
    verdict: Verdict
    a_ms: float | None = None
    b_ms: float | None = None
    ratio: float | None = None  # B over A; above 1 is slower
    low: float | None = None  # the 95 % interval of the ratio
    high: float | None = None
    p: float | None = None  # two-sided, of a ratio of 1
    noise: float | None = None  # largest relative change that would still be noise
    runs: tuple[int, int] = (0, 0)  # number of runs used of A and of B
    note: str | None = None

    @property
    def too_noisy(self) -> bool:
        """Return whether the noise is too large for `ok` to mean anything."""
        return self.noise is not None and self.noise > BLIND

    @property
    def blind(self) -> bool:
        """Return whether the noise is too large to judge the ratio, which then counts for no mean."""
        return self.verdict is Verdict.UNKNOWN and self.too_noisy

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "verdict": "verdict",
        **of_part("series", SHOWN),
        **of_row("a_ms", "b_ms", "ratio", "low", "high", "p", "noise", "runs", "note"),
    }


@dataclass(frozen=True)
class Comparison:
    """The comparison of two sides, with a pair for every series of either side."""

    a: ComparedSide
    b: ComparedSide
    pairs: tuple[SeriesPair, ...]

    @property
    def counts(self) -> dict[str, int]:
        counts = Counter(pair.verdict for pair in self.pairs)
        return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}

    @property
    def comparable(self) -> bool:
        return any(pair.verdict in COMPARING or pair.ratio is not None for pair in self.pairs)

    @property
    def differences(self) -> tuple[str, ...]:
        """The distinct reasons why pairs are incomparable."""
        notes = (pair.note or "environments differ" for pair in self.pairs if pair.verdict is Verdict.INCOMPARABLE)
        return tuple(dict.fromkeys(notes))

    def rows(self) -> Rows[SeriesPair]:
        return Rows(SeriesPair, self.pairs)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the pairs as a pandas data frame. Raises QueryError without pandas."""
        return self.rows().to_pandas()

    @property
    def geometric_mean(self) -> float | None:
        """The geometric mean of all ratios, if any."""
        return None if self.overall is None else self.overall.ratio

    @property
    def overall(self) -> GeometricMean | None:
        """The geometric mean over all ratios with an interval, if any."""
        return _mean_of(self._timed)

    @property
    def _timed(self) -> list[SeriesPair]:
        return [pair for pair in self.pairs if not pair.blind and pair.ratio is not None]

    @property
    def by_backend(self) -> dict[str, GeometricMean]:
        """The geometric mean of each backend with ratios, by name."""
        pairs = sorted(grouped(self._timed, lambda pair: pair.series.backend).items())
        means = {backend: _mean_of(of_backend) for backend, of_backend in pairs}
        return {backend: mean for backend, mean in means.items() if mean is not None}

    def facts(self) -> dict[str, Any]:
        """Return the counts, the geometric means and the differences, for JSON."""
        return {
            "counts": self.counts,
            "geometric_mean": self.geometric_mean,
            "geometric_means": [{"backend": backend, **asdict(mean)} for backend, mean in self.by_backend.items()],
            "differences": list(self.differences),
        }


def compare(
    session: Session | None,
    a: str,
    b: str,
    *,
    force: bool = False,
    min_effect: float | None = None,
    where: Filter = Filter(),  # noqa: B008
    options: Options | None = None,
) -> Comparison:
    """Compare two sides by name (see `sides.find_side`). Raises QueryError.

    `force` ignores differences of environment. Only the series fields of `where` apply. `options` supply facts that
    files in other formats lack.
    """
    both = sides.find_sides(session, a, b, options)
    return compare_sides(session, *both, force=force, min_effect=min_effect, where=where)


def compare_sides(
    session: Session | None,
    a: ComparedSide,
    b: ComparedSide,
    *,
    force: bool = False,
    min_effect: float | None = None,
    where: Filter = Filter(),  # noqa: B008
) -> Comparison:
    """Compare every series of either side, sorted by severity and size of the change.

    Raises QueryError if `where` names something that neither side has, or if both sides are the same.
    """
    if a.points == b.points:
        raise QueryError(f"A and B are the same {a.title}; give two different sides")
    series = {point.series.sort_key: point.series for side in (a, b) for point in side.points}
    allowed = {row.sort_key for row in narrowed(series.values(), where, exact=True)}
    a, b = (replace(side, points=tuple(p for p in side.points if p.series.sort_key in allowed)) for side in (a, b))
    at_a, at_b = (grouped(side.points, lambda point: point.series.sort_key) for side in (a, b))
    stored = [point for side in (a, b) if side.state is not None for point in side.points]
    keys = {point.series.sort_key: point.series.pk for point in stored}
    runs = {point.run.pk for point in stored}
    changes = changes_between_runs(session, keys.values(), runs) if session is not None and keys else {}
    pairs = [
        compare_series(
            *(series[key], at_a.get(key, []), at_b.get(key, []), changes.get(keys.get(key, 0), {})),
            force=force,
            min_effect=min_effect,
        )
        for key in sorted({*at_a, *at_b})
    ]
    pairs.sort(key=lambda pair: (ORDER.index(pair.verdict), -abs(math.log(pair.ratio or 1.0))))
    return Comparison(a, b, tuple(pairs))


def compare_series(
    series: SeriesRow,
    a: Sequence[PointRow],  # oldest first
    b: Sequence[PointRow],
    changes: Changes | None = None,  # between other runs; None: judge by these sides alone, for a hint
    *,
    force: bool = False,
    min_effect: float | None = None,
) -> SeriesPair:
    """Compare the points of one series at A with those at B."""
    wrong = next((point for point in reversed(b) if point.status == "wrong"), None)
    if wrong is not None:
        return SeriesPair(series, Verdict.WRONG, runs=(len(a), len(b)), note=wrong.message)
    good_a, good_b = [p for p in a if p.status == "ok"], [p for p in b if p.status == "ok"]
    if not good_a or not good_b:
        return _one_sided(series, a, b, good_b)
    timed = partial(_timed, series, changes, min_effect)
    if force:
        return _judged(series, good_a, good_b, _ignored(good_a, good_b), timed)
    if (alike := _alike(good_a, good_b)) is not None:
        return _judged(series, *alike, None, timed)
    note = "; ".join(_unlike(good_a, good_b))
    return SeriesPair(series, Verdict.INCOMPARABLE, note=note, runs=(len(good_a), len(good_b)))


def _alike(a: list[PointRow], b: list[PointRow]) -> tuple[list[PointRow], list[PointRow]] | None:
    """Return the points of both sides in the newest environment and toolchain of B that A has, or None."""
    for newest in reversed(b):
        here_a, here_b = (_in_environment_of(newest, points) for points in (a, b))
        names = (point.run.toolchain for point in (newest, *reversed(here_a)))
        toolchain = next((name for name in names if name is not None), None)
        in_a, in_b = (_of_toolchain(toolchain, points) for points in (here_a, here_b))
        if in_a:
            return in_a, in_b
    return None


def _in_environment_of(newest: PointRow, points: Sequence[PointRow]) -> list[PointRow]:
    return [p for p in points if p.environment.identity == newest.environment.identity]


def _of_toolchain(name: str | None, points: Sequence[PointRow]) -> list[PointRow]:
    """Return the points of a toolchain that plans name, and those of runs without a plan."""
    return [p for p in points if p.run.toolchain in (name, None)]


def _unlike(a: Sequence[PointRow], b: Sequence[PointRow]) -> list[str]:
    """Return the differences between the newest environments of two sides, and between the toolchains they name."""
    differences = environment_differences(a[-1].environment.facts, b[-1].environment.facts)
    return [*differences, *named_difference(a[-1].run, b[-1].run)]


def _ignored(a: Sequence[PointRow], b: Sequence[PointRow]) -> str | None:
    """Return a note of the differences that `force` ignores, or None."""
    if len({p.environment.identity for p in (*a, *b)}) == 1 and len({p.run.toolchain for p in (*a, *b)} - {None}) <= 1:
        return None
    return "forced: " + ("; ".join(_unlike(a, b)) or "several environments")


def _one_sided(series: SeriesRow, a: Sequence[PointRow], b: Sequence[PointRow], good_b: list[PointRow]) -> SeriesPair:
    runs = (len(a), len(b))
    if good_b:
        return SeriesPair(
            series,
            Verdict.NEW,
            b_ms=_median(good_b),
            runs=runs,
            note="no result at A" if not a else _why(a[-1], "A"),
        )
    good_a = [p for p in a if p.status == "ok"]
    note = "not measured at B" if not b else _why(b[-1], "B")
    return SeriesPair(
        series, Verdict.MISSING if good_a else Verdict.UNKNOWN, a_ms=_median(good_a), runs=runs, note=note
    )


def _judged(
    series: SeriesRow,
    a: list[PointRow],
    b: list[PointRow],
    note: str | None,
    timed: Callable[[list[PointRow], list[PointRow], str | None], SeriesPair],
) -> SeriesPair:
    timed_a = [p for p in a if p.timed]
    timed_b = [p for p in b if p.timed and timed_a and p.timing == timed_a[-1].timing]
    errors, now, worse = sorted(p.rms for p in a if p.rms is not None), b[-1].rms, None
    known = bool(errors) and now is not None
    if known and RMS.worse(before := median(errors), now):
        worse = f"accuracy: {rms_text(before, now)}"
    if timed_a and timed_b:
        pair = timed(timed_a, timed_b, note)
    else:
        interpreted = "interpreted" if "interpreted" in {a[-1].timing, b[-1].timing} else "no latency"
        verdict = Verdict.OK if known else Verdict.UNKNOWN
        note = f"{interpreted}: accuracy only" if known else interpreted
        pair = SeriesPair(series, verdict, runs=(len(a), len(b)), note=note)
    return replace(pair, verdict=Verdict.REGRESSED, note=worse) if worse else pair


def _mean_of(pairs: Sequence[SeriesPair]) -> GeometricMean | None:
    widths = [math.log(pair.high / pair.low) / 2 for pair in pairs if pair.low and pair.high]
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    return geometric_mean(ratios, widths if len(widths) == len(pairs) else None)


def _timed(
    series: SeriesRow,
    changes: Changes | None,
    min_effect: float | None,
    a: list[PointRow],
    b: list[PointRow],
    note: str | None,
) -> SeriesPair:
    """Return the pair of two sides with latencies of the same timing."""
    pools = (
        finite(p.median_ms for p in a),
        finite(p.error for p in a),
        finite(p.median_ms for p in b),
        finite(p.error for p in b),
    )
    timing = str(a[-1].timing)
    others = Scatter(0.0)
    if changes is not None:
        of_others = changes.get((b[-1].environment.identity, timing), ())
        others = scatter_of(of_others, timing, _median(a) or 1.0)
    judged = judge_pools(*pools, timing=timing, others=others, min_effect=min_effect)
    pair = SeriesPair(
        series,
        judged.verdict if judged.verdict in COMPARING else Verdict.UNKNOWN,
        a_ms=_median(a),
        b_ms=_median(b),
        ratio=math.exp(judged.change),
        noise=relative(judged.threshold),
        runs=(len(a), len(b)),
        note=note,
    )
    if pair.verdict is Verdict.UNKNOWN:
        return replace(pair, note=note or "one run with one burst on a side: the noise is unknown")
    if pair.verdict is Verdict.OK and pair.too_noisy:
        assert pair.noise is not None
        reason = f"too noisy to judge: only a change of more than {100 * pair.noise:.0f} % would show"
        pair = replace(pair, verdict=Verdict.UNKNOWN, note=joined(reason, note))
    interval = ratio_interval(*pools, timing=timing, others=others)
    if interval is None:
        pair = replace(pair, note=joined(UNREPEATED, pair.note))
    else:
        pair = replace(pair, low=interval.low, high=interval.high, p=interval.p)
    ran = {(point.code_hash, point.packages_hash) for point in (*a, *b)}
    if note is None and pair.verdict is not Verdict.OK and len(ran) == 1 and a[-1].code_hash is not None:
        pair = replace(pair, verdict=Verdict.UNKNOWN, note=joined(SAME_FILES, pair.note))
    return pair


def _median(points: Sequence[PointRow]) -> float | None:
    """Return the median of the runs' latencies on the logarithmic scale, as for the ratio."""
    logs = sorted(math.log(p.median_ms) for p in points if p.timed and p.median_ms is not None)
    return math.exp(median(logs)) if logs else None


def _why(point: PointRow, side: str) -> str:
    return f"{side} {point.status}: {point.message}"
