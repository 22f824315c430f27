"""The shell of both programs: robust output streams, one-line errors, and exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

import click

from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import printable
from groupbench.tracker.tools import signals

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
"""Disk errors of standard output, which have no file name. Writers of other files handle their own."""


def run(
    program: str,
    command: click.Command,
    expected: type[Exception],
    arguments: Sequence[str] | None = None,
    name: str | None = None,
    **settings: Any,
) -> NoReturn:
    """Run a command and exit with the command's exit code. An error is one line on standard error.

    Args:
        program: Prefix of error lines.
        expected: Root of the program's own exceptions, with an `exit_code` and perhaps a `program`.
        arguments: Command-line arguments; by default those of this process.
        name: Name in usage lines; by default `program`.
        settings: Settings of the command's context.

    The exit code is 141 for a closed pipe, 130 for an interrupt and 3 for a full disk. Any other exception is a bug: it
    prints a traceback, and the exit code is 70, never 1, which would mean a regression.
    """
    # The interpreter looks for garbage among all modules at its end, which takes a seventh of a short command's time.
    atexit.register(gc.freeze)
    _complete(command, name or program, settings)
    _prepare_streams()
    signals.begin(program)
    command_line = list(sys.argv[1:] if arguments is None else arguments)

    def invoke() -> int:
        if arguments is None:
            signals.interrupt()
        return _invoke(command, name or program, command_line, settings)

    code = _code(program, invoke, expected)
    if arguments is None:
        signals.end_at_once()
    for stream in (sys.stdout, sys.stderr):
        _abandon(stream)
    sys.exit(code)


def _complete(command: click.Command, name: str, settings: dict[str, Any]) -> None:
    """Answer a shell that asks for completions, which click knows by an environment variable, and exit."""
    if not os.environ.get(f"_{name.upper()}_COMPLETE"):
        return
    with suppress(Exception):  # an error would be printed into the command line that a person is typing
        command._main_shell_completion(settings, name, f"_{name.upper()}_COMPLETE")
    sys.exit(ExitCode.OK)


def _invoke(command: click.Command, name: str, arguments: list[str], settings: dict[str, Any]) -> int:
    """Invoke a command without click's `main`, which exits with 1 on a closed pipe: here that means a regression."""
    try:
        with command.make_context(name, arguments, **settings) as context:
            command.invoke(context)
        code = int(ExitCode.OK)
    except click.exceptions.Exit as done:
        code = done.exit_code
    sys.stdout.flush()
    return code


def _code(program: str, command: Callable[[], int], expected: type[Exception]) -> int:
    try:
        return command()
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError):
            click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.ClickException as error:
        return _report(program, error.format_message(), ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        signals.report()
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.BROKEN_PIPE
    except expected as error:
        code = getattr(error, "exit_code", ExitCode.USAGE)
        return _report(getattr(error, "program", program), str(error), code)
    except OSError as error:
        where = error.filename if error.filename else "standard output" if error.errno in DISK else ""
        reason = str(error.strerror or error)
        return _report(program, f"{os.fsdecode(where)}: {reason}" if where else reason, ExitCode.INCOMPLETE)
    except Exception as error:
        with suppress(OSError):
            traceback.print_exc()
        return _report(program, f"this is a bug; please report it with the lines above: {error!r}", ExitCode.BUG)


def _report(program: str, message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"{program}: {printable(message)}", err=True)
    return code


def _prepare_streams() -> None:
    """Open closed standard streams on /dev/null, and replace characters that a terminal cannot show by `?`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        with suppress(AttributeError, ValueError):
            getattr(sys, name).reconfigure(errors="replace")


def _abandon(stream: IO[str]) -> None:
    """Redirect a broken stream to /dev/null, so that Python does not complain at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
