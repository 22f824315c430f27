"""The `groupbench` command. Each command is imported when it is called, so that `--help` stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.text.wording import closest
from groupbench.tracker.tools import shell

SECTIONS = {
    "Measure": {
        "init": ("init:init", "Write groupbench.toml, a benchmark and a CI workflow for this repository."),
        "night": ("night:night", "Measure everything in groupbench.toml, store it, judge it and report."),
        "backfill": ("backfill:backfill", "Measure past commits, each in its own checkout."),
        "pull-request": (
            "pull_request:pull_request",
            "Compare a change with its merge base by measuring both alternately.",
        ),
        "evaluate": ("evaluate:evaluate", "Check whether a candidate is correct, honest and faster."),
        "tune": ("tune:tune", "Find the fastest kernel configs for this GPU and save them for this user."),
        "doctor": ("doctor:doctor", "Check this machine and suggest improvements for measuring on it."),
        "selftest": ("selftest:selftest", "Check that this machine catches backends that cheat."),
        "calibrate": ("calibrate:calibrate", "Measure this machine's noise floor with A/A comparisons."),
    },
    "Judge": {
        "gate": ("gate:gate", "Judge the newest run; the exit code is the verdict."),
        "post": ("post:post", "Post or update a comment on a pull request."),
        "alerts": ("alerts:alerts", "List open alerts."),
        "ack": ("alerts:ack", "Mark alerts as known and being worked on."),
        "expect": ("alerts:expect", "Accept the new level of alerts."),
        "accept-transition": ("alerts:accept_transition", "Accept levels that changed with the toolchain or machine."),
        "close": ("alerts:close", "Close alerts as fixed or invalid."),
        "pin": ("pin:pin", "Compare every later run with a fixed commit too."),
        "pins": ("pin:pins", "List the pinned commits."),
        "unpin": ("pin:unpin", "Stop comparing runs with a pinned commit."),
    },
    "Find the cause": {
        "confirm": ("confirm:confirm", "Measure suspects again: an A/B of both commits."),
        "bisect": ("bisect:bisect", "Find the commit that made a kernel slower or less accurate."),
        "profile": ("profile:profile", "Profile a call on the GPU with ncu or proton, and store the counters."),
        "explain": ("explain:explain", "Explain how the kernels of two commits, runs or backends differ."),
    },
    "Compare": {
        "ab": ("ab:ab", "Measure BASE and HEAD alternately on one device until the result is clear."),
        "compare": ("compare:compare", "Compare two commits, runs or files, series by series."),
        "league": ("league:league", "Rank the backends by problem: which is fastest, and by how much."),
        "gains": ("gains:gains", "List problems by the time that an optimal kernel would save."),
    },
    "Show": {
        "history": ("history:history", "Show how each series changed from commit to commit."),
        "runs": ("runs:runs", "List the runs, newest first."),
        "commits": ("commits:commits", "List the measured commits."),
        "series": ("series:series", "List the series."),
        "envs": ("envs:envs", "List the environments and how they differ."),
        "show": ("show:show", "Show everything stored about a point or a run."),
        "sql": ("sql:sql", "Run one read-only SQL statement."),
        "report": ("report:report", "Write a report as one HTML file that works offline."),
        "serve": ("serve:serve", "Serve a live dashboard of the database."),
        "mcp": ("mcp:mcp", "Serve history, verdicts and evaluations over the Model Context Protocol."),
    },
    "Store and maintain": {
        "ingest": ("ingest:ingest", "Store files of records in the database."),
        "import": ("import_:import_", "Import files written by other benchmarks."),
        "export": ("export:export", "Export every point as records, CSV, Parquet or PyTorch's v3 format."),
        "prune": ("prune:prune", "Remove some of the old points."),
        "backup": ("backup:backup", "Copy the database while it is in use."),
        "verify": ("verify:verify", "Check the database file, its references and every hash."),
        "merge": ("merge:merge", "Add another database to this one."),
    },
}
"""The commands by task. name: (module:attribute below this package, one line of help)"""

COMMANDS = {name: entry for commands in SECTIONS.values() for name, entry in commands.items()}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and reports each error in one line."""

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
            meant = closest(args[0], COMMANDS)
            instead = f"did you mean {meant!r}?" if meant else "see `groupbench --help`"
            raise click.UsageError(f"no command {args[0]!r}; {instead}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Options of the group may also follow the command."""
        return super().parse_args(ctx, self._own_options_first(ctx, args))

    def _own_options_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return `args` with --db, --config and their values in front. Raises UsageError if a value is missing."""
        with_value = {name for param in self.params if param.expose_value for name in param.opts}
        first: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                others += [word, *words]
            elif word.partition("=")[0] not in with_value:
                others.append(word)
            elif "=" in word:
                first.append(word)
            elif (value := next(words, None)) is not None:
                first += [word, value]
            else:
                raise click.BadOptionUsage(word, f"Option {word!r} requires an argument.", ctx)
        return first + others

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an exception that damage or the driver explains is raised as that explanation."""
        try:
            return super().invoke(ctx)
        except (TrackerError, click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # `shell.run` reports these
        except Exception as error:
            from groupbench.tracker.store.failures import explained

            explanation = explained(error, ctx.obj)
            if explanation is None:
                raise
            raise explanation from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))  # the same column in every section
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", short) for name, (_, short) in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        shell.run("groupbench", self, TrackerError, args, prog_name, **extra)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--db",
    metavar="FILE|URL",
    envvar="GROUPBENCH_DB",
    show_default="`database` of groupbench.toml, or groupbench.db",
    show_envvar=True,
    help="SQLite file or SQLAlchemy URL of the database. This option may also follow the command.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    show_default="groupbench.toml in this folder or the nearest parent",
    help="Project file, which lists the operators and shapes to measure. It may also follow the command.",
)
@click.version_option(package_name="groupbench")
@click.pass_context
def main(context: click.Context, db: str | None, config: Path | None) -> None:
    """Track the latency and accuracy of kernels per commit.

    Exit codes: 0 ok, 1 regression or wrong result, 2 usage error, 3 incomplete or not written, 4 not comparable.

    To complete commands, options and stored names with the Tab key, add this line to ~/.bashrc. For zsh, write
    zsh_source instead; docs/guide/completion.md describes every shell.

    \b
    eval "$(_GROUPBENCH_COMPLETE=bash_source groupbench)"
    """
    here = importlib.import_module(f"{__name__}.here")  # `groupbench --help` does not need it
    project = here.find_project(context, config)
    context.obj = project.database if db is None else db
