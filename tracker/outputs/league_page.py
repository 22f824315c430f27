"""The league as Markdown: for each table the standings, then every problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from groupbench.tracker.compare.league import LeagueTable, Match, Standing
from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.outputs.escape import code, words
from groupbench.tracker.text.wording import counted, interval, milliseconds, printable, ratio

HEAD = """# League table

Times are medians over bursts. "Behind" is a backend's latency over the fastest one's: the geometric mean over its
problems, with a 95 % interval. A value of 1.000 means always fastest. A backend wins if it is fastest or level with the
fastest: the 95 % interval of the ratio contains 1, or the difference is too small to count. Nothing is compared across
GPUs, toolchains or commits. Dynamic routing accepts new offsets without a new preparation; fixed routing does not."""

LONGEST = 60
"""Largest number of characters of a shape. Longer ones, such as lists of rows, are shortened in the middle."""


def page(tables: Sequence[LeagueTable]) -> str:
    """Return the whole page, or a sentence if nothing can be compared."""
    if not tables:
        return f"{HEAD}\n\nNo problem has results of two backends on one GPU at one commit.\n"
    return "\n\n".join([HEAD, *(part for table in tables for part in _table(table))]) + "\n"


def _table(table: LeagueTable) -> Iterator[str]:
    yield f"## {_plain(table.title)}"
    counts = f"{counted(len(table.matches), 'problem')}, protocol {_plain(table.protocol)}."
    untimed = [f"{_plain(name)} ({status})" for name, status in sorted(table.untimed.items())]
    lines = [_plain(line) for line in table.provenance] + [f"not timed: {', '.join(untimed)}"] * bool(untimed)
    yield "\n".join([counts, *(f"- {line}" for line in lines)])
    head = ("backend", "won", "behind", "95 %", "worst", "on", "RMS error", "memory", "prepare", "routing", "version")
    yield _lines([head, *map(_standing, table.standings)])
    names = [standing.backend for standing in table.standings]
    columns = ("shape", "fastest", "second", "lead", "95 %", *map(_plain, names))
    yield _lines([columns, *(_match(match, names) for match in table.matches)])


def _standing(standing: Standing) -> list[str]:
    missed = [f"{standing.wrong} wrong"] * bool(standing.wrong) + [f"{standing.absent} not run"] * bool(standing.absent)
    return [
        _plain(standing.backend),
        f"{standing.won} of {standing.matches}" + (f" ({', '.join(missed)})" if missed else ""),
        ratio(standing.behind.ratio),
        interval(standing.behind.low, standing.behind.high),
        ratio(standing.worst),
        _shape(standing.worst_shape),
        "" if standing.rms is None else f"{standing.rms:.1e}",
        METRICS["workspace_mib"].text(standing.memory_mib),
        METRICS["prepare_ms"].text(standing.prepare_ms),
        standing.routing,
        _plain(", ".join(standing.packages)),
    ]


def _match(match: Match, names: Iterable[str]) -> list[str]:
    """Return the row of a match: the fastest's latency, and how far each backend is behind."""
    second = match.entries[1]
    bounds = match.lead_over(second)
    entries = {point.series.backend: point for point in match.entries}
    out = {point.series.backend: point.status for point in match.out}
    level = match.level(second)
    return [
        _shape(match.shape),
        _plain(match.first.series.backend) + (" (level)" if level else ""),
        _plain(second.series.backend),
        ratio(match.behind(second)),
        interval(bounds.low, bounds.high) if bounds else "",
        *(
            f"{milliseconds(p.median_ms)} ms" if (p := entries.get(name)) is match.first
            else ratio(match.behind(p)) if p is not None
            else out.get(name, "")
            for name in names
        ),
    ]  # fmt: skip


def _shape(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 21]}…{text[-20:]}"
    return code(text)


def _plain(text: str) -> str:
    """Return a text as Markdown that shows it; names with underscores are not emphasised, so they stay as they are."""
    flat = printable(text)
    bare = flat.replace("_", "")
    return flat if words(bare) == bare else code(flat)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
