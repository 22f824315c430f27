"""Name the place that this groupbench was installed from, as a requirement for pip on another machine.

A bare name such as `groupbench==0.1.0` is never an answer: its owner on a package index, who
may be anyone, would run code on the machines of all users.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from groupbench.tracker.tools import git

_ADDRESS = re.compile(r"[\w./:+@%~#=-]+")
"""An address that means the same in YAML, in a file of requirements and in a quoted word of a shell."""

_SHORT_SSH = re.compile(r"([\w.-]+@[\w.-]+):(?!//)(.+)")
"""An address of a repository as ssh and scp write it."""

_BARE = re.compile(r"\s*groupbench\s*(\[[^\]]*\])?\s*([=<>~!].*)?", re.IGNORECASE)


def is_bare(requirement: str) -> bool:
    """Return whether a requirement leaves it to a package index whose groupbench it means."""
    return _BARE.fullmatch(requirement) is not None


def requirement(extras: str) -> str | None:
    """Return the repository and commit, or the wheel's address, that this groupbench was installed from.

    Returns None if they are unknown, or not reachable from other machines.
    """
    origin = json.loads(distribution("groupbench").read_text("direct_url.json") or "{}")  # PEP 610
    address = _address(origin)
    return f"groupbench[{extras}] @ {address}" if address and _ADDRESS.fullmatch(address) else None


def _address(origin: dict[str, Any]) -> str | None:
    url = str(origin.get("url", ""))
    if vcs := origin.get("vcs_info"):
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if _is_remote(url) else None
    if "dir_info" in origin:
        return _of_checkout(Path(unquote(urlsplit(url).path)))
    if not _is_remote(url):
        return None
    hashes = (origin.get("archive_info") or {}).get("hashes") or {}
    return f"{url}#sha256={hashes['sha256']}" if "sha256" in hashes else url


def _of_checkout(folder: Path) -> str | None:
    """Return a checkout's remote and commit."""
    if not (folder / "pyproject.toml").is_file():
        return None
    remote = (git.ask(folder, "remote", "get-url", "origin") or "").strip()
    if short := _SHORT_SSH.fullmatch(remote):
        remote = f"ssh://{short[1]}/{short[2]}"
    commit = git.rev_parse("HEAD", folder)
    return f"git+{remote}@{commit}" if commit and _is_remote(remote) else None


def _is_remote(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("https", "http", "ssh", "git") and bool(parts.hostname) and parts.password is None
