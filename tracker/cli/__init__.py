"""The `groupbench` command. Commands are loaded when they are called: the help of all needs none of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

import click

from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode

COMMANDS = {
    "ingest": ("ingest:ingest", "Store files of records."),
    "history": ("history:history", "How each series went from commit to commit."),
    "compare": ("compare:compare", "Two commits, runs or files side by side."),
    "gate": ("gate:gate", "Judge the newest run; the exit code is the verdict."),
    "post": ("post:post", "Comment on a pull request, edited in place."),
    "ab": ("ab:ab", "Measure BASE and HEAD in turns on one device, until it is clear whether they differ."),
    "calibrate": ("calibrate:calibrate", "What this machine can tell apart: like sides compared, by latency."),
    "bisect": ("bisect:bisect", "Name the commit that made a kernel slower, or less accurate."),
    "confirm": ("confirm:confirm", "Measure suspects again, both commits in turns."),
    "alerts": ("alerts:alerts", "List the changes for the worse that are open."),
    "ack": ("alerts:ack", "Acknowledge alerts: known, and worked on."),
    "expect": ("alerts:expect", "Accept the new level of alerts."),
    "close": ("alerts:close", "Close alerts as fixed or invalid."),
    "doctor": ("doctor:doctor", "What this machine can measure, and what would make it better."),
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
        for closed in (name for name in ("stdout", "stderr") if getattr(sys, name) is None):  # nobody wants to read
            setattr(sys, closed, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        for stream in (sys.stdout, sys.stderr):  # a terminal without ± shows ?, and does not fail
            with suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._main_shell_completion(extra, name, complete_var)
        code = self._run(list(sys.argv[1:] if args is None else args), name, extra)
        for stream in (sys.stdout, sys.stderr):
            _abandon(stream)
        sys.exit(code)

    def _run(self, args: list[str], name: str, extra: dict[str, Any]) -> int:
        try:
            try:
                with self.make_context(name, args, **extra) as context:
                    self.invoke(context)
                code = int(ExitCode.OK)
            except click.exceptions.Exit as done:
                code = done.exit_code
            sys.stdout.flush()
            return code
        except click.exceptions.NoArgsIsHelpError as error:
            with suppress(OSError):
                click.echo(error.format_message(), err=True)
            return ExitCode.USAGE
        except click.ClickException as error:
            return _say(" ".join(error.format_message().split()), error.exit_code)
        except TrackerError as error:
            return _say(error.message, error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            return ExitCode.INTERRUPTED
        except BrokenPipeError:
            return ExitCode.BROKEN_PIPE
        except OSError as error:  # a full disk; writing to an open file names none, and others are looked after
            return _say(f"{error.filename or 'standard output'}: {error.strerror or error}", ExitCode.INCOMPLETE)


def _say(message: str, code: int) -> int:
    from groupbench.tracker.text.wording import printable

    with suppress(OSError):
        click.echo(f"groupbench: {printable(message)}", err=True)
    return code


def _abandon(stream: IO[str]) -> None:
    """What a stream does not take goes nowhere, or Python complains of it at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--db",
    metavar="FILE|URL",
    envvar="GROUPBENCH_DB",
    default="groupbench.db",
    show_default=True,
    show_envvar=True,
    help="Database: a SQLite file, or an SQLAlchemy URL.",
)
@click.version_option(package_name="groupbench")
@click.pass_context
def main(context: click.Context, db: str) -> None:
    """Latency and accuracy of grouped-GEMM kernels, per commit.

    Exit codes: 0 ok, 1 a regression or a wrong result, 2 usage, 3 incomplete or not written, 4 not comparable.
    """
    context.obj = db
