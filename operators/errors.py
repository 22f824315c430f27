"""Errors of the measuring program. Each ends a command with one line and its exit code."""

from __future__ import annotations

from groupbench.tracker.exits import ExitCode


class GroupbenchError(Exception):
    """The root: the message is for the user."""

    exit_code: ExitCode = ExitCode.USAGE


class WorkerLost(GroupbenchError):
    """A process that does a part of the work died, or did not answer."""


class UsageError(GroupbenchError):
    """An option or argument is invalid, or names something unknown."""


class Incomplete(GroupbenchError):
    """The host gave up before it had measured every selected cell. The finished cells are recorded."""

    exit_code = ExitCode.INCOMPLETE


class Unavailable(GroupbenchError):
    """Raised by a backend's `prepare` if it cannot run on these inputs; recorded as the cell's status and message."""
