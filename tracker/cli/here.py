"""The groupbench.toml that a command uses."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.ab.worktree import Recipe
from groupbench.tracker.project import Project, load

_PROJECT = "groupbench.project"


def find_project(context: click.Context, config: Path | None) -> Project:
    """Return the project of `config`, or of this folder, and keep it for every command of this invocation.

    Raises ProjectError.
    """
    context.meta[_PROJECT] = project = load(config)
    return project


def this_project(context: click.Context) -> Project:
    """Return the project of this invocation; without a groupbench.toml, one with every default."""
    return context.meta.get(_PROJECT) or Project()


def recipe_of(context: click.Context, setup: str | None) -> Recipe:
    """Return how to turn a commit into a folder to measure: from groupbench.toml, and `setup` if given.

    Raises ProjectError if a benchmark of the file does not exist.
    """
    project = this_project(context)
    project.check_benchmarks()
    settings = project.settings
    return Recipe(setup or settings.setup, settings.benchmarks, settings.pythonpath, by_option=bool(setup))
