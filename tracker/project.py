"""Read `groupbench.toml`: the cells to measure in a repository, the plugins, and where to store results.

Both programs use it. They look for it in the current folder and above, up to the top of the git repository. Paths are
relative to the file's folder.

    plugins = ["bench_softmax.BACKENDS"]   # as `tritonbench --plugin` takes them
    setup = "make"                         # builds a checkout, if necessary
    budget = "1h"                          # cells that have not started by then are recorded as skipped

    [[measure]]
    operator = "softmax"
    shapes = ["4096,1024"]                 # and/or suites = ["NAME"]
    dtypes = ["bf16"]
    device = "cuda"                        # "cuda": only with a GPU; "cpu": only without; omitted: both
    only = ["triton"]                      # optional, like skip, mode, protocol, bursts, samples, idle and seed

    [renamed]
    fast_scale = "scale"                   # the new name of an operator, a backend or a shape

    [toolchains]
    stable = "requirements-stable.txt"     # a .txt file: requirements of an environment, which is kept
    nightly = "/opt/nightly/bin/python"    # anything else: a Python interpreter
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from groupbench.tracker.facts.durations import seconds
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.identity import TOOLCHAIN_MARK
from groupbench.tracker.facts.measured_tree import USUAL_FOLDERS

NAME = "groupbench.toml"

LONGEST_S = 6e6
"""The longest duration, as for `tritonbench --budget`."""

Duration: TypeAlias = Annotated[
    str | int | float, msgspec.Meta(description='a duration such as "90s" or "2h", or a number of minutes')
]
"""A duration such as `90s` or `2h`; a plain number is in minutes."""


class ProjectError(TrackerError):
    """A groupbench.toml cannot be read or is invalid."""


class PlanEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[measure]]` section: cells of an operator. Omitted fields default to the operator's or the protocol's.

    `min_effect` is the smallest relative change of the latency that counts for the gate: 0.05 is 5 %.
    """

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
    min_effect: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


