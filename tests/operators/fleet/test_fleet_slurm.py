"""Workers in jobs of submitit, with its local executor instead of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import drive

submitit = pytest.importorskip("submitit", reason="NOT TESTED: SLURM. pip install 'groupbench[slurm]'")
pytest.importorskip("distributed", reason="NOT TESTED: SLURM. pip install 'groupbench[slurm]'")

from groupbench.operators.fleet import slurm  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))
import fleet_cells as cells  # noqa: E402


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm_imports: dict[str, str]) -> None:
    here = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, warm_imports["PYTHONPATH"]]))
    monkeypatch.setenv("FLEET_MARK", str(tmp_path / "mark"))


def measure(kind: Any, tmp_path: Path, number: int = 4, submitter: Any = None, **options: Any) -> list[Any]:
    submitter = submitter or slurm.executor(tmp_path / "jobs", "cpu", {"cluster": "local"})
    fleet = slurm.SlurmFleet(submitter, "cpu", local=True, measure=kind, look=cells.look, **options)
    return list(drive.records(fleet, cells.work(number), Progress()))


def test_the_cards_of_all_jobs_take_batches(tmp_path: Path) -> None:
    records = measure(cells.takes_turns, tmp_path, 6, jobs=2)
    assert len({(r.cell.shape, r.cell.backend) for r in records}) == len(records) == 12
    assert len({r.environment.host for r in records}) == 2
    assert (tmp_path / "jobs").stat().st_mode & 0o077 == 0  # others must not read the key


def test_a_batch_that_kills_its_worker_twice_is_an_error(tmp_path: Path) -> None:
    records = measure(cells.dies, tmp_path, 4, jobs=1)
    failed = [r for r in records if r.status != "ok"]
    assert {(r.cell.shape, r.status) for r in failed} == {("G=1,M_g=3,N=256,K=256", "error")}
    assert all("its worker died on " in (r.message or "") for r in failed)
    assert len(records) == 8


def test_a_worker_with_other_hardware_is_sent_away_and_its_reason_recorded(tmp_path: Path) -> None:
    messages: list[str] = []
    records = measure(cells.instant, tmp_path, 2, jobs=1, hardware="NVIDIA*", say=messages.append)
    assert {r.status for r in records} == {"skipped"}
    (message,) = {r.message for r in records}
    assert message is not None and "and the run needs NVIDIA*" in message
    assert messages == [message]


class DeadJobs:
    """An executor whose jobs end before they join."""

    def batch(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def submit(self, *arguments: Any) -> Any:
        return SimpleNamespace(job_id="7", done=lambda: True, paths=SimpleNamespace(stderr="7.err"), cancel=print)


def test_jobs_that_end_before_they_join_leave_skipped_cells(tmp_path: Path) -> None:
    records = measure(cells.instant, tmp_path, 2, DeadJobs())
    assert {(r.status, r.message) for r in records} == {("skipped", "no SLURM job is left: see 7.err")}


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
