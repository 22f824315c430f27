"""Batches of a fleet: the choice of cards, and the processes that measure them on a worker."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Before
from groupbench.operators.measure.wire import Failure
from groupbench.tracker.facts.record import Environment, Record

sys.path.append(str(Path(__file__).parents[1]))
import fleet_cells as cells


def test_all_cells_of_a_shape_are_one_batch() -> None:
    jobs = [cells.job(n, backend, dtype=d) for d in ("fp16", "fp32") for n in (0, 1) for backend in ("a", "b")]
    first, second = batches.batches(jobs, cells.RUN, 1.0)
    assert first.problem == ("grouped_gemm", jobs[0].shape)
    assert [(job.dtype, job.backend) for job in first.jobs] == [
        ("fp16", "a"),
        ("fp16", "b"),
        ("fp32", "a"),
        ("fp32", "b"),
    ]
    assert {job.shape for job in second.jobs} == {jobs[2].shape}
    assert sorted((*first.jobs, *second.jobs), key=str) == sorted(jobs, key=str)


# earlier card of each problem, its seconds -> problems that change their card
ASSIGNED: dict[str, tuple[str, tuple[float, ...], int]] = {
    "each goes back to its card": ("bbaa", (10, 10, 10, 10), 0),
    "an overloaded card gives away as few as possible": ("aaaaa", (40, 30, 10, 10, 10), 2),
    "cards exchange shapes if none is short enough": ("aabb", (7, 6, 5, 4), 2),
    "nearly even cards keep their shapes": ("aaaaabbbbb", (10.4,) * 5 + (9.6,) * 5, 0),
    "others take the work of a missing card": ("xxxx", (10, 10, 10, 10), 4),
}


@pytest.mark.parametrize(("homes", "seconds", "moved"), ASSIGNED.values(), ids=ASSIGNED)
def test_cards_have_even_loads_and_most_of_their_earlier_problems(
    homes: str, seconds: tuple[float, ...], moved: int
) -> None:
    work, cards = cells.work(len(homes)), [cells.card(name, f"GPU-{name}") for name in "ab"]
    history = {b.problem: Before(f"GPU-{home}", s) for b, home, s in zip(work, homes, seconds, strict=True)}
    for order in (cards, cards[::-1]):
        chosen = [order[card].name for card in batches.assign(work, order, history)]
        loads = [sum(s for s, card in zip(seconds, chosen, strict=True) if card == name) for name in "ab"]
        assert max(loads) <= batches.SHARING.uneven * sum(seconds) / 2
        assert sum(home != card for home, card in zip(homes, chosen, strict=True)) <= moved


def test_a_night_of_one_card_is_spread_evenly_over_four() -> None:
    """Loads that differ by 5 % would limit four cards to 3.8 times the speed of one, even without start-up time."""
    work = cells.work(200)
    cards = [cells.card(f"{i}", f"GPU-{i}") for i in range(4)]
    history = {b.problem: Before("GPU-0", 3.5 + 0.003 * i) for i, b in enumerate(work)}
    chosen = batches.assign(work, cards, history)
    loads = [sum(history[b.problem].seconds for b, c in zip(work, chosen, strict=True) if c == i) for i in range(4)]
    assert max(loads) <= 1.01 * sum(loads) / 4
    assert chosen.count(0) >= 45  # no batch leaves its card without need


@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=40),
    st.integers(1, 8),
    st.lists(st.integers(0, 8), min_size=40, max_size=40),
)
def test_no_load_exceeds_the_mean_by_more_than_the_longest_batch(
    seconds: list[float], number: int, homes: list[int]
) -> None:
    work = cells.work(len(seconds))
    cards = [cells.card(f"{i}", f"GPU-{i}") for i in range(number)]
    history = {b.problem: Before(f"GPU-{h}", s) for b, s, h in zip(work, seconds, homes[: len(work)], strict=True)}
    chosen = batches.assign(work, cards, history)
    assert len(chosen) == len(work)
    loads = [sum(s for s, c in zip(seconds, chosen, strict=True) if c == i) for i in range(number)]
    assert max(loads) <= batches.SHARING.uneven * sum(seconds) / number + max(seconds) + 1e-6
    again = {b.problem: Before(f"GPU-{c}", s) for b, s, c in zip(work, seconds, chosen, strict=True)}
    assert batches.assign(work, cards, again) == chosen  # the second night moves no batch


def test_card_and_duration_are_read_from_records(make: Callable[..., Record]) -> None:
    def record(backend: str, seconds: float, dtype: str = "fp16") -> Record:
        measured = make(backend, dtype=dtype, duration_s=seconds)
        return msgspec.structs.replace(measured, environment=Environment(device="cuda", gpu_uuid="GPU-a"))

    earlier = batches.before([record("a", 3.0), record("b", 5.0), record("a", 2.0, "fp32")])
    assert earlier == {("grouped_gemm", "G=1,M_g=2,N=3,K=4"): Before("GPU-a", 7.0)}


@pytest.mark.parametrize(
    ("first", "others", "counted"),
    [
        (9.0, (5.0, 6.0), 6.0),
        (4.0, (5.0, 6.0), 4.0),
        (60.0, (5.0, 6.0), 60.0 - batches.SHARING.starting_s),
        (9.0, (), 9.0),
    ],
    ids=["starting", "shorter", "alone", "long"],
)
def test_the_start_of_a_night_does_not_count_as_time_of_its_first_problem(
    make: Callable[..., Record], first: float, others: tuple[float, ...], counted: float
) -> None:
    def record(shape: str, seconds: float) -> Record:
        measured = make("a", shape=shape, duration_s=seconds)
        return msgspec.structs.replace(measured, environment=Environment(device="cuda", gpu_uuid="GPU-a"))

    records = [record(f"s{number}", seconds) for number, seconds in enumerate((first, *others))]
    earlier = batches.before(records)
    assert [earlier["grouped_gemm", record.cell.shape].seconds for record in records] == [counted, *others]


HARDWARE = {
    "any": (None, True),
    "exact": ("NVIDIA H100 PCIe", True),
    "pattern": ("NVIDIA H100*", True),
    "another": ("NVIDIA A100*", False),
    "part of a name": ("H100", False),
}


@pytest.mark.parametrize(("pattern", "fits"), HARDWARE.values(), ids=HARDWARE)
def test_hardware(pattern: str | None, fits: bool) -> None:
    assert batches.matches(Environment(device="cuda", gpu="NVIDIA H100 PCIe"), pattern) == fits


def test_a_worker_refuses_other_code_and_other_hardware() -> None:
    (batch,) = cells.work(1)
    with pytest.raises(batches.OtherCode):
        batches.measure(replace(batch, code="x"))
    with pytest.raises(GroupbenchError, match="the run needs NVIDIA"):
        batches.measure(replace(batch, hardware="NVIDIA *"))


def test_a_missing_plugin_error_names_the_worker() -> None:
    (batch,) = batches.batches([cells.job(plugins=("my_kernels.mine",))], cells.RUN, 20.0, batches.code())
    with pytest.raises(GroupbenchError, match=f"^the worker on {platform.node()} cannot .*'my_kernels.mine' does not"):
        batches.measure(batch)


def test_the_digest_is_of_the_code_that_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package may have several folders, and one of them twice. The first that has a file is the one that counts."""
    kernels, operators = (importlib.import_module(f"groupbench.{name}") for name in ("kernels", "operators"))
    before = batches.code.__wrapped__()
    other = tmp_path / "other"
    (other / "measure").mkdir(parents=True)
    (other / "measure/cell.py").write_text("# older")
    for package in (kernels, operators):
        monkeypatch.setattr(package.__spec__, "submodule_search_locations", [*package.__path__, *package.__path__])
    assert batches.code.__wrapped__() == before
    monkeypatch.setattr(operators.__spec__, "submodule_search_locations", [*operators.__path__, str(other)])
    assert batches.code.__wrapped__() == before
    monkeypatch.setattr(operators.__spec__, "submodule_search_locations", [str(other), *operators.__path__])
    assert batches.code.__wrapped__() != before


