"""groupbench.toml: its location, its contents, and their effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupbench.tracker import project
from groupbench.tracker.project import NAME, Project, ProjectError, ProjectSettings

MEASURE = '[[measure]]\noperator = "canary"\n'


def write(folder: Path, text: str = MEASURE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(text)
    return path


def test_it_is_found_above_up_to_the_top_of_the_repository(tmp_path: Path) -> None:
    outside = write(tmp_path)
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    deep = repository / "kernels" / "deep"
    deep.mkdir(parents=True)
    assert project.find(deep) is None  # files above a repository do not belong to it
    top = write(repository)
    assert project.find(deep) == top
    nearer = write(repository / "kernels")
    assert project.find(deep) == nearer
    assert project.find(tmp_path) == outside


def test_files_of_plugins_are_in_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Project(ProjectSettings(plugins=("a.py", "b.py:KERNEL", "c.json", "pkg.mod")), tmp_path, tmp_path / NAME)
    monkeypatch.chdir("/")
    files = [str(tmp_path / name) for name in ("a.py", "b.py:KERNEL", "c.json")]
    assert found.placed_plugins(["d.py"]) == (*files, "pkg.mod", "d.py")
    assert found.plugins(["d.py"]) == ("a.py", "b.py:KERNEL", "c.json", "pkg.mod", "d.py")


def test_outside_a_repository_only_the_folder_itself_counts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "below").mkdir()
    assert project.find(tmp_path / "below") is None


def test_without_a_file_every_default_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = project.load()
    assert (loaded.file, loaded.folder, loaded.database) == (None, tmp_path, "groupbench.db")
    assert loaded.settings == ProjectSettings() and loaded.python_path() == []


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "part", f'pythonpath = ["lib", "missing"]\n{MEASURE}')
    for name in ("lib", "src"):
        (tmp_path / "part" / name).mkdir()
    monkeypatch.chdir(tmp_path)
    loaded = project.load(tmp_path / "part" / NAME)
    folder = tmp_path / "part"
    assert loaded.database == str(folder / "groupbench.db")
    assert loaded.python_path() == [str(folder / "lib"), str(folder / "src"), str(folder)]
    monkeypatch.chdir(folder)
    assert project.load().database == "groupbench.db"


def test_a_databases_url_is_no_path() -> None:
    assert (
        Project(ProjectSettings(database="postgresql://here/db"), Path("/elsewhere")).database == "postgresql://here/db"
    )


def test_plugins_of_a_command_line_are_added() -> None:
    assert Project(ProjectSettings(plugins=("a.A", "b.B"))).plugins(("c.C", "a.A")) == ("a.A", "b.B", "c.C")


def test_pythonpath_of_the_environment_is_kept() -> None:
    assert project.add_to_path(["/a"], {"PYTHONPATH": "/b", "X": "1"}) == {"PYTHONPATH": "/a:/b", "X": "1"}
    assert project.add_to_path([], {"X": "1"}) == {"X": "1"}


@pytest.mark.parametrize(("text", "seconds"), [('"90s"', 90), ('"1h30m"', 5400), ("15", 900), ("0.5", 30)])
def test_durations(text: str, seconds: float, tmp_path: Path) -> None:
    assert project.load(write(tmp_path, f"budget = {text}\n{MEASURE}")).budget_s == seconds


BAD = {
    "an unknown field": ('plugin = "a.B"', "plugin"),
    "a budget of nothing": ("budget = 0", "budget"),
    "a budget that is not a duration": ('budget = "soon"', "soon"),
    "an endless wait": ("wait = inf", "inf"),
    "a request without a number": ('post = { on = "github" }', "number"),
    "another forge": ('post = { on = "cvs", number = 1 }', "cvs"),
    "no TOML": ("plugins = [", "groupbench.toml"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_invalid_contents(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ProjectError, match=says):
        project.load(write(tmp_path, f"{text}\n{MEASURE}"))
