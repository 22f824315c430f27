"""`groupbench confirm`: decide suspects, which history alone cannot decide, by an A/B of both commits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.ab.toolchains import Interpreters, interpreter_of
from groupbench.tracker.cli.declared import argument, command, flag, option, options
from groupbench.tracker.cli.here import is_step_of_another, recipe_of, this_project, wait_option
from groupbench.tracker.cli.options import plugins_option, setup_option, toolchain_option
from groupbench.tracker.cli.output import Format, output_format, say, write_json
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.text.unchecked import unchecked_lines
from groupbench.tracker.text.wording import counted, printable, signed_change, signed_ends
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration

if TYPE_CHECKING:
    from groupbench.tracker.ab.confirm import Confirmed
    from groupbench.tracker.judge.verdicts import Judged
    from groupbench.tracker.store.comparisons import Compared


@dataclass(frozen=True)
class ConfirmOptions:
    """Options for the suspects, their commits and interpreters."""

    repo: Path | None = option(
        "--repo",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Repository with both commits. Default: the one of groupbench.toml, or this folder's.",
    )
    budget: float = option(
        "--budget",
        type=Duration(above=True),
        default="30m",
        help="Measure nothing after this time, and list unmeasured suspects.",
    )
    setup: str | None = setup_option
    base_python: Path | None = option(
        "--base-python",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Measure the earlier commits with this interpreter. Default: the one that measures the run's commit.",
    )
    toolchain: str | None = toolchain_option
    plugins: tuple[str, ...] = plugins_option
    install: bool = flag(
        "--install", help="If no interpreter has an old toolchain's packages, install them, and keep them for later."
    )
    again: bool = flag("--again", help="Also measure suspects whose earlier A/B was inconclusive.")


@command()
@wait_option()
def confirm(
    context: click.Context,
    run_id: str | None = argument(required=False, metavar="[RUN]"),
    how: ConfirmOptions = options(ConfirmOptions),
    form: Format = output_format("table", "json"),
) -> None:
    """Measure the suspects of RUN again: alternate between the run's commit and the one before the change.

    RUN is the start of a run's id. Default: the newest run.

    Each comparison is stored at once, and the gate uses it: "different" makes a suspect a regression or an improvement,
    and "same" makes it ok. Series whose earlier results come from another GPU of the same model are measured too. Both
    commits are checked out into temporary folders; your working tree does not change.

    The budget goes to known causes first: `bisect` finds the commit of each with several possible commits, once for
    each incident. Then the suspects follow by cause, the least likely to be noise first.

    If torch, Triton or Helion changed as well, both toolchains are measured. The old one needs an interpreter with
    the old packages: this one, --base-python, one of [toolchains] in groupbench.toml, or a new one from --install.

    Exit codes: 0 every suspect is decided or there is nothing to confirm, 2 usage error, 3 a suspect is undecided
    or a comparison failed, 75 another command uses this device.
    """
    from groupbench.tracker.ab import confirm as confirming
    from groupbench.tracker.bisect.causes import Searches
    from groupbench.tracker.store.engine import open_store

    project = this_project(context)
    python = sys.executable if how.toolchain is None else interpreter_of(how.toolchain, project, say)
    others = [Path(python), *([] if how.base_python is None else [how.base_python])]
    measuring = confirming.Measuring(
        how.repo or project.folder,
        recipe_of(context, how.setup),
        python,
        how.base_python,
        Interpreters(project.settings.toolchains, project.folder, others, install=how.install, say=say),
        project.plugins(how.plugins),
    )
    compared: list[Compared] = []

    def report(row: Judged, comparison: Compared) -> None:
        compared.append(comparison)
        _report(form, row, comparison)

    with (
        signals.keeping(lambda: f"{counted(len(compared), 'comparison')} stored; repeat the command for the others"),
        open_store(context.obj, create=False) as store,
    ):
        search = Searches(store, context.obj, measuring, say, time.monotonic() + how.budget)
        done = confirming.confirm(
            store, measuring, run=run_id, budget_s=how.budget, again=how.again, repeat=True,
            report=report, say=say, search=search,
        )  # fmt: skip
    lines = [done.text, *(searched.lines[0] for searched in search.done)]
    if form == "json":
        write_json({"summary": lines[0], "decided": done.decided, "compared": _rows(done), "searches": lines[1:]})
    else:
        click.echo("\n".join(map(printable, lines)))
    if (done.compared or search.done) and not is_step_of_another(context):  # `night` runs the gate next
        say("the gate judges by these comparisons: run `groupbench gate`")
    context.exit(ExitCode.OK if done.decided else ExitCode.INCOMPLETE)


def _rows(done: Confirmed) -> list[dict[str, Any]]:
    """Return the comparisons for JSON."""
    return [
        {"series": row.series.pk, **{name: getattr(row.series, name) for name in SHOWN}, "metric": row.what}
        | {name: getattr(one, name) for name in ("verdict", "base", "head", "base_ms", "head_ms", "pairs", "message")}
        | dict(zip(("change", "change_low", "change_high"), _changes(one), strict=True))
        for row, one in done.compared
    ]


def _changes(compared: Compared) -> tuple[float | None, ...]:
    return tuple(relative(value) for value in (compared.effect, compared.low, compared.high))


def _report(form: Format, row: Judged, compared: Compared) -> None:
    effect, low, high = _changes(compared)
    ends = f" ({signed_ends(low, high, ' .. ')})" if low is not None and high is not None else ""
    change = f" {signed_change(effect)}{ends}" if effect is not None else ""
    reason = "; ".join([*filter(None, [compared.message]), *unchecked_lines(compared.unchecked)])
    commits = f"{compared.base[:10]}..{compared.head[:10]}"
    line = f"{compared.verdict}{change} {commits} {row.series}{reason and f': {reason}'}"
    click.echo(printable(line), err=form == "json")
