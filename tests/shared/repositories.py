"""Run git in the repositories of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

SETTINGS = (
    *("-c", "user.name=A", "-c", "user.email=a@example.org"),
    *("-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"),
)


def git(folder: Path, *args: str, stdin: str | None = None) -> str:
    """Run git in a folder with an identity of its own, and return its output without the final newline."""
    command = ["git", "-C", str(folder), *SETTINGS, *args]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
