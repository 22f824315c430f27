"""`groupbench gate`: judge a run and return the verdict as an exit code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.tracker.cli.declared import command, flag, option
from groupbench.tracker.cli.here import program_of, this_project, traffic_of, without_collections
from groupbench.tracker.cli.options import min_effect_option, reading, writing
from groupbench.tracker.cli.output import (
    APART,
    CELL,
    Column,
    Format,
    output_formats,
    plain,
    say,
    write_json,
    write_table,
    write_with_details,
)
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.outputs import FORMATS, OutputTarget, parse, write
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import printable
from groupbench.tracker.tools import git
from groupbench.tracker.tools.parameters import Number

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from groupbench.tracker.judge.verdicts import Gate, Judged
    from groupbench.tracker.outputs.result import GateResult
    from groupbench.tracker.query.traffic import Traffic

LONGEST_NOTE = 300
"""Most characters of a line, since a compiler's message may be megabytes. JSON, CSV and `--why` have all of it."""


REPROS = 3
"""Most commands, printed below the table, that measure a row again. JSON and CSV have one for each row."""


def without_end(text: str) -> str:
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 2] + " …"


COLUMNS = (
    *plain(("verdict", "metric")),
    *(replace(column, varies=column.key in ("mode", "dtype")) for column in CELL),
    *APART,
    *plain(("was", "now", "change"), right=True),
)
DETAILS = Column("details", "details", without_end)


@command()
def gate(
    context: click.Context,
    run_id: str | None = option(
        "--run", metavar="ID", help="Judge the run whose id starts with ID. Default: the newest run."
    ),
    min_effect: float | None = min_effect_option,
    strict: bool = flag(
        "--strict",
        help="Fail on acknowledged regressions (exit code 1) and on series too new or too noisy to judge "
        "(exit code 3).",
    ),
    window: int = option(
        "--window",
        type=Number(3),
        default=100,
        help="Judge a series by at most this many earlier results.",
    ),
    why: str | None = option(
        "--why",
        metavar="SERIES",
        help="Print the evidence about a series and the rule that decided: its number in `list series`, or words "
        "of it.",
    ),
    update: bool = flag("--update", help="Open incidents for new regressions and close fixed ones."),
    outputs: tuple[str, ...] = option(
        "-o",
        "--output",
        multiple=True,
        metavar="FORMAT=FILE",
        help="Also write the verdict for CI; may be repeated: "
        f"{', '.join(name + form.target for name, form in FORMATS.items())}.",
    ),
    form: Format = output_formats,
) -> None:
    """Judge the newest run; the exit code is the verdict.

    The first line is the verdict, with a count of each kind. The table lists only changed and unjudged series,
    the most severe first. A change is a suspect if history alone cannot decide it: `groupbench confirm` decides
    it by measuring both commits alternately. Acknowledged regressions are listed, but fail only under --strict. Later
    runs are judged by accepted levels.

    With -o, the verdict is also written for CI. If one output fails, the others are still written.

    \b
    Exit codes:
    0  ok: nothing changed, something improved, or every regression is acknowledged
    1  latency, accuracy or repeatability regressed, or a result is wrong
    2  usage error, or an output failed
    3  incomplete: a suspect or unresolved series, a failed or missing cell, or nothing measured
    4  a series changed on a new machine
    """
    without_collections(context)
    from groupbench.tracker.judge import gate as gates
    from groupbench.tracker.query.resolve import find_run

    targets, traffic = _targets(outputs), traffic_of(context)
    updated = None
    with (writing if update else reading)(context.obj) as session:
        run = find_run(session, run_id)
        judged = gates.judge_run(
            session,
            run,
            window=window,
            min_effect=min_effect,
            strict=strict,
            first_parents=git.first_parents,
            between=git.between,
        )
        if update:
            from groupbench.tracker.judge import incident_moves, owners

            project = this_project(context)
            owner = owners.owner_in(project.folder, project.settings.owner)
            updated = incident_moves.update(session, judged, owner=owner)
        result = _result(session, judged, strict, traffic) if targets else None
    if why is not None:
        _explain(judged, why)
    else:
        _write(judged, form, program_of(context))
    if updated is not None:
        say(updated.text)
    failures = write(result, targets) if result else []
    for message in [f"groupbench: {failure}" for failure in failures] or judged.notes:
        say(message)
    context.exit(ExitCode.USAGE if failures else judged.exit_code)


