"""`groupbench pull-request`: compare a change with its merge base, in everything that groupbench.toml measures."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.ab import COLUMNS, announced, as_row, left_out, progress_line
from groupbench.tracker.cli.here import recipe_of
from groupbench.tracker.cli.night import Places, here, interrupt
from groupbench.tracker.cli.options import WAIT, cell_budget_option, min_effect_same_option, plan_device_option
from groupbench.tracker.cli.output import say, write_table
from groupbench.tracker.completion import CommitName
from groupbench.tracker.durations import Duration
from groupbench.tracker.exits import ExitCode

if TYPE_CHECKING:
    from groupbench.tracker.ab.bench import AbCell, AbResult, Bench
    from groupbench.tracker.project import Project

CONCLUSIONS = {ExitCode.OK: "nothing got worse", ExitCode.FAILED: "something got worse"}
KEPT = ("verdict", "conclusion", "operator", "backend", "shape", "dtype", "base_ms", "head_ms", "change", "change_low",
        "change_high", "message")  # fmt: skip


@click.command("pull-request")
@click.argument("base", type=CommitName(words=False))
@click.argument("head", default="HEAD", type=CommitName(words=False))
@plan_device_option
@cell_budget_option
@min_effect_same_option
@click.option("--wait", type=Duration(most=6e5, was_minutes=True), default="60m", show_default=True, help=WAIT)
@click.pass_context
def pull_request(
    context: click.Context,
    base: str,
    head: str,
    device: str | None,
    budget: float,
    min_effect: float | None,
    wait: float,
) -> None:
    """Compare HEAD with the merge base of HEAD and BASE, in everything that groupbench.toml measures.

    Measures both commits alternately on one device. It needs neither a history nor a database. Cells whose compiled
    kernels did not change are not timed. Writes artifacts/comment.md for `groupbench post`, and appends each comparison
    to artifacts/comparisons.jsonl.

    \b
    Exit codes:
    0  nothing got worse
    1  a cell is slower, less accurate or wrong
    2  usage error
    3  a cell failed or was not resolved within its budget
    """
    from groupbench.tracker.ab.bench import Bench, exit_code, open_sides
    from groupbench.tracker.night.measuring import ensure_alone

    project = here(context)
    device = device or project.settings.device
    first, last = _ends(project.folder, base, head)
    ensure_alone(device, wait, sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupt)  # so that worktrees are removed
    places = Places.of(context, project)
    os.chdir(project.folder)
    places.clear()
    recipe = recipe_of(context, None)
    with (
        open_sides(first, last, repo=project.folder, recipe=recipe) as sides,
        Bench(*sides, budget_s=budget, min_effect=min_effect, only_changed=True, progress=progress_line(),
              records=places.artifacts / "comparisons.jsonl") as bench,
    ):  # fmt: skip
        cells = _cells(bench, project, device)
        say(announced(len(cells), str(bench.device), budget))
        for cell in cells:
            bench.compare(cell)
    code = exit_code(bench.results)
    text = _comment(bench.results, code, first, last)
    (places.artifacts / "comment.md").write_text(text)
    click.echo(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a") as file:
            file.write(text)
    context.exit(code)


def _ends(folder: Path, base: str, head: str) -> tuple[str, str]:
    """Return the hashes of the merge base and the head. Raises WorktreeError, UsageError."""
    from groupbench.tracker import git
    from groupbench.tracker.ab.worktree import resolve

    git.require_repository(folder)
    first, last = resolve(folder, base), resolve(folder, head)
    common = (git.ask(folder, "merge-base", first, last) or "").strip()
    if not common:
        raise click.UsageError(f"{base} and {last[:10]} have no common commit here; fetch the full history")
    if common == last:
        raise click.UsageError(
            f"{base} already contains {last[:10]}: nothing to compare. Give an earlier commit, such as HEAD~1; "
            "for uncommitted changes use `groupbench ab HEAD . --operator NAME`"
        )
    return common, last


def _cells(bench: Bench, project: Project, device: str) -> list[AbCell]:
    """Return every cell of groupbench.toml that both commits have, without duplicates."""
    unique: dict[AbCell, None] = {}
    running_on = bench.start(device)
    for entry in project.settings.measure:
        if entry.device not in (None, running_on):
            continue
        selection: dict[str, Any] = {
            "operator": entry.operator,
            "backends": entry.only,
            "shapes": entry.shapes,
            "suites": entry.suites,
            "dtypes": entry.dtypes,
            "mode": entry.mode,
            "plugins": project.plugins(),
        }
        cells, notes = bench.cells(running_on, **selection)
        for line in left_out(notes):
            say(line)
        unique |= dict.fromkeys(cell for cell in cells if cell.backend not in entry.skip)
    return list(unique)


def _comment(results: list[AbResult], code: int, base: str, head: str) -> str:
    """Return the comment as Markdown: the verdict, then a row for each cell, changes first."""
    conclusion = CONCLUSIONS.get(ExitCode(code), "not everything could be decided")
    shown = sorted(results, key=lambda result: (result.verdict == "same", -(result.change or 0.0)))
    table = io.StringIO()
    with redirect_stdout(table):
        write_table([column for column in COLUMNS if column.key in KEPT], [as_row(each) for each in shown], "md")
    first = f"**groupbench: {conclusion}.** `{head[:10]}` compared with its merge base `{base[:10]}` on one device."
    return f"{first}\n\n{table.getvalue()}"