class Post(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Posts of `night`: the newest verdict as a comment on `number`, and an issue for each incident."""

    number: Annotated[int, msgspec.Meta(ge=1)] | None = None
    on: Literal["github", "gitlab"] | None = None
    repo: str | None = None
    issues: bool = False


class Calls(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The calls of some problems in a model's step.

    Attributes:
        calls: Number for each problem; with a trace, for all together.
        layer: The model's layer with these calls.
        trace: Routing trace, by which the calls are divided among the problems.
    """

    calls: float
    layer: str | None = None
    trace: str | None = None


class TrafficSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Each problem's number of calls in a model's step.

    Attributes:
        calls: A number, or `Calls`, by `OPERATOR SHAPE`, which may have wildcards.
        file: CSV with the columns operator, shape and calls, and perhaps layer.
    """

    calls: dict[str, Any] = {}
    file: str | None = None


class ProjectSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The fields of a groupbench.toml.

    Attributes:
        name: Name of the plan, without @; the gate reports cells that its previous run measured and this one lacks.
        plugins: Modules of operators and backends, as for `--plugin`.
        pythonpath: Folders to search for modules, before the file's folder and its `src`.
        setup: Shell command that builds a checkout, run in the file's folder of every commit that is measured.
        benchmarks: Files and folders to copy from this checkout into commits that predate them.
        budget: Time for measuring.
        confirm: Time for suspects, by default `ab.confirm.enough`.
        wait: Time to wait for other commands on the device.
        database: A file or a URL; records and artifacts are folders; report is a file.
        renamed: New names of operators, backends and shapes by their old ones: `night` lets their series continue.
        owner: Of incidents that neither a commit nor CODEOWNERS gives one, such as `@team/kernels`.
        toolchains: Requirement files (*.txt) and interpreters by name, for `night --toolchain` and `confirm`.
    """

    measure: tuple[PlanEntry, ...] = ()
    name: Annotated[str, msgspec.Meta(min_length=1)] = "nightly"
    plugins: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    setup: str | None = None
    benchmarks: tuple[str, ...] = ()
    budget: Duration | None = None
    confirm: Duration | None = None
    wait: Duration | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    database: str = "groupbench.db"
    records: str = "records"
    artifacts: str = "artifacts"
    report: str = "report.html"
    post: Post | None = None
    renamed: dict[str, str] = {}
    owner: str | None = None
    traffic: TrafficSettings = TrafficSettings()
    toolchains: dict[str, str] = {}


@dataclass(frozen=True)
class Project:
    """A groupbench.toml and the folder around it. Without a file: the current folder and the defaults."""

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
        """Return a path of the file, relative to the current folder if that is the file's."""
        return path if self.folder == Path.cwd() else str(self.folder / path)

    def plugins(self, further: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the file's plugins, followed by those of a command line."""
        return tuple(dict.fromkeys((*self.settings.plugins, *further)))

    def placed_plugins(self, further: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the plugins; the file's own Python and JSON files are relative to the folder."""
        own = (self.place(name) if ".py" in name or name.endswith(".json") else name for name in self.settings.plugins)
        return tuple(dict.fromkeys((*own, *further)))

    def check_benchmarks(self) -> None:
        """Raise ProjectError if a file or folder in `benchmarks` does not exist."""
        for name in self.settings.benchmarks:
            if not (self.folder / name).exists():
                raise ProjectError(f"{NAME}: benchmarks: cannot find {name}")

    def python_path(self) -> list[str]:
        """Return the folders in which Python finds the plugins; none without a file."""
        if self.file is None:
            return []
        return import_folders(self.folder, self.settings.pythonpath)


def import_folders(tree: Path, pythonpath: Iterable[str]) -> list[str]:
    """Return the module folders of a checkout: `pythonpath`, then the usual ones, the checkout itself last."""
    folders = dict.fromkeys(tree / path for path in (*pythonpath, *USUAL_FOLDERS))
    return [str(folder) for folder in folders if folder.is_dir()]


def find(start: Path | None = None) -> Path | None:
    """Return the nearest groupbench.toml in a folder or above it within the git repository, or None."""
    folder = (start or Path.cwd()).resolve()
    above = [folder, *folder.parents]
    top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
    return next((each / NAME for each in above[: top + 1] if (each / NAME).is_file()), None)


def load(path: Path | None = None) -> Project:
    """Return the project of a file, or the one of the current folder. Raises ProjectError."""
    path = path or find()
    return Project() if path is None else Project(read(path), path.resolve().parent, path.resolve())


def read(path: Path) -> ProjectSettings:
    """Return the fields of a file. Raises ProjectError."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ProjectError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise ProjectError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ProjectError(f"{path}: is nested too deeply") from error
    try:
        settings = msgspec.convert(data, ProjectSettings, strict=True)
        for name in ("budget", "confirm", "wait"):
            value = getattr(settings, name)
            if value is not None:
                _check(name, value)
        if TOOLCHAIN_MARK in settings.name:
            raise ValueError(
                f'name = "{settings.name}": expected a name without {TOOLCHAIN_MARK}, which `groupbench night '
                "--toolchain NAME` puts between the names of the plan and the toolchain"
            )
    except msgspec.ValidationError as error:
        from groupbench.tracker.text.misfits import explain

        raise ProjectError(f"{path}: {explain(error, data, ProjectSettings)}") from error
    except ValueError as error:
        raise ProjectError(f"{path}: {error}") from error
    return settings


def _check(name: str, value: Duration) -> None:
    """Check a duration of the file. Raises ValueError."""
    try:
        duration_s = in_seconds(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not 0 <= duration_s <= LONGEST_S or (name == "budget" and duration_s == 0):
        raise ValueError(
            f"{name} = {value!r} is out of range: {'above ' if name == 'budget' else ''}0 to 100000 minutes"
        )


def in_seconds(duration: Duration) -> float:
    """Return the seconds of a duration. Raises ValueError."""
    return seconds(str(duration), "m")
