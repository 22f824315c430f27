"""The exit codes of both programs, `tritonbench` and `groupbench`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. If several apply, the first of 1, 5, 3, 4, 0 is used."""

    OK = 0
    """The command did everything, and nothing is worse."""
    FAILED = 1
    """A regression, a wrong result, damage that `db verify` finds, or a machine that cannot measure."""
    USAGE = 2
    """An error that the user can fix, such as a wrong option or an invalid file."""
    INCOMPLETE = 3
    """Some results were not measured, confirmed or written."""
    INCOMPARABLE = 4
    """The environments differ, so results cannot be compared; or `--resume` refuses to continue a run."""
    CANDIDATE = 5
    """`evaluate`: the candidate failed, because it does not load, raises, crashes or does not answer."""
    BUG = 70
    """A bug in the program (EX_SOFTWARE of sysexits). The traceback is on standard error."""
    BUSY = 75
    """Another process uses the device; try again later (EX_TEMPFAIL of sysexits)."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, or by a signal that the command treats like it, such as SIGTERM."""
    BROKEN_PIPE = 141
    """The reader closed the output."""
    TERMINATED = 143
    """Ended by SIGTERM at once."""
