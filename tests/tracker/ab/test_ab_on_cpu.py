"""Compare real processes on the CPU: the modules that a side runs, and the command end to end."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from repositories import git

from groupbench.tracker.ab import bench as ab
from groupbench.tracker.ab.bench import Bench
from groupbench.tracker.ab.result import AbCell
from groupbench.tracker.ab.side import AbError, AbSide, is_groupbench, make_layout
from groupbench.tracker.facts.record import Environment, Record
from groupbench.tracker.text import repro

pytestmark = pytest.mark.usefixtures("warm_imports")

# --- which modules a side runs ----------------------------------------------------------------------------------------

ROOT = Path(ab.__file__).resolve().parents[2]


def tree(folder: Path, says: str) -> Path:
    """A checkout of groupbench in small."""
    for part in ("kernels", "operators/measure", "tracker"):
        (folder / part).mkdir(parents=True)
    (folder / "kernels" / "mark.py").write_text(f"SAYS = {says!r}\n")
    (folder / "operators" / "__init__.py").write_text("")
    (folder / "operators" / "operator.py").write_text(f"SAYS = {says!r}\n")
    (folder / "operators" / "measure" / "__init__.py").write_text("raise RuntimeError('not the tree's clock')\n")
    return folder


def test_kernels_are_the_trees_and_the_clock_is_the_drivers(tmp_path: Path) -> None:
    candidate = tree(tmp_path / "tree", "mine")
    assert is_groupbench(candidate) and not is_groupbench(tmp_path)
    make_layout(candidate, tmp_path / "layout")
    code = """
import importlib.util, groupbench.operators.operator as operator, groupbench.operators.measure as measure
import groupbench.tracker as tracker, groupbench.kernels.mark as mark
print(operator.SAYS, mark.SAYS, measure.__file__, tracker.__file__)
for name in ("groupbench.operators.registry", "groupbench.kernels.grouped_gemm"):
    print(importlib.util.find_spec(name))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "layout")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    paths, *missing = done.stdout.splitlines()
    operators, kernels, measure, tracker = paths.split()
    assert (operators, kernels) == ("mine", "mine"), done.stderr
    assert Path(measure).resolve() == ROOT / "operators" / "measure" / "__init__.py"
    assert Path(tracker).resolve() == ROOT / "tracker" / "__init__.py"
    assert missing == ["None", "None"]  # modules that the tree lacks are not taken from the installed packages


def test_measuring_imports_little_of_the_tree() -> None:
    """The code that measures is the driver's. A module that older trees lack would end comparisons with them."""
    imported = set()
    for path in (ROOT / "operators" / "measure").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "groupbench.operators":
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("groupbench.operators."):
                imported.add((node.module or "").split(".")[2])
    contract = {"dtypes", "errors", "operator", "tolerances", "registry", "plugins", "relayout"}
    assert imported <= contract | {"measure"}


def test_a_tree_that_is_too_old_says_so(tmp_path: Path) -> None:
    old = AbSide("v0", tree(tmp_path / "tree", "old"))
    with Bench(old, old) as bench:
        result = bench.compare(AbCell("grouped_gemm", "torch_loop", "single", "fp32", device="cpu"))
        assert result.verdict == "failed"
        assert "(v0): too old or too broken for this groupbench to measure" in (result.message or "")
        with pytest.raises(AbError, match="too old"):
            bench.cells("cpu", operator="grouped_gemm")


# --- end to end -------------------------------------------------------------------------------------------------------

