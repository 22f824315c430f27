"""`groupbench history --plot`: plot a history, one panel per problem and one line per backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.identity import PROBLEM
from groupbench.tracker.facts.metrics import METRICS, RMS, named
from groupbench.tracker.text.wording import commit_text, printable
from groupbench.tracker.tools import plots
from groupbench.tracker.tools.plots import Curve, Trend


def drawn(name: str) -> tuple[str, str]:
    """Return (row key, unit) to plot for a name in `history --metrics`."""
    if name == "latency":
        return "latency_ms", "ms"
    if name == "speedup":
        return "speedup", "times the baseline"
    if named(name) is RMS:
        return "rms", "relative RMS error"
    return name, METRICS[name].unit or name


def check(form: str) -> None:
    """Check whether a plot is possible, before the database is read. Raises UsageError."""
    if form != "table":
        raise click.UsageError(f"--plot and --format {form} cannot be combined")
    try:
        plots.check()
    except plots.DrawError as error:
        raise click.UsageError(str(error)) from error


def draw_history(rows: Sequence[dict[str, Any]], order: Sequence[str], metric: str) -> None:
    """Plot in the terminal."""
    panels = trends(rows, order, metric)
    if len(panels) > plots.PANELS:
        left = len(panels) - plots.PANELS
        say(f"left out: {left} of {len(panels)} problems; select fewer with --shape")
    plots.draw(panels, sys.stdout)


def trends(rows: Sequence[dict[str, Any]], order: Sequence[str], metric: str) -> list[Trend]:
    """Return a panel for each problem, in row order; `order` lists the run ids.

    Interpreted latencies and wrong results are gaps. A tick is a run; two runs of one commit are two ticks.
    """
    place = {run: i for i, run in enumerate(order)}
    key, unit = drawn(metric)
    problems = grouped(rows, lambda row: tuple(str(row[name]) for name in PROBLEM))
    varying = {i for i in range(4, 8) if len({problem[i] for problem in problems}) > 1}
    panels = []
    for problem, points in problems.items():
        operator, shape, dtype, mode = problem[:4]
        title = " ".join([operator, mode, dtype, shape, *(problem[i] for i in sorted(varying))])
        panels.append(_trend(printable(title), sorted(points, key=lambda row: place[row["run"]]), key, unit))
    return panels


def _trend(title: str, points: list[dict[str, Any]], key: str, unit: str) -> Trend:
    runs = {row["run"]: row for row in points}
    place = {run: i for i, run in enumerate(runs)}
    backends: dict[str, dict[int, dict[str, Any]]] = {}
    for row in points:
        backends.setdefault(row["backend"], {})[place[row["run"]]] = row
    curves = tuple(_curve(name, at, key, len(runs)) for name, at in backends.items())
    breaks = {place[row["run"]]: "; ".join(row["environment_changed"]) for row in points if row["environment_changed"]}
    ticks = tuple(commit_text(row["commit"]) for row in runs.values())
    return Trend(title, unit, ticks, curves, tuple(sorted(breaks.items())))


def _curve(name: str, at: dict[int, dict[str, Any]], key: str, runs: int) -> Curve:
    """Return a backend's values by run. Latencies have bounds."""
    shown = [row if (row := at.get(i)) is not None and _counts(row, key) else None for i in range(runs)]

    def values(column: str) -> tuple[float | None, ...]:
        return tuple(None if row is None else row[column] for row in shown)

    return Curve(name, values(key), *map(values, ("low_ms", "high_ms") if key == "latency_ms" else ()))


def _counts(row: dict[str, Any], key: str) -> bool:
    """Return whether to plot a row's value: the result is correct, and no interpreter timed it."""
    return row[key] is not None and row["status"] == "ok" and (key != "latency_ms" or row["timing"] != "interpreted")
