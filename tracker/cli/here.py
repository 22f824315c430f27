"""The groupbench.toml of a command."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from groupbench.tracker.ab.worktree import Recipe
from groupbench.tracker.night.measuring import ensure_alone
from groupbench.tracker.project import Project, in_seconds, load
from groupbench.tracker.tools.git import user
from groupbench.tracker.tools.lease import LONGEST_WAIT_S, URGENT_WAIT_S, WAITING, device_of, elsewhere
from groupbench.tracker.tools.parameters import Duration

if TYPE_CHECKING:
    from groupbench.tracker.query.traffic import Traffic

F = TypeVar("F", bound=Callable[..., Any])

_PROJECT = "groupbench.project"


def find_project(context: click.Context, config: Path | None) -> Project:
    """Return the project at `config` or in this folder, and keep it for every command in this invocation.

    Raises ProjectError.
    """
    context.meta[_PROJECT] = project = load(config)
    return project


def this_project(context: click.Context) -> Project:
    """Return this invocation's project; without a groupbench.toml, one with every default."""
    return context.meta.get(_PROJECT) or Project()


def traffic_of(context: click.Context) -> Traffic:
    """Return the traffic of this invocation's project. Raises ProjectError."""
    from groupbench.tracker.query.traffic import load

    return load(this_project(context))


def without_collections(context: click.Context) -> None:
    """Stop garbage collections until a command ends: it takes a tenth less time, and rows have no cycles."""
    if gc.isenabled():
        gc.disable()
        context.call_on_close(gc.enable)


def recipe_of(context: click.Context, setup: str | None) -> Recipe:
    """Return how to turn a commit into a folder to measure: from groupbench.toml, and `setup` if given.

    Raises ProjectError if a benchmark of the file does not exist.
    """
    project = this_project(context)
    project.check_benchmarks()
    settings = project.settings
    return Recipe(setup or settings.setup, settings.benchmarks, settings.pythonpath, by_option=bool(setup))


def seconds_of(variable: str, option: float | None, field: Any) -> float | None:
    """Return a duration in seconds: the option's, the environment variable's (minutes), or the file's, if any."""
    text = os.environ.get(variable) or field
    if option is not None or text is None:
        return option
    try:
        return in_seconds(text)
    except ValueError as error:
        raise click.UsageError(f"{variable}: {error}") from error


def wait_option(default: str = "0s") -> Callable[[F], F]:
    """Add `--wait`, which sets how long this process waits for its device."""

    def keep(context: click.Context, parameter: click.Parameter, option: float | None) -> None:
        wait_s = seconds_of("GROUPBENCH_WAIT_MINUTES", option, this_project(context).settings.wait)
        least_s = URGENT_WAIT_S if WAITING.urgent else 0.0
        WAITING.first_s = max(in_seconds(default), least_s) if wait_s is None else wait_s
        WAITING.places = _shared_places(str(context.obj))
        WAITING.begun = False  # a program may call several commands

    return click.option(
        "--wait",
        type=Duration(most=LONGEST_WAIT_S),
        expose_value=False,
        callback=keep,
        help="Wait up to this long while other commands measure on the device. First come, first served. "
        f"Default: GROUPBENCH_WAIT_MINUTES, `wait` of groupbench.toml, or {default}.",
    )


def hold_device(context: click.Context, device: str) -> Path:
    """Hold a device until the command ends, and return the lock file. Raises Busy, MeasuringError.

    Print nothing before: the process that holds the device begins the command again.
    """
    lock = ensure_alone(device, sys.argv[1:])
    context.with_resource(elsewhere(device_of(lock), gives_way=True))(WAITING.first_s)
    return lock


def _shared_places(database: str) -> Any:
    """Return the database's queue; None if the database is a file."""
    if "://" not in database or database.startswith("sqlite"):
        return None

    def place(*arguments: Any) -> Any:
        from groupbench.tracker.store.queue import place

        return place(database, *arguments)

    return place


def program_of(context: click.Context) -> list[str]:
    """Return a follow-up command's first words: `groupbench` with this invocation's database options."""
    above, project = context.parent, this_project(context)
    words = ["groupbench"]
    if above is not None and above.params.get("config") is not None:
        words += ["--config", str(project.file)]
    if above is not None and above.get_parameter_source("db") is ParameterSource.COMMANDLINE:
        database = str(context.obj)
        has_password = "://" in database and urlsplit(database).password is not None
        words += [] if has_password else ["--db", database]  # the output may be a public log
    return words


def person() -> str:
    """Return the name to record with a change: GIT_AUTHOR_NAME, git's user, or the login name."""
    return os.environ.get("GIT_AUTHOR_NAME") or user() or os.environ.get("USER") or "unknown"


def is_step_of_another(context: click.Context) -> bool:
    """Return whether another command, such as `night`, runs this one as a step."""
    above = context.parent
    return above is not None and above.invoked_subcommand not in (None, context.info_name)
