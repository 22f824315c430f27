"""What can go wrong before anything is measured. Each ends a command with one line and the exit code beside it."""

from __future__ import annotations

from groupbench.tracker.exits import ExitCode


class GroupbenchError(Exception):
    """The root: the message is for the user."""

    exit_code: ExitCode = ExitCode.USAGE


class UsageError(GroupbenchError):
    """The command asks for what does not exist or does not parse."""


class Incomplete(GroupbenchError):
    """A host gave up before it had measured all that was asked; what it did measure is recorded."""

    exit_code = ExitCode.INCOMPLETE


class Unavailable(GroupbenchError):
    """Raised by a backend's `prepare` where it cannot run on these inputs: becomes the cell's status, with the text."""
