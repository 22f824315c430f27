"""Test `groupbench night` with a fake `tritonbench`: the steps, their order, and the exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from repositories import git

from groupbench.tracker.ab.confirm import Confirmed, Measuring, Outcome
from groupbench.tracker.ab.toolchains import interpreter_of
from groupbench.tracker.cli import main
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.measured_tree import measured_folders
from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.night import measuring
from groupbench.tracker.project import load

Make = Callable[..., Record]
PROJECT = """
plugins = ["mine.KERNEL"]
budget = "1h"
[[measure]]
operator = "grouped_gemm"
"""


class Tritonbench:
    """A fake of the program that keeps its arguments, appends records, and ends with a code."""

    def __init__(self) -> None:
        self.records: list[list[Record]] = []
        self.codes: list[int] = []
        self.commands: list[list[str]] = []
        self.paths: list[str] = []
        self.folders: list[list[str]] = []
        self.pythons: list[str | None] = []

    @property
    def files(self) -> list[str]:
        """The files of records, one for each command."""
        return [command[command.index("--records") + 1] for command in self.commands]

    def __call__(
        self, arguments: list[str], folder: Path, environment: dict[str, str], python: str | None = None
    ) -> int:
        self.commands.append(list(arguments))
        self.pythons.append(python)
        self.paths.append(environment.get("PYTHONPATH", ""))
        self.folders.append(measured_folders(environment))
        file = Path(arguments[arguments.index("--records") + 1])
        with file.open("ab") as stream:
            stream.writelines(map(encode, self.records.pop(0) if self.records else []))
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture
def whole_report() -> None:
    """Make the reports of a test's nights, which takes longer than the rest of a night."""


