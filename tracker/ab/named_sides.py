"""Two sides from a user's names: folders, or checked-out commits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker.ab import worktree
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.ab.worktree import AS_IT_IS, Recipe


@contextlib.contextmanager
def open_sides(
    base: str,
    head: str,
    *,
    repo: Path | None = None,
    recipe: Recipe = AS_IT_IS,
    base_python: str | None = None,
    head_python: str | None = None,
) -> Iterator[tuple[AbSide, AbSide]]:
    """Yield two sides from a user's names: each is a folder, or a commit of `repo`, checked out for the duration.

    A commit measured with two interpreters is checked out twice, since `recipe` builds it for one of them.
    Raises WorktreeError if a name is neither, SetupError if a commit does not build.
    """
    repo = repo or Path.cwd()
    wanted = [(base, base_python or sys.executable), (head, head_python or sys.executable)]
    commits = [(name, python) for name, python in dict.fromkeys(wanted) if not Path(name).is_dir()]
    with worktree.checkouts(repo, commits, recipe) as trees:
        checkouts = dict(zip(commits, trees, strict=True))

        def side(name: str, python: str) -> AbSide:
            if (name, python) not in checkouts:
                return AbSide(name, Path(name).resolve(), python, pythonpath=recipe.pythonpath)
            return AbSide(name, checkouts[name, python], python, worktree.resolve(repo, name), recipe.pythonpath)

        yield side(*wanted[0]), side(*wanted[1])
