"""The modules of a measured checkout are imported, however the environment finds the working tree's."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from groupbench.operators.measure import own_modules
from groupbench.tracker.facts.measured_tree import MeasuredTree

CODE = "where = {where!r}\n"


class Layout:
    """A working tree, a checkout of it, and an environment in which Python finds the working tree."""

    def __init__(self, folder: Path) -> None:
        self.user, self.tree, self.library = folder / "user", folder / "tree", folder / "library"
        for place in (self.user, self.tree, self.library):
            place.mkdir()

    def package(self, path: str, name: str = "__init__.py", both: bool = True) -> None:
        for root, where in ((self.user, "user"), (self.tree, "tree"))[: 1 + both]:
            (root / path).mkdir(parents=True, exist_ok=True)
            (root / path / name).write_text(CODE.format(where=where))

    def run(
        self,
        program: str,
        *,
        path: tuple[Path | str, ...] = (),
        startup: str = "",
        projects: tuple[tuple[str, str], ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that measures the checkout; `startup` is its sitecustomize, where editable finders begin."""
        measured = MeasuredTree(str(self.tree), (str(self.user),), projects)
        (self.library / "sitecustomize.py").write_text(startup)
        inherited = filter(None, [os.environ.get("PYTHONPATH")])  # the product itself may be found by it
        return subprocess.run(
            [sys.executable, "-c", f"import sys; import groupbench.operators\n{program}"],
            capture_output=True,
            text=True,
            cwd=self.tree,
            env={**measured.variables(), "PYTHONPATH": os.pathsep.join([*map(str, [self.library, *path]), *inherited])},
        )


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


SETUPTOOLS = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "kern":
            place = {folder!r}
            return importlib.util.spec_from_file_location(
                name, place + "/__init__.py", submodule_search_locations=[place])
