"""The measuring program's errors. Each ends a command with one line and an exit code."""

from __future__ import annotations

from groupbench.tracker.facts.exits import ExitCode


class GroupbenchError(Exception):
    """The base for all errors a user can act on. The command prints the message and exits with `exit_code`."""

    exit_code: ExitCode = ExitCode.USAGE


class WorkerLost(GroupbenchError):
    """A worker process died or did not answer in time."""


class UsageError(GroupbenchError):
    """An option or argument is invalid, or names something unknown."""


class PlanError(UsageError):
    """A groupbench.toml entry is invalid, or names something unknown. The message begins with the place.

    Reported under the tracker program's name, since most plans are measured by `groupbench night`.
    """

    program = "groupbench"


class Incomplete(GroupbenchError):
    """The host gave up before it had measured every selected cell. The finished cells are recorded."""

    exit_code = ExitCode.INCOMPLETE


class Unavailable(GroupbenchError):
    """Raised by a backend's `prepare` if it cannot run on these inputs; recorded as the cell's status and message."""
