"""Test the command as a whole: the modules that it loads, and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cases import Cli, commands, rarely, refused
from click.testing import CliRunner

from groupbench.tracker.cli import GROUPS, SECTIONS, main
from groupbench.tracker.cli.groups import Program
from groupbench.tracker.tools.lease import WAITING

COMMANDS = [name for entries in SECTIONS.values() for name in entries]
EVERY = dict(commands(main))


def python(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return done.stdout


def test_help_and_a_comment_load_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "comment.md").write_text("Nothing got worse.")
    code = """
import sys
from groupbench.tracker.cli import main

def loaded(*args):
    try:
        main(list(args))
    except SystemExit as done:
        assert done.code == 0
    names = ("sqlalchemy", "numpy", "plotly", "rich", "msgspec", "torch")
    return [name for name in names if name in sys.modules]

print("HEAVY", loaded("--help"))
print("HEAVY", loaded("post", sys.argv[1], "--dry-run"))
"""
    out = python(code, str(tmp_path / "comment.md"))
    assert all(name in out for name in COMMANDS)
    assert [line for line in out.splitlines() if line.startswith("HEAVY")] == ["HEAVY []", "HEAVY ['msgspec']"]
    assert "Nothing got worse." in out


def test_the_tracker_loads_no_torch(stored: Any, make: Any) -> None:
    path = stored([make()])
    code = """
import sys
from groupbench.tracker.cli import main
try:
    main(["--db", sys.argv[1], "history", "--baseline", "triton", "--format=json"])
except SystemExit as done:
    assert done.code == 0
print("HEAVY", [name for name in ("numpy", "pandas", "groupbench.tracker.formats", "groupbench.tracker.store.records")
    if name in sys.modules])
import groupbench.tracker.judge.gate, groupbench.tracker.compare.comparison, groupbench.tracker.report.page
print("HEAVY", [name for name in ("rich", "plotly", "torch", "groupbench.kernels", "groupbench.operators")
    if name in sys.modules])
