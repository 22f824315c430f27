"""`groupbench bisect`: which commit, or which release of a package, made a kernel slower, or less accurate."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.here import recipe_of, this_project
from groupbench.tracker.cli.options import (
    BACKEND,
    DTYPE,
    OPERATOR,
    SHAPE,
    Percent,
    min_effect_option,
    reading,
)
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_table
from groupbench.tracker.durations import Duration
from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from groupbench.tracker.bisect.hunt import History
    from groupbench.tracker.bisect.log import Header
    from groupbench.tracker.bisect.search import Finding, Question

COLUMNS = (
    Column("commit", "hash"),
    Column("subject", "subject", wraps=True),
    Column("author", "author"),
    Column("before", "before", lambda v: "" if v is None else f"{v:#.4g}", right=True),
    Column("after", "after", lambda v: "" if v is None else f"{v:#.4g}", right=True),
    Column("change", "change", lambda v: "" if v is None else f"{100 * v:+.2f}%", right=True),
    Column("low", "low", lambda v: "" if v is None else f"{100 * v:+.2f}%", right=True),
    Column("high", "high", lambda v: "" if v is None else f"{100 * v:+.2f}%", right=True),
    Column("certainty", "confidence", lambda v: "" if v is None else f"{v:.4f}", right=True),
    Column("note", "note", wraps=True),
)
_CELL = ("operator", "backend", "shape", "dtype", "mode", "seed")


@click.command()
@click.argument("good", required=False)
@click.argument("bad", required=False)
@click.option("--series", metavar="ID", help="What to measure: a number that `series` lists, or a point's id.")
@click.option(*OPERATOR, metavar="NAME", help="What to measure, where no --series says it.")
@click.option(*BACKEND, metavar="NAME", help="Which backend.")
@click.option(*SHAPE, metavar="TEXT", help="Which shape, as `series` shows it or `tritonbench --shapes` takes it.")
@click.option(*DTYPE, metavar="NAME", help="bf16, fp16, fp32. Default: bf16 on a GPU, fp16 on a CPU.")
@click.option("--mode", metavar="NAME", help="fwd, bwd or fwd_bwd. Default: fwd.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of the inputs. Default: 0.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE.NAME", help="Further backends; may be repeated.")
@click.option("--metric", type=click.Choice(["latency", "accuracy"]), default="latency", show_default=True)
@click.option(
    "--direction",
    type=click.Choice(["worse", "better", "either"]),
    default="worse",
    show_default=True,
    help="Look for a regression, an improvement, or whichever there is.",
)
@click.option("--all", "all_", is_flag=True, help="Go on with what the first commit does not explain.")
@click.option(
    "--repo",
    type=click.Path(path_type=Path),
    help="The repository. Default: that of groupbench.toml, or this folder's.",
)
@click.option(
    "--paths",
    multiple=True,
    metavar="PATH",
    help="Only commits that change these can matter; may be repeated. Default: kernels and operators in "
    "groupbench's own repository, else all.",
)
@click.option("--setup", metavar="COMMAND", help="Run in each checkout before it is measured: a build, say.")
@click.option("--python", metavar="EXE", help="Python that measures. Default: this one.")
@min_effect_option
@click.option("--budget", type=Duration(least=1, most=86_400), help="Most for one comparison.")
@click.option("--only-changed", is_flag=True, help="Equal compiled kernels are the same without timing.")
@click.option(
    "--confidence", type=Percent(), default="95", show_default=True, metavar="PCT", help="How sure to be of a name."
)
@click.option("--package", metavar="NAME==FIRST..LAST",
              help="Search the releases of a package, in the place of commits: triton==3.6.0..3.8.0.")  # fmt: skip
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Where comparisons are kept to resume from.")
@click.option("--resume", is_flag=True, help="Go on with a search that was interrupted: the newest, or that of --log.")
@output_formats
@click.pass_context
def bisect(
    context: click.Context,
    good: str | None,
    bad: str | None,
    form: Format | None,
    log_file: Path | None,
    resume: bool,
    repo: Path | None,
    **given: Any,
) -> None:
    """Name the commit between GOOD and BAD that made a kernel slower, or less accurate.

    \b
    groupbench bisect v1.2 HEAD --series 12
    groupbench bisect HEAD~40 HEAD --operator grouped_gemm --backend triton_pointer --shape 8,1024,512,256
    groupbench bisect --package triton==3.6.0..3.8.0 --series 12
    groupbench bisect --resume

    Every step is an A/B of a commit against GOOD, both in turns on this machine, until it says the same or
    different. Both ends are checked first, wrong answers are counted on, and the commit found is measured once more
    against its parent before it is named. Commits that fail are skipped; merges are descended into.

    With --package, the code stays as it is. Each release that the package index has is installed into an environment
    that is kept, in front of this interpreter's packages.

    \b
    0  nothing to be found: the ends measure the same, or BAD is better; or the improvement asked for
    1  a regression is confirmed, and its commit named; or BAD's result is wrong or less accurate
    2  usage
    3  not decided: unknown, an end fails, or only narrowed to several commits
    """
    from groupbench.tracker.bisect import drive, report
    from groupbench.tracker.bisect import history as bisect_git
    from groupbench.tracker.bisect import log as bisect_log
    from groupbench.tracker.bisect.hunt import hunt
    from groupbench.tracker.bisect.search import Trace

    given["plugins"] = this_project(context).plugins(given["plugins"])
    repository = bisect_git.folder_of(repo or this_project(context).folder)
    folder = bisect_git.log_folder(repository)
    if given["package"] and (good is not None or given["python"]):
        raise click.UsageError("--package searches releases: it goes without GOOD, BAD and --python", context)
    if resume and good is None and not given["package"]:
        path = log_file or bisect_log.newest(folder)
        header = bisect_log.read_header(path)
    else:
        if not given["package"] and (good is None or bad is None):
            raise click.UsageError("give GOOD and BAD, --package, or --resume", context)
        ends = ("HEAD", "HEAD") if good is None or bad is None else (good, bad)
        header = _header(context, repository, *ends, given)
        path = log_file or folder / f"bisect-{header.identity}.jsonl"
    if header.package is None:
        history = bisect_git.read_history(repository, header.good, header.bad, header.paths)
    else:
        history = bisect_git.history_of_releases(header.package, header.releases)
    trace = Trace()
    said = iter(range(1, 1_000_000))

    def tell(question: Question, finding: Finding) -> None:
        say(report.step_line(question, finding, history, header.metric, next(said)))

    log = bisect_log.Log(path, header, resume=resume, replace=log_file is None)
    with drive.open_comparator(repository, header) as comparator:
        say(_plan(history, header, path))
        hunting = hunt(history, drive.settings_of(header), trace)
        try:
            answer = drive.drive(hunting, comparator, log, tell)
        except KeyboardInterrupt:
            say("interrupted; `groupbench bisect --resume` goes on")
            raise
    _write(form, header, answer, history, trace, path)
    context.exit(report.exit_code(answer))


def _header(context: click.Context, repository: Path, good: str, bad: str, given: dict[str, Any]) -> Header:
    """What is to be searched, with every default filled in: the log says it, and refuses anything else."""
    from groupbench.tracker.bisect import history as bisect_git
    from groupbench.tracker.bisect.log import Header

    cell = _cell_of_series(context, given) if given["series"] else _cell_of_options(context, given)
    first, last = bisect_git.resolve(repository, good), bisect_git.resolve(repository, bad)
    paths = given["paths"] or bisect_git.relevant_paths(repository, last, given["plugins"])
    bench = {name: given[name] for name in ("min_effect", "budget", "python", "only_changed") if given[name]}
    bench |= {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(recipe_of(context, given["setup"])).items()
        if value
    }
    package, releases = _releases(context, given["package"])
    return Header(
        repository=str(repository),
        good=first,
        bad=last,
        cell={**cell, "device": given["device"], "plugins": list(given["plugins"])},
        metric=given["metric"],
        direction=given["direction"],
        all=given["all_"],
        confidence=given["confidence"],
        paths=tuple(paths),
        package=package,
        releases=releases,
        bench=bench,
    )


def _releases(context: click.Context, text: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return (package, its releases, the oldest first) of --package. Raises ToolchainError."""
    from groupbench.tracker.ab.toolchains import releases

    if text is None:
        return None, ()
    said = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s=]+?)\.\.([^\s=]+)", text)
    if said is None:
        raise click.UsageError(f"--package {text!r}: give NAME==FIRST..LAST, as triton==3.6.0..3.8.0", context)
    package, first, last = said.groups()
    return package, tuple(releases(package, first, last))


