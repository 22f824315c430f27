"""`groupbench history`: show each series along the commits of a branch, one line per run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from groupbench.tracker.cli.declared import command, flag, group, option
from groupbench.tracker.cli.history_plot import check, draw_history
from groupbench.tracker.cli.options import CELL_FILTERS, RUN_FILTERS, limit_option, reading
from groupbench.tracker.cli.output import (
    APART,
    CELL,
    Column,
    Format,
    marked,
    marked_latency,
    output_formats,
    plain,
    say,
    write_table,
)
from groupbench.tracker.facts.metrics import METRICS, QUANTITIES
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import HistoryRow
from groupbench.tracker.text.wording import (
    commit_text,
    date,
    no_such,
    short_number,
    signed_percent,
    spread,
    times,
    yes_or_no,
)

_SERIES = (
    Column("measured", "started", date),
    Column("commit", "commit", commit_text),
    *CELL,
    *APART,
)
_SHOWS: dict[str, Callable[[Any], str]] = {
    "latency": marked_latency,
    "speedup": lambda x: "" if x is None else times(x),
    "repeatable": yes_or_no,
}
_GROUPS = {"accuracy": ("rms", "max_abs", "worst_block_rms", "mismatch", "repeatable")}
"""Names that `--metrics` expands to several metrics."""


def known_metrics() -> tuple[str, ...]:
    """Return the names for `--metrics`: every metric, `speedup`, and group names."""
    return (*METRICS, "speedup", *_GROUPS)


def metric_columns(name: str) -> tuple[Column, ...]:
    """Return the columns for a metric or a metric group."""
    if name in _GROUPS:
        return tuple(column for each in _GROUPS[name] for column in metric_columns(each))
    title = METRICS[name].title if name in METRICS else name
    key = "latency_ms" if name == "latency" else name
    column = Column(title, key, _SHOWS.get(name, short_number), right=name != "repeatable")
    if name != "latency":
        return (column,)
    return (
        column,
        Column("spread", "spread", spread, right=True),
        Column("Δ", "change", signed_percent, right=True),
    )


_REST = (
    *plain(("status", "timing")),
    Column("environment changed", "environment_changed", "; ".join, wraps=True),
    Column("loaded", "loaded_changed", "; ".join, wraps=True),
    Column("message", "message", wraps=True),
)
_IMPORTED = tuple(metric.name for metric in QUANTITIES)
_DEFAULT = ("latency", "tflops", "rms", *_IMPORTED)
_RARE = {"environment_changed", "loaded_changed", "message", "tflops", "gbps", "change", "speedup", *_IMPORTED}
"""Keys of columns that are left out if they are empty."""


class Metrics(click.ParamType[tuple[str, ...]]):
    """Names of metrics, joined by commas."""

    name = "metrics"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in str(value).split(","))
        for name in names:
            if name not in known_metrics():
                self.fail(no_such("no metric", name, known_metrics()), param, ctx)
        return tuple(dict.fromkeys(names))


@command()
def history(
    db: str,
    where: Filter = group(Filter, **CELL_FILTERS, **RUN_FILTERS),
    all_branches: bool = flag("--all", help="Show the results of every branch."),
    baseline: str | None = option(
        "--baseline", metavar="BACKEND", help="Show the speed-up over this backend in the same run."
    ),
    metrics: tuple[str, ...] | None = option(
        "--metrics",
        type=Metrics(),
        metavar="LIST",
        help="Metrics to show, joined by commas; `tritonbench --list-metrics` lists them. Also `speedup` (with "
        "--baseline) and `accuracy`. JSON and CSV always include all of them.",
    ),
    ids: bool = flag("--ids", help="Show each point's id, as `groupbench show` takes it."),
    limit: int | None = limit_option("Show only the newest N points of each series."),
    plot: bool = flag("--plot", help="Plot the first metric in the terminal."),
    form: Format = output_formats,
) -> None:
    """Show how each series changed from commit to commit.

    Results are in commit order, the oldest first, along the first parents of the newest run's branch. Results
    at one commit are in time order. --branch follows another branch, and --all shows every branch. Δ compares a
    latency with the series' previous one in the same environment. `interpreted` timings do not measure speed:
    they have no Δ, tflops or speed-up. The column `loaded` names the files of the repository and the packages that
    differ from those that the previous result's process loaded.
    """
    from groupbench.tracker.query import history as histories

    if metrics and "speedup" in metrics and baseline is None:
        raise click.UsageError("--metrics speedup requires --baseline BACKEND")
    if plot:
        check(form)
    with reading(db) as session:
        lines = histories.history(session, where, baseline=baseline, limit=limit, all_branches=all_branches)
    if not lines.rows:
        say("no points match")
    for note in lines.notes:
        say(note)
    rows = [row.flat() for row in lines.rows]
    if plot:
        draw_history(rows, lines.runs, (metrics or ("latency",))[0])
        return
    if form in ("json", "csv"):
        write_table(plain(HistoryRow.columns()), rows, form)
        return
    names = metrics or (*_DEFAULT, *(["speedup"] if baseline else []))
    write_table(_columns(names, ids, rows), [marked(row) for row in rows], form)


def _columns(metrics: Iterable[str], ids: bool, rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return table columns for these metrics, without empty rare ones."""
    values = dict.fromkeys(column for name in metrics for column in metric_columns(name))
    columns = [*([Column("id", "id")] if ids else []), *_SERIES, *values, *_REST]
    return [c for c in columns if c.key not in _RARE or any(row[c.key] for row in rows)]
