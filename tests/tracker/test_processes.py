"""A process may end while a file about it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupbench.tracker.tools.processes import parent_of, stat_of


def test_a_name_with_blanks_and_brackets() -> None:
    name = "open('/proc/self/comm', 'w').write('a) (b 1')"
    code = f"{name}; print(open('/proc/self/stat').readline(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and b"(a) (b 1)" in child.stdout.readline()
        assert parent_of(child.pid) == os.getpid()


@pytest.mark.parametrize("text", ["", "\n", "1 (sh"])
def test_one_that_ends_while_it_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    for read in (stat_of, parent_of):
        with pytest.raises(ProcessLookupError):
            read(1)