@pytest.mark.usefixtures("unaudited")
def test_backends_keep_their_processes_from_batch_to_batch_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise most of a night goes into opening the GPU three times for every shape."""
    begun: list[Any] = []

    class Counted(executor.Worker):
        def __init__(self, *args: Any) -> None:
            begun.append(self)
            super().__init__(*args)

    monkeypatch.setattr(executor, "Worker", Counted)
    monkeypatch.setattr(batches, "SHARING", batches.Sharing(waiting_s=1.0))
    first, second = cells.work(2)
    assert [(r.status, r.message) for r in batches.measure(first)] == [("ok", None)] * 2
    assert [(r.status, r.message) for r in batches.measure(second)] == [("ok", None)] * 2
    assert len(begun) == 2
    deadline = time.monotonic() + 60
    while any(worker._process.lives() for worker in begun) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker._process.lives() for worker in begun)  # no batch came in time
    monkeypatch.setattr(batches, "SHARING", batches.Sharing(waiting_s=60.0))
    batches.measure(first)
    other = msgspec.structs.replace(cells.RUN, id="another")
    batches.measure(replace(second, run=other))
    assert len(begun) == 6
    assert not any(worker._process.lives() for worker in begun[:4])
    batches._KEPT.end()
    assert not any(worker._process.lives() for worker in begun)


def test_a_judge_that_was_started_before_the_run_examines_the_machine_and_judges_it() -> None:
    kept, (batch, _) = batches._KeptWorkers(), cells.work(2)
    assert kept.start("cpu", ()) == executor.probe("cpu")
    started = kept._judge
    with kept.of(batch) as workers:
        assert workers.judge("cpu") is started
        assert started.timeout_s == batch.timeout_s
    kept.end()
    assert not started._process.lives()
    with kept.of(batch) as workers:
        assert workers.judge("cpu") is not started
    kept.end()


@pytest.mark.usefixtures("unaudited")
def test_processes_that_were_started_early_measure_the_first_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    spares: list[Any] = []

    class Noted(batches.Spare):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            spares.append(self)

    monkeypatch.setattr(batches, "Spare", Noted)
    kept, (batch, _) = batches._KeptWorkers(), cells.work(2)
    kept.start("cpu", (*batch.jobs, batch.jobs[0]))
    with kept.of(batch) as workers:
        assert [workers.get(job) for job in batch.jobs] == spares[: len(batch.jobs)]
        records = list(
            executor.execute(list(batch.jobs), executor.probe("cpu"), cells.RUN, 60.0, Progress(), workers=workers)
        )
    assert [record.status for record in records] == ["ok"] * len(batch.jobs)
    assert [spare._process.lives() for spare in spares] == [True] * len(batch.jobs) + [False]
    kept.end()
    assert not any(spare._process.lives() for spare in spares)


def test_a_plugin_gets_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module may set how CUDA starts."""
    monkeypatch.setattr(executor, "facts_of", lambda job: job)
    workers = executor.Workers(60.0, spares=[spare := batches.Spare("cpu", 60.0)])
    assert workers.get(cells.job(plugins=("my_kernels.mine",))) is not spare
    assert workers.get(cells.job(backend="torch_grouped_mm")) is spare
    workers.close(at_once=True)


def test_one_process_is_started_early_for_each_backend_of_the_first_cells() -> None:
    jobs = [cells.job(n, backend, dtype=dtype) for n in (0, 1) for dtype in ("fp16", "fp32") for backend in ("a", "b")]
    assert batches.together(jobs) == tuple(jobs[:2])
    assert batches.together([*jobs[:1], cells.job(0, "b", plugins=("my_kernels.mine",))]) == ()
    assert batches.together([]) == ()


def test_a_judge_that_cannot_examine_the_machine_reports_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class NoDevice(batches.Judge):
        def receive(self) -> Any:
            started.append(self)
            return Failure("error", "no device")

    monkeypatch.setattr(batches, "Judge", NoDevice)
    kept = batches._KeptWorkers()
    with pytest.raises(GroupbenchError, match="no device"):
        kept.start("cpu", cells.work(1)[0].jobs)
    assert (kept._judge, kept._spares) == (None, [])
    assert not started[0]._process.lives()