def _explain(judged: Gate, why: str) -> None:
    """Print the evidence about some series, and the rule of the table that decided each row.

    Raises UsageError if no series of the night has the number or the words.
    """
    from groupbench.tracker.judge.rules import RULES

    words = why.lower().split()
    if not words:
        raise click.UsageError("--why needs the number of a series or words of it; `groupbench list series`")
    every = [*judged.rows, *judged.asked]
    rows = [row for row in every if why == str(row.series.pk)]
    rows = rows or [row for row in every if all(word in str(row.series).lower() for word in words)]
    if not rows:
        raise click.UsageError(f"no series of the run has the number or the words {why!r}; `groupbench list series`")
    for row in rows:
        shown = row.shown
        levels = f", {shown.before_text} → {shown.now_text}, {shown.change_text}" if shown.change_text else ""
        click.echo(printable(f"{row.series}: {row.verdict}" + (f" {row.what}" if row.what else "") + levels))
        if row.details:
            click.echo(printable(f"  {row.details}"))
        for line in row.evidence.lines:
            click.echo(printable(f"  {line}"))
        number, rule = next(each for each in enumerate(RULES, 1) if each[1].name == row.rule)
        click.echo(printable(f"  rule {number} of {len(RULES)}, the first that applies, {rule.name}: {rule.meaning}"))


def _targets(outputs: tuple[str, ...]) -> list[OutputTarget]:
    """Return the parsed `-o` options, before anything is judged. Raises UsageError, OutputError."""
    targets = [parse(text) for text in outputs]
    files = [Path(target.place).absolute() for target in targets]
    for file in files:
        if files.count(file) > 1:
            raise click.UsageError(f"two outputs name the same file: {file}")
    return targets


def _result(session: Session, judged: Gate, strict: bool, traffic: Traffic) -> GateResult:
    from groupbench.tracker.outputs import result

    return result.gather(session, judged, strict=strict, place=result.ci_place(os.environ), traffic=traffic)


def _write(judged: Gate, form: Format, program: list[str]) -> None:
    from groupbench.tracker.judge.verdicts import Judged

    if form == "json":
        from groupbench.tracker.outputs.verdict import verdict

        write_json(verdict(judged))
    elif form == "csv":
        say(judged.summary)
        write_table(plain(Judged.columns()), [row.flat() for row in judged.notable], form)
    else:
        _write_rows(judged, form, program)


def _write_rows(judged: Gate, form: Format, program: list[str]) -> None:
    """Print the summary, the rows as a table, and commands to measure rows again or find their commits."""
    click.echo(printable(judged.summary))
    alike, rest = judged.folded
    for line in alike:
        click.echo(printable(without_end(line)))
    rows = [row.flat() | cells(row) for row in rest]
    if rows:
        click.echo()
    if form == "md" and rows:
        write_table([*COLUMNS, DETAILS], rows, form)
    elif rows:
        write_with_details(COLUMNS, rows, [row["details"] for row in rows])
    failing = (row for row in rest if row.verdict.exit is not ExitCode.OK and not row.acknowledged)
    commands = [f"reproduce: {row.repro}" for row in failing if row.repro]
    for line in commands[:REPROS] + _searches(rest, program)[:REPROS]:
        click.echo(printable(line))


def _searches(rows: Iterable[Judged], program: list[str]) -> list[str]:
    """Return the command to find the commit for each range with a regression.

    Ranges whose ends git does not know here are left out, and those in which a search has named a commit.
    """
    commands: dict[tuple[object, ...], str] = {}
    searched: set[tuple[object, ...]] = set()
    for row in rows:
        span, metric = row.span, repro.SEARCH_OF.get(row.what or "")
        if not row.verdict.fails or metric is None or row.point is None or span is None or span.base is None:
            continue
        if (span.number or 0) < 2 or row.series.host not in repro.HOSTS:
            continue
        ends = span.base.commit, span.head.commit
        change = (*ends, row.series.operator, row.series.backend, metric)
        if span.named:
            searched.add(change)
        environment = row.point.environment.facts
        line = f"one of {span.number} commits: {repro.search(program, row.series.pk, *ends, metric, environment)}"
        commands.setdefault(change, line)
    by_ends = {change[:2]: line for change, line in reversed(commands.items()) if change not in searched}
    return list(reversed(by_ends.values()))


def cells(row: Judged) -> dict[str, str]:
    """Return the table cells that are missing in the JSON; `latency` goes without saying."""
    shown = row.shown
    metric = "" if row.what in ("latency", row.verdict) else row.what or ""
    return {
        "metric": metric, "was": shown.before_text, "now": shown.now_text, "change": shown.change_text,
        "details": row.details,
    }  # fmt: skip
