"""End a process of multiprocessing when its parent has ended, even if that was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection

from groupbench.tracker.facts.exits import ExitCode


def end_with_parent() -> None:
    """Start a thread that ends this process when its multiprocessing parent has ended."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(ExitCode.FAILED)

    threading.Thread(target=wait, daemon=True).start()
