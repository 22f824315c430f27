"""Backends and operators from plugins."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from groupbench.operators import plugins, registry
from groupbench.operators.errors import UsageError
from groupbench.operators.operator import Backend, Operator
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker.facts.programs import FOLDERS

PLUGIN = """
from groupbench.operators.define import operator
from groupbench.operators.operator import Backend, Operator

def prepare(inputs):
    return lambda: inputs.a

one = Backend("one", prepare, "a test", operator="grouped_gemm")
two = Backend("two", prepare, "a test", operator="grouped_gemm")
canary = Backend("of_canary", prepare, "a test", operator="canary")
several = [one, two, canary]
none = []
torch_loop = Backend("torch_loop", prepare, "in its place", operator="grouped_gemm")
nowhere = Backend("nowhere", prepare, "a test")
elsewhere = Backend("elsewhere", prepare, "a test", operator="conv")
mixed = [one, "two"]
unnamed = Backend("", prepare, "a test", operator="grouped_gemm")
numbered = Backend(3, prepare, "a test", operator="grouped_gemm")
endless = Backend("x" * 501, prepare, "a test", operator="grouped_gemm")
two_lines = Backend("a\\nb", prepare, "a test", operator="grouped_gemm")
undecodable = Backend("a\\udcff", prepare, "a test", operator="grouped_gemm")
two_names = Backend("a,b", prepare, "a test", operator="grouped_gemm")
padded = Backend("a ", prepare, "a test", operator="grouped_gemm")
longest = Backend("ä " * 249 + "ä", prepare, "a test", operator="grouped_gemm")
unkind = Backend("unkind", prepare, "a test", "cuda", operator="grouped_gemm")
unhashable = Backend("unhashable", prepare, "a test", ["triton"], operator="grouped_gemm")
number = 7
text = "one"

def made(name):
    @operator(["N=4"], name=name)
    def make(N):
        return N
    return make

unjudged, empty_operator, canary_again, two_operators = map(made, ("unjudged", "empty", "canary", "a,b"))
for each in (unjudged, canary_again, two_operators):
    each.backend(str)
for each in (empty_operator, canary_again, two_operators):
    each.reference(str)

def function():
    return one

def function_of_several():
    yield one
    yield two

def raises():
    raise RuntimeError("first line\\nsecond line")

def exits():
    import sys
    sys.exit(0)

def raises_later():
    yield one
    raise RuntimeError("later")

def wrong():
    return 7
"""


OPERATOR = """
from groupbench.operators.define import operator

@operator(["N=4"])
def twice(N, dtype, device):
    import torch
    return torch.randn(N, dtype=dtype, device=device)

