"""The tracker's exceptions. A message is one line with the cause and, if possible, the next step."""

from __future__ import annotations

from groupbench.tracker.facts.exits import ExitCode


class TrackerError(Exception):
    """An error that the user can act on. The command line prints the message and exits with `exit_code`."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    @property
    def message(self) -> str:
        return str(self.args[0])


class StoreError(TrackerError):
    """The database cannot be opened, read or written."""


class NoDatabaseError(StoreError):
    """A path has no database yet; `advice` is the command that makes one."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}; {advice}")
        self.problem = problem


class DamageError(StoreError):
    """The database is damaged: bytes changed on disk."""


class IngestError(TrackerError):
    """A file of records cannot be stored. The message names the file and the line."""


class QueryError(TrackerError):
    """A query names something that does not exist or is ambiguous."""


class ReportError(TrackerError):
    """A report cannot be built or written."""


class ReportPackageError(ReportError):
    """A package that the report needs is not installed."""


class OutputError(TrackerError):
    """An output of the gate cannot be written or posted."""