@pytest.fixture
def tritonbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tritonbench:
    if "whole_report" not in request.fixturenames:
        monkeypatch.setattr("groupbench.tracker.report.page.build", lambda *_, **__: "<html></html>")
    for name in [name for name in os.environ if name.startswith(("GROUPBENCH_", "GITHUB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(measuring.HELD, "/tmp/groupbench-cpu-here.lock")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "groupbench.toml").write_text(PROJECT)
    fake = Tritonbench()
    monkeypatch.setattr("groupbench.tracker.cli.night.measure", fake)
    return fake


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code and all output of a command that ends."""
    runner = CliRunner()
    with runner.isolation() as (out, err, _):
        try:
            with main.make_context("groupbench", list(arguments)) as context:
                main.invoke(context)
            code = 0
        except click.exceptions.Exit as done:
            code = done.exit_code
        return code, (out.getvalue() + err.getvalue()).decode()


def committed(folder: Path) -> Path:
    """Make a folder a repository of two commits, with its groupbench.toml."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    for name in ("One", "Two"):
        git(folder, "commit", "-q", "--allow-empty", "-m", name)
    return folder


def test_a_night_leaves_everything_and_the_next_is_judged_by_it(
    whole_report: None, tritonbench: Tritonbench, make: Make, tmp_path: Path
) -> None:
    tritonbench.records = [[make(1)], [make(2)]]
    code, output = run("night", "--samples", "3")
    assert code == 0, output
    assert "GATE not judged: nothing to compare with yet. 1 new" in output
    written = sorted(path.name for path in (tmp_path / "artifacts").iterdir())
    assert written == ["comment.md", "gate.xml", "summary.md", "verdict.json"]
    assert "<html" in (tmp_path / "report.html").read_text()
    (arguments,) = tritonbench.commands
    assert arguments[arguments.index("--plan") + 1] == str(tmp_path / "groupbench.toml")
    assert arguments[-4:] == ["--device", "auto", "--samples", "3"] and "--previous" not in arguments
    assert tritonbench.folders[0][0] == str(tmp_path) and str(tmp_path) not in tritonbench.paths[0]
    code, output = run("night")
    assert code == 0, output
    assert tritonbench.commands[1][tritonbench.commands[1].index("--previous") + 1] == tritonbench.files[0]
    assert json.loads((tmp_path / "artifacts/verdict.json").read_text())["run"] == "run-002"


def test_it_works_from_a_folder_below(
    tritonbench: Tritonbench, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    tritonbench.records = [[make(1)]]
    assert run("night")[0] == 0
    assert (tmp_path / "groupbench.db").exists() and not list((tmp_path / "below").iterdir())


@pytest.mark.parametrize(("status", "code"), [("wrong", 1), ("ok", 3)])
def test_what_was_measured_decides_where_the_gate_finds_nothing(
    status: str, code: int, tritonbench: Tritonbench, make: Make
) -> None:
    tritonbench.records, tritonbench.codes = [[make(1, status=status)]], [code]
    assert run("night")[0] == code


def test_what_cannot_begin_leaves_no_half_night(tritonbench: Tritonbench, tmp_path: Path) -> None:
    tritonbench.codes = [3, 2]
    with pytest.raises(measuring.Unmeasured):
        run("night")
    assert run("night", "--nonsense") == (2, "")  # `tritonbench` prints the one line, with or without a commit
    assert not list((tmp_path / "records").glob(".unfinished*"))


SETUP, BENCHMARK = {"groupbench.toml": 'setup = "touch built; exit 7"'}, {"groupbench.toml": "benchmarks = ['nope.py']"}
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "no file": ("night", {"groupbench.toml": "rm"}, "groupbench init"),
    "another database": ("night", {"groupbench.db": "text"}, r"groupbench\.db: is not a SQLite database"),
    "setup": ("night", SETUP, r"this checkout does not build: `setup` of groupbench\.toml ended with 7"),
    **{
        command: (command, BENCHMARK, r"^groupbench.toml: benchmarks: cannot find nope.py$")
        for command in ("night", "backfill HEAD", "ab HEAD~1 HEAD --operator canary", "pull-request HEAD")
    },
    "--records": ("night --records=x", {}, "set the folder with"),
    "--list-backends": ("night --list-backends", {}, "tritonbench --list-backends"),
    **{f"--budget {text}": (f"night --samples 3 --budget {text}", {}, text) for text in ("1x", "0", "-1h")},
}
"""Commands with texts that are put in front of files; `rm` removes one."""


@pytest.mark.parametrize(("command", "files", "says"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_ends_it_before_anything_is_measured(
    command: str, files: dict[str, str], says: str, tritonbench: Tritonbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget is checked before the device is locked, too."""
    if "--budget" in command:
        monkeypatch.setattr("groupbench.tracker.cli.here.ensure_alone", lambda *arguments: pytest.fail("it was locked"))
    for file, text in zip(map(Path, files), files.values(), strict=True):
        before = file.read_text() if file.exists() else ""
        file.unlink() if text == "rm" else file.write_text(f"{text}\n{before}")
    with pytest.raises((TrackerError, click.UsageError), match=says) as caught:
        run(*command.split())
    assert caught.value.exit_code == (ExitCode.INCOMPLETE if files == SETUP else ExitCode.USAGE)
    assert not tritonbench.commands and Path("built").exists() == (files == SETUP)


READ_ONLY = {
    **{f"{name or 'the folder'} of a night": ("night", name) for name in ("records", "", "artifacts", "groupbench.db")},
    **{f"{name} of a backfill": ("backfill HEAD~1..", name) for name in ("records", ".git")},
}


@pytest.mark.parametrize(("command", "name"), READ_ONLY.values(), ids=READ_ONLY)
def test_a_read_only_place_ends_it_before_anything_is_measured(
    command: str, name: str, tritonbench: Tritonbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(tmp_path)
    if name == "groupbench.db":
        (tmp_path / name).touch()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, m: Path(path).absolute() != tmp_path / name and access(path, m))
    what = "database groupbench.db: " if name == "groupbench.db" else f"folder {tmp_path / name}: "
    with pytest.raises(TrackerError, match=f"^cannot write to the {what}") as caught:
        run(*command.split())
    assert caught.value.exit_code == ExitCode.USAGE and not tritonbench.commands


def test_another_commits_half_night_is_stored_and_a_new_one_begins(tritonbench: Tritonbench, make: Make) -> None:
    tritonbench.records, tritonbench.codes = [[make(1)]], [130]
    with pytest.raises(KeyboardInterrupt):
        run("night")
    tritonbench.records, tritonbench.codes = [[], [make(2)]], [4, 0]
    code, output = run("night")
    assert code == 0, output
    first, second, third = tritonbench.files
    assert first == second != third
    assert "run run-001" in output and "run run-002" in output


def test_a_misspelled_option_keeps_a_half_night(tritonbench: Tritonbench, make: Make) -> None:
    tritonbench.records, tritonbench.codes = [[make(1)]], [130]
    with pytest.raises(KeyboardInterrupt):
        run("night")
    tritonbench.codes = [2, 0]
    code, output = run("night", "--budjet")
    assert code == 2 and "the interrupted run is kept" in output
    assert run("night")[0] == 0
    assert len({*tritonbench.files}) == 1


def test_a_budget_is_that_of_the_measurement(tritonbench: Tritonbench, make: Make) -> None:
    tritonbench.records = [[make(1)]]
    run("night", "--budget", "1h30m")
    (arguments,) = tritonbench.commands
    assert arguments[arguments.index("--budget") + 1] == "5400.000000s"


def test_the_first_night_in_a_shallow_clone_names_the_command_that_completes_it(
    tritonbench: Tritonbench, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    source = committed(tmp_path / "source")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{source}", "shallow")
    tritonbench.records = [[make(1)], [make(2)], [make(3)]]
    for folder, hints in (("shallow", 1), ("shallow", 0), ("source", 0)):
        (tmp_path / folder / "groupbench.toml").write_text(PROJECT)
        monkeypatch.chdir(tmp_path / folder)
        assert run("night")[1].count("this is a shallow clone") == hints


def test_uncommitted_changes_are_reported_before_they_are_measured(
    tritonbench: Tritonbench, make: Make, tmp_path: Path
) -> None:
    committed(tmp_path)
    tritonbench.records = [[make(1)], [make(2)]]
    assert "uncommitted changes" not in run("night")[1]
    (tmp_path / "groupbench.toml").write_text(PROJECT + "# changed\n")
    assert "groupbench: uncommitted changes: " in run("night")[1]


@pytest.mark.parametrize(
    ("dirty", "cells", "then"),
    [
        (False, 1, "repeat the command to continue this run"),
        (True, 1, "a run of uncommitted changes cannot continue: a repeated command begins a new run"),
        (False, 0, "nothing was measured"),
    ],
)
def test_an_interrupt_says_whether_the_run_can_be_continued(
    dirty: bool, cells: int, then: str, tritonbench: Tritonbench, make: Make, tmp_path: Path, capsys: Any
) -> None:
    committed(tmp_path)
    if dirty:
        (tmp_path / "groupbench.toml").write_text(PROJECT + "# changed\n")
    tritonbench.records, tritonbench.codes = [[make(1)][:cells]], [130]
    with main.make_context("groupbench", ["night"]) as context, pytest.raises(KeyboardInterrupt):
        main.invoke(context)
    assert capsys.readouterr().err.splitlines()[-1] == f"groupbench: interrupted; {then}"


def test_an_error_of_a_step_that_does_not_decide_is_printed(
    tritonbench: Tritonbench, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token nothing is posted, and the verdict does not change."""
    for name in ("GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "GITLAB_CI", "CI"):
        monkeypatch.delenv(name, raising=False)
    Path("groupbench.toml").write_text('post = { number = 7, on = "github", repo = "o/r" }\n' + PROJECT)
    tritonbench.records = [[make(1)]]
    code, output = run("night")
    assert code == 0 and "TOKEN" in output, output


NO_REPORT = {
    "no folder": (2, 'report = "no/folder/report.html"', "no/folder"),
    "no plotly": (0, "", "no report: the report needs plotly: pip install -e '.[report]'"),
}


@pytest.mark.parametrize(("code", "setting", "says"), NO_REPORT.values(), ids=NO_REPORT)
@pytest.mark.parametrize("status", ["ok", "wrong"])
def test_a_report_that_cannot_be_made_does_not_hide_the_verdict(
    whole_report: None,
    tritonbench: Tritonbench,
    make: Make,
    monkeypatch: Any,
    status: str,
    code: int,
    setting: str,
    says: str,
) -> None:
    """The run has ended, so the next night starts another run."""
    if not setting:
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    Path("groupbench.toml").write_text(f"{setting}\n{PROJECT}")
    tritonbench.records = [[make(1, status=status)]]
    ended, output = run("night")
    assert (ended, says in output) == (1 if status == "wrong" else code, True), output
    assert Path("artifacts/verdict.json").is_file() and not Path("report.html").exists()
    assert not list(Path("records").glob(".unfinished*"))


TOOLCHAINS = """
[toolchains]
nightly = "other/python"
missing = "requirements-missing.txt"
"../x" = "other/python"
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return an interpreter without groupbench, as `nightly` in groupbench.toml. Its torch is an empty file."""
    python = tmp_path / "other" / "python"
    python.parent.mkdir()
    (python.parent / "torch.py").touch()
    packages = (path for path in sys.path if path.endswith("site-packages"))
    folders = os.pathsep.join([str(python.parent), *packages])
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folders}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "groupbench.toml").write_text(PROJECT + TOOLCHAINS)
    return python


def test_toolchains_have_runs_and_verdicts_of_their_own(
    tritonbench: Tritonbench, make: Make, other: Path, tmp_path: Path
) -> None:
    new = {"environment": {"triton": "3.8.0"}}
    tritonbench.records, tritonbench.codes = [[make(1)], [make(2, plan="nightly@nightly", **new)]], [0, 130, 0]
    assert run("night")[0] == 0
    with pytest.raises(KeyboardInterrupt):
        run("night", "--toolchain", "nightly")
    tritonbench.records = [[make(3)], []]
    assert run("night")[0] == 0  # does not continue the interrupted run of the other
    code, output = run("night", "--toolchain", "nightly", "--samples", "3")
    assert code == 0, output
    assert tritonbench.pythons == [None, str(other), None, str(other)]
    assert tritonbench.files[1] == tritonbench.files[3] and len({*tritonbench.files}) == 3
    assert [command[-2:] for command in tritonbench.commands][1] == ["--device", "auto"]
    assert [command.count("nightly@nightly") for command in tritonbench.commands] == [0, 1, 0, 1]
    assert json.loads((tmp_path / "artifacts/verdict.json").read_text())["run"] == "run-003"
    assert json.loads((tmp_path / "artifacts/nightly/verdict.json").read_text())["run"] == "run-002"
    assert (tmp_path / "artifacts/nightly/report.html").is_file()
    layout = tritonbench.paths[1].split(os.pathsep)[0]
    assert (
        tritonbench.folders[1][0] == str(tmp_path) and layout not in tritonbench.paths[0] and not Path(layout).exists()
    )


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("nigthly", r"no toolchain 'nigthly' \(did you mean 'nightly'\?\); it names nightly, missing", 2),
        ("missing", r"toolchain requirements-missing\.txt: no such file", 3),
        ("nightly", r"toolchain nightly: .*broken here.* needs the packages of 'groupbench\[measure\]'", 3),
        ("../x", r"use only letters", 2),
    ],
)
def test_a_toolchain_that_is_not_available(
    tritonbench: Tritonbench, other: Path, name: str, message: str, code: int
) -> None:
    other.write_text("#!/bin/sh\necho broken here >&2; exit 1\n")
    with pytest.raises(TrackerError, match=message) as raised:
        run("night", "--toolchain", name)
    assert raised.value.exit_code == code and not tritonbench.commands


def test_an_interpreter_without_groupbench_imports_this_one(tritonbench: Tritonbench, other: Path) -> None:
    code = "import groupbench.operators.cli as cli; print(cli.__file__)"
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([other, "-P", "-c", code], check=True, capture_output=True)
    assert interpreter_of("nightly", load()) == str(other)


def test_suspects_are_confirmed_with_the_toolchain(
    tritonbench: Tritonbench, make: Make, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons: list[str] = []

    def confirmed(store: object, measuring: Measuring, **more: Any) -> Confirmed:
        pythons.append(measuring.python)
        return Confirmed()

    monkeypatch.setattr("groupbench.tracker.ab.confirm.confirm", confirmed)
    tritonbench.records = [[make(1)], [make(2)]]
    run("night")
    run("night", "--toolchain", "nightly")
    assert pythons == [sys.executable, str(other)]


def test_only_confirm_by_itself_names_the_gate_as_the_next_step(
    tritonbench: Tritonbench, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    same: Any = SimpleNamespace(verdict="same", decided=True)
    confirmed = Confirmed({(1, ()): Outcome(same, "same", same)})
    monkeypatch.setattr("groupbench.tracker.ab.confirm.confirm", lambda *args, **more: confirmed)
    tritonbench.records = [[make(1)]]
    hint = "run `groupbench gate`"
    code, output = run("night")
    assert code == 0 and "CONFIRM 1 same" in output and hint not in output
    code, output = run("--db", "groupbench.db", "confirm")
    assert code == 0 and "CONFIRM 1 same" in output and hint in output


DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
MEASURE = """
import os, sys
from pathlib import Path
from groupbench.tracker.night import measuring
measuring.PROGRAM = (sys.executable, "-c", sys.argv[1])
measuring.measure([], Path(), dict(os.environ))
"""


@pytest.mark.parametrize(("program", "number"), [(DEAF + SLEEP, signal.SIGKILL), (SLEEP, signal.SIGINT)])
def test_a_program_ends_with_the_command_that_is_killed_or_interrupted(program: str, number: signal.Signals) -> None:
    """After Ctrl-C, the command waits for it; a killed command's program may miss SIGTERM."""
    words = [sys.executable, "-c", MEASURE, program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        command.send_signal(number)
        try:
            command.wait(60)
            assert number == signal.SIGKILL or not is_running(pid)
            deadline = time.monotonic() + 60
            while is_running(pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_running(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
