"""Each party has a cache of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from groupbench.operators.errors import GroupbenchError
from groupbench.operators.measure import folders, worker
from groupbench.tracker.facts.measured_tree import MeasuredTree


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders._all_parties.cache_clear()
    return tmp_path


def test_a_party_is_a_set_of_plugins_in_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    none, one, two = folders.of_party(()), folders.of_party(["a.py"]), folders.of_party(["a.py", "b.py"])
    assert len({none, one, two}) == 3
    monkeypatch.setattr(folders, "repository_root", lambda: "/elsewhere")
    assert folders.of_party(()) == none
    assert folders.of_party(["a.py"]) != one
    for name, value in MeasuredTree("/tmp/tree-1", ("/elsewhere",)).variables().items():
        monkeypatch.setenv(name, value)
    there = folders.of_party(["/tmp/tree-1/a.py"])
    for name, value in MeasuredTree("/tmp/tree-2", ("/elsewhere",)).variables().items():
        monkeypatch.setenv(name, value)
    assert folders.of_party(["/tmp/tree-2/a.py"]) == there


def test_the_cache_of_a_party_that_is_not_measured_any_more_is_removed(home: Path) -> None:
    old = home / "groupbench" / "compiled" / "0123456789abcdef"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    new = folders.of_party(["new"])
    assert [new] == list(old.parent.iterdir())


def test_without_a_home_compiled_code_is_kept_as_long_as_the_command(home: Path) -> None:
    (home / "groupbench").write_text("not a folder")
    assert folders.of_party(["a.py"]) == folders.of_this_command()


def test_a_process_writes_to_its_own_folders_and_to_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other, shared = folders.of_party(["other.py"]), tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv(folders.SETTING, str(shared))
    where = worker.call(kept, str(shared))
    assert where.startswith(os.path.realpath(folders._scratch(os.getpid())))
    assert not Path(where).exists()  # removed with its process
    with contextlib.suppress(GroupbenchError):  # without a layer, it is refused
        worker.call(kept, str(other))
    assert not (other / "kernel").exists()
    with pytest.raises(GroupbenchError, match=f"only in TMPDIR, and in the folders that {folders.SETTING} names"):
        worker.call(kept, "/usr")
    with pytest.raises(GroupbenchError, match=f"readonly database.* that {folders.SETTING} names"):
        worker.call(keeps_a_database)


def test_a_killed_process_leaves_no_lock_for_which_others_wait(tmp_path: Path) -> None:
    """Torch's extensions have one each, which is a file without an owner."""
    lock = tmp_path / "torch_extensions_dir" / "extension" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    ends, is_killed = worker.Worker("cpu", 60, tmp_path), worker.Worker("cpu", 60, tmp_path)
    ends.close()
    assert lock.exists()  # of another process, which compiles
    is_killed.kill()
    is_killed.close()
    assert not lock.exists()


def keeps_a_database() -> None:
    import sqlite3

    raise sqlite3.OperationalError("attempt to write a readonly database")


def kept(folder: str) -> str:
    import tempfile

    Path(folder, "kernel").touch()
    Path(os.environ["TRITON_CACHE_DIR"]).mkdir()
    return tempfile.mkdtemp()
