"""Test which files of a repository a process loads, and which of them count as code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from groupbench.operators.measure import fingerprint
from groupbench.operators.measure.fingerprint import Fingerprints
from groupbench.operators.measure.loaded import Watch
from groupbench.tracker.facts.record import Loaded

START = "import sys, os, json; from groupbench.operators.measure.loaded import watch; watch()\n"
END = """
from groupbench.operators.measure.fingerprint import fingerprints
import msgspec
print(msgspec.json.encode(fingerprints().of(*watch().loaded())).decode())
"""


class Repository:
    """A repository, and a process in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q")

    def git(self, *words: str) -> None:
        subprocess.run(["git", "-C", str(self.root), *words], check=True, capture_output=True)

    def write(self, path: str, text: str = "", tracked: bool = True) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        if tracked:
            self.git("add", "--force", "--", path)
        return place

    def run(self, program: str, before: str = "", pass_fds: tuple[int, ...] = ()) -> Loaded:
        """Return the fingerprint of a process that runs a program."""
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), "."]))
        done = subprocess.run(
            [sys.executable, "-c", before + START + program + END],
            capture_output=True,
            text=True,
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=pass_fds,
        )
        assert done.returncode == 0, done.stderr
        fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Loaded(**fields)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


CASES: dict[str, tuple[str, str, bool, bool]] = {  # path, program, whether git tracks it, whether it counts
    "module": ("mod.py", "import mod", True, True),
    "module of a package": ("pkg/mod.py", "import pkg.mod", True, True),
    "untracked module": ("mod.py", "import mod", False, True),
    "forgotten module": ("mod.py", "import mod; del sys.modules['mod']", True, True),
    "by its path": ("a.b.py", "import runpy; runpy.run_path('a.b.py')", True, True),
    "script": ("tool.py", "exec(compile(open('tool.py').read(), 'tool.py', 'exec'))", True, True),
    "script of a program": ("tool.py", "import subprocess; subprocess.run(['true', 'tool.py'])", False, True),
    "its data": ("config.json", "import subprocess; subprocess.run(['true', 'config.json'])", True, True),
    "its scratch data": ("config.json", "import subprocess; subprocess.run(['true', 'config.json'])", False, False),
    "data": ("config.json", "open('config.json').read()", True, True),
    "data by os.open": ("config.json", "os.read(os.open('config.json', os.O_RDONLY), 9)", True, True),
    "data in bytes": ("config.json", "open(b'config.json').read()", True, True),
    "untracked data": ("scratch.json", "open('scratch.json').read()", False, False),
    "written only": ("out.json", "open('out.json', 'w').write('')", True, False),
    "not read": ("mod.py", "", True, False),
    "hidden, tracked": (".tuned/config.json", "open('.tuned/config.json').read()", True, True),
    "hidden, untracked": (".cache/mod.py", "sys.path.insert(0, '.cache'); import mod", False, False),
    "compiler's cache": ("triton_cache/mod.py", "sys.path.insert(0, 'triton_cache'); import mod", False, False),
    "version file": ("pkg/_version.py", "import pkg._version", False, False),
    "tracked version file": ("pkg/_version.py", "import pkg._version", True, True),
    "compiler's argument": ("k.cu", "import subprocess; subprocess.run(['true', '-O3', 'k.cu'])", True, True),
    "forked child": ("mod.py", "pid = os.fork()\nif pid: os.waitpid(pid, 0); os._exit(0)\nimport mod", True, True),
    "before the fork": ("mod.py", "import mod\npid = os.fork()\nif pid: os.waitpid(pid, 0); os._exit(0)", True, True),
}


@pytest.mark.parametrize(("path", "program", "tracked", "counts"), CASES.values(), ids=list(CASES))
def test_which_files_count(repository: Repository, path: str, program: str, tracked: bool, counts: bool) -> None:
    repository.write(path, "{}", tracked)
    loaded = repository.run(program)
    assert (path in loaded.files) == counts and set(loaded.files) <= {path}
    assert loaded.code is not None


def test_a_module_counts_that_was_imported_before(repository: Repository) -> None:
    repository.write("early.py")
    assert set(repository.run("", before="import early\n").files) == {"early.py"}


def test_what_is_mapped_without_pythons_knowledge_counts(repository: Repository) -> None:
    """The loader maps the libraries that a shared object needs."""
    place = repository.write("libkernels.so", "code")
    with place.open() as file:
        os.set_inheritable(file.fileno(), True)
        program = f"import mmap\nkept = mmap.mmap({file.fileno()}, 0, prot=mmap.PROT_READ)\n"
        loaded = repository.run(program, pass_fds=(file.fileno(),))
    assert set(loaded.files) == {"libkernels.so"}


def test_a_shared_object_that_was_built_in_place_counts(repository: Repository) -> None:
    place = repository.root / "built.so"
    place.write_bytes(Path(msgspec._core.__file__).read_bytes())
    loaded = repository.run("import ctypes; ctypes.CDLL('./built.so')")
    assert set(loaded.files) == {"built.so"}


