"""Check the contents of the wheel, and the packages that our modules import."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from groupbench.tracker.facts.record import SCHEMA

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, because setuptools leaves folders behind."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("NOT TESTED: the wheel. pip and setuptools are needed to build it")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kernels", "operators", "tracker"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, source]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_nothing_is_installed_outside_of_groupbench(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert top == {"groupbench", f"groupbench-{PYPROJECT['project']['version']}.dist-info"}
    assert "groupbench/__init__.py" not in wheel.namelist()  # a namespace, which other packages may share


def test_every_file_of_the_folders_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"groupbench/{path.relative_to(ROOT)}"
        for folder in ("kernels", "operators", "tracker")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".html", ".css", ".js", ".json", ".mako")
    }
    assert len(expected) > 40
    assert expected <= set(wheel.namelist())


def test_kernels_is_not_a_top_level_package() -> None:
    """The top-level package `kernels` belongs to another project, and transformers imports it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or ROOT not in Path(spec.origin or "/").parents


def test_both_commands_are_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "groupbench = groupbench.tracker.__main__:main" in text
    assert "tritonbench = groupbench.operators.__main__:main" in text


def modules_after(code: str) -> set[str]:
    """Return the names of the packages that are loaded after running `code` in a new interpreter."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


HELP = {
    "groupbench": "from groupbench.tracker.cli import main; sys.argv = ['groupbench', '--help']; main()",
    "tritonbench": "from groupbench.operators.cli import main; sys.argv = ['tritonbench', '--help']; main()",
}


@pytest.mark.parametrize("command", HELP)
def test_help_is_light(command: str) -> None:
    loaded = modules_after(HELP[command])
    assert "click" in loaded
    assert not loaded & {"torch", "triton", "helion", "sqlalchemy", "numpy", "plotly"}


def test_the_record_only_needs_msgspec() -> None:
    """import-linter checks what each part of the product imports; a record must also decode without other packages."""
    run = '{"id":"r","started":"2026-01-01T00:00:00Z","commit":{"hash":"c"}}'
    cell = '{"operator":"o","backend":"b","shape":"s","dtype":"fp16"}'
    facts = f'"run":{run},"environment":{{"device":"cpu"}},"cell":{cell}'
    line = f'{{"schema":{SCHEMA},{facts},"status":"error","message":"m"}}'
    loaded = modules_after(f"from groupbench.tracker.facts import record as r; r.encode(r.decode({line!r}))")
    loaded -= modules_after("pass") | sys.stdlib_module_names
    assert loaded <= {"groupbench", "msgspec", "typing_extensions"}  # msgspec uses the last one if it is there