@twice.reference
@twice.backend
def added(x):
    return x + x
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a module in the current folder, and no installed plugin."""
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    (tmp_path / "an_operator.py").write_text(OPERATOR)
    (tmp_path / "a_bare_plugin.py").write_text("number = 7")
    (tmp_path / "a_text.md").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(OPERATOR)
    (tmp_path / "a_broken_plugin.py").write_text("import no_such_module_at_all")
    (tmp_path / "an_exiting_plugin.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "entry_points", lambda: SimpleNamespace(select=lambda group: []))
    registry.forget()
    yield
    registry.forget()
    for name in (
        "a_plugin",
        "a_broken_plugin",
        "an_exiting_plugin",
        "an_operator",
        "package",
        "package.inner",
        "candidate",
        "bare",
    ):
        sys.modules.pop(name, None)


def added(*plugins: str, operator: str = "grouped_gemm") -> list[str]:
    built_in = {
        backend.name for o in map(registry.catalog_operator, registry.operator_names()) for backend in o.backends
    }
    return [b.name for b in get_operator(operator, plugins).backends if b.name not in built_in]


GOOD = {
    "a backend": ("a_plugin.one", ["one"]),
    "with a colon": ("a_plugin:one", ["one"]),
    "a list": ("a_plugin.several", ["one", "two"]),
    "an empty list": ("a_plugin.none", []),
    "a function": ("a_plugin.function", ["one"]),
    "a generator": ("a_plugin.function_of_several", ["one", "two"]),
    "of another operator": ("a_plugin.canary", []),
    "a long name": ("a_plugin.longest", ["ä " * 249 + "ä"]),
}


@pytest.mark.parametrize(("path", "names"), GOOD.values(), ids=GOOD)
def test_plugin(path: str, names: list[str]) -> None:
    assert added(path) == names


OPERATORS = ["an_operator.twice", "an_operator", "an_operator.py", "an_operator.py:twice", "package.inner"]


@pytest.mark.parametrize("path", OPERATORS)
def test_a_plugin_brings_an_operator(path: str) -> None:
    operator = get_operator("twice", [path])
    assert [backend.name for backend in operator.backends] == ["added"]
    assert "twice" in registry.operator_names([path])
    assert registry.has_operator("twice", [path])
    assert registry.home_of("twice", ["a_plugin.one", path]) == (path,)
    assert registry.operator_alone("twice", [path]).name == "twice"


def test_a_later_plugin_adds_backends_to_the_operator_of_another(tmp_path: Path) -> None:
    (tmp_path / "candidate.py").write_text(
        "from an_operator import twice\n@twice.backend(name='other')\ndef doubled(x):\n    return 2 * x"
    )
    (tmp_path / "bare.py").write_text(
        "from groupbench.operators.operator import Backend\nb = Backend('bare', lambda x: x, '', operator='twice')"
    )
    paths = ["an_operator", "candidate.py", "bare.py"]
    assert [backend.name for backend in get_operator("twice", paths).backends] == ["added", "other", "bare"]
    assert registry.home_of("twice", paths) == ("an_operator",), "the judge imports no candidate"


def test_two_operators_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'an_operator' and 'package.inner' both have an operator 'twice'"):
        get_operator("twice", ["an_operator", "package.inner"])


def test_an_installed_package_brings_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plugins.load("an_operator"), "groupbench.operators")
    assert get_operator("twice").backend("added").operator == "twice"
    assert registry.operator_names()[-1] == "twice"
    assert registry.home_of("twice", ["a_plugin.one"]) == ()


def test_a_function_is_not_called_to_look_for_operators() -> None:
    assert not registry.has_operator("softmax", ["a_plugin.raises"])


def test_plugins_add_up() -> None:
    assert added("a_plugin.two", "a_plugin.function", "a_plugin.several") == ["two", "one"]
    assert added("a_plugin.several", operator="canary") == ["of_canary"]


def test_a_plugin_replaces_its_namesake() -> None:
    operator = get_operator("grouped_gemm", ["a_plugin.torch_loop"])
    assert operator.backend("torch_loop").source == "in its place"
    assert [b.name for b in operator.backends] == [b.name for b in get_operator("grouped_gemm").backends]
    assert get_operator("grouped_gemm").backend("torch_loop").source != "in its place"


@pytest.mark.parametrize("form", ["copy = {}", "BACKENDS = ({},)", "BACKENDS = [{}]"])
def test_a_plugin_may_import_an_operator_of_groupbench(form: str, tmp_path: Path) -> None:
    """A candidate often takes a kernel of the catalog as its start."""
    backend = "Backend('copy', _loop.prepare, 'the same', operator='grouped_gemm')"
    (tmp_path / "candidate.py").write_text(
        "from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM\n"
        "from groupbench.operators.operator import Backend\n"
        "_loop = GROUPED_GEMM.backend('torch_loop')\n" + form.format(backend)
    )
    assert added("candidate.py") == ["copy"]
    assert get_operator("grouped_gemm", ["candidate.py"]).baseline == get_operator("grouped_gemm").baseline


def test_a_plugin_that_only_imports_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text("from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM\n")
    with pytest.raises(UsageError, match="imports operators of groupbench, and has no Backend"):
        get_operator("grouped_gemm", ["imports.py"])


BAD = {
    "nothing": ("", "neither module.attribute"),
    "an operator without a reference": ("a_plugin.unjudged", "raised ValueError: unjudged has no reference"),
    "an operator without a backend": ("a_plugin.empty_operator", "operator 'empty' has no backend"),
    "an operator of a name that there is": ("a_plugin.canary_again", "groupbench has an operator 'canary' already"),
    "an operator with a name of two": ("a_plugin.two_operators", "because --op could not select it"),
    "a module with nothing": ("a_bare_plugin", "the module has no operator and no Backend"),
    "no such file": ("nowhere/softmax.py", "there is no file nowhere/softmax.py"),
    "a similar file": ("a_plugn.py", "no file a_plugn.py; did you mean a_plugin.py?"),
    "no such JSON": ("nowhere/definition.json", "no file nowhere/definition.json"),
    "not a Python file": ("a_text.md", "neither module.attribute, a module nor a Python file"),
    "a file that does not import": ("a_broken_plugin.py", "no_such_module_at_all"),
    "no such attribute of a file": ("a_plugin.py:nope", "nope"),
    "no such module": ("no_such_module.x", "no_such_module"),
    "no such attribute": ("a_plugin.nope", "nope"),
    "does not import": ("a_broken_plugin.x", "no_such_module_at_all"),
    "exits at import": ("an_exiting_plugin.x", "does not load: SystemExit: 0"),
    "a function that exits": ("a_plugin.exits", "raised SystemExit: 0"),
    "a number": ("a_plugin.number", "neither a Backend"),
    "a text": ("a_plugin.text", "neither a Backend"),
    "a list with something else": ("a_plugin.mixed", "neither a Backend"),
    "a function that raises": ("a_plugin.raises", "RuntimeError: first line"),
    "a generator that raises": ("a_plugin.raises_later", "RuntimeError: later"),
    "a function of a number": ("a_plugin.wrong", "neither a Backend"),
    "a backend of no operator": ("a_plugin.nowhere", "known: grouped_gemm, "),
    "a backend of an unknown operator": ("a_plugin.elsewhere", "'conv'"),
    "no name": ("a_plugin.unnamed", "'' is not a backend's name: it needs 1 to 500 printable characters"),
    "a number for a name": ("a_plugin.numbered", "3 is not a backend's name"),
    "a name that no record holds": ("a_plugin.endless", "xxx is not a backend's name"),
    "a name of two lines": ("a_plugin.two_lines", r"'a\nb' is not a backend's name"),
    "a name that no encoding has": ("a_plugin.undecodable", r"'a\udcff' is not a backend's name"),
    "two names in one": ("a_plugin.two_names", "'a,b' is not a backend's name, because --only could not select it"),
    "a name that ends in a space": ("a_plugin.padded", "'a ' is not a backend's name"),
    "a kind there is not": ("a_plugin.unkind", "'unkind' is of kind 'cuda'; known: torch, triton, helion"),
    "a kind that is not text": ("a_plugin.unhashable", "is of kind ['triton']"),
    "dots": ("..x", "neither module.attribute"),
    "this folder": (".", "it is a folder; name a file in it, such as FILE.py"),
    "a folder": ("../", "it is a folder; name a file in it, such as FILE.py"),
    "a path without a suffix": ("./a_plugin", "neither module.attribute"),
}


@pytest.mark.parametrize(("path", "message"), BAD.values(), ids=BAD)
def test_bad_plugins_are_usage_errors(path: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        get_operator("grouped_gemm", [path])
    assert message in str(caught.value)
    assert "plugin" in str(caught.value)


PLACES = {
    "a module that it imports": (
        "import helper\n",
        "def f():\n    retrun 1\n",
        "SyntaxError: invalid syntax, at helper.py:2",
    ),
    "a line of its own": ("x = 1\nBLOCK['M']\n", "", "NameError: name 'BLOCK' is not defined, at broken.py:2"),
    "a function elsewhere": (
        "import helper\nhelper.f()\n",
        "def f():\n    raise KeyError('M')\n",
        "KeyError: 'M', at helper.py:2 in f",
    ),
    "a file that it may not change": (
        "raise OSError(30, 'Read-only file system', '/srv/cache')\n",
        "",
        "'/srv/cache', at broken.py:1; a backend changes files only in TMPDIR, and in the folders that "
        "GROUPBENCH_WRITABLE names",
    ),
    "an import": ("import no_such_one\n", "", "No module named 'no_such_one', at broken.py:1"),
}


@pytest.mark.parametrize(("bench", "helper", "end"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("plugin", ["broken.py", "broken"])
def test_a_plugin_that_does_not_load_names_its_line(
    bench: str, helper: str, end: str, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(bench)
    (tmp_path / "helper.py").write_text(helper)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("broken", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError) as caught:
        plugins.load(plugin)
    sys.modules.pop("helper", None)
    assert str(caught.value).startswith(f"plugin '{plugin}' does not load: ")
    assert str(caught.value).endswith(end)


def entry_point(loaded: Any) -> Any:
    def load() -> Any:
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    return SimpleNamespace(name="theirs", value="their.package:attribute", load=load)


def offer(monkeypatch: pytest.MonkeyPatch, loaded: Any, offered: str = "groupbench.backends") -> None:
    """Have an installed package offer an object under a group of entry points."""
    packages = SimpleNamespace(select=lambda group: [entry_point(loaded)] if group == offered else [])
    monkeypatch.setattr(plugins, "entry_points", lambda: packages)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Backend("theirs", lambda inputs: lambda: inputs.a, "installed", operator="grouped_gemm")
    both = [entry_point(installed), entry_point(lambda: [installed])]
    look_up = Mock(return_value=SimpleNamespace(select=lambda group: both if group == "groupbench.backends" else []))
    monkeypatch.setattr(plugins, "entry_points", look_up)
    assert added("a_plugin.one") == ["theirs", "one"]
    assert added() == ["theirs"]
    look_up.assert_called_once_with()  # though each record asks for its operator


def test_entry_points_of_a_measured_folder_are_known_to_a_process_that_does_not_find_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.egg-info").mkdir()
    (tmp_path / "theirs.egg-info" / "entry_points.txt").write_text("[groupbench.backends]\nx = theirs:X\n")
    (tmp_path / "theirs.egg-info" / "PKG-INFO").write_text("Name: theirs\n")
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert [entry.value for entry in plugins.offered()["groupbench.backends"]] == ["theirs:X"]


def test_an_option_beats_an_installed_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Backend("one", lambda inputs: lambda: inputs.a, "installed", operator="grouped_gemm")
    offer(monkeypatch, installed)
    assert get_operator("grouped_gemm", ["a_plugin.one"]).backend("one").source == "a test"


@pytest.mark.parametrize("loaded", [ImportError("gone"), AttributeError("x"), SystemExit(0), 7], ids=repr)
def test_a_bad_entry_point_is_a_usage_error(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, loaded)
    with pytest.raises(UsageError, match=r"their\.package:attribute"):
        get_operator("grouped_gemm")


@pytest.mark.parametrize("name", registry.CATALOG)
def test_the_catalog_has_each_operator_under_its_name(name: str) -> None:
    assert registry.catalog_operator(name).name == name


def test_every_operator_of_the_catalog_is_registered() -> None:
    folder = Path(registry.__file__).parent / "catalog"
    defined = set()
    for file in folder.glob("*.py"):
        module = importlib.import_module(f"groupbench.operators.catalog.{file.stem}")
        defined |= {value.name for value in vars(module).values() if isinstance(value, Operator)}
    assert defined == set(registry.CATALOG)


CODE = """
import sys
import time
import time
from groupbench.operators.measure import cell, selection
from groupbench.operators.registry import get_operator

