"""Find or create interpreters for toolchains, from groupbench.toml's requirement files.

For a requirement file, a virtual environment is created that sees this interpreter's packages, except for those of the
file. So a file with one pin differs in that package alone. `with_packages` does the same for named packages. An
environment is created once for each set of packages, and kept in ~/.cache/groupbench/toolchains.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from groupbench.tracker.ab.side import AbError, AbSide, SideFailure, SideProcess, python_path
from groupbench.tracker.facts.environment import software_identity
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.measured_tree import add_to_path
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.project import NAME, Project, ProjectError
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.text.wording import closest

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "triton", "helion")
"""Packages of a toolchain that are in a package index."""

Say = Callable[[str], None]

_FIRST_ANSWER_S = 300.0
_STARTS = "import torch, groupbench.operators.cli"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ToolchainError(TrackerError):
    """A toolchain is not available: a file is missing, or a package does not install."""

    exit_code = ExitCode.INCOMPLETE


def interpreter(location: str, folder: Path, say: Say = lambda text: None) -> Path:
    """Return the interpreter of a toolchain. Raises ToolchainError.

    Args:
        location: Path of a requirement file, whose name ends in .txt, or of an interpreter.
        folder: Folder to which a relative path refers.
    """
    path = folder / Path(location).expanduser()
    if not path.is_file():
        raise ToolchainError(f"toolchain {location}: no such file")
    if path.suffix != ".txt":
        return path
    name = _name(path.read_bytes(), *_running())
    return _kept(name, f"toolchain {location}", say, lambda home: _install_over(home, ["-r", str(path)]))


def interpreter_of(name: str, project: Project, say: Say = lambda text: None) -> str:
    """Return the interpreter of a toolchain in groupbench.toml, after starting groupbench in it.

    Raises ProjectError if the file does not name it, ToolchainError if it is not available.
    """
    named = project.settings.toolchains
    if name not in named:
        meant = closest(name, named)
        known = f"it names {', '.join(named)}" if named else "it has no [toolchains]"
        suggestion = f" (did you mean {meant!r}?)" if meant else ""
        raise ProjectError(f"{project.file or NAME}: no toolchain {name!r}{suggestion}; {known}")
    if not _FILE_NAME.fullmatch(name):  # it names a folder of results
        raise ProjectError(f"toolchain {name!r}: use only letters, digits, dots, dashes and underscores in its name")
    python = str(interpreter(named[name], project.folder, say))
    with Scratch("toolchain") as folder:
        try:
            _run([python, "-P", "-c", _STARTS], f"toolchain {name}", module_path(folder))
        except ToolchainError as error:
            raise ToolchainError(f"{error.message}; {python} needs the packages of 'groupbench[measure]'") from None
    return python


def module_path(folder: Path) -> list[str]:
    """Return the folders in which an interpreter without groupbench finds this one's. Links are made in `folder`."""
    return python_path(AbSide("toolchain"), folder)


def with_packages(wanted: Sequence[str], say: Say = lambda text: None) -> Path:
    """Return an interpreter with this one's packages, except for `wanted`: `triton==3.8.0`. Raises ToolchainError.

    It finds the wanted packages first, then this interpreter's, so only the wanted ones are installed.
    """
    name = _name(*wanted, *_running())
    return _kept(name, " ".join(wanted), say, lambda home: _install_over(home, wanted))


def pins(path: Path) -> dict[str, str]:
    """Return the exact versions in a requirement file, by package name in lower case."""
    matches = (re.match(r"\s*([A-Za-z0-9._-]+)\s*==\s*([^\s;#]+)", line) for line in path.read_text().splitlines())
    return {match.group(1).lower().replace("_", "-"): match.group(2) for match in matches if match}