def _cell_of_series(context: click.Context, given: dict[str, Any]) -> dict[str, Any]:
    """The cell of a stored series: `12` as `series` lists it, or `12.3`, a point of it as `history --ids` does."""
    from groupbench.tracker.errors import QueryError
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.series import find_series

    also = [name for name in _CELL if given[name] is not None]
    if also:
        raise click.UsageError(f"--series says what is measured; it does not go with --{also[0]}", context)
    number = given["series"].partition(".")[0]
    with reading(context.obj) as session:
        found = [row for row in find_series(session, Filter()) if str(row.pk) == number]
    if not found:
        raise QueryError(f"no series {given['series']!r}; `groupbench series` lists them by number")
    return {name: getattr(found[0], name) for name in _CELL}


def _cell_of_options(context: click.Context, given: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("operator", "backend", "shape") if not given[name]]
    if missing:
        raise click.UsageError(f"say what is measured: --series, or --{' and --'.join(missing)}", context)
    cell = {name: given[name] for name in _CELL if given[name] is not None}
    return {"mode": "fwd", "seed": 0, **cell}


def _plan(history: History, header: Header, path: Path) -> str:
    changes = len(history.line(history.base, history.first_parents(history.bad)[1], history.bad).changes)
    change = "changes" if changes == 1 else "change"
    within = f" of which {changes} {change} {', '.join(header.paths) or 'something'}"
    first_parents = len(history.first_parents(history.bad)[1])
    if header.package is not None:
        return f"{counted(len(header.releases), 'release')} of {header.package}; comparisons are kept in {path}"
    return f"{counted(first_parents, 'commit')} on the line of first parents{within}; comparisons are kept in {path}"


def cell_text(cell: dict[str, Any]) -> str:
    return " ".join(str(cell[name]) for name in ("operator", "backend", "mode", "dtype", "shape") if cell.get(name))


def _write(form: Format | None, header: Header, answer: Any, history: History, trace: Any, path: Path) -> None:
    from groupbench.tracker.bisect import report

    text = list(report.lines(answer, history, trace, header.metric, cell_text(header.cell)))
    if form == "json":
        write_json({**report.as_data(answer, history, trace, header.metric, header.cell), "log": str(path)})
    elif form in ("csv", "md"):
        say(text[0])
        rows = [
            {**culprit, **commit, "note": culprit["note"] or ""}
            for culprit in (report.culprit_data(each, history) for each in answer.culprits)
            for commit in culprit["commits"]
        ]
        write_table(COLUMNS, rows, form)
    else:
        for line in text:
            click.echo(line[: len(line) - len(line.lstrip())] + printable(line))
