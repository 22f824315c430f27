"""The package's own programs find no module of the measured repository, even if PYTHONPATH names its folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from groupbench.tracker.facts.programs import FOLDERS

PROGRAM = """
from groupbench.tracker.facts.programs import begin

begin()
import json, os, sys
print(json.dumps([sys.path, os.environ.get("PYTHONPATH"), os.environ.get({folders!r}), sys.argv[1:]]))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(FOLDERS, raising=False)  # set where a command has run in the tests' own process
    folder = tmp_path / "repository"
    for name in (".git", "python", "deps/click.dist-info", "layout/groupbench", "sub"):
        (folder / name).mkdir(parents=True)
    (folder / "python" / "json.py").write_text("raise RuntimeError('not the json of Python')\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM.format(folders=FOLDERS))
    return folder


def start(repository: Path, path: str, *options: str, **variables: str) -> tuple[list[str], str | None, str | None]:
    """Return the program's module path, PYTHONPATH and measured folders, without those that find groupbench."""
    own = os.environ.get("PYTHONPATH", "")  # the tests' groupbench may be found by it
    done = subprocess.run(
        [sys.executable, *options, "an argument", "--x"],
        capture_output=True,
        text=True,
        cwd=repository / "sub",
        env={**os.environ, **variables, "PYTHONPATH": f"{path}:{own}" if own else path},
    )
    assert done.returncode == 0, done.stderr
    paths, after, folders, arguments = json.loads(done.stdout)
    assert arguments == ["an argument", "--x"]
    return paths, (after or "").removesuffix(own).removesuffix(":"), folders


@pytest.mark.parametrize(
    ("path", "kept", "measured"),
    [
        ("{0}/python", "", "{0}/python"),
        ("../python", "", "{0}/python"),
        ("{0}", "", "{0}"),
        ("{0}/python:{0}/../elsewhere:../deps:{0}/layout", "{0}/../elsewhere:{0}/deps:{0}/layout", "{0}/python"),
        ("{0}/../elsewhere", "{0}/../elsewhere", None),
    ],
)
def test_a_repositorys_folders_are_found_only_where_it_is_measured(
    repository: Path, path: str, kept: str, measured: str | None
) -> None:
    def clean(text: str) -> str:
        return ":".join(str(Path(each).resolve()) for each in text.format(repository).split(":"))

    paths, after, folders = start(repository, path.format(repository), str(repository.parent / "program.py"))
    assert str(repository / "python") not in paths
    assert (after and clean(after)) == (kept and clean(kept))
    assert folders == (measured and clean(measured))


def test_folders_that_were_named_before_are_kept(repository: Path) -> None:
    _, _, folders = start(repository, f"{repository}/python", str(repository.parent / "program.py"), **{FOLDERS: "/a"})
    assert folders == f"{repository}/python:/a"


def test_an_empty_entry_of_the_path_is_the_current_folder(repository: Path) -> None:
    _, _, folders = start(repository, "/nowhere::/nowhere", str(repository.parent / "program.py"))
    assert folders == str(repository / "sub")


def test_python_m_puts_no_module_of_the_current_folder_before_pythons(repository: Path) -> None:
    paths, _, folders = start(repository, str(repository.parent), "-m", "program")
    assert str(repository / "sub") not in paths
    assert folders == str(repository / "sub")


def test_without_such_a_folder_it_does_not_start_again(repository: Path) -> None:
    count = repository.parent / "elsewhere" / "sitecustomize.py"
    count.write_text(f"open({str(repository / 'starts')!r}, 'a').write('x')\n")
    start(repository, str(repository.parent / "elsewhere"), str(repository.parent / "program.py"))
    assert (repository / "starts").read_text() == "x"


INTERRUPTED = """
from groupbench.tracker.facts.programs import begin

begin()
import os, signal
os.kill(os.getpid(), signal.SIGINT)
print(sorted(map(int, signal.pthread_sigmask(signal.SIG_UNBLOCK, []))))
"""


@pytest.mark.parametrize(
    ("path", "ignored", "code", "output"),
    [
        ("", False, -signal.SIGINT, ""),
        ("", True, 0, "[]"),
        ("python", False, 0, str([int(signal.SIGHUP), int(signal.SIGINT), int(signal.SIGTERM)])),
    ],
    ids=["ends it", "ignored", "waits in a program that starts again"],
)
def test_an_interrupt_before_the_imports_gives_no_traceback(
    repository: Path, tmp_path: Path, path: str, ignored: bool, code: int, output: str
) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    folders = [str(repository / path), *filter(None, [os.environ.get("PYTHONPATH")])] if path else []
    script = ("trap '' INT; " if ignored else "") + 'exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        cwd=repository / "sub",
        env={**os.environ, **({"PYTHONPATH": ":".join(folders)} if folders else {})},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (code, "", output)
