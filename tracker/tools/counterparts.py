"""Find the commits that replaced those of a rewritten branch, such as after a rebase or `git filter-repo`.

Two commits are the same change if both have the same files before and after it, or if their patches are equal apart
from line numbers (`git patch-id`). A merge counts as its change to the first parent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from groupbench.tracker.tools import git

MOST_COMMITS = 2000
"""Largest number of commits, on each side, whose patches are compared."""

PATCH_TIMEOUT_S = 60.0  # for the patches of MOST_COMMITS commits

Counterparts = Mapping[str, str | None]
"""Maps commits to their counterparts on a branch, or to None without one. Unknown commits are absent."""


def counterparts(old: Collection[str], line: Sequence[str]) -> Counterparts:
    """Return the counterparts of commits on a line of commits.

    Args:
        old: Hashes of commits that are not on the line. Those that this repository does not have are left out.
        line: Hashes of the line, newest first.
    """
    try:
        stored = _known(old)
        return _matched(stored, line) if stored else {}
    except git.RefusedError:
        raise
    except git.GitError:  # patches of a huge repository take too long, or a shallow clone lacks their files
        return {}


def _known(commits: Iterable[str]) -> list[str]:
    """Return the commits that this repository has."""
    query = "".join(f"{commit}^{{commit}}\n" for commit in commits)
    answers = git.run(".", "cat-file", "--batch-check=%(objectname) %(objecttype)", stdin=query).splitlines()
    return [name for name, _, kind in (line.partition(" ") for line in answers) if kind == "commit"]


def _matched(old: Sequence[str], line: Sequence[str]) -> dict[str, str | None]:
    matches: dict[str, str | None] = dict.fromkeys(old)
    since = _since(old, line)
    for facts in (_files, _patches):
        left = [commit for commit, counterpart in matches.items() if counterpart is None]
        if left:
            by_fact = {fact: commit for commit, fact in facts(since).items()}
            matches |= {commit: by_fact.get(fact) for commit, fact in facts(left).items()}
    return matches


def _since(old: Sequence[str], line: Sequence[str]) -> list[str]:
    """Return the newest commits of the line that are not ancestors of old ones."""
    wanted = "".join(f"{name}\n" for name in (line[0], *(f"^{commit}" for commit in old)))
    output = git.run(".", "rev-list", "--first-parent", f"--max-count={MOST_COMMITS}", "--stdin", stdin=wanted)
    return output.split()


def _files(commits: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the trees before and after each commit. Commits that change nothing are left out."""
    names = "".join(f"{name}^{{tree}}\n" for commit in commits for name in (commit, f"{commit}^1"))
    answers = git.run(".", "cat-file", "--batch-check=%(objectname)", stdin=names).splitlines()
    # For a root, git repeats the name, which is not a tree.
    pairs = zip(answers[1::2], answers[::2], strict=True)
    trees = [("" if before.endswith(" missing") else before, after) for before, after in pairs]
    return {commit: trees for commit, trees in zip(commits, trees, strict=True) if trees[0] != trees[1]}


def _patches(commits: Sequence[str]) -> dict[str, str]:
    """Return the patch ids of the newest commits. Commits that change nothing are left out."""
    newest = "".join(f"{commit}\n" for commit in commits[:MOST_COMMITS])
    options = ("--no-walk=unsorted", "--diff-merges=first-parent", "-p", "--no-textconv", "--no-ext-diff", "--root")
    log = git.run(".", "log", *options, "--stdin", stdin=newest, timeout=PATCH_TIMEOUT_S)
    pairs = (line.split() for line in git.run(".", "patch-id", "--stable", stdin=log).splitlines())
    return {commit: patch for patch, commit in pairs}