sys.meta_path.append(Finder)
"""

REDIRECTED = SETUPTOOLS.replace("append(Finder)", "insert(0, Finder)")

FOUND: dict[str, Callable[[Layout, str], dict[str, object]]] = {
    "PYTHONPATH": lambda layout, folder: {"path": (layout.user / folder,)},
    "sys.path": lambda layout, folder: {"startup": f"import sys; sys.path.insert(0, {str(layout.user / folder)!r})"},
    "appended finder": lambda layout, folder: {"startup": SETUPTOOLS.format(folder=str(layout.user / folder / "kern"))},
    "first finder": lambda layout, folder: {"startup": REDIRECTED.format(folder=str(layout.user / folder / "kern"))},
}


@pytest.mark.parametrize("folder", ["", "src", "python", "packages/kern/lib"])
@pytest.mark.parametrize("way", FOUND)
def test_the_checkouts_package_is_imported(layout: Layout, way: str, folder: str) -> None:
    layout.package(str(Path(folder, "kern")))
    layout.package(str(Path(folder, "kern")), "fast.py")
    done = layout.run("import kern, kern.fast; print(kern.where, kern.fast.where)", **FOUND[way](layout, folder))
    assert done.stdout == "tree tree\n", done.stderr


def test_a_package_whose_folder_has_another_name(layout: Layout) -> None:
    layout.package("code/of")
    layout.package("code/of", "fast.py")
    startup = SETUPTOOLS.format(folder=str(layout.user / "code/of"))
    done = layout.run("import kern, kern.fast; print(kern.where, kern.fast.where)", startup=startup)
    assert done.stdout == "tree tree\n", done.stderr


def test_an_installed_package_of_links_to_the_working_trees_files(layout: Layout) -> None:
    layout.package("python/kern")
    (layout.library / "kern").mkdir()
    (layout.library / "kern/__init__.py").symlink_to(layout.user / "python/kern/__init__.py")
    done = layout.run("import kern; print(kern.where)")
    assert done.stdout == "tree\n", done.stderr


@pytest.mark.parametrize("way", ["PYTHONPATH", "sys.path"])
def test_a_namespace_package(layout: Layout, way: str) -> None:
    layout.package("python/acme/kern")
    done = layout.run("import acme.kern as kern; print(kern.where)", **FOUND[way](layout, "python"))
    assert done.stdout == "tree\n", done.stderr


def test_a_namespace_package_with_a_build_tools_folder_of_links(layout: Layout) -> None:
    """Setuptools makes one for a distribution in strict mode; here, two distributions share a namespace."""
    layout.package("one/acme/first")
    layout.package("two/acme/inner/second")
    layout.package("two/acme/inner/second", "new.py", both=False)
    links = layout.user / "two/build/links"
    (links / "acme/inner/second").mkdir(parents=True)
    for name in ("__init__.py", "new.py"):
        (links / "acme/inner/second" / name).symlink_to(layout.user / "two/acme/inner/second" / name)
    program = "import acme.first as one, acme.inner.second as two; print(one.where, two.where)"
    path = (layout.user / "one", links)
    done = layout.run(program, path=path)
    assert done.stdout == "tree tree\n", done.stderr
    done = layout.run(f"{program}; import acme.inner.second.new", path=path)
    assert "No module named 'acme.inner.second.new'" in done.stderr


def test_a_module_that_only_the_commit_has(layout: Layout) -> None:
    layout.package("python/kern")
    (layout.tree / "python/old.py").write_text(CODE.format(where="tree"))
    done = layout.run("import old; print(old.where)", path=(layout.user / "python",))
    assert done.stdout == "tree\n", done.stderr


def test_a_module_that_the_commit_lacks_is_missing(layout: Layout) -> None:
    layout.package("python/kern")
    layout.package("python/kern", "later.py", both=False)
    program = "import kern\ntry:\n    import kern.later\nexcept ImportError as error:\n    print(error.name)"
    assert layout.run(program, path=(layout.user / "python",)).stdout == "kern.later\n"


def test_a_module_that_the_commit_lacks_in_a_package_that_it_lacks(layout: Layout) -> None:
    layout.package("python/kern")
    layout.package("python/later", both=False)
    done = layout.run("import later", path=(layout.user / "python",))
    assert "ModuleNotFoundError" in done.stderr
    assert "is not used in its place" in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import runpy; runpy.run_path({file!r})",
        "exec(open({file!r}).read())",
        "import importlib.util as u; s = u.spec_from_file_location('kern', {file!r})\n"
        "s.loader.exec_module(u.module_from_spec(s))",
        "import ctypes; ctypes.CDLL({library!r})",
        "try:\n    exec(open({file!r}).read())\nexcept Exception:\n    print('hidden')",
    ],
    ids=["runpy", "open", "spec", "dlopen", "fallback"],
)
def test_code_of_the_working_tree_that_is_read_in_another_way_is_refused(layout: Layout, program: str) -> None:
    layout.package("python/kern")
    library = layout.user / "kern.so"
    library.write_bytes(b"")
    py_compile.compile(str(layout.user / "python/kern/__init__.py"))
    done = layout.run(program.format(file=str(layout.user / "python/kern/__init__.py"), library=str(library)))
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{layout.user}" in done.stderr and "would be measured as" in done.stderr
    assert "__pycache__" not in done.stderr


def test_data_of_the_working_tree_may_be_read(layout: Layout) -> None:
    layout.package("python/kern")
    (layout.user / "weights.bin").write_bytes(b"12")
    done = layout.run(f"print(len(open({str(layout.user / 'weights.bin')!r}, 'rb').read()))")
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "print(open({file!r}).read())",
        "import subprocess; print(subprocess.run(['cat', {file!r}], capture_output=True).stdout)",
        "import subprocess, sys; subprocess.run([sys.executable, {script!r}], check=True)",
        "import subprocess, sys; command = [sys.executable, '-c', 'open(input())']\n"
        "sys.exit(subprocess.run(command, env=guarded, input={file!r}, text=True).returncode)",
    ],
    ids=["open", "another program", "script", "another Python"],
)
def test_data_of_which_the_commit_has_its_own_is_refused(layout: Layout, program: str) -> None:
    """The working tree's tuned configs would be measured under the commit's name."""
    layout.package("kern")
    for root in (layout.user, layout.tree):
        (root / "tuned.json").write_text(str(root))
    guard = "import os; from pathlib import Path; from groupbench.operators.measure.own_modules import guard_programs\n"
    guard += f"guarded = os.environ | guard_programs(Path({str(layout.library)!r}))\n"
    places = {"file": str(layout.user / "tuned.json"), "script": str(layout.user / "kern/__init__.py")}
    done = layout.run(guard + program.format(**places))
    assert done.returncode == 1 and done.stdout == "", done.stdout
    assert "of the working tree would be measured as" in done.stderr, done.stderr


def test_files_of_a_removed_checkout_can_be_cleared_away(layout: Layout) -> None:
    (layout.tree / "a" / "b").mkdir(parents=True)
    (layout.user / "c" / "d").mkdir(parents=True)
    program = (
        f"import os, shutil; os.chdir('a'); shutil.rmtree({str(layout.tree)!r}); shutil.rmtree({str(layout.user)!r})"
    )
    done = layout.run(program)
    assert done.returncode == 0, done.stderr


def test_a_guarded_program_still_has_the_users_startup(layout: Layout) -> None:
    guard = (
        "import os, subprocess, sys; from pathlib import Path; from groupbench.operators.measure import own_modules\n"
    )
    first = layout.library / "first"
    first.mkdir()
    program = f"env = os.environ | own_modules.guard_programs(Path({str(first)!r})); print(end='', flush=True)\n"
    done = layout.run(
        f"{guard}{program}subprocess.run([sys.executable, '-c', 'print(sys.argv)'], env=env)",
        startup="import sys, builtins; builtins.sys = sys",
    )
    assert done.stdout == "['-c']\n", done.stderr


def test_an_extension_that_was_built_in_the_working_tree_is_refused(layout: Layout) -> None:
    layout.package("python/kern")
    from importlib.machinery import EXTENSION_SUFFIXES

    (layout.user / f"python/kern/_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    program = "try:\n    import kern._C\nexcept Exception:\n    print('slow fallback')"
    # Some finders name the extension's place, such as meson-python's and scikit-build-core's. Others find nothing.
    startup = SETUPTOOLS.replace('"kern"', '"kern._C"').replace(
        'place + "/__init__.py", submodule_search_locations=[place]', f'place + "/_C{EXTENSION_SUFFIXES[0]}"'
    )
    for begun in (startup.format(folder=str(layout.user / "python/kern")), ""):
        done = layout.run(program, path=(layout.user / "python",), startup=begun)
        assert done.stdout == ""
        assert "has not been built" in done.stderr


def test_a_virtual_environment_within_the_working_tree_is_not_its_code(layout: Layout) -> None:
    program = (
        "import sys\n"
        "from groupbench.operators.measure.own_modules import OwnModules\n"
        "from groupbench.tracker.facts.measured_tree import MeasuredTree\n"
        "import numpy, pathlib\n"
        "finder = OwnModules(MeasuredTree('/nowhere', (sys.prefix,)))\n"
        "print(finder.counterpart(numpy.__file__), finder.counterpart(sys.prefix + '/kern.py'))"
    )
    assert layout.run(program).stdout == "None /nowhere/kern.py\n"


def installed(layout: Layout, name: str = "kern") -> None:
    """Install a wheel of another version of the project."""
    (layout.library / name).mkdir()
    (layout.library / name / "__init__.py").write_text(CODE.format(where="library"))
    distribution = Path(name).name
    info = layout.library / f"{distribution}-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.9\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{distribution}-0.9.dist-info/METADATA,,\n")


@pytest.mark.parametrize("folder", ["", "src", "python", "deep/er"])
def test_the_checkouts_package_is_preferred_to_an_installed_copy(layout: Layout, folder: str) -> None:
    installed(layout)
    layout.package(str(Path(folder, "kern")))
    done = layout.run("import kern; print(kern.where)", projects=(("kern", "."),))
    assert done.stdout == "tree\n", done.stderr


def test_a_namespace_with_an_installed_copy(layout: Layout) -> None:
    """A judge has the checkout's folders behind the installed ones."""
    (layout.library / "acme").mkdir()
    installed(layout, "acme/kern")
    layout.package("src/acme/kern")
    done = layout.run(
        "import acme.kern as kern; print(kern.where)", path=(layout.tree / "src",), projects=(("kern", "."),)
    )
    assert done.stdout == "tree\n", done.stderr


def test_an_installed_copy_whose_source_is_not_found_is_refused(layout: Layout) -> None:
    installed(layout)
    layout.package("one/kern")
    layout.package("two/kern")
    done = layout.run("import kern; print(kern.where)", projects=(("kern", "."),))
    assert done.stdout == ""
    assert "pythonpath" in done.stderr


def test_another_distribution_is_left_alone(layout: Layout) -> None:
    installed(layout, "other")
    layout.package("python/kern")
    done = layout.run("import other; print(other.where)", projects=(("kern", "."),))
    assert done.stdout == "library\n", done.stderr


def test_a_package_behind_a_link_is_not_a_second_one(tmp_path: Path) -> None:
    package = tmp_path / "python/kern"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "linked").symlink_to("python")
    assert own_modules._packages_below(tmp_path, ["kern"]) == [package]
