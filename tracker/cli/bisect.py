"""`groupbench bisect`: find the commit responsible for a slower or less accurate kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.ab.result import CELL, cell_of_series
from groupbench.tracker.bisect import history as bisect_git
from groupbench.tracker.bisect import log as bisect_log
from groupbench.tracker.bisect import report
from groupbench.tracker.bisect.history import folder_of
from groupbench.tracker.bisect.hunt import BisectResult, History
from groupbench.tracker.bisect.log import Header, bench_of
from groupbench.tracker.cli.declared import argument, command, flag, option, options
from groupbench.tracker.cli.here import recipe_of, this_project, wait_option
from groupbench.tracker.cli.options import (
    Percent,
    device_option,
    min_effect_option,
    plugins_option,
    reading,
    setup_option,
)
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_notes, write_table
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.vocabulary import BACKEND, DTYPE, DTYPE_DEFAULT, MODE_HELP, OPERATOR, SEED_HELP, SHAPE
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.text.repro import SEARCHED
from groupbench.tracker.text.wording import printable, signed_percent
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration, Number

if TYPE_CHECKING:
    from groupbench.tracker.bisect.run import Searched

COLUMNS = (
    Column("commit", "hash"),
    Column("subject", "subject", wraps=True),
    Column("author", "author"),
    Column("before", "before", lambda v: "" if v is None else f"{v:#.4g}", right=True),
    Column("after", "after", lambda v: "" if v is None else f"{v:#.4g}", right=True),
    Column("change", "change", partial(signed_percent, digits=2), right=True),
    Column("low", "low", partial(signed_percent, digits=2), right=True),
    Column("high", "high", partial(signed_percent, digits=2), right=True),
    Column("probability", "confidence", lambda v: "" if v is None else f"{v:.4f}", right=True),
    Column("note", "note", wraps=True),
)


@dataclass(frozen=True)
class BisectCell:
    """The cell to measure: a stored series, or a cell by name."""

    series: str | None = option(
        "--series",
        metavar="ID",
        help="Series to measure: its number in `groupbench list series`, or the id of one of its points.",
    )
    operator: str | None = option(*OPERATOR, help="Operator to measure, if --series is not given.")
    backend: str | None = option(*BACKEND, help="Backend to measure.")
    shape: str | None = option(
        *SHAPE,
        metavar="TEXT",
        help="Shape to measure, as `groupbench list series` prints it or `tritonbench --shapes` takes it.",
    )
    dtype: str | None = option(*DTYPE, help=f"Dtype to measure, such as bf16, fp16 or fp32. {DTYPE_DEFAULT}")
    mode: str | None = option("--mode", help=f"{MODE_HELP} Default: fwd.")
    seed: int | None = option("--seed", type=Number(0, 2**63 - 1), help=f"{SEED_HELP} Default: 0.")
    device: str = device_option
    plugins: tuple[str, ...] = plugins_option


@dataclass(frozen=True)
class BisectOptions:
    """Options for the search, and for comparing two commits."""

    metric: str = option(
        "--metric", type=click.Choice(SEARCHED), default="latency", help="Find a change of this metric."
    )
    all_: bool = flag(
        "--all",
        help="Search for further causes if the first one explains only part of the change. Default: only if the "
        "unexplained part may be larger.",
    )
    repo: Path | None = option(
        "--repo",
        type=click.Path(path_type=Path),
        help="Repository to search. Default: the one of groupbench.toml, or this folder's.",
    )
    paths: tuple[str, ...] = option(
        "--paths",
        multiple=True,
        metavar="PATH",
        help="Skip commits that do not change these paths; may be repeated. Default: kernels and operators in "
        "groupbench's own repository, else all paths.",
    )
    setup: str | None = setup_option
    python: str | None = option("--python", metavar="EXE", help="Measure with this interpreter. Default: this one.")
    min_effect: float | None = min_effect_option
    budget: float | None = option(
        "--budget",
        type=Duration(least=1, most=86_400),
        help="Stop measuring one comparison after this time, without its preparation. Default: 120s.",
    )
    only_changed: bool = flag("--only-changed", help="Do not time commits whose compiled kernels did not change.")
    confidence: float = option(
        "--confidence",
        type=Percent(),
        default="95",
        help="Name a commit once the probability that it is the cause reaches this, in percent.",
    )


@command()
@wait_option()
def bisect(
    context: click.Context,
    good: str | None = argument(required=False),
    bad: str | None = argument(required=False),
    cell: BisectCell = options(BisectCell),
    how: BisectOptions = options(BisectOptions),
    log_file: Path | None = option(
        "--log",
        type=click.Path(path_type=Path),
        help="Keep the comparisons in this file, from which --resume continues.",
    ),
    resume: bool = flag("--resume", help="Continue an interrupted search: the newest one, or the one in --log."),
    form: Format = output_formats,
) -> None:
    """Find the commit between GOOD and BAD that made a kernel slower or less accurate.

    \b
    groupbench bisect v1.2 HEAD --series 12
    groupbench bisect HEAD~40 HEAD --operator grouped_gemm --backend triton_pointer --shape 8,1024,512,256
    groupbench bisect --resume

    Each step measures GOOD and another commit alternately on this machine, until the A/B is decided. GOOD and BAD are
    compared first. The search allows for wrong A/B results. Before it names a commit, it compares the commit with the
    parent again. Commits that fail twice are skipped. If the commit is a merge, the merged branch is searched too.

    If the database has the series, the decided comparisons and the commit are stored with it. The gate judges by them,
    and the gate, the report and incidents name the commit.

    \b
    Exit codes:
    0   no regression: the same, or an improvement, whose commit is named
    1   a regression was confirmed and the commit named, or BAD's result is wrong or less accurate
    2   usage error
    3   undecided: not resolved, GOOD or BAD fails, or several commits remain
    75  another command uses this device
    """
    project = this_project(context)
    cell = replace(cell, plugins=project.plugins(cell.plugins))
    repository = folder_of(how.repo or project.folder)
    header, path = _search_of(context, repository, good, bad, cell, how, log_file, resume)
    context.exit(_search(context.obj, repository, header, path, form, resume=resume, replaces=log_file is None))


def _search(
    db: str, repository: Path, header: Header, path: Path, form: Format, *, resume: bool, replaces: bool
) -> int:
    """Search, print the result, and return the exit code."""
    from groupbench.tracker.bisect import report, run

    begun = "run `groupbench bisect --resume` to continue"
    with signals.keeping(lambda: begun if path.exists() else "nothing was compared"):
        done = run.run(db, repository, header, path, say, resume=resume, replaces=replaces)
    _write(form, done, path)
    return report.exit_code(done.result)


def _search_of(
    context: click.Context,
    repository: Path,
    good: str | None,
    bad: str | None,
    cell: BisectCell,
    how: BisectOptions,
    log_file: Path | None,
    resume: bool,
) -> tuple[Header, Path]:
    """Return the search and the log file: a new search, or the one to continue. Raises UsageError."""
    folder = bisect_git.log_folder(repository)
    if good is not None and bad is not None:
        header = _header(context, repository, good, bad, cell, how)
        return header, log_file or folder / f"bisect-{header.identity}.jsonl"
    if resume and good is None:
        path = log_file or bisect_log.newest(folder)
        return bisect_log.read_header(path), path
    raise click.UsageError("give GOOD and BAD, or --resume", context)


def _header(
    context: click.Context, repository: Path, good: str, bad: str, cell: BisectCell, how: BisectOptions
) -> Header:
    """Return the search with every default filled in. The log refuses any other search."""
    first, last = bisect_git.resolve(repository, good), bisect_git.resolve(repository, bad)
    if first == last:
        raise click.UsageError(f"GOOD and BAD are one commit, {first[:10]}; give two", context)
    named = _cell_of_options(context, cell) if cell.series is None else _cell_of_series(context, cell, cell.series)
    paths = how.paths or bisect_git.relevant_paths(repository, last, cell.plugins)
    settings = {name: getattr(how, name) for name in ("min_effect", "budget", "python", "only_changed")}
    return Header(
        repository=str(repository),
        good=first,
        bad=last,
        cell={**named, "device": cell.device, "plugins": list(cell.plugins)},
        metric=how.metric,
        all=how.all_,
        confidence=how.confidence,
        paths=tuple(paths),
        bench=bench_of(**settings, **asdict(recipe_of(context, how.setup))),
    )


def _cell_of_series(context: click.Context, cell: BisectCell, series: str) -> dict[str, Any]:
    """Return a stored series' cell: `12` is a series number, `12.3` a point id.

    Raises UsageError, QueryError.
    """
    from groupbench.tracker.query.series import find_series

    conflicting = [name for name in CELL if getattr(cell, name) is not None]
    if conflicting:
        raise click.UsageError(f"--series selects the cell; it cannot be combined with --{conflicting[0]}", context)
    number = series.partition(".")[0]
    with reading(context.obj) as session:
        matches = [row for row in find_series(session, Filter()) if str(row.pk) == number]
    if not matches:
        raise QueryError(f"no series {series!r}; `groupbench list series` prints them with their numbers")
    return cell_of_series(matches[0])


def _cell_of_options(context: click.Context, cell: BisectCell) -> dict[str, Any]:
    missing = [name for name in ("operator", "backend", "shape") if not getattr(cell, name)]
    if missing:
        raise click.UsageError(f"nothing to measure: give --series, or --{' and --'.join(missing)}", context)
    named = {name: value for name in CELL if (value := getattr(cell, name)) is not None}
    return {"mode": "fwd", "seed": 0, **named}


def _write(form: Format, done: Searched, path: Path) -> None:
    header, text = done.header, done.lines
    if form == "json":
        data = report.as_data(done.result, done.history, done.trace, header.metric, header.cell)
        write_json({**data, "log": str(path)})
    elif form in ("csv", "md"):
        say(text[0])
        write_table(COLUMNS, list(_rows(done.result, done.history)), form)
        write_notes(report.unchecked(done.trace), form)
    else:
        for line in text:
            click.echo(printable(line))


def _rows(result: BisectResult, history: History) -> Iterator[dict[str, Any]]:
    for culprit in (report.culprit_data(each, history) for each in result.culprits):
        for commit in culprit["commits"]:
            yield {**culprit, **commit, "note": culprit["note"] or ""}
