"""Imported by the fork server alone: what it does for the processes that it starts.

It is the parent of processes whose warden was killed, and it keeps quiet about a process that had nothing to do because
an interrupt came before its client had sent any work.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing import spawn
from pickle import UnpicklingError
from types import TracebackType

from groupbench.operators.measure import warden


def _print_unless_abandoned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as usual, unless the process ended while it waited for its work."""
    frames = traceback.extract_tb(trace)
    abandoned = issubclass(kind, EOFError | UnpicklingError) and frames and frames[-1].filename == spawn.__file__
    if not abandoned:
        sys.__excepthook__(kind, error, trace)


warden._prctl(warden.PR_SET_CHILD_SUBREAPER, 1)
sys.excepthook = _print_unless_abandoned
