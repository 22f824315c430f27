"""The `groupbench` command. Commands are loaded when they are called: the help of all needs none of them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from groupbench.tracker import shell
from groupbench.tracker.errors import TrackerError

COMMANDS = {
    "ingest": ("ingest:ingest", "Store files of records."),
    "history": ("history:history", "How each series went from commit to commit."),
    "compare": ("compare:compare", "Two commits, runs or files side by side."),
    "league": ("league:league", "Which backend is fastest, on what, and by how much."),
    "night": ("night:night", "Measure what groupbench.toml holds, store it, judge it, and report."),
    "backfill": ("backfill:backfill", "Measure past commits, each in a checkout of its own."),
    "init": ("init:init", "Write groupbench.toml, a benchmark and a workflow for this repository."),
    "pull-request": ("pull_request:pull_request", "Compare a change with its merge base, in turns on one device."),
    "gate": ("gate:gate", "Judge the newest run; the exit code is the verdict."),
    "post": ("post:post", "Comment on a pull request, edited in place."),
    "gains": ("gains:gains", "List problems by how much time is left to gain, by the speed of light."),
    "explain": ("explain:explain", "Say what happened to the kernels between two commits, runs or backends."),
    "ab": ("ab:ab", "Measure BASE and HEAD in turns on one device, until it is clear whether they differ."),
    "evaluate": ("evaluate:evaluate", "Say whether a candidate is right, honest and faster."),
    "mcp": ("mcp:mcp", "Serve history, verdicts and evaluations to programs that write kernels (MCP)."),
    "calibrate": ("calibrate:calibrate", "What this machine can tell apart: like sides compared, by latency."),
    "bisect": ("bisect:bisect", "Name the commit that made a kernel slower, or less accurate."),
    "confirm": ("confirm:confirm", "Measure suspects again, both commits in turns."),
    "alerts": ("alerts:alerts", "List the changes for the worse that are open."),
    "ack": ("alerts:ack", "Acknowledge alerts: known, and worked on."),
    "expect": ("alerts:expect", "Accept the new level of alerts."),
    "accept-transition": ("alerts:accept_transition", "Accept the levels since another toolchain or machine."),
    "pin": ("pin:pin", "Compare every later run with a commit, besides its history."),
    "pins": ("pin:pins", "List the pinned commits."),
    "unpin": ("pin:unpin", "Stop comparing runs with a pinned commit."),
    "close": ("alerts:close", "Close alerts as fixed or invalid."),
    "doctor": ("doctor:doctor", "What this machine can measure, and what would make it better."),
    "selftest": ("selftest:selftest", "Check that backends that cheat are caught on this machine."),
    "tune": ("tune:tune", "Find the fastest configs of the kernels on this GPU, for this user."),
    "report": ("report:report", "Write one HTML page that works offline."),
    "serve": ("serve:serve", "Show the same in a browser, live from the database."),
    "runs": ("runs:runs", "List the newest runs."),
    "commits": ("commits:commits", "List the commits that were measured."),
    "series": ("series:series", "List the series."),
    "envs": ("envs:envs", "List the environments, and what differs between them."),
    "show": ("show:show", "All that is known of a point or a run."),
    "sql": ("sql:sql", "One SQL statement of your own, which can only read."),
    "import": ("import_:import_", "Store files that other benchmarks wrote."),
    "export": ("export:export", "Write all that is stored: records, CSV, Parquet, PyTorch's v3."),
    "prune": ("prune:prune", "Let old points go; a dry run unless told otherwise."),
    "backup": ("backup:backup", "Copy the database while it is in use."),
    "verify": ("verify:verify", "Check the file, the references and every hash."),
    "repair": ("repair:repair", "Save what can be read of a damaged database into a new one."),
    "merge": ("merge:merge", "Add another database to this one."),
}
"""name: (module:attribute below this package, one line of help)"""


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and says each error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            raise click.UsageError(f"no command {args[0]!r}; known: {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an exception that damage or the driver explains is raised as that explanation."""
        try:
            return super().invoke(ctx)
        except (TrackerError, click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # `shell.run` reports these
        except Exception as error:
            from groupbench.tracker.cli.failures import explained

            explanation = explained(error, ctx.obj)
            if explanation is None:
                raise
            raise explanation from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        name = prog_name or "groupbench"
        self._main_shell_completion(extra, name, complete_var)
        shell.run("groupbench", self, TrackerError, args, name, **extra)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--db",
    metavar="FILE|URL",
    envvar="GROUPBENCH_DB",
    show_default="that of groupbench.toml, or groupbench.db",
    show_envvar=True,
    help="Database: a SQLite file, or an SQLAlchemy URL.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    show_default="groupbench.toml, here or above",
    help="What is measured in this repository, and how.",
)
@click.version_option(package_name="groupbench")
@click.pass_context
def main(context: click.Context, db: str | None, config: Path | None) -> None:
    """Latency and accuracy of kernels, per commit.

    Exit codes: 0 ok, 1 a regression or a wrong result, 2 usage, 3 incomplete or not written, 4 not comparable.
    """
    here = importlib.import_module(f"{__name__}.here")  # the help of all needs none of it
    found = here.find_project(context, config)
    context.obj = found.database if db is None else db
