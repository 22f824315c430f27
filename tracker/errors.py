"""The tracker's exceptions: one tree. A message is one line: the cause, and the next step if any."""

from __future__ import annotations

from groupbench.tracker.exits import ExitCode


class TrackerError(Exception):
    """Something that the user can act on. The command line prints the message and exits with `exit_code`."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    @property
    def message(self) -> str:
        return str(self.args[0])


class StoreError(TrackerError):
    """The database cannot be opened, read or written."""


class DamageError(StoreError):
    """The database holds what nothing wrote: bytes of it changed on their disk."""


class IngestError(TrackerError):
    """A file of records that cannot be stored: names the file and the line."""


class QueryError(TrackerError):
    """A question about something that the database does not hold, or that has several answers."""


class ReportError(TrackerError):
    """A report that cannot be built or written."""


class OutputError(TrackerError):
    """An output of the gate that cannot be written or posted."""
