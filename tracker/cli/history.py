"""`groupbench history`: a line for each series and run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from groupbench.tracker.cli.options import commit_filters, limit_option, reading, series_filters
from groupbench.tracker.cli.output import APART, Column, Format, output_formats, plain, say, write_table
from groupbench.tracker.text.wording import (
    commit_text,
    date,
    milliseconds,
    short_number,
    signed_percent,
    spread,
    yes_or_no,
)

_WHAT = (
    Column("date", "started", date),
    Column("commit", "commit", commit_text),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True, middle=True),
    Column("dtype", "dtype"),
    *APART,
)
METRICS = {
    "latency": (
        Column("ms", "latency_ms", milliseconds, right=True),
        Column("spread", "spread", spread, right=True),
        Column("Δ", "change", signed_percent, right=True),
    ),
    "tflops": (Column("tflops", "tflops", short_number, right=True),),
    "gbps": (Column("GB/s", "gbps", short_number, right=True),),
    "speedup": (Column("speedup", "speedup", lambda x: "" if x is None else f"{x:.2f}×", right=True),),
    "rms": (Column("rms", "rms", short_number, right=True),),
    "accuracy": (
        Column("rms", "rms", short_number, right=True),
        Column("max error", "max_abs", short_number, right=True),
        Column("worst block", "worst_block_rms", short_number, right=True),
        Column("mismatch", "mismatch", short_number, right=True),
        Column("repeatable", "repeatable", yes_or_no),
    ),
}
"""What `--metrics` names, and the columns of each."""
_REST = (
    Column("status", "status"),
    Column("timing", "timing"),
    Column("environment changed", "environment_changed", "; ".join, wraps=True),
    Column("message", "message", wraps=True),
)
_DEFAULT = ("latency", "tflops", "rms")
_RARE = {"environment_changed", "message", "tflops", "gbps", "change", "speedup"}
"""Left out where they hold nothing."""


class Metrics(click.ParamType[tuple[str, ...]]):
    """Names of metrics, joined by commas."""

    name = "metrics"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in str(value).split(","))
        for name in names:
            if name not in METRICS:
                self.fail(f"no metric {name!r}; known: {', '.join(METRICS)}", param, ctx)
        return tuple(dict.fromkeys(names))


@click.command()
@series_filters
@commit_filters
@click.option("--baseline", metavar="BACKEND", help="Show the speed-up over this backend, in the same run.")
@click.option("--metrics", type=Metrics(), metavar="LIST", help=f"Of {', '.join(METRICS)}; programs get all.")
@click.option("--ids", is_flag=True, help="Show each point's id, which `show` takes.")
@limit_option("Only the newest N of each series.")
@click.option("--plot", is_flag=False, flag_value="", metavar="[FILE]",
              help="Draw the first metric in the terminal, or into FILE.png or FILE.svg.")  # fmt: skip
@output_formats
@click.pass_obj
def history(
    db: str,
    since: datetime | None,
    until: datetime | None,
    baseline: str | None,
    metrics: tuple[str, ...] | None,
    ids: bool,
    limit: int | None,
    plot: str | None,
    form: Format | None,
    **fields: tuple[str, ...],
) -> None:
    """How each series went from commit to commit.

    Δ is against the latest earlier speed of the series in the same environment. `interpreted` timings are no
    speed: they have no Δ, no tflops and no speed-up.
    """
    from groupbench.tracker.query import history as histories
    from groupbench.tracker.query.rows import Filter, HistoryRow

    if metrics and "speedup" in metrics and baseline is None:
        raise click.UsageError("--metrics speedup needs --baseline BACKEND")
    if plot is not None:
        from groupbench.tracker.cli.history_plot import check

        check(plot, form)
    with reading(db) as session:
        where = Filter(**fields, since=since, until=until)
        found = histories.history(session, where, baseline=baseline, limit=limit)
    if not found:
        say("no point matches")
    rows = [row.flat() for row in found]
    if plot is not None:
        from groupbench.tracker.cli.history_plot import draw_history

        draw_history(rows, (metrics or ("latency",))[0], plot)
        return
    if form in ("json", "csv"):
        write_table(plain(HistoryRow.columns()), rows, form)
        return
    names = metrics or (*_DEFAULT, *(["speedup"] if baseline else []))
    chosen = dict.fromkeys(column for name in names for column in METRICS[name])
    columns = [*([Column("id", "id")] if ids else []), *_WHAT, *chosen, *_REST]
    write_table([c for c in columns if c.key not in _RARE or any(row[c.key] for row in rows)], rows, form)
