"""`groupbench confirm`: an A/B of both commits for what history alone cannot decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.tracker.cli.here import recipe_of, this_project
from groupbench.tracker.cli.output import say
from groupbench.tracker.durations import Duration
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import printable, signed_percent

if TYPE_CHECKING:
    from groupbench.tracker.judge.verdicts import Judged
    from groupbench.tracker.store.comparisons import Compared


@click.command()
@click.argument("run_id", required=False, metavar="[RUN]")
@click.option("--repo", type=click.Path(path_type=Path), metavar="PATH",
              help="A clone that holds both commits. Default: that of groupbench.toml, or this folder's.")  # fmt: skip
@click.option("--budget", type=Duration("m", above=True), default="30m", show_default=True,
              help="What is not measured by then is left out, and listed. A plain number is minutes.")  # fmt: skip
@click.option("--setup", metavar="COMMAND", help="Run in each tree before it is measured, as to build an extension.")
@click.option("--base-python", type=click.Path(path_type=Path), metavar="FILE",
              help="Python that measures the earlier commits, where it is not this one.")  # fmt: skip
@click.option(
    "--plugin", "plugins", multiple=True, metavar="MODULE.NAME", help="Further backends, as `tritonbench` has it."
)
@click.option("--install", is_flag=True,
              help="Install the packages of an old toolchain that no interpreter has, and keep them.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also what was measured before without a decision.")
@click.pass_context
def confirm(
    context: click.Context,
    run_id: str | None,
    repo: Path | None,
    budget: float,
    setup: str | None,
    base_python: Path | None,
    plugins: tuple[str, ...],
    install: bool,
    again: bool,
) -> None:
    """Measure the suspects of a run (the newest) again: the commit before and the run's, in turns on this machine.

    Each comparison is stored as it comes, and the gate judges by it: different is a regression or an improvement, same
    is ok. Series that are incomparable only because the night landed on another card of the model are measured as
    well. Commits are checked out from --repo beside it, which stays as it is.

    A change that came with another torch, Triton or Helion is measured in both toolchains, where an interpreter has the
    packages of the old one: this one, --base-python, one of [toolchains] in groupbench.toml, or one that --install
    makes.

    Exit codes: 0 all decided or nothing to do, 2 usage, 3 something is left undecided.
    """
    from groupbench.tracker.ab import confirm as confirming
    from groupbench.tracker.ab.toolchains import Interpreters
    from groupbench.tracker.store.engine import open_store

    project = this_project(context)

    def tell(row: Judged, compared: Compared) -> None:
        percent = [
            None if effect is None else signed_percent(confirming.relative(effect))
            for effect in (compared.effect, compared.low, compared.high)
        ]
        change = "" if percent[0] is None else f" {percent[0]} ({percent[1] or '?'} .. {percent[2] or '?'})"
        why = f": {compared.message}" if compared.message else ""
        commits = f"{compared.base[:10]}..{compared.head[:10]}"
        click.echo(printable(f"{compared.verdict}{change} {commits} {row.series}{why}"))

    others = [] if base_python is None else [base_python]
    named = project.settings.toolchains
    interpreters = Interpreters(named, project.folder, others, install=install, say=say)
    with open_store(context.obj, create=False) as store:
        done = confirming.confirm(
            store,
            run_id,
            repo=repo or project.folder,
            budget_s=budget,
            recipe=recipe_of(context, setup),
            base_python=base_python,
            interpreters=interpreters,
            plugins=project.plugins(plugins),
            again=again,
            tell=tell,
            say=say,
        )
    click.echo(printable(done.text))
    context.exit(ExitCode.OK if done.decided else ExitCode.INCOMPLETE)
