"""The checkout that a process measures, passed from a driver to the processes that it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from groupbench.tracker.facts.programs import FOLDERS

VARIABLE = "GROUPBENCH_MEASURED_TREE"
"""Environment variable that holds a `MeasuredTree` as JSON. Every process below the driver inherits it."""

USUAL_FOLDERS = ("src", "python", "lib", "")
"""Folders of a project in which its packages usually are, relative to pyproject.toml."""


@dataclass(frozen=True)
class MeasuredTree:
    """A checkout, and the folders whose modules must not be measured instead.

    Attributes:
        tree: Top folder of the checkout.
        others: Top folders of the repository's other checkouts, such as the user's working tree.
        projects: Distributions that the checkout builds: name, and folder relative to the top.
    """

    tree: str
    others: tuple[str, ...]
    projects: tuple[tuple[str, str], ...] = ()

    def variables(self) -> dict[str, str]:
        """Return the environment variable for processes that measure the checkout."""
        return {VARIABLE: json.dumps(asdict(self))}


def measured_tree(environment: Mapping[str, str] = os.environ) -> MeasuredTree | None:
    """Return the checkout that this process measures, or None if it measures the imported code."""
    if not (text := environment.get(VARIABLE)):
        return None
    fields = json.loads(text)
    return MeasuredTree(
        fields["tree"], tuple(fields["others"]), tuple((name, folder) for name, folder in fields["projects"])
    )


def measured_folders(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders in which the processes of cells find the measured modules before all others."""
    return list(filter(None, environment.get(FOLDERS, "").split(os.pathsep)))


def with_folders(folders: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which cells, not the command, find these folders' modules first."""
    return {**environment, FOLDERS: os.pathsep.join(dict.fromkeys([*folders, *measured_folders(environment)]))}


def add_to_path(folders: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these folders at the front of PYTHONPATH."""
    path = os.pathsep.join([*folders, *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, "PYTHONPATH": path} if path else {**environment}


def add_measured_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs measured code."""
    return add_to_path(measured_folders(environment), environment)