class Interpreters:
    """Finds an interpreter with the packages of a stored result.

    Args:
        named: Requirement files and interpreters by name, as in groupbench.toml; relative paths refer to `folder`.
        others: Further interpreters.
        install: Install missing packages from the package index.
    """

    def __init__(
        self,
        named: Mapping[str, str],
        folder: Path,
        others: Iterable[Path] = (),
        *,
        install: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.named, self.folder, self.install, self.say = named, folder, install, say
        self.others = [sys.executable, *map(str, others)]
        self._environments: dict[tuple[str, str], Environment] = {}

    def find(self, wanted: Environment) -> str | None:
        """Return an interpreter with an environment's packages, or None."""
        if wanted.device not in ("cuda", "cpu"):
            return None
        for python in self.others:
            if self._has(python, wanted):
                return python
        for name, location in self.named.items():
            try:
                if not self._contradicts(location, wanted) and self._has(
                    python := str(interpreter(location, self.folder, self.say)), wanted
                ):
                    return python
            except ToolchainError as error:
                self.say(f"toolchain {name}: {error.message}")
        return self._installed(wanted) if self.install else None

    def _contradicts(self, location: str, wanted: Environment) -> bool:
        """Return whether a requirement file pins another version, which rules it out without installing it."""
        path = self.folder / location
        pinned = pins(path) if path.suffix == ".txt" and path.is_file() else {}
        versions = {name: getattr(wanted, name) for name in PACKAGES}
        return any(version is not None and pinned.get(name, version) != version for name, version in versions.items())

    def _installed(self, wanted: Environment) -> str | None:
        """Install the packages of an environment and return the interpreter, or None on failure."""
        here = self._environment(sys.executable, wanted.device)
        differs = [name for name in PACKAGES if here is not None and getattr(here, name) != getattr(wanted, name)]
        packages = [f"{name}=={getattr(wanted, name)}" for name in differs if getattr(wanted, name)]
        if not packages:
            return None
        try:
            python = str(with_packages(packages, self.say))
        except ToolchainError as error:
            self.say(error.message)
            return None
        return python if self._has(python, wanted) else None

    def _has(self, python: str, wanted: Environment) -> bool:
        environment = self._environment(python, wanted.device)
        return environment is not None and software_identity(environment) == software_identity(wanted)

    def _environment(self, python: str, device: str) -> Environment | None:
        """Return an interpreter's environment, or None if it does not start."""
        key = python, device
        if key not in self._environments:
            try:
                self._environments[key] = environment_of(python, device)
            except (AbError, SideFailure) as error:
                self.say(f"{python}: {error}")
                return None
        return self._environments[key]


def environment_of(python: str, device: str) -> Environment:
    """Return an interpreter's measuring environment. Raises AbError, SideFailure."""
    side = SideProcess("base", AbSide(python, None, python), device)
    try:
        side.send("hello", _FIRST_ANSWER_S, device=device)
        side.hello()
        return msgspec.convert(side.facts.environment, Environment, strict=False)
    finally:
        side.close()


def _running() -> list[str]:
    """Return what an environment starts from: this interpreter, and the versions of its packages."""
    installed = sorted(f"{package.name}=={package.version}" for package in distributions())
    return [*installed, sys.version, sys.prefix]


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupbench" / "toolchains"


def _name(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def _kept(name: str, what: str, say: Say, make: Callable[[Path], None]) -> Path:
    """Return a kept environment's interpreter. If it does not exist, one process at a time creates it."""
    from filelock import FileLock

    home = _home() / name
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):
        if not (home / "complete").exists():
            say(f"installing {what} into {home}")
            shutil.rmtree(home, ignore_errors=True)
            make(home)
            (home / "complete").touch()
    return home / "bin" / "python"


def _install_over(home: Path, wanted: Sequence[str]) -> None:
    """Create an environment with this interpreter's packages behind the wanted ones.

    Args:
        home: Folder of the environment.
        wanted: Requirements, as arguments of pip.
    """
    what = " ".join(wanted)
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)], what)
    (packages,) = home.glob("lib/python*/site-packages")
    folders = (f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
    (packages / "behind.pth").write_text("".join(folders))
    options = ["--quiet", "--disable-pip-version-check"]
    _run([*_pip(), "--python", str(home / "bin" / "python"), "install", *options, *wanted], what)


def _pip() -> list[str]:
    """Return the pip command: this interpreter's, or one in an environment created for it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]

    def make(home: Path) -> None:
        _run([sys.executable, "-m", "venv", str(home)], "pip")

    python = _kept(f"pip-{_name(sys.version, sys.base_prefix)}", "pip", lambda text: None, make)
    return [str(python), "-m", "pip"]


def _run(command: Sequence[str], what: str, path: Sequence[str] = ()) -> str:
    """Run a command with PYTHONPATH `path`, and return the output. Raises ToolchainError with the last error line."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = add_to_path(path, environment)
    logger.info("%s: running %s", what, " ".join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
    except OSError as error:
        raise ToolchainError(f"{what}: cannot start {command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise ToolchainError(f"{what}: {errors[-1][:400]}")
    return done.stdout
