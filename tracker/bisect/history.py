"""Read the history of a range from git once: commits, parents, and which trees are equal in the relevant paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from groupbench.tracker.bisect.hunt import BisectCommit, History
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.tools import git

OWN_PATHS = ("kernels", "operators")
"""Paths that decide how fast a kernel is, in groupbench's own repository."""


MOST_OBJECTS = 20_000
"""Files times commits above which the search does not look for a commit that restores them."""


class BisectError(TrackerError):
    """The range cannot be searched, or the log does not belong to it."""


def folder_of(folder: Path) -> Path:
    """Return a checked-out folder's full path. Raises GitError if it is not in one."""
    git.require_repository(folder)
    return folder.resolve()


def log_folder(repository: Path) -> Path:
    """Return the folder for search logs: in the git directory, outside every checkout."""
    git_dir = Path(git.run(repository, "rev-parse", "--git-common-dir").strip())
    return (repository / git_dir).resolve() / "groupbench"


def resolve(repository: Path, name: str) -> str:
    """Return the full hash for a commit, tag or branch. Raises BisectError."""
    if not name or "\0" in name:
        raise BisectError(f"{name!r} is not a commit; give a hash, a branch or a tag")
    full = git.rev_parse(name, repository)
    if full is None:
        raise BisectError(git.unknown_commit(name, repository, "fetch it, or give --repo"))
    return full


def relevant_paths(repository: Path, commit: str, plugins: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the default for `--paths`: OWN_PATHS in groupbench's own repository, otherwise all paths."""
    if plugins:  # a plugin may be anywhere in the tree
        return ()
    names = [f"{commit}:{path}" for path in (*OWN_PATHS, "tracker/facts/record.py")]
    return OWN_PATHS if all(_objects(repository, names)) else ()


def read_history(repository: Path, good: str, bad: str, paths: Sequence[str] = ()) -> History:
    """Return the history between two commits.

    Args:
        good, bad: Full hashes.
        paths: Relevant paths, relative to the repository's root; all if empty.

    Raises BisectError if the two have no common ancestor, or no commit has one of the paths.
    """
    bases = (git.ask(repository, "merge-base", good, bad) or "").split()
    if not bases:
        raise BisectError(f"{good[:10]} and {bad[:10]} have no common ancestor")
    base = bases[0]
    if base == bad != good:
        raise BisectError(f"BAD ({bad[:10]}) is an ancestor of GOOD ({good[:10]}): give the older commit first")
    rows = _log(repository, "--boundary", "--topo-order", f"{base}..{bad}")
    listed = {row[1] for row in rows}
    ends = [each for each in dict.fromkeys((good, base, bad)) if each not in listed]
    if ends:
        rows += [["-", *row[1:]] for row in _log(repository, "--no-walk=unsorted", *ends)]
    keys = _keys(repository, [row[1] for row in rows], paths)
    commits = {
        row[1]: BisectCommit(row[1], tuple(row[2].split()), keys[row[1]], "\0".join(row[4:]), row[3]) for row in rows
    }
    inside = frozenset(row[1] for row in rows if row[0] == ">")
    return History(commits, good, bad, base, inside, restoring=partial(_restoring, repository, paths))


def _restoring(repository: Path, paths: Sequence[str], parent: str, commit: str, later: Sequence[str]) -> str | None:
    """Return the last of the later commits after which a commit's files are as in the parent again, or None."""
    listed = git.ask(repository, "diff", "--name-only", "--no-renames", "-z", parent, commit, "--", *paths) or ""
    files = [path for path in listed.split("\0") if path and "\n" not in path]
    if not files or len(files) * len(later) > MOST_OBJECTS:
        return None
    states = [_objects(repository, [f"{each}:{path}" for path in files]) for each in (parent, commit, *later)]
    restored = [state == states[0] for state in states[1:]]
    return next((later[j - 1] for j in range(len(later), 0, -1) if restored[j] and not restored[j - 1]), None)


def _log(repository: Path, *arguments: str) -> list[list[str]]:
    """Return `git log` as rows with mark, hash, parents, author and subject, which may be in several parts."""
    form = "%m%x00%H%x00%P%x00%an%x00%s"
    log = git.run(repository, "log", f"--format={form}", *arguments, "--")
    return [line.split("\0") for line in log.split("\n") if line.count("\0") >= 4]


def _keys(repository: Path, commits: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """Return a key for each commit's tree under the paths. Equal keys mean equal trees. Raises BisectError."""
    wanted = [path.strip("/") for path in paths] or [""]
    if any(not path or path.startswith("..") for path in wanted) and paths:
        raise BisectError(f"--paths {' '.join(paths)}: paths are relative to the repository's root, without ..")
    hashes = _objects(repository, [f"{commit}:{path}" for commit in commits for path in wanted])
    for i, path in enumerate(wanted):
        if not any(hashes[i :: len(wanted)]):
            raise BisectError(f"no commit of the range has {path!r}: --paths are relative to the repository's root")
    width = len(wanted)
    return {commit: " ".join(hashes[i * width : (i + 1) * width]) for i, commit in enumerate(commits)}


def _objects(repository: Path, names: Sequence[str]) -> list[str]:
    """Return the hash for each `commit:path`, empty if it does not exist. Raises BisectError."""
    if any("\n" in name for name in names):
        raise BisectError("a path in --paths contains a line break")
    output = git.run(repository, "cat-file", "--batch-check=%(objectname)", stdin="".join(f"{n}\n" for n in names))
    return ["" if " " in line else line for line in output.split("\n")[:-1]]
