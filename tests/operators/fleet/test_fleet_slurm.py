"""Job arrays through submitit, with its local executor instead of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import drive, slurm

submitit = pytest.importorskip("submitit", reason="NOT TESTED: SLURM. pip install 'groupbench[slurm]'")

sys.path.append(str(Path(__file__).parents[1]))
import fleet_cells as cells  # noqa: E402


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm_imports: dict[str, str]) -> None:
    here = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, warm_imports["PYTHONPATH"]]))
    monkeypatch.setenv("FLEET_MARK", str(tmp_path / "mark"))
    monkeypatch.setattr(submitit.core.core.Job, "_results_timeout_s", 1)


def measure(kind: Any, tmp_path: Path, number: int = 4, **options: Any) -> list[Any]:
    fleet = slurm.SlurmFleet(slurm.executor(tmp_path, "cpu", {"cluster": "local"}), measure=kind, **options)
    return list(drive.records(fleet, cells.work(number), Progress()))


def test_batches_are_jobs_of_an_array(tmp_path: Path) -> None:
    records = measure(cells.instant, tmp_path, 5, max_array=2)
    assert len({(r.cell.shape, r.cell.backend) for r in records}) == len(records) == 10
    assert len({r.environment.host for r in records}) == 2


@pytest.mark.exhaustive  # that which dies twice is measured again too
def test_a_job_that_dies_once_is_measured(tmp_path: Path) -> None:
    assert {r.status for r in measure(cells.dies_once, tmp_path, 3)} == {"ok"}


def test_a_job_that_dies_is_measured_again_once(tmp_path: Path) -> None:
    records = measure(cells.dies, tmp_path, 3, max_array=4)
    failed = [r for r in records if r.status != "ok"]
    assert {(r.cell.shape, r.status) for r in failed} == {("G=1,M_g=3,N=256,K=256", "error")}
    assert len(records) == 6
    assert all("two SLURM jobs died" in (r.message or "") for r in failed)


def test_an_exception_fails_only_its_own_batch(tmp_path: Path) -> None:
    assert {(r.status, (r.message or "")[:9]) for r in measure(cells.refuses, tmp_path, 2)} == {("error", "not here:")}
    assert {r.status for r in measure(cells.instant, tmp_path, 1, budget_s=-1)} == {"skipped"}


def test_chunks_are_even_and_contain_every_batch_once() -> None:
    chunks = slurm._chunks(cells.work(10), 3)
    assert sorted(n for chunk in chunks for n in chunk) == list(range(10))
    assert sorted(map(len, chunks)) == [3, 3, 4]
    assert slurm._chunks(cells.work(2), 1000) == [[0], [1]]


PARAMETERS = {
    "local": ("local", {"cluster": "local"}),
    "a partition": ("partition=gpu,timeout_min=60", {"partition": "gpu", "timeout_min": 60}),
}


@pytest.mark.parametrize(("text", "expected"), PARAMETERS.values(), ids=PARAMETERS)
def test_parameters(text: str, expected: dict[str, Any]) -> None:
    assert slurm.parameters(text) == expected


@pytest.mark.parametrize("text", ["", "gpu", "partition=", "=x", "partition=gpu,x"])
def test_parameters_that_do_not_parse(text: str) -> None:
    with pytest.raises(UsageError, match="--slurm"):
        slurm.parameters(text)


def test_no_slurm_here_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--slurm"):
        slurm.executor(tmp_path, "cuda", {"partition": "gpu"})


@pytest.mark.exhaustive  # jobs of an array measure above, and test_fleet.py real cells
def test_local_jobs_measure_on_this_machine(tmp_path: Path) -> None:
    """Run the command of a user, on a machine with or without a GPU."""
    command = [sys.executable, "-m", "groupbench.operators", "--op", "grouped_gemm", "--host", "builtin"]
    command += ["--only", "torch_loop", "--shapes", "2,16,64,64", "--slurm", "local", "--bursts", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cell: 1 ok" in done.stdout
    assert " ·  · " not in done.stdout
    (left,) = tmp_path.glob("*.slurm")
    assert not [path.name for path in left.iterdir() if "%" in path.name]
