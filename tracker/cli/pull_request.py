"""`groupbench pull-request`: compare a change with the merge base, in everything measured by groupbench.toml."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.named_sides import open_sides
from groupbench.tracker.ab.result import AbCell, AbResult, AbSettings, exit_code, footnotes
from groupbench.tracker.ab.worktree import resolve
from groupbench.tracker.cli.ab import COLUMNS, announced, as_row, left_out, progress_line, so_far
from groupbench.tracker.cli.declared import argument, command
from groupbench.tracker.cli.here import hold_device, program_of, recipe_of, wait_option
from groupbench.tracker.cli.night import Places, here
from groupbench.tracker.cli.options import cell_budget_option, min_effect_same_option, plan_device_option
from groupbench.tracker.cli.output import say, write_notes, write_table
from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.project import Project
from groupbench.tracker.text import repro
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.tools import git, signals

CONCLUSIONS = {ExitCode.OK: "nothing got worse", ExitCode.FAILED: "something got worse"}
_SHOWN = ("verdict", "conclusion", "operator", "backend", "shape", "dtype", "base_ms", "head_ms", "change",
          "change_low", "change_high", "message")  # fmt: skip


@command("pull-request")
@wait_option("60m")
def pull_request(
    context: click.Context,
    base: str = argument(),
    head: str = argument(default="HEAD"),
    device: str | None = plan_device_option,
    budget: float = cell_budget_option,
    min_effect: float | None = min_effect_same_option,
) -> None:
    """Compare HEAD with the merge base of HEAD and BASE, in everything measured by groupbench.toml.

    Measures both commits alternately on one device. It needs neither a history nor a database. Cells whose compiled
    kernels did not change are not timed. Writes artifacts/comment.md for `groupbench post`, and appends each comparison
    to artifacts/comparisons.jsonl.

    \b
    Exit codes:
    0   nothing got worse
    1   head is slower, less accurate, or wrong where base is right
    2   usage error
    3   a cell failed or was not resolved within the budget
    75  another command uses this device
    """
    project = here(context)
    device = device or project.settings.device
    first, last = _ends(project.folder, base, head)
    hold_device(context, device)
    if head == "HEAD" and git.ask(project.folder, "status", "--porcelain", "--untracked-files=no"):
        say("groupbench: uncommitted changes are left out: the commit of HEAD is compared")
    places = Places.of(context, project)
    os.chdir(project.folder)
    places.clear()
    settings = AbSettings(budget_s=budget, min_effect=min_effect, only_changed=True)
    recipe = recipe_of(context, None)
    comparisons = places.artifacts / "comparisons.jsonl"
    cells: list[AbCell] = []
    results: list[AbResult] = []
    then = "there is no comment, and a repeated run compares all cells"
    with (
        signals.keeping(lambda: f"{so_far(cells, results, comparisons)}; {then}"),
        open_sides(first, last, repo=project.folder, recipe=recipe) as sides,
        Bench(*sides, settings, records=comparisons, progress=progress_line()) as bench,
    ):
        results = bench.results
        cells += _cells(bench, project, device)
        measured_on = str(bench.device)  # None after the end of the bench
        say(announced(len(cells), measured_on, budget))
        for cell in cells:
            bench.compare(cell)
    code = exit_code(results)
    commits = int(git.ask(project.folder, "rev-list", "--count", "--no-merges", f"{first}..{last}") or 0)
    text = _comment(results, code, first, last)
    text += _search(program_of(context), results, commits, first, last, measured_on)
    _publish(text, places.artifacts / "comment.md")
    context.exit(code)


def _publish(text: str, comment: Path) -> None:
    """Write the comment to a file, standard output and GitHub's step summary. Raises OutputError."""
    with whole_file(comment, OutputError) as file:
        file.write(text.encode())
    click.echo(text)
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        from groupbench.tracker.outputs import summary  # imported late, so that other commands start fast

        try:
            summary.append_text(text, Path(path))
        except OutputError as error:  # the comment has the same text
            say(f"groupbench: {error.message}")


def _ends(folder: Path, base: str, head: str) -> tuple[str, str]:
    """Return the merge base's and the head's hash. Raises WorktreeError, UsageError."""
    git.require_repository(folder)
    first, last = (resolve(folder, name, "check the spelling, or fetch it") for name in (base, head))
    common = (git.ask(folder, "merge-base", first, last) or "").strip()
    if not common:
        advice = "run `git fetch --unshallow`" if git.is_shallow(folder) else "compare commits of one history"
        raise click.UsageError(f"{base} and {last[:10]} have no common commit here; {advice}")
    if common == last:
        raise click.UsageError(
            f"{base} already contains {last[:10]}: nothing to compare. Give an earlier commit, such as HEAD~1; "
            "for uncommitted changes use `groupbench ab HEAD . --operator NAME`"
        )
    return common, last


def _cells(bench: Bench, project: Project, device: str) -> list[AbCell]:
    """Return every groupbench.toml cell known to both commits, without duplicates."""
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
    """Return the comment as Markdown: the verdict, a row for each cell, changes first, and footnotes."""
    conclusion = CONCLUSIONS.get(ExitCode(code), "not everything could be decided")
    shown = sorted(results, key=lambda result: (result.verdict == "same", -(result.change or 0.0)))
    table = io.StringIO()
    with redirect_stdout(table):
        write_table([column for column in COLUMNS if column.key in _SHOWN], [as_row(each) for each in shown], "md")
        write_notes(footnotes(results), "md")
    first = f"**groupbench: {conclusion}.** `{head[:10]}` compared with its merge base `{base[:10]}` on one device."
    return f"{first}\n\n{table.getvalue()}"


def _search(program: list[str], results: list[AbResult], commits: int, base: str, head: str, device: str) -> str:
    """Return the command to find the worst cell's commit, as Markdown; nothing if there is only one commit."""
    worse = [result for result in results if result.is_worse]
    if not worse or commits < 2:
        return ""
    worst = max(worse, key=lambda result: (result.direction == "slower", result.change or 0.0))
    metric = "latency" if worst.direction == "slower" else "accuracy"
    command = repro.search_cell(program, worst.cell, base, head, metric, device)
    return f"\nTo find which of the {commits} commits made it worse:\n\n```bash\n{command.replace('`', '')}\n```\n"
