"""The groupbench.toml that a command goes by."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.ab.worktree import Recipe
from groupbench.tracker.project import Project, load

_PROJECT = "groupbench.project"


def find_project(context: click.Context, config: Path | None) -> Project:
    """Return the project of a file, or of this folder, and have every command of this invocation use it.

    Raises ProjectError.
    """
    context.meta[_PROJECT] = found = load(config)
    return found


def this_project(context: click.Context) -> Project:
    """Return the groupbench.toml that this invocation goes by; every default where there is none."""
    return context.meta.get(_PROJECT) or Project()


def recipe_of(context: click.Context, setup: str | None) -> Recipe:
    """Return how commits become folders: by groupbench.toml, and --setup where it is given."""
    settings = this_project(context).settings
    return Recipe(setup or settings.setup, settings.benchmarks, settings.pythonpath)