def test_headers_count_with_the_source_that_includes_them(repository: Repository) -> None:
    repository.write("csrc/k.cu", '#include <vector>\n#include "detail/a.cuh"\n')
    repository.write("csrc/include/detail/a.cuh", '  #  include "b.h"\n')
    repository.write("csrc/include/detail/b.h", "")
    repository.write("csrc/other.h", "")
    loaded = repository.run("open('csrc/k.cu').read()")
    assert set(loaded.files) == {"csrc/k.cu", "csrc/include/detail/a.cuh", "csrc/include/detail/b.h"}


def test_links_into_the_repository_are_followed(repository: Repository, tmp_path: Path) -> None:
    repository.write("pkg/__init__.py")
    repository.write("pkg/table.json", "{}")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "linked").symlink_to(repository.root / "pkg")
    program = f"sys.path.insert(0, {str(tmp_path / 'links')!r}); import linked\n"
    program += "open(os.path.join(os.path.dirname(linked.__file__), 'table.json')).read()"
    assert set(repository.run(program).files) == {"pkg/__init__.py", "pkg/table.json"}


def test_a_virtual_environment_in_the_repository_does_not_count(repository: Repository) -> None:
    repository.write("env/pyvenv.cfg", "", tracked=False)
    repository.write("env/lib/mod.py", "", tracked=False)
    assert repository.run("sys.path.insert(0, 'env/lib'); import mod").files == {}


def test_the_hash_follows_the_content_and_nothing_else(repository: Repository) -> None:
    place = repository.write("mod.py", "x = 1\n")
    repository.write("notes.md", "one")
    first = repository.run("import mod")
    os.utime(place, (1, 1))
    repository.write("notes.md", "two")
    repository.write("scratch.py", "", tracked=False)
    assert repository.run("import mod").code == first.code
    place.write_text("x = 2\n")
    second = repository.run("import mod")
    assert second.code not in (None, first.code) and second.files.keys() == first.files.keys()


def test_code_is_unknown_if_a_file_changed_after_it_was_read(repository: Repository) -> None:
    repository.write("mod.py", "x = 1\n")
    loaded = repository.run("import mod; os.utime('mod.py', (1, 1))")
    assert (loaded.code, loaded.files) == (None, {})
    assert loaded.packages is not None


def test_a_file_that_changes_later_keeps_the_hash_of_what_ran(repository: Repository) -> None:
    """A fork server reads a module once, and cells of the whole night run it."""
    place = repository.write("mod.py", "x = 1\n")
    watch, prints = Watch(str(repository.root)), Fingerprints(str(repository.root))
    watch.note(str(place), run=True)
    first = prints.of(*watch.loaded())
    place.write_text("x = 22\n")
    assert prints.of(*watch.loaded()).code == first.code is not None


def test_without_git_all_files_outside_caches_count(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    (root / ".cache").mkdir(parents=True)
    for name in ("groupbench.toml", "mod.py", "config.json", ".cache/kernel.json"):
        (root / name).write_text("")
    program = "import mod; [open(p).read() for p in ('config.json', '.cache/kernel.json')]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{START}{program}{END}"],
        capture_output=True, text=True, cwd=root, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["files"]) == {"mod.py", "config.json"}


def test_without_a_repository_the_code_is_unknown() -> None:
    loaded = Fingerprints(None).of([], ["msgspec"])
    assert loaded.code is None and set(loaded.versions) == {"msgspec"}


def test_packages_are_those_that_were_imported(repository: Repository) -> None:
    import importlib.metadata as metadata

    loaded = repository.run("import yaml, msgspec")
    assert {"msgspec", "pyyaml"} <= loaded.versions.keys() and "torch" not in loaded.versions
    assert loaded.versions["msgspec"] == metadata.version("msgspec")


def test_names_of_modules_and_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["yaml", "click", "numpy", "no_such_module", "__editable___x_finder"]
    assert {"pyyaml", "click", "numpy"} == set(fingerprint.versions(names))


@pytest.mark.parametrize("place", ["/no/such/file", "relative", "a\0b", "<string>", "", "/\udcff"])
def test_no_name_makes_the_hook_fail(tmp_path: Path, place: str) -> None:
    """An exception would be raised from the user's own call."""
    watch = Watch(str(tmp_path))
    for event in ("open", "exec", "import", "ctypes.dlopen", "subprocess.Popen"):
        watch.audit(event, (place, place, 0))
        watch.audit(event, (None, None, None))
    assert watch.loaded()[0] == ()


def test_checks_see_what_is_read(tmp_path: Path) -> None:
    watch, seen = Watch(str(tmp_path)), list[str]()
    watch.checks.append(seen.append)
    events: list[tuple[str, tuple[Any, ...]]] = [
        *(("open", (name, mode, 0)) for name, mode in (("read", "rb"), ("written", "w"), ("both", "r+"))),
        ("open", ("flags", None, os.O_WRONLY)),
        ("open", (3, "r", 0)),
        ("import", ("name", "extension.so", None)),
        ("ctypes.dlopen", (b"library.so",)),
        ("id", (1,)),
    ]
    for event, arguments in events:
        watch.audit(event, arguments)
    assert seen == ["read", "both", "extension.so", "library.so"]
