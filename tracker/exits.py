"""The exit codes of both programs, `tritonbench` and `groupbench`, with what each means."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit code says to a CI job. Where several hold, the first of 1, 3, 4, 0 is used."""

    OK = 0
    """Everything that was asked for was done, and nothing is worse."""
    FAILED = 1
    """A regression, a wrong result, a damaged database, or a machine that cannot measure."""
    USAGE = 2
    """Something that the user can fix: a wrong option, a file that is not what it should be."""
    INCOMPLETE = 3
    """Not everything was measured, decided or written."""
    INCOMPARABLE = 4
    """The two sides cannot be compared: other environments, or a run that `--resume` would not continue."""
    BUG = 70
    """An error of the program itself, as sysexits' EX_SOFTWARE; its traceback is on standard error."""
    BUSY = 75
    """Another process holds the device: sysexits' EX_TEMPFAIL, try again later."""
    INTERRUPTED = 130
    """Ended by Ctrl-C or a signal that means the same."""
    BROKEN_PIPE = 141
    """The reader of the output closed it."""
    TERMINATED = 143
    """Ended by SIGTERM."""
