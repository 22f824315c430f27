"""A run that is resumed, a budget, and a nightly run that begins with the cells skipped by the previous one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupbench.operators import executor, resume
from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.measure.wire import Job
from groupbench.operators.plan import Selection, jobs
from groupbench.operators.resume import CannotResume
from groupbench.tracker.facts.record import Commit, Environment, Record, Run, encode

Make = Callable[..., Record]
HERE = Environment(device="cpu", cpu="a CPU", torch="2.13.0", host="one")
NOW = Commit(hash="c" * 40)
SHAPES = ("G=1,M_g=2,N=3,K=4", "G=2,M_g=2,N=3,K=4", "G=3,M_g=0|1|2,N=3,K=4")


def planned() -> list[Job]:
    selection = Selection("grouped_gemm", shapes=SHAPES, dtypes=("fp32",), only=("torch_loop", "torch_grouped_mm"))
    return jobs(selection, "cpu", interpreted=True)


@pytest.fixture
def night(make: Make, tmp_path: Path) -> Callable[..., Path]:
    """Write a file of a run's records, each described by (backend, shape, status)."""

    def write(*cells: tuple[str, str, str], **run: Any) -> Path:
        facts = {"id": "r", "started": datetime.now(UTC), "commit": NOW, "plan": "night"} | run
        path = tmp_path / "night.jsonl"
        with path.open("ab") as file:
            for backend, shape, status in cells:
                record = make(
                    backend, ms=None if status == "skipped" else 1.0, shape=shape, dtype="fp32", status=status
                )
                file.write(encode(msgspec.structs.replace(record, run=Run(**facts), environment=HERE)))
        return path

    return write


CELLS = (
    ("torch_loop", SHAPES[0], "ok"),
    ("torch_grouped_mm", SHAPES[0], "error"),
    ("torch_loop", SHAPES[1], "skipped"),
)


def test_measured_records_are_kept_and_skipped_ones_are_not(night: Callable[..., Path]) -> None:
    path = night(*CELLS)
    resumed = resume.go_on(path, NOW, HERE, "night")
    run, records = resumed
    assert run.id == "r"
    assert [record.status for record in records] == ["ok", "error"]
    assert resume.read_run(path) == records  # otherwise a cell measured now would have two records
    assert [(job.backend, job.shape) for job in resume.not_done(planned(), records)] == [
        (backend, shape) for shape, backend in itertools.product(SHAPES[1:], ("torch_loop", "torch_grouped_mm"))
    ]


def test_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert resume.go_on(tmp_path / "none.jsonl", NOW, HERE, "night") is None
    (tmp_path / "empty.jsonl").touch()
    assert resume.go_on(tmp_path / "empty.jsonl", NOW, HERE, "night") is None


def test_the_last_run_of_a_file_goes_on_and_earlier_ones_stay(night: Callable[..., Path]) -> None:
    night(("torch_loop", SHAPES[2], "ok"), ("torch_loop", SHAPES[1], "skipped"), id="first")
    earlier = night(("torch_loop", SHAPES[2], "error"), id="second").read_bytes()
    path = night(*CELLS)
    with path.open("ab") as file:
        file.write(b'{"half a rec')
    resumed = resume.go_on(path, NOW, HERE, "night")
    assert {record.run.id for record in resumed[1]} == {"r"}
    assert path.read_bytes() == earlier + b"".join(map(encode, resumed[1]))


OLD = datetime.now(UTC) - timedelta(hours=25)
REFUSED: dict[str, tuple[dict[str, Any], tuple[Commit, Environment, str | None], str]] = {
    "another commit": ({}, (Commit(hash="d" * 40), HERE, "night"), "commit cccccccccc; this is dddddddddd"),
    "uncommitted changes": (
        *({}, (Commit(hash="c" * 40, dirty=True), HERE, "night")),
        "this is cccccccccc+ (+ marks uncommitted changes, as in `git status`",
    ),
    "another plan": ({}, (NOW, HERE, "other"), "plan night, not other"),
    "no plan": ({}, (NOW, HERE, None), "plan night"),
    "another torch": ({}, (NOW, msgspec.structs.replace(HERE, torch="2.14.0"), "night"), "torch"),
    "another card": ({}, (NOW, msgspec.structs.replace(HERE, gpu_uuid="GPU-2"), "night"), "gpu_uuid"),
    "an old night": ({"started": OLD}, (NOW, HERE, "night"), "24 hours"),
}


