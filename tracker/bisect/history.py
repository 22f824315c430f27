"""The history of a range, read from git once: commits, parents, and which trees are alike where it matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from groupbench.tracker import git
from groupbench.tracker.bisect.hunt import Commit, History
from groupbench.tracker.errors import TrackerError

OWN_PATHS = ("kernels", "operators")
"""What decides how fast a kernel is, in this project's own repository."""


class BisectError(TrackerError):
    """A range that cannot be searched, or a log that does not belong to it."""


def folder_of(folder: Path) -> Path:
    """Return the full path of a folder of a checkout. Raises GitError where it is in none."""
    git.run(folder, "rev-parse", "--show-toplevel")
    return folder.resolve()


def log_folder(repository: Path) -> Path:
    """Where searches of this repository are kept: beside its objects, so that no checkout shows them."""
    said = Path(git.run(repository, "rev-parse", "--git-common-dir").strip())
    return (repository / said).resolve() / "groupbench"


def resolve(repository: Path, name: str) -> str:
    """The full hash of what git knows as a commit."""
    if not name or "\0" in name:
        raise BisectError(f"{name!r} is no commit")
    full = git.rev_parse(name, repository)
    if full is None:
        raise BisectError(f"git knows no commit {name!r} in {repository}; fetch it, or give --repo")
    return full


def relevant_paths(repository: Path, commit: str, plugins: Sequence[str] = ()) -> tuple[str, ...]:
    """The paths that matter where none are given: this project's own, in its own repository, else all."""
    if plugins:  # a plugin may be anywhere in the tree
        return ()
    names = [f"{commit}:{path}" for path in (*OWN_PATHS, "tracker/record.py")]
    return OWN_PATHS if all(_objects(repository, names)) else ()


def read_history(repository: Path, good: str, bad: str, paths: Sequence[str] = ()) -> History:
    """What lies between two commits. `good` and `bad` are full hashes, `paths` relative to the repository's root.

    Raises BisectError where the two have no common ancestor, or no commit has any of the paths.
    """
    bases = (git.ask(repository, "merge-base", good, bad) or "").split()
    if not bases:
        raise BisectError(f"{good[:10]} and {bad[:10]} have no common ancestor")
    base = bases[0]
    if base == bad != good:
        raise BisectError(f"BAD ({bad[:10]}) is an ancestor of GOOD ({good[:10]}): give the older commit first")
    form = "%m%x00%H%x00%P%x00%an%x00%s"
    said = git.run(repository, "log", "--boundary", "--topo-order", f"--format={form}", f"{base}..{bad}", "--")
    rows = [line.split("\0") for line in said.split("\n") if line.count("\0") >= 4]
    known = {row[1] for row in rows}
    ends = [each for each in dict.fromkeys((good, base, bad)) if each not in known]
    if ends:
        said = git.run(repository, "log", "--no-walk=unsorted", f"--format={form}", *ends, "--")
        rows += [["-", *line.split("\0")[1:]] for line in said.split("\n") if line.count("\0") >= 4]
    keys = _keys(repository, [row[1] for row in rows], paths)
    commits = {row[1]: Commit(row[1], tuple(row[2].split()), keys[row[1]], "\0".join(row[4:]), row[3]) for row in rows}
    inside = frozenset(row[1] for row in rows if row[0] == ">")
    return History(commits, good, bad, base, inside)


def history_of_releases(package: str, versions: Sequence[str]) -> History:
    """Return the releases of a package as a line of commits, named `triton 3.8.0`. `versions`: the oldest first."""
    names = [f"{package} {version}" for version in versions]
    before = [None, *names]
    commits = {
        name: Commit(name, () if parent is None else (parent,), name)
        for name, parent in zip(names, before, strict=False)
    }
    return History(commits, names[0], names[-1], names[0], frozenset(names[1:]), "release")


def _keys(repository: Path, commits: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """What a commit's tree is under the paths: equal texts mean equal trees."""
    wanted = [path.strip("/") for path in paths] or [""]
    if any(not path or path.startswith("..") for path in wanted) and paths:
        raise BisectError(f"--paths {' '.join(paths)}: paths are relative to the repository's root, without ..")
    found = _objects(repository, [f"{commit}:{path}" for commit in commits for path in wanted])
    for i, path in enumerate(wanted):
        if not any(found[i :: len(wanted)]):
            raise BisectError(f"no commit of the range has {path!r}: --paths are relative to the repository's root")
    width = len(wanted)
    return {commit: " ".join(found[i * width : (i + 1) * width]) for i, commit in enumerate(commits)}


def _objects(repository: Path, names: Sequence[str]) -> list[str]:
    """The hash of each `commit:path`, empty where there is none."""
    if any("\n" in name for name in names):
        raise BisectError("a path of --paths has a line break")
    said = git.run(repository, "cat-file", "--batch-check=%(objectname)", stdin="".join(f"{n}\n" for n in names))
    return ["" if " " in line else line for line in said.splitlines()]
