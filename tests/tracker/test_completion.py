"""Test completion as a shell requests it: by an environment variable, in a new process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sqlite
DOCS = (Path(__file__).parents[2] / "docs" / "guide" / "completion.md").read_text(encoding="utf-8")
Complete = Callable[..., list[str]]
PROGRAMS = {"groupbench": "groupbench.tracker.cli", "tritonbench": "groupbench.operators.cli"}


def start(program: str, code: str = "main()", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program as its console script does."""
    script = f"from {PROGRAMS[program]} import main; import sys; sys.argv = ['{program}']; {code}"
    return subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def database(stored: Any, make: Any) -> Path:
    path: Path = stored([
        make(0, operator="grouped_gemm", backend="triton", commit_facts={"branch": "main", "subject": "First"}),
        make(0, operator="grouped_gemm", backend="torch"),
        make(0, operator="gather_rows", backend="plain"),
        make(1, operator="grouped_gemm", backend="triton", commit_facts={"branch": "side", "subject": "Second: 'x'"}),
    ])  # fmt: skip
    return path


def variables(program: str, line: str, shell: str) -> dict[str, str]:
    """Return the variables by which a shell asks for values of the last word of a line."""
    typed = line.split(" ")
    place = typed[-1] if shell == "fish" else str(len(typed) - 1)
    return {f"_{program.upper()}_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": place}


def proposed(out: str, shell: str) -> list[str]:
    """Return the values in a program's answer to a shell."""
    if shell == "bash":
        return [row.partition(",")[2] for row in out.splitlines() if row]
    if shell == "zsh":
        return out.splitlines()[1::3]
    return [row.partition(",")[2].partition("\t")[0] for row in out.splitlines() if row]


def words(program: str, line: str, shell: str = "bash", **environment: str) -> list[str]:
    """Return the values proposed for the last word of a line, which may be empty."""
    return words_of_each(program, [line], shell, **environment)[0]


EACH = """
import os
for variables in {requests}:
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.environ.update(variables)
        main()
    if os.waitpid(process, 0)[1] != 0:
        raise SystemExit(1)
    print("----", flush=True)
"""


def each(program: str, requests: list[dict[str, str]], **environment: str) -> list[str]:
    """Return a program's output for each of some variables, in forks of one process."""
    done = start(program, f"exec({EACH.format(requests=requests)!r})", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.split("----\n")[:-1]
    assert len(answers) == len(requests)
    return answers


def words_of_each(program: str, lines: list[str], shell: str = "bash", **environment: str) -> list[list[str]]:
    """Return the values proposed for each of some lines."""
    requests = [variables(program, line, shell) for line in lines]
    return [proposed(answer, shell) for answer in each(program, requests, **environment)]


def test_names_of_the_database_are_proposed(database: Path) -> None:
    expected = {
        "history --operator g": ["gather_rows", "grouped_gemm"],
        "league --op gr": ["grouped_gemm"],
        "history --operator grouped_gemm --backend t": ["torch", "triton"],
        "gate --run run": ["run-001", "run-000"],
        "compare 00": ["001ccccccc", "000ccccccc"],
        "history --commits main..00": ["main..001ccccccc", "main..000ccccccc"],
    }
    requests = [("bash", f"groupbench {line}") for line in expected]
    requests += [(shell, f"groupbench {line}") for shell in ("zsh", "fish") for line in [*expected][-2:]]
    answers = each(
        "groupbench",
        [variables("groupbench", line, shell) for shell, line in requests],
        GROUPBENCH_DB=str(database),
    )
    proposals = [proposed(answer, shell) for answer, (shell, _) in zip(answers, requests, strict=True)]
    values = list(expected.values())
    assert proposals == values + values[-2:] * 2


def test_the_words_and_the_branches_come_before_the_commits(database: Path) -> None:
    expected = {
        "groupbench compare ": ["latest", "previous", "main", "side", "001ccccccc", "000ccccccc"],
        "groupbench ab s": ["side"],
        "groupbench show run:run-00": ["run:run-001", "run:run-000"],
    }
    assert words_of_each("groupbench", [*expected], GROUPBENCH_DB=str(database)) == list(expected.values())


def test_the_option_and_the_project_name_the_database(database: Path, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.toml"
    file.write_text(f'database = "{database}"\n')
    lines = [f"groupbench {option} history --op ga" for option in (f"--db {database}", f"--config {file}")]
    assert words_of_each("groupbench", lines) == [["gather_rows"]] * 2


def test_tritonbench_proposes_its_own_names_too(database: Path) -> None:
    requests = [
        variables("tritonbench", f"tritonbench {line}", "bash") | {"GROUPBENCH_DB": place}
        for line, place in (
            ("--op ga", str(database)),
            ("--op grouped_gemm --only torch,triton_p", str(database)),
            ("--op ", "nowhere.db"),
        )
    ]
    stored, named, every = (proposed(answer, "bash") for answer in each("tritonbench", requests))
    assert stored == ["gather_rows"]
    assert "vector_add" in every
    assert "torch,triton_pointer" in named
    assert all(name.startswith("torch,triton_p") for name in named)


def test_a_database_that_cannot_be_read_proposes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    (tmp_path / "empty.db").touch()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    places = ("none.db", ".", "broken.db", "postgresql://nobody@127.0.0.1:1/nothing", "empty.db", "odd?#.db")
    requests = [
        variables("groupbench", f"groupbench {line}", "bash") | {"GROUPBENCH_DB": place}
        for place in places
        for line in ("history --operator ", "history --backend ", "gate --run ", "pins add ")
        if place == "broken.db" or "--run" in line  # all lines are read by one function
    ]
    for variable, answer in zip(requests, each("groupbench", requests), strict=True):
        names = [name for name in proposed(answer, "bash") if name not in ("latest", "previous")]
        assert names == [], variable
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_broken_project_file_prints_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GROUPBENCH_DB", raising=False)
    (tmp_path / "groupbench.toml").write_text("database = [")
    assert words("groupbench", "groupbench history --operator ") == []
    assert "grouped_gemm" not in words("tritonbench", "tritonbench --plan groupbench.toml --only ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_completion_loads_nothing_slow(database: Path, program: str) -> None:
    slow = "{'torch', 'triton', 'numpy', 'sqlalchemy', 'jinja2'}"
    code = f"import atexit; atexit.register(lambda: print('loaded', {slow} & set(sys.modules))); main()"
    requests = variables(program, f"{program} history --op ", "bash")
    done = start(program, code, GROUPBENCH_DB=str(database), **requests)
    assert done.stdout.splitlines()[-1] == "loaded set()", done.stdout
    assert len(done.stdout.splitlines()) > 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_lines_of_the_page_print_a_script_that_the_shell_takes(program: str) -> None:
    variable, shells = f"_{program.upper()}_COMPLETE", ("bash", "zsh", "fish")
    scripts = each(program, [{variable: f"{shell}_source"} for shell in shells])
    for shell, script in zip(shells, scripts, strict=True):
        (line,) = (
            line for line in re.findall(rf"```{shell}\n(.*?)```", DOCS, re.DOTALL)[0].splitlines() if variable in line
        )
        assert f"{variable}={shell}_source {program}" in line
        assert f"{variable}={shell}_complete" in script
        if shutil.which(shell) is not None:
            checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, timeout=60)
            assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wrong_instruction_is_quiet(program: str) -> None:
    done = start(program, **{f"_{program.upper()}_COMPLETE": "no_shell"})
    assert "Traceback" not in done.stderr