PLUGIN = """
from groupbench.operators.operator import Backend

WORK, FACTOR, RAISES = {facts}


def backend(name, work=8, factor=1.0, raises=False):
    def prepare(x):
        print("this must not reach the answers")
        if raises:
            raise RuntimeError("no such instruction")

        def run():
            for _ in range(work):
                out = x.a @ x.b[0]
            return out * factor

        return run

    return Backend(name, prepare, "a test", operator="grouped_gemm")


ALL = (backend("mine", work=WORK), backend("wrong", factor=FACTOR), backend("raises", raises=RAISES))
"""
COMMITS = {"one": (8, 1.0, False), "two": (96, 1.1, True)}
SHAPE = "G=1,M_g=32,N=32,K=32"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team's own package, whose second commit makes everything worse."""
    folder = tmp_path_factory.mktemp("repository")

    git(folder, "init", "-q")
    for name, facts in COMMITS.items():
        (folder / "my_plugin.py").write_text(PLUGIN.format(facts=facts))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", name)
        git(folder, "tag", name)
    return folder


@pytest.fixture(scope="module")
def groupbench_ab(repository: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        cells = ("--operator", "grouped_gemm", "--shape", SHAPE, "--dtype", "fp32")
        where = ("--device", "cpu", "--plugin", "my_plugin.ALL")
        command = [sys.executable, "-m", "groupbench.tracker", "ab", *args, *cells, *where]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    yield run
    done = subprocess.run(["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1


def test_a_commit_that_makes_everything_worse(groupbench_ab: Any, tmp_path: Path) -> None:
    backends = [part for name in ("mine", "wrong", "raises") for part in ("--backend", name)]
    options = ("--budget", "30", "--min-effect", "100", "--format=json", "--records", str(tmp_path / "ab.jsonl"))
    done = groupbench_ab("one", "two", *backends, *options)
    assert done.returncode == 1, done.stderr
    rows = {row["cell"]["backend"]: row for row in json.loads(done.stdout)}
    row = rows["mine"]
    assert row["verdict"] == "different" and row["change"] > 0, row
    assert row["head"]["title"] == "two" and len(row["head"]["commit"]) == 40
    assert row["base_accuracy"]["status"] == row["head_accuracy"]["status"] == "ok"
    assert rows["wrong"]["head_accuracy"]["status"] == "wrong" and "head is wrong" in rows["wrong"]["conclusion"]
    assert (rows["raises"]["verdict"], rows["raises"]["failed_side"]) == ("failed", "head")
    assert "head (two): RuntimeError: no such instruction" in rows["raises"]["message"]
    assert "3 cells on cpu" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "ab.jsonl").read_text().splitlines()]
    assert [len(line["bursts"]) for line in records] == [row["blocks"] for row in json.loads(done.stdout)]


def test_the_line_that_reproduces_a_change_measures_its_cell(repository: Path, make: Callable[..., Record]) -> None:
    record = make(1, backend="torch_loop", dtype="fp32", shape=SHAPE)
    cell = msgspec.structs.replace(record.cell, host="builtin", protocol="cooled+idle=0.01s", seed=7)
    program, *words = shlex.split(repro.compare(cell, "one", "two", Environment(device="cpu")))
    words += ["--budget", "1", "--min-effect", "900", "--format=json"]
    command = [sys.executable, "-m", "groupbench.tracker", *words]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    names = ("operator", "backend", "shape", "dtype", "mode", "seed")
    assert (program, [row["cell"][name] for name in names]) == ("groupbench", [getattr(cell, name) for name in names])
    assert (row["cell"]["device"], row["cell"]["idle_s"]) == ("cpu", 0.01)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("one", "no-such-commit"), "git knows no commit 'no-such-commit'"),
        (("one", "one", "--records", "/no/such/folder/ab.jsonl"), "cannot write"),
        (("one", "one", "--setup", "echo no compiler; false"), "does not build: --setup ended with 1: no compiler"),
        (("one", "one", "--head-python", "/no/such/python"), "cannot start /no/such/python"),
        (("one", "one", "--backend", "nope"), "grouped_gemm has no backend 'nope'"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(groupbench_ab: Any, args: tuple[str, ...], says: str) -> None:
    done = groupbench_ab(*args)
    assert done.returncode == (3 if "--setup" in args else 2)
    assert says in done.stderr.splitlines()[-1] and not done.stdout
