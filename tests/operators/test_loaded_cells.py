"""Real cells record the files and packages that their process loaded, in every process model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repositories import git

from groupbench.tracker.facts.record import Loaded, Record, read


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    subprocess.run(["bash", str(Path(__file__).parents[2] / "examples/slower/make.sh"), str(root)], check=True)
    (root / "tuned.json").write_text('{"rows": 4}')
    norm = (root / "norm.py").read_text()
    (root / "norm.py").write_text(f"import json\njson.load(open('tuned.json'))\n{norm}")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "read the tuned config")
    return root


def measure(root: Path, *arguments: str) -> list[Record]:
    command = [sys.executable, "-m", "groupbench.operators", "--op", "norm", "--device", "cpu", *arguments]
    done = subprocess.run([*command, "--records", "out.jsonl"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (root / "out.jsonl").read_bytes()
    (root / "out.jsonl").unlink()
    return [record for _, record in read(text.splitlines())]


def loaded_in(record: Record) -> Loaded:
    return record.loaded


def test_a_cell_names_its_files_and_packages(repository: Path) -> None:
    shapes = ("--shapes", "M=32,N=1024", "--shapes", "M=16,N=512")
    first, second = map(loaded_in, measure(repository, *shapes))
    assert set(first.files) == {"bench_norm.py", "norm.py", "tuned.json"}
    assert first.versions["torch"] and "msgspec" in first.versions
    assert second == Loaded(code=first.code, packages=first.packages)  # the file has the lists already
    (repository / "README.md").write_text("text")
    (again,) = map(loaded_in, measure(repository, "--shapes", "M=32,N=1024"))
    assert again == first
    (repository / "tuned.json").write_text('{"rows": 8}')
    (changed,) = map(loaded_in, measure(repository, "--shapes", "M=32,N=1024"))
    assert changed.code != first.code
    assert {path for path in first.files if first.files[path] != changed.files[path]} == {"tuned.json"}


def test_an_ab_of_the_same_files_is_not_timed(repository: Path) -> None:
    (repository / "README.md").write_text("text")
    git(repository, "commit", "-q", "-a", "-m", "text only")
    (repository / "tuned.json").write_text('{"rows": 8}')
    git(repository, "commit", "-q", "-a", "-m", "tune")
    results = [compare(repository, base, head) for base, head in (("HEAD~2", "HEAD~1"), ("HEAD~1", "HEAD"))]
    assert (results[0]["verdict"], results[0]["blocks"]) == ("same", 0)
    assert results[0]["message"] == "not timed: both sides ran the same 3 files, with the same packages"
    assert "not timed" not in str(results[1]["message"]), "its files differ; a busy machine may reach no block"


def compare(root: Path, base: str, head: str) -> dict[str, Any]:
    words = ("ab", base, head, "--operator", "norm", "--shape", "M=32,N=1024", "--device", "cpu", "--budget", "1")
    command = [sys.executable, "-m", "groupbench.tracker", *words, "--format=json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout, done.stderr
    (result,) = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_a_projects_tests_name_their_files(repository: Path) -> None:
    (repository / "test_norm.py").write_text(
        "import norm, torch\n\n\ndef test_norm(benchmark_gpu):\n    benchmark_gpu(torch.abs, torch.ones(8))\n"
    )
    git(repository, "add", "-A")
    words = ("-q", "-p", "no:cacheprovider", "--groupbench-records", "out.jsonl", "test_norm.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), "."]))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=repository, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((_, record),) = read((repository / "out.jsonl").read_bytes().splitlines())
    assert set(loaded_in(record).files) == {"test_norm.py", "norm.py", "tuned.json"}
    assert "pytest" in loaded_in(record).versions
