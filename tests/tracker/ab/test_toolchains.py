"""Test environments of toolchains, which are found by their packages and made once."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from groupbench.tracker.ab import toolchains
from groupbench.tracker.ab.side import AbError
from groupbench.tracker.ab.toolchains import Interpreters, ToolchainError, interpreter, pins, with_packages
from groupbench.tracker.facts.record import Environment

HERE = Environment(device="cpu", python="3.11.9", torch="2.13.0", triton="3.8.0")
OLD = msgspec.structs.replace(HERE, triton="3.7.1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "groupbench" / "toolchains"


@pytest.fixture
def commands(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of commands that would run. Nothing runs."""
    ran: list[list[str]] = []

    def run(command: Sequence[str], what: str) -> str:
        ran.append(list(command))
        return ""

    monkeypatch.setattr(toolchains, "_run", run)
    return ran


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the wheels that pip finds."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_an_environment_has_one_package_and_this_interpreters(index: Path, home: Path) -> None:
    for version in ("1.9.0", "1.10.0", "1.11.0"):
        wheel(index, "groupbench_fake_kernels", version)
    messages: list[str] = []
    for _ in range(2):
        python = with_packages(["groupbench-fake-kernels==1.10.0"], messages.append)
    assert len(messages) == 1 and home in python.parents
    code = "import groupbench_fake_kernels as g, msgspec; print(g.version, msgspec.__name__)"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1.10.0", "msgspec"]  # its own, and this interpreter's


def test_a_requirement_file_is_made_once_for_each_content_and_set_of_packages(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "_run", made(commands, toolchains._home()))
    monkeypatch.setattr(toolchains, "_pip", lambda: ["pip"])
    (tmp_path / "new.txt").write_text("triton==3.8.0\n")
    first = interpreter("new.txt", tmp_path)
    assert interpreter("new.txt", tmp_path) == first
    assert len(commands) == 2 and commands[1][-2:] == ["-r", str(tmp_path / "new.txt")]
    (tmp_path / "new.txt").write_text("triton==3.9.0\n")
    second = interpreter("new.txt", tmp_path)
    monkeypatch.setattr(toolchains, "distributions", lambda: ())
    assert len({first, second, interpreter("new.txt", tmp_path)}) == 3


def made(commands: list[list[str]], home: Path) -> Callable[[Sequence[str], str], str]:
    """Run nothing, but make the folder that an environment is made in."""

    def run(command: Sequence[str], what: str) -> str:
        commands.append(list(command))
        if "venv" in command:
            Path(command[-1], "lib", "python3", "site-packages").mkdir(parents=True)
        return ""

    return run


def test_a_file_with_one_pin_differs_in_that_package_alone(tmp_path: Path, index: Path, home: Path) -> None:
    """Its other packages are those of the running interpreter, whatever the index has."""
    for name, version in (("groupbench_fake_kernels", "1.10.0"), ("msgspec", "99.0")):
        wheel(index, name, version)
    (tmp_path / "pinned.txt").write_text("groupbench_fake_kernels==1.10.0\n")
    python = interpreter("pinned.txt", tmp_path)
    code = "import importlib.metadata as m; print(sorted({f'{d.name}=={d.version}' for d in m.distributions()}))"
    here, there = (
        set(ast.literal_eval(subprocess.run([each, "-c", code], capture_output=True, text=True, check=True).stdout))
        for each in (sys.executable, python)
    )
    assert home in python.parents
    assert there - here == {"groupbench_fake_kernels==1.10.0"} and here <= there


def test_pins_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("# a comment\nTorch==2.15.0 ; python_version > '3'\nnvidia_ml_py==12\nnumpy>=1\n\n")
    assert pins(tmp_path / "r.txt") == {"torch": "2.15.0", "nvidia-ml-py": "12"}


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"toolchain nope\.txt: no such file"):
        interpreter("nope.txt", tmp_path)


class TestInterpreters:
    @pytest.fixture
    def has(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Environment]:
        """Return the environments of the test's interpreters, by path, which the test can extend."""
        held = {sys.executable: HERE}

        def environment_of(python: str, device: str) -> Environment:
            if python not in held:
                raise AbError("it does not start")
            return held[python]

        monkeypatch.setattr(toolchains, "environment_of", environment_of)
        return held

    def test_the_one_with_the_packages(self, tmp_path: Path, has: dict[str, Environment]) -> None:
        old = tmp_path / "python"
        old.touch()
        has[str(old)] = msgspec.structs.replace(OLD, driver="any")
        named = {"broken": str(tmp_path / "gone"), "stable": "python"}
        messages: list[str] = []
        interpreters = Interpreters(named, tmp_path, say=messages.append)
        assert (interpreters.find(HERE), interpreters.find(OLD)) == (sys.executable, str(old))
        assert interpreters.find(msgspec.structs.replace(OLD, torch="2.9")) is None
        assert "toolchain broken: " in messages[0]

    def test_a_file_with_other_versions_is_not_installed(
        self, tmp_path: Path, has: dict[str, Environment], commands: list[list[str]]
    ) -> None:
        (tmp_path / "r.txt").write_text("triton==3.6.0\n")
        assert Interpreters({"old": "r.txt"}, tmp_path).find(OLD) is None
        assert commands == []

    def test_what_differs_is_installed_where_that_is_allowed(
        self, tmp_path: Path, has: dict[str, Environment], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed: list[Any] = []

        def install(packages: Sequence[str], say: Any) -> Path:
            installed.append(list(packages))
            has["/made"] = OLD
            return Path("/made")

        monkeypatch.setattr(toolchains, "with_packages", install)
        assert Interpreters({}, tmp_path).find(OLD) is None
        assert Interpreters({}, tmp_path, install=True).find(OLD) == "/made"
        assert installed == [["triton==3.7.1"]]
