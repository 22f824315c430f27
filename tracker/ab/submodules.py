"""Check out a commit's submodules without changing anything of the user's repository.

`git submodule update` writes to the repository's configuration, which all worktrees share, and clones over the network.
Here the files come from the user's own copies of the submodules, `.git/modules`, by a temporary index file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker.tools import git

NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""The user's hooks run in the user's own checkouts: one that installs the package would replace the installed one."""

SUBMODULE_LIMIT_S = 600.0
"""Longest time in s to write the files of one submodule."""


def add_submodules(git_folder: Path, tree: Path, commit: str) -> None:
    """Write the files of a commit's submodules, and of theirs, into its checkout.

    A never-initialized submodule stays an empty folder, as in the user's own checkout.

    Args:
        git_folder: The repository's or a submodule's `.git`.
        tree: The checkout of `commit`.
        commit: Full hash.

    Raises:
        git.GitError: The user's copy of a submodule lacks the commit, or files cannot be written.
    """
    if not (tree / ".gitmodules").is_file():
        return
    names = _names(tree / ".gitmodules")
    for path, wanted in _submodules(git_folder, commit):
        module = git_folder / "modules" / names.get(path, path)
        if module.is_dir():
            _write_files(module, tree / path, wanted)
            add_submodules(module, tree / path, wanted)


def _submodules(git_folder: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Yield (path, commit) for a commit's submodules."""
    for entry in git.run(git_folder, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0"):
        mode, _, rest = entry.partition(" ")
        if mode == "160000":
            facts, _, path = rest.partition("\t")
            yield path, facts.split()[1]


def _names(file: Path) -> dict[str, str]:
    """Return submodule names by path: a renamed submodule keeps the first name's folder."""
    output = git.ask(file.parent, "config", "-z", "-f", str(file), "--get-regexp", r"^submodule\..*\.path$") or ""
    pairs = [field.partition("\n") for field in output.split("\0") if field]
    return {path: key.removeprefix("submodule.").removesuffix(".path") for key, _, path in pairs}


def _write_files(module: Path, folder: Path, commit: str) -> None:
    if git.rev_parse(commit, module) is None:
        reason = f"submodule {folder.name} lacks commit {commit[:10]}; run `git fetch --recurse-submodules`"
        raise git.GitError(reason, reason)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".groupbench-") as scratch:
        # --work-tree also overrides the module's own setting, which names the user's checkout.
        places = (f"--git-dir={module}", f"--work-tree={folder}")
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git.run(
            folder, *NO_HOOKS, *places, "read-tree", "--reset", "-u", commit, timeout=SUBMODULE_LIMIT_S, variables=index
        )