"""
    assert python(code, str(path)).count("HEAVY []") == 2


@pytest.mark.parametrize("name", [*EVERY, *GROUPS])
def test_each_command_has_a_help(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    assert "default: (" not in result.stdout
    if "--mode" in result.stdout:
        assert "fwd_bwd" in result.stdout


@pytest.mark.parametrize(
    "args",
    [["--nope"], ["ingest"], ["compare", "a"], ["history", "--format=json", "x"], ["gate", "--format=xml"]],
    ids=str,
)
def test_usage_is_one_line(cli: Cli, args: list[str]) -> None:
    assert cli(*args).exit_code == 2


def test_a_mistyped_command_names_the_one_that_was_meant(cli: Cli) -> None:
    assert cli("histroy").stderr == "groupbench: no command 'histroy'; did you mean 'history'?\n"
    assert cli("zzz").stderr == "groupbench: no command 'zzz'; see `groupbench --help`\n"


def test_help_lists_each_command_once_under_its_task() -> None:
    help_text = CliRunner().invoke(main, ["--help"]).stdout
    titles = [line.removesuffix(":") for line in help_text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["Options", *SECTIONS]
    assert len(help_text.splitlines()) <= 50
    assert all(len(line) <= 80 for line in help_text.splitlines())


def test_a_group_runs_its_default_command(cli: Cli, stored: Any, make: Any) -> None:
    stored([make()])
    for command in (["pins"], ["pins", "list"]):
        assert cli(*command, "--all", "--format", "json").stdout == "[]\n"
    assert cli("incidents").stderr == "no incident is open; `gate` lists undecided series, --all closed incidents\n"
    assert cli("db", "verfy").stderr == "groupbench: no command 'verfy'; did you mean 'verify'?\n"
    assert "incidents [OPTIONS] COMMAND [ARGS]..." in cli("incidents", "--help").stdout


def test_verbosity_may_follow_the_command(cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored([make()])  # by a command, unless another test has stored the same
    given: list[int] = []
    monkeypatch.setattr("groupbench.tracker.tools.logs.configure", given.append)
    for args in (["gate"], ["-v", "gate"], ["list", "runs", "-vv"], ["list", "runs", "--verbose"]):
        cli(*args)
    assert given == [0, 1, 2, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_urgent_command_has_its_flag_anywhere(place: int, cli: Cli, stored: Any, make: Any) -> None:
    stored([make()])
    words = ["list", "runs"]
    done = cli(*words[:place], "--urgent", *words[place:])
    assert (done.exit_code, WAITING.urgent) == (0, True), done.output
    cli(*words)
    assert not WAITING.urgent


def test_an_empty_name_of_a_database(cli: Cli) -> None:
    assert "the database name is empty" in cli("list", "runs", db="").stderr  # type: ignore[arg-type]
    assert cli("list", "runs", db="a\0b").exit_code == 2  # type: ignore[arg-type]


def test_the_database_of_the_environment(stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored([make()])
    monkeypatch.setenv("GROUPBENCH_DB", str(path))
    assert "run-000" in CliRunner().invoke(main, ["list", "runs"]).stdout


@pytest.mark.parametrize("named", [("--db={}",), ("--db", "{}")])
def test_the_database_may_follow_the_command(named: tuple[str, ...], stored: Any, make: Any) -> None:
    path = stored([make()])
    words = [word.format(path) for word in named]
    after = CliRunner().invoke(main, ["history", *words, "--format=json"])
    before = CliRunner().invoke(main, [*words, "history", "--format=json"])
    assert after.exit_code == 0, after.output
    assert after.output == before.output
    nothing = CliRunner().invoke(main, ["history", words[0].partition("=")[0]])
    assert nothing.exit_code == 2
    assert "'--db' requires an argument" in nothing.output
    ended = CliRunner().invoke(main, ["show", "--", *words])
    assert ended.exit_code == 2, "an argument after -- is not an option"


@pytest.mark.parametrize(
    "words",
    [
        ("list runs", "--limit", "9" * 20),
        ("incidents ack", "9" * 20, "--reason", "known"),
        ("incidents expect", "9" * 20, "--reason", "known"),
        ("incidents close", "9" * 20, "--as", "fixed", "--reason", "known"),
    ],
    ids=lambda words: words[0],
)
def test_a_number_beyond_64_bits_is_refused_in_one_line(
    words: tuple[str, ...], cli: Cli, stored: Any, make: Any
) -> None:
    stored([make()])
    assert "a number has more than the 64 bits" in refused(cli, *words[0].split(), *words[1:])


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (click.Abort(), 130), (BrokenPipeError(32, "Broken pipe"), 141)],
    ids=["interrupt", "abort", "pipe"],
)
def test_interruptions_take_a_line_at_most(raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(self: Program, context: click.Context) -> Any:
        raise raised

    monkeypatch.setattr(Program, "invoke", invoke)
    result = CliRunner().invoke(main, ["list", "runs"])
    assert (result.exit_code, result.output) == (code, "groupbench: interrupted\n" if code == 130 else "")


ANCESTRY = "ancestry unknown: earlier runs ordered by time, possibly including other branches\n"


def test_a_closed_pipe_is_quiet(stored: Any, make: Any, tmp_path: Path) -> None:
    path = stored([make(night) for night in range(30)])
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "from groupbench.tracker.cli import main; main()", "--db", str(path), "history"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, ANCESTRY)


def run(*args: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from groupbench.tracker.cli import main; main()", *args]
    return subprocess.run(command, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("args", "unbuffered"),
    [
        *[(["history", "--format=csv"], ""), (["gate"], "1")],
        *rarely((["gate"], ""), *((args, more) for args in (["--help"], ["db", "export", "-"]) for more in ("", "1"))),
        *rarely((["history", "--format=csv"], "1")),
    ],
    ids=str,
)
def test_a_full_disk_is_one_line_and_no_verdict(
    args: list[str], unbuffered: str, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored([make(0), make(1, status="wrong")])  # which is a regression
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("w") as full:
        done = run("--db", str(path), *args, stdout=full)
        note = ANCESTRY if "history" in args else ""
        assert (done.returncode, done.stderr) == (3, f"{note}groupbench: standard output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", *rarely("1")])
def test_a_full_disk_behind_standard_error(unbuffered: str, stored: Any, make: Any, monkeypatch: Any) -> None:
    path = stored([make(0), make(1, status="wrong")])
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("w") as full:
        assert run("--db", str(path), "nope", stderr=full).returncode == 2
        assert run("--db", str(path), "gate", stdout=full, stderr=full).returncode == 3


@pytest.mark.parametrize("closed", [">&- 2>&-", *rarely(">&-", "2>&-")])
def test_closed_streams_are_read_by_nobody(closed: str, stored: Any, make: Any) -> None:
    path = stored([make(0), make(1, status="wrong")])
    command = f"exec {sys.executable} -c 'from groupbench.tracker.cli import main; main()' --db {path} gate {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "" if "2>&-" in closed else ANCESTRY)
