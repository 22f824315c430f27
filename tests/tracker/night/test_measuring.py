"""The program that measures ends with the command that started it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
MEASURE = f"""
import os, sys
from pathlib import Path
from groupbench.tracker.night import measuring
measuring.PROGRAM = (sys.executable, "-c", {DEAF + "time.sleep(600)"!r})
measuring.measure([], Path(), dict(os.environ))
"""


def test_a_program_that_misses_sigterm_ends_with_a_killed_command() -> None:
    with subprocess.Popen([sys.executable, "-c", MEASURE], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        program = int(command.stdout.readline())
        command.kill()
        deadline = time.monotonic() + 60
        while is_running(program):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