operator = get_operator("split_k_matmul")
print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("groupbench.operators.catalog.")))
"""


def test_an_operator_is_imported_without_the_others() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["backends", "gemm_shapes", "split_k_matmul"]


def test_unknown_names_are_reported_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"known: grouped_gemm, .*, canary\. "):
        get_operator("conv")
    with pytest.raises(UsageError, match=r"no operator 'twce' \(did you mean 'twice'\?\); known: .*, canary, twice"):
        get_operator("twce", ["an_operator"])
    with pytest.raises(UsageError, match="torch_loop"):
        get_backend(get_operator("grouped_gemm"), "cutlass")


VERSION = "import sys; from groupbench.operators.plugins import load; print(load(sys.argv[1]).VERSION)"


@pytest.mark.parametrize("age_s", [-3600, 10], ids=["changing", "at rest"])
def test_a_file_that_changes_twice_in_a_second_is_read_again(tmp_path: Path, age_s: int) -> None:
    """Both versions have one size and one time, by which Python finds compiled code."""
    (folder := tmp_path / "mine").mkdir()
    file, when, seen = folder / "changing.py", int(time.time()) - age_s, []
    for version in (1, 2):
        file.write_text(f"VERSION = {version}")
        os.utime(file, (when, when))
        command = [sys.executable, "-c", VERSION, str(file)]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert seen == (["1", "2"] if age_s < 0 else ["1", "1"])
    assert (folder / "__pycache__").exists() == (age_s > 0)


@pytest.mark.parametrize("installed", [True, False])
def test_an_unknown_operator_may_be_tritonbenchs(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(registry, "has_tritonbench", lambda: installed)
    with pytest.raises(UsageError) as error:
        get_operator("softmax")
    assert str(error.value).endswith(", and TritonBench, which is not installed, has more") is not installed
