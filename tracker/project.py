"""`groupbench.toml`: what is measured in a repository, with which plugins, and where the results go.

Both programs read it here. It is found in the current folder or above it, up to the top of the git repository. Paths in
it are relative to its folder.

    plugins = ["bench_softmax.BACKENDS"]   # as `tritonbench --plugin` takes them
    setup = "make"                         # builds a checkout, where it needs a build
    budget = "1h"                          # what has not begun by then is left out, and recorded as skipped

    [[measure]]
    operator = "softmax"
    shapes = ["4096,1024"]                 # and/or suites = ["NAME"]
    dtypes = ["bf16"]
    device = "cuda"                        # only on machines with a GPU; "cpu": only on those without; absent: both
    only = ["triton"]                      # optional, as are skip, mode, protocol, bursts, samples, idle, seed

    [toolchains]
    stable = "requirements-stable.txt"     # an environment is made of a file that ends in .txt, and kept
    nightly = "/opt/nightly/bin/python"    # all else is an interpreter
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from groupbench.tracker.durations import seconds
from groupbench.tracker.errors import TrackerError

NAME = "groupbench.toml"
LONGEST_S = 6e6
"""The longest duration: as `tritonbench --budget` allows."""

Duration: TypeAlias = str | int | float
"""`90s`, `2h`; a plain number is minutes."""


class ProjectError(TrackerError):
    """A groupbench.toml that cannot be read, or does not hold what it should."""


class PlanEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[measure]]`: cells of an operator. What is left out is the operator's or the protocol's default."""

    operator: str
    suites: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    mode: str = "fwd"
    protocol: str | None = None
    bursts: int | None = None
    samples: int | None = None
    idle: float | None = None
    costs: tuple[Literal["memory", "kernels", "energy", "cold"], ...] = ("memory",)
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class Post(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where a comment shows the newest verdict: the arguments of `groupbench post`."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    on: Literal["github", "gitlab"] | None = None
    repo: str | None = None


class ProjectSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The fields of a groupbench.toml.

    name        of the plan: runs of one name are compared as to what is missing
    plugins     modules of operators and backends, as `--plugin` takes them
    pythonpath  folders that Python looks for modules in, before the folder of the file and its `src`
    setup       a shell command that builds a checkout, run in the file's folder, and in that of every other commit
                that is measured
    benchmarks  files and folders that commits from before them get from this checkout
    budget      for measuring; confirm is for suspects; wait is for another run on the device to end
    database    a file or a URL; records and artifacts are folders; report is a file
    toolchains  requirement files (*.txt) and interpreters by name: what `confirm` measures older toolchains with
    """

    measure: tuple[PlanEntry, ...] = ()
    name: Annotated[str, msgspec.Meta(min_length=1)] = "nightly"
    plugins: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    setup: str | None = None
    benchmarks: tuple[str, ...] = ()
    budget: Duration | None = None
    confirm: Duration = "30m"
    wait: Duration = 0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    database: str = "groupbench.db"
    records: str = "records"
    artifacts: str = "artifacts"
    report: str = "report.html"
    post: Post | None = None
    toolchains: dict[str, str] = {}


@dataclass(frozen=True)
class Project:
    """A groupbench.toml and its folder; without a file, the current folder and every default."""

    settings: ProjectSettings = field(default_factory=ProjectSettings)
    folder: Path = field(default_factory=Path.cwd)
    file: Path | None = None

    @property
    def database(self) -> str:
        return self.settings.database if "://" in self.settings.database else self.place(self.settings.database)

    @property
    def budget_s(self) -> float | None:
        return None if self.settings.budget is None else in_seconds(self.settings.budget)

    def place(self, path: str) -> str:
        """Return a path of the file as the current folder has it."""
        return path if self.folder == Path.cwd() else str(self.folder / path)

    def plugins(self, given: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the file's plugins, then those that a command line names."""
        return tuple(dict.fromkeys((*self.settings.plugins, *given)))

    def python_path(self) -> list[str]:
        """Return the folders that Python needs to find the plugins: none without a file."""
        if self.file is None:
            return []
        return import_folders(self.folder, self.settings.pythonpath)


def import_folders(tree: Path, pythonpath: Iterable[str]) -> list[str]:
    """Return the folders that modules of a checkout are found in: `pythonpath`, then its `src`, then itself."""
    folders = [*(tree / path for path in pythonpath), tree / "src", tree]
    return [str(folder) for folder in folders if folder.is_dir()]


def add_to_path(folders: Iterable[str], environment: dict[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH begins with these folders."""
    before = filter(None, [environment.get("PYTHONPATH")])
    path = os.pathsep.join([*folders, *before])
    return {**environment, "PYTHONPATH": path} if path else environment


def find(start: Path | None = None) -> Path | None:
    """Return the groupbench.toml of a folder: its own, or the nearest above it within the git repository."""
    folder = (start or Path.cwd()).resolve()
    above = [folder, *folder.parents]
    top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
    return next((each / NAME for each in above[: top + 1] if (each / NAME).is_file()), None)


def load(path: Path | None = None) -> Project:
    """Return the project of a file, or of the current folder. Raises ProjectError."""
    path = path or find()
    return Project() if path is None else Project(read(path), path.resolve().parent, path.resolve())


def read(path: Path) -> ProjectSettings:
    """Return the fields of a file. Raises ProjectError."""
    try:
        settings = msgspec.convert(tomllib.loads(path.read_text()), ProjectSettings, strict=True)
        for name in ("budget", "confirm", "wait"):
            value = getattr(settings, name)
            if value is not None:
                _check(name, value)
    except OSError as error:
        raise ProjectError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProjectError(f"{path}: {error}") from error
    return settings


def _check(name: str, value: Duration) -> None:
    """Raises ValueError."""
    found = in_seconds(value)
    if not 0 <= found <= LONGEST_S or (name == "budget" and found == 0):
        raise ValueError(
            f"{name} = {value!r} is out of range: {'above ' if name == 'budget' else ''}0 to 100000 minutes"
        )


def in_seconds(duration: Duration) -> float:
    """Return the seconds of a duration. Raises ValueError."""
    return seconds(str(duration), "m")
