"""The output of cells is kept in log files, and messages name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from groupbench.operators import cli
from groupbench.operators.logs import Logs, file_name, logs_for, own_folder
from groupbench.tracker.facts.record import Record, read

pytestmark = pytest.mark.usefixtures("unaudited")
NOISY = """
import ctypes
from groupbench.operators.define import operator

@operator({"smoke": ["N=8"]})
def noisy(N, dtype, device):
    import torch
    return torch.randn(N, dtype=dtype, device=device)

@noisy.reference
@noisy.backend
def chatty(x):
    print("chatty was here")
    return x + 1

@noisy.backend
def from_c(x):
    ctypes.CDLL(None).printf(b"printed by C\\n")
    return x + 1

@noisy.backend
def raises(x):
    print("before it")
    raise KeyError("BLOCK_M")

@noisy.prepare
def eager(x):
    return x + 1
"""


def measure(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[str, dict[str, Record]]:
    """Return (output of the command, records by backend)."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "noisy.py").write_text(NOISY)
    where = ("--host", "builtin", "--device", "cpu", "--bursts", "1", "--samples", "1", "--quiet")
    done = CliRunner().invoke(
        cli.command, ["--plugin", "noisy.py", "--op", "noisy", *where, "--records", "r.jsonl", *args]
    )
    return done.output, {r.cell.backend: r for _, r in read((folder / "r.jsonl").read_bytes().split(b"\n"))}


def test_failures_have_logs_and_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, records = measure(tmp_path, monkeypatch)
    assert records["raises"].message == "KeyError: 'BLOCK_M', at noisy.py:24 in raises"
    assert records["eager"].message == "TypeError: prepare must return a callable, and eager's returned a Tensor"
    assert "logs of failed cells: r.jsonl.logs" in output
    kept = {path.name: path.read_text() for path in (tmp_path / "r.jsonl.logs").iterdir()}
    assert set(kept) == {file_name(records["raises"]), file_name(records["eager"])}
    log = kept[file_name(records["raises"])]
    assert log.startswith("noisy/raises N=8 fp16 fwd\nerror: KeyError")
    assert "before it" in log and "Traceback (most recent call last)" in log and 'raise KeyError("BLOCK_M")' in log
    assert "chatty was here" not in log


def test_all_logs_and_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, records = measure(tmp_path, monkeypatch, "--logs", "all", "-s", "--only", "chatty,from_c")
    assert {path.name for path in (tmp_path / "all").iterdir()} == {file_name(r) for r in records.values()}
    assert "printed by C" in (tmp_path / "all" / file_name(records["from_c"])).read_text()
    assert "--- noisy/chatty N=8 fp16 fwd\nchatty was here\n" in output
    assert "logs: all" in output


def test_without_records_logs_are_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    first, second = (logs_for(None, run, None, False).folder for run in ("a" * 32, "b" * 32))
    assert first != second and first.is_relative_to(tmp_path)


def test_no_other_user_can_change_a_temporary_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    folder = own_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "groupbench-ada", 0o700)
    folder.chmod(0o777)
    assert own_folder() == folder and folder.stat().st_mode & 0o777 == 0o755
    with monkeypatch.context() as another:
        another.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
        assert own_folder() != folder
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert own_folder() != folder


def test_a_cells_output_does_not_control_the_terminal(
    make: Callable[..., Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Logs(tmp_path, screen=True).keep(make(), "  File\x1b[2J\n\tline  2\r\x9bend")
    assert capsys.readouterr().err.endswith("\n  File�[2J\n\tline  2\n�end\n")


def test_a_silent_cell_has_no_log(tmp_path: Path, make: Callable[..., Record]) -> None:
    logs = Logs(tmp_path, every=True)
    logs.keep(make(), " \n")
    assert not logs.written([make()])
    logs.keep(make(), "a word")
    assert logs.written([make()]) and not logs.written([make(backend="another")])


def test_a_folder_that_cannot_be_written_costs_no_record(tmp_path: Path, make: Callable[..., Record]) -> None:
    (tmp_path / "file").write_text("")
    Logs(tmp_path / "file", every=True).keep(make(), "a word")


def test_names_of_logs_are_files_names(make: Callable[..., Record]) -> None:
    names = {file_name(make(shape=shape)) for shape in ("G=1|2,N=3", "G=1/2,N=3", "ä" * 400)}
    assert len(names) == 3
    assert all("/" not in name and len(name) < 140 for name in names)
