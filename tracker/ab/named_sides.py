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
    with contextlib.ExitStack() as stack:
        wanted = [(base, base_python or sys.executable), (head, head_python or sys.executable)]
        sides: dict[tuple[str, str], AbSide] = {}
        for name, python in dict.fromkeys(wanted):
            if Path(name).is_dir():
                sides[name, python] = AbSide(name, Path(name).resolve(), python, pythonpath=recipe.pythonpath)
            else:
                commit = worktree.resolve(repo, name)
                tree = stack.enter_context(worktree.checkout(repo, commit, recipe, python))
                sides[name, python] = AbSide(name, tree, python, commit, recipe.pythonpath)
        first, second = (sides[side] for side in wanted)
        yield first, second