@pytest.mark.parametrize(("run", "now", "message"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_cannot_go_on(run: Any, now: Any, message: str, night: Callable[..., Path]) -> None:
    path = night(*CELLS, **run)
    before = path.read_bytes()
    with pytest.raises(CannotResume) as caught:
        resume.go_on(path, *now)
    assert message in str(caught.value)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == before


def test_a_run_with_cells_that_the_command_does_not_select(night: Callable[..., Path]) -> None:
    """Its table would show cells that were not asked for, and its records another command."""
    path = night(*CELLS, command="--op grouped_gemm")
    before = path.read_bytes()
    with pytest.raises(CannotResume) as caught:
        resume.go_on(path, NOW, HERE, "night", planned=[job for job in planned() if job.shape != SHAPES[0]])
    assert "with 2 cells that this command does not select (it began as: tritonbench --op gr" in str(caught.value)
    assert path.read_bytes() == before
    assert resume.go_on(path, NOW, HERE, "night", planned=planned()) is not None


def test_another_container_of_the_same_machine_goes_on(night: Callable[..., Path]) -> None:
    assert resume.go_on(night(*CELLS), NOW, msgspec.structs.replace(HERE, host="two"), "night") is not None


def test_a_line_that_is_not_a_record(night: Callable[..., Path]) -> None:
    path = night(*CELLS)
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(UsageError, match="line 1"):
        resume.go_on(path, NOW, HERE, "night")


@given(cut=st.integers(0, 3000), statuses=st.lists(st.sampled_from(["ok", "error", "skipped"]), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_killed_process_costs_the_cell_it_was_writing(
    cut: int, statuses: list[str], night: Callable[..., Path]
) -> None:
    """Wherever the file ends, whole lines are kept, and every job is either kept or measured once."""
    cells = [(job.backend, job.shape, status) for job, status in zip(planned(), statuses, strict=False)]
    path = night()
    path.unlink(missing_ok=True)
    path = night(*cells)
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    resumed = resume.go_on(path, NOW, HERE, "night")
    records = resumed[1] if resumed else []
    kept = [cell for cell in cells[: whole.count(b"\n")] if cell[2] != "skipped"]
    assert [(r.cell.backend, r.cell.shape, r.status) for r in records] == kept
    done = {resume.key_of_cell(record.cell) for record in records}
    again = {resume.key_of_job(job) for job in resume.not_done(planned(), records)}
    assert done | again == {resume.key_of_job(job) for job in planned()}
    assert not done & again


def test_cells_skipped_by_the_previous_night_come_first(night: Callable[..., Path]) -> None:
    late = resume.left_out(night(("torch_loop", SHAPES[0], "ok"), ("torch_grouped_mm", SHAPES[2], "skipped")))
    ordered = executor.first_of(planned(), lambda job: resume.key_of_job(job) in late)
    assert [job.shape for job in ordered] == [SHAPES[2]] * 2 + [SHAPES[0]] * 2 + [SHAPES[1]] * 2
    assert executor.first_of(planned(), lambda job: False) == planned()


# ---- the budget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Every problem takes ten simulated seconds."""
    now = 0.0

    def measured(problem: list[Job], machine: Any, run: Run, workers: Any, progress: Progress) -> Iterator[Any]:
        nonlocal now
        now += 10
        for job in problem:
            yield executor.record_of(job, machine, run, "unavailable", "not really"), job

    monkeypatch.setattr(executor.time, "monotonic", lambda: now)
    monkeypatch.setattr(executor, "_problem_records", measured)
    return lambda: now


BUDGETS = {"none": (None, 3), "too short for one": (0.001, 1), "one": (10, 1), "two": (15, 2), "all": (30, 3)}


@pytest.mark.parametrize(("budget", "problems"), BUDGETS.values(), ids=BUDGETS)
def test_a_budget_ends_before_the_problem_that_would_begin_after_it(
    budget: float | None, problems: int, clock: Callable[[], float]
) -> None:
    advanced: list[float] = []
    run = Run(id="r", started=datetime.now(UTC), commit=NOW)
    options = {} if budget is None else {"budget_s": budget}
    records = list(
        executor.execute(planned(), Machine(HERE, None), run, 1.0, Progress(advance=advanced.append), **options)
    )
    assert clock() == 10 * problems
    assert [r.status for r in records] == ["unavailable"] * 2 * problems + ["skipped"] * 2 * (3 - problems)
    assert all("budget of" in str(r.message) for r in records if r.status == "skipped")
    assert [r.cell.shape for r in records] == [job.shape for job in planned()]
    assert sum(advanced) == 2 * (3 - problems)  # the rest is advanced as it is measured
