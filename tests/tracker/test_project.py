"""groupbench.toml: its location, its contents, and their effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupbench.tracker import project
from groupbench.tracker.facts.measured_tree import add_to_path
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
    project = Project(ProjectSettings(plugins=("a.py", "b.py:KERNEL", "c.json", "pkg.mod")), tmp_path, tmp_path / NAME)
    monkeypatch.chdir("/")
    files = [str(tmp_path / name) for name in ("a.py", "b.py:KERNEL", "c.json")]
    assert project.placed_plugins(["d.py"]) == (*files, "pkg.mod", "d.py")
    assert project.plugins(["d.py"]) == ("a.py", "b.py:KERNEL", "c.json", "pkg.mod", "d.py")


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
    write(tmp_path / "part", f'pythonpath = ["kernels", "missing", "lib"]\n{MEASURE}')
    for name in ("kernels", "lib", "python", "src"):
        (tmp_path / "part" / name).mkdir()
    monkeypatch.chdir(tmp_path)
    loaded = project.load(tmp_path / "part" / NAME)
    folder = tmp_path / "part"
    assert loaded.database == str(folder / "groupbench.db")
    assert loaded.python_path() == [*(str(folder / name) for name in ("kernels", "lib", "src", "python")), str(folder)]
    monkeypatch.chdir(folder)
    assert project.load().database == "groupbench.db"


def test_a_databases_url_is_no_path() -> None:
    assert (
        Project(ProjectSettings(database="postgresql://here/db"), Path("/elsewhere")).database == "postgresql://here/db"
    )


def test_plugins_of_a_command_line_are_added() -> None:
    assert Project(ProjectSettings(plugins=("a.A", "b.B"))).plugins(("c.C", "a.A")) == ("a.A", "b.B", "c.C")


def test_pythonpath_of_the_environment_is_kept() -> None:
    assert add_to_path(["/a"], {"PYTHONPATH": "/b", "X": "1"}) == {"PYTHONPATH": "/a:/b", "X": "1"}
    assert add_to_path([], {"X": "1"}) == {"X": "1"}


@pytest.mark.parametrize(("text", "seconds"), [('"90s"', 90), ('"1h30m"', 5400), ("15", 900), ("0.5", 30)])
def test_durations(text: str, seconds: float, tmp_path: Path) -> None:
    assert project.load(write(tmp_path, f"budget = {text}\n{MEASURE}")).budget_s == seconds


ENTRY = '[[measure]]\noperator = "a"\n'
MISFITS = {
    "a mistyped key": (
        'plugns = ["a"]',
        "unknown key 'plugns' (did you mean 'plugins'?); accepted: measure, name, plugins",
    ),
    "a mistyped key of an entry": (
        f"{ENTRY}{ENTRY}dtyps = []",
        "[[measure]] 2: unknown key 'dtyps' (did you mean 'dtypes'?); accepted: operator, suites, ",
    ),
    "a mistyped key of a table": (
        "[post]\nnumer = 1",
        "post: unknown key 'numer' (did you mean 'number'?); accepted: ",
    ),
    "an entry without operator": ("[[measure]]\nshapes = []", "[[measure]] 1: the key 'operator' is missing"),
    "one entry for several": ("[measure]\nshapes = []", "measure = {...}: expected [[measure]] tables"),
    "a text for a list": ('plugins = "a"', 'plugins = "a": expected a list, such as ["a", "b"]'),
    "a number in a list": ('plugins = ["a", 1]', "plugins, item 2 = 1: expected text in quotes"),
    "an empty name": ('name = ""', 'name = "": expected text in quotes, not empty'),
    "a name that would be a toolchain's": (
        'name = "h200@cuda13"',
        'name = "h200@cuda13": expected a name without @, which `groupbench night --toolchain NAME` puts between',
    ),
    "a list for a duration": (
        "budget = [1]",
        'budget = [1]: expected a duration such as "90s" or "2h", or a number of minutes',
    ),
    "another device": ('device = "gpu"', 'device = "gpu": expected one of "auto", "cpu", "cuda"'),
    "another cost": (
        f'{ENTRY}costs = ["time"]',
        '[[measure]] 1: costs, item 1 = "time": expected one of "cold", "energy", "kernels", "memory"',
    ),
    "a number too small": ("[post]\nnumber = 0", "post.number = 0: expected a whole number from 1"),
    "a number out of its range": (
        f"{ENTRY}min_effect = 5",
        "[[measure]] 1: min_effect = 5: expected a number above 0, up to 1",
    ),
    "a text for a number": (f'{ENTRY}idle = "1"', '[[measure]] 1: idle = "1": expected a number'),
    "a number for a toolchain": ('[toolchains]\na = "x"\nb = 1', "toolchains.b = 1: expected text in quotes"),
    "a number for a table": ("post = 1", "post = 1: expected a table"),
    "a duration of another form": ('wait = "soon"', "wait: 'soon' is not a duration"),
    "a budget of nothing": ("budget = 0", "budget"),
    "an endless wait": ("wait = inf", "wait"),
    "another forge": ('post = { on = "cvs", number = 1 }', 'post.on = "cvs": expected one of'),
    "no TOML": ("a = ", "not valid TOML: Invalid value (at "),
    "nested arrays": ("a = " + "[" * 10_000, "is nested too deeply"),
}


@pytest.mark.parametrize(("text", "says"), MISFITS.values(), ids=MISFITS)
def test_an_error_names_the_file_the_key_and_what_it_accepts(text: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProjectError) as caught:
        project.load(path)
    assert str(caught.value).startswith(f"{path}: {says}")
