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
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("kernels", "operators", "tracker"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
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
    assert not loaded & {"torch", "triton", "helion", "sqlalchemy", "alembic", "numpy", "plotly"}


def test_the_tracker_imports_no_torch() -> None:
    names = [
        "groupbench.tracker" + "".join(f".{part}" for part in path.relative_to(ROOT / "tracker").with_suffix("").parts)
        for path in (ROOT / "tracker").rglob("*.py")
        if path.name != "__init__.py" and "migrations" not in path.parts and not path.name.startswith("__main__")
    ]
    assert len(names) > 10
    assert not modules_after(f"import {', '.join(sorted(names))}") & {"torch", "triton", "helion", "tritonbench"}


def test_operators_measure_without_a_database() -> None:
    loaded = modules_after(
        "import groupbench.operators.executor, groupbench.operators.session, groupbench.operators.cli"
    )
    assert "msgspec" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "plotly"}


def test_the_record_only_needs_msgspec() -> None:
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = top in sys.stdlib_module_names or top in ("msgspec", "groupbench") or top.startswith("__editable__")
        if not allowed:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Block())
try:
    import numpy
except ModuleNotFoundError:
    pass
else:
    sys.exit("the import is not blocked")
from groupbench.tracker.facts import record
run = '{"id":"r","started":"2026-01-01T00:00:00Z","commit":{"hash":"c"}}'
cell = '{"operator":"o","backend":"b","shape":"s","dtype":"fp16"}'
facts = f'"run":{run},"environment":{{"device":"cpu"}},"cell":{cell}'
line = f'{{"schema":{record.SCHEMA},{facts},"status":"error","message":"m"}}'
assert record.decode(record.encode(record.decode(line))) == record.decode(line)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
