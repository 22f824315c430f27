"""Measuring on several cards of a host: the choice of cards, and recovery when a process dies."""

from __future__ import annotations

import importlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators import alone, executor, resume
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import drive, host, local
from groupbench.operators.fleet.batch import Before
from groupbench.operators.fleet.drive import NotReached, WorkerDied
from groupbench.operators.fleet.local import Slot
from groupbench.operators.measure.cell import Failure
from groupbench.tracker.facts.record import Environment, Record, decode, encode, read
from groupbench.tracker.tools.device_lock import HELD, lock_file

sys.path.append(str(Path(__file__).parents[1]))
import fleet_cells as cells

# --- batches and cards ------------------------------------------------------------------------------------------------


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


def test_a_problem_goes_back_to_its_card() -> None:
    work = cells.work(4)
    cards = [cells.card("a", "GPU-a"), cells.card("b", "GPU-b")]
    history = {
        b.problem: Before(uuid, 10.0) for b, uuid in zip(work, ("GPU-b", "GPU-b", "GPU-a", "GPU-a"), strict=True)
    }
    assert batches.assign(work, cards, history) == [1, 1, 0, 0]
    assert batches.assign(work, cards[::-1], history) == [0, 0, 1, 1]


def test_an_overloaded_card_gives_away_as_few_shapes_as_possible() -> None:
    work = cells.work(5)
    cards = [cells.card("a", "GPU-a"), cells.card("b", "GPU-b")]
    history = {b.problem: Before("GPU-a", s) for b, s in zip(work, (40.0, 30.0, 10.0, 10.0, 10.0), strict=True)}
    chosen = batches.assign(work, cards, history)
    loads = [sum(history[b.problem].seconds for b, c in zip(work, chosen, strict=True) if c == i) for i in (0, 1)]
    assert sorted(loads) == [50.0, 50.0]
    assert chosen.count(1) <= 2


def test_a_night_of_one_card_is_spread_evenly_over_four() -> None:
    """Loads that differ by 5 % would limit four cards to 3.8 times the speed of one, even without start-up time."""
    work = cells.work(200)
    cards = [cells.card(f"{i}", f"GPU-{i}") for i in range(4)]
    history = {b.problem: Before("GPU-0", 3.5 + 0.003 * i) for i, b in enumerate(work)}
    chosen = batches.assign(work, cards, history)
    loads = [sum(history[b.problem].seconds for b, c in zip(work, chosen, strict=True) if c == i) for i in range(4)]
    assert max(loads) <= 1.01 * sum(loads) / 4
    assert chosen.count(0) >= 45  # no batch leaves its card without need


def test_cards_exchange_shapes_if_none_is_short_enough_to_move() -> None:
    work = cells.work(4)
    cards = [cells.card("a", "GPU-a"), cells.card("b", "GPU-b")]
    history = {
        b.problem: Before(uuid, seconds)
        for b, uuid, seconds in zip(work, ("GPU-a", "GPU-a", "GPU-b", "GPU-b"), (7.0, 6.0, 5.0, 4.0), strict=True)
    }
    assert batches.assign(work, cards, history) == [1, 0, 0, 1]


def test_cards_that_are_nearly_even_keep_their_shapes() -> None:
    work = cells.work(10)
    cards = [cells.card("a", "GPU-a"), cells.card("b", "GPU-b")]
    history = {b.problem: Before("GPU-a" if i < 5 else "GPU-b", 10.4 if i < 5 else 9.6) for i, b in enumerate(work)}
    assert batches.assign(work, cards, history) == [0] * 5 + [1] * 5


def test_the_other_cards_take_the_work_of_a_missing_card() -> None:
    work = cells.work(4)
    history = {b.problem: Before("GPU-gone", 10.0) for b in work}
    assert sorted(batches.assign(work, [cells.card("a", "GPU-a"), cells.card("b", "GPU-b")], history)) == [0, 0, 1, 1]


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
    assert max(loads) <= batches.UNEVEN * sum(seconds) / number + max(seconds) + 1e-6
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
        (60.0, (5.0, 6.0), 60.0 - batches.STARTING_S),
        (9.0, (), 9.0),
    ],
    ids=["starting", "shorter", "long", "alone"],
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
        batches.measure(_with(batch, code="x"))
    with pytest.raises(GroupbenchError, match="the run needs NVIDIA"):
        batches.measure(_with(batch, hardware="NVIDIA *"))


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
    monkeypatch.setattr(batches, "IDLE_S", 1.0)
    first, second = cells.work(2)
    assert [(r.status, r.message) for r in batches.measure(first)] == [("ok", None)] * 2
    assert [(r.status, r.message) for r in batches.measure(second)] == [("ok", None)] * 2
    assert len(begun) == 2
    deadline = time.monotonic() + 60
    while any(worker._process.is_alive() for worker in begun) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker._process.is_alive() for worker in begun)  # no batch came within IDLE_S
    monkeypatch.setattr(batches, "IDLE_S", 60.0)
    batches.measure(first)
    other = msgspec.structs.replace(cells.RUN, id="another")
    batches.measure(_with(second, run=other))
    assert len(begun) == 6
    assert not any(worker._process.is_alive() for worker in begun[:4])
    batches._KEPT.end()
    assert not any(worker._process.is_alive() for worker in begun)


def test_a_judge_that_was_started_before_the_run_examines_the_machine_and_judges_it() -> None:
    kept, (batch, _) = batches._KeptWorkers(), cells.work(2)
    assert kept.start("cpu", ()) == executor.probe("cpu")
    started = kept._judge
    assert started is not None
    with kept.of(batch) as workers:
        assert workers.judge("cpu") is started
        assert started.timeout_s == batch.timeout_s
    kept.end()
    assert not started._process.is_alive()
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
    assert [spare._process.is_alive() for spare in spares] == [True] * len(batch.jobs) + [False]
    kept.end()
    assert not any(spare._process.is_alive() for spare in spares)


def test_a_plugin_gets_a_process_of_its_own() -> None:
    """Its module may set how CUDA starts."""
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
    assert not started[0]._process.is_alive()


def _with(batch: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(batch, **changes)


# --- the driver -------------------------------------------------------------------------------------------------------


class Scripted:
    """A fleet whose futures have the outcomes that a test passes."""

    cards = (cells.card("a"),)

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = outcomes
        self.closed: bool | None = None

    def submit(self, work: Any) -> list[Future[list[Record]]]:
        futures = []
        for outcome, batch in zip(self.outcomes, work, strict=True):
            future: Future[list[Record]] = Future()
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            elif outcome is not None:
                future.set_result(cells.instant(batch))
            futures.append(future)
        return futures

    def close(self, at_once: bool = False) -> None:
        self.closed = at_once


FATES = {
    "measured": (True, "ok", None),
    "died twice": (WorkerDied("its worker died on a and then b"), "error", "its worker died on a and then b"),
    "budget": (NotReached("not begun within the budget"), "skipped", "not begun within the budget"),
    "refused": (GroupbenchError("other code"), "error", "other code"),
    "an exception of the engine": (KeyError("x"), "error", "KeyError: 'x'"),
    "an unencodable message": (GroupbenchError("a\n\udcff"), "error", r"a / \udcff"),
    "not reached": (NotReached("a \udcff"), "skipped", r"a \udcff"),
}


@pytest.mark.parametrize(("outcome", "status", "message"), FATES.values(), ids=FATES)
def test_every_cell_has_a_record_for_every_outcome_of_its_batch(outcome: object, status: str, message: str) -> None:
    fleet = Scripted(True, outcome)
    records = list(drive.records(fleet, cells.work(2), Progress()))
    assert sorted(r.cell.shape for r in records) == ["G=1,M_g=1,N=256,K=256"] * 2 + ["G=1,M_g=2,N=256,K=256"] * 2
    assert {(r.status, r.message) for r in records if r.cell.shape.startswith("G=1,M_g=2")} == {(status, message)}
    assert [decode(encode(record)) for record in records] == records
    assert fleet.closed is False


def test_an_interrupt_keeps_finished_records_and_skips_the_rest() -> None:
    fleet = Scripted(True, None, None)
    records: list[Record] = []
    with pytest.raises(KeyboardInterrupt):
        produced = drive.records(fleet, cells.work(3), Progress())
        records.append(next(produced))
        records.append(produced.throw(KeyboardInterrupt))
        records.extend(produced)
    assert [(r.cell.backend, r.status) for r in records] == [
        ("torch_loop", "ok"),
        ("torch_grouped_mm", "ok"),
        *[("torch_loop", "skipped"), ("torch_grouped_mm", "skipped")] * 2,
    ]
    assert fleet.closed is True


# --- one host ---------------------------------------------------------------------------------------------------------


def on(number: int, measure: Callable[..., Any], **options: Any) -> list[Record]:
    slots = local.slots(",".join(map(str, range(number))), "cpu")
    slots = [local.Slot(s.name, s.device, {"CUDA_VISIBLE_DEVICES": s.name}, s.processors) for s in slots]
    return list(
        drive.records(
            local.LocalFleet(slots, measure=measure, look=cells.look_at_slot, **options), cells.work(8), Progress()
        )
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the processes import the fake cells, which need no torch."""
    here = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("GROUPBENCH_LOCKS", str(tmp_path))
    monkeypatch.setenv("FLEET_MARK", str(tmp_path / "mark"))


def test_each_slot_is_a_process_of_its_own_with_its_own_environment() -> None:
    records = on(2, cells.instant)
    assert len({(r.cell.shape, r.cell.backend) for r in records}) == len(records) == 16
    assert {(r.environment.host or "").split(" ", 1)[1] for r in records} == {"cpu 0", "cpu 1"}
    assert len({r.environment.host for r in records}) == 2
    by_shape: dict[str, set[str | None]] = {}
    for record in records:
        by_shape.setdefault(record.cell.shape, set()).add(record.environment.host)
    assert all(len(hosts) == 1 for hosts in by_shape.values())


def test_a_batch_whose_worker_dies_is_measured_again_elsewhere() -> None:
    records = on(2, cells.dies_once)
    assert [r.status for r in records] == ["ok"] * 16


def test_a_batch_that_kills_two_workers_is_an_error_that_names_them() -> None:
    records = on(2, cells.dies)
    bad = [r for r in records if r.status != "ok"]
    assert len(records) == 16
    assert {(r.cell.shape, r.status) for r in bad} == {("G=1,M_g=3,N=256,K=256", "error")}
    assert all((r.message or "").startswith("its worker died on cpu ") for r in bad)
    assert all("cpu 0" in (r.message or "") and "cpu 1" in (r.message or "") for r in bad)


def test_batches_not_begun_within_the_budget_are_skipped() -> None:
    assert {r.status for r in on(1, cells.instant, budget_s=0)} == {"skipped"}


@pytest.mark.usefixtures("warm_imports")
def test_a_fleet_measures_real_cells() -> None:
    fleet = local.LocalFleet(local.slots("0", "cpu"))
    records = list(drive.records(fleet, cells.work(1), Progress()))
    assert [r.status for r in records] == ["ok", "ok"]
    assert all(r.latency is not None and r.latency.timing == "cpu" for r in records)


def test_a_client_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, fleet_cells as cells; from groupbench.operators.fleet import local\n"
        "if __name__ == '__main__':\n"
        "    fleet = local.LocalFleet(local.slots('0', 'cpu'), measure=cells.hangs, look=cells.look_at_slot)\n"
        "    fleet.submit(cells.work(1))\n"
        "    print(*(fleet._processes[0].pool._processes), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = tmp_path / "client.py"
    path.write_text(script)
    client = subprocess.Popen([sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    os.kill(pid, 0)
    client.send_signal(signal.SIGKILL)
    client.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the process is still running")


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-abc,7")


GPUS = {
    "all": ("all", ["4", "5", "GPU-abc", "7"]),
    "some, as CUDA counts them": ("0,2", ["4", "GPU-abc"]),
}


@pytest.mark.parametrize(("gpus", "expected"), GPUS.values(), ids=GPUS)
def test_gpus_are_numbered_among_the_visible_ones(gpus: str, expected: list[str], four: None) -> None:
    slots = local.slots(gpus, "cuda")
    assert [dict(slot.variables) for slot in slots] == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]
    shares = [processor for slot in slots for processor in slot.processors]
    assert len(shares) == len(set(shares))


@pytest.mark.parametrize("gpus", ["4", "a", "-1", "", "0,", "0 1"])
def test_unknown_gpus_are_refused(gpus: str, four: None) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        local.slots(gpus, "cuda")


@pytest.mark.parametrize(("visible", "here"), [("3", "1 GPU here"), ("3,4", "2 GPUs here")])
def test_the_error_for_a_gpu_number_counts_the_gpus(visible: str, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=f"GPU 7 does not exist: {here}, numbered from 0"):
        local.slots("7", "cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_named_twice_is_refused(device: str, four: None) -> None:
    with pytest.raises(UsageError, match=r"^--gpus 1,0,2,00 names 0 twice"):
        local.slots("1,0,2,00", device)


@pytest.mark.parametrize("gpus", ["all", "0"])
def test_no_gpu_is_visible(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=f"^--gpus {gpus}: no GPU is visible.* --device cpu"):
        local.slots(gpus, "cuda")


@pytest.mark.parametrize("gpus", [None, "0,1"])
def test_workers_use_cpus_only_on_request(gpus: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a host without a GPU
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(local, "_card", cells.look_at_slot)
    with pytest.raises(UsageError, match="torch sees no GPU here; use --device cpu"):
        local.look(gpus, "auto")
    slots = [slot for slot, _ in local.look(gpus, "cpu")]
    assert [slot.name for slot in slots] == [f"cpu {n}" for n in (gpus or "0").split(",")]


def test_a_plan_takes_all_gpus_and_a_table_one(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.for_plan("cuda") == host.DeviceChoice(gpus="all", named=False)
    assert not host.for_plan("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert not host.for_plan("cuda")
    none = {"gpus": None, "scheduler": None, "slurm": None, "hardware": None}
    assert not host.place(none)
    with pytest.raises(UsageError, match="--gpus and --slurm"):
        host.place(none | {"gpus": "all", "slurm": "local"})
    with pytest.raises(UsageError, match="--hardware"):
        host.place(none | {"gpus": "all", "hardware": "NVIDIA*"})


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    held: list[Any] = []
    monkeypatch.setattr(alone, "_HELD", held)
    yield
    for lock in held:
        lock.release()


@pytest.mark.usefixtures("locks")
def test_a_card_is_locked_unless_its_nightly_run_holds_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    local._lock("GPU-x")
    with pytest.raises(alone.Busy, match="GPU-x"):
        local._lock("GPU-x")
    monkeypatch.setenv(HELD, str(lock_file("GPU-x")))
    local._lock("GPU-x")


UUID = "GPU-90cf6f3e-c184-4377-2a0a-53ea40627005"


def _gpus(*names: str) -> list[Slot]:
    return [Slot(name, "cuda", {}) for name in names]


def test_a_gpu_is_locked_before_it_is_opened_if_its_name_tells_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that judges computes on it from then on, which would disturb another run's measurement."""
    locked: list[str | None] = []
    monkeypatch.setattr(local, "_lock", locked.append)
    monkeypatch.setattr(local, "_card", cells.look_at_gpu)
    fleet = local.LocalFleet(_gpus(UUID, "1", UUID[:8]))
    fleet.close()
    assert [card.name for card in fleet.cards] == ["locked", "not locked", "not locked"]
    assert [name for name in locked if name] == [UUID, "GPU behind 1", f"GPU behind {UUID[:8]}"]


@pytest.mark.parametrize("installed", [False, True])
def test_a_gpu_is_kept_open_only_if_a_driver_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    class Driver:
        cuInit = staticmethod(begun.append)

    def library(name: str) -> type[Driver]:
        if not installed:
            raise OSError(f"{name}: cannot open shared object file")
        return Driver

    monkeypatch.setattr(local.ctypes, "CDLL", library)
    local._keep_open()
    assert begun == [0] * installed


@pytest.mark.parametrize("busy", [UUID, "0"])
def test_a_busy_card_is_skipped_with_a_message_unless_it_was_named(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(uuid: str | None) -> None:
        if uuid in (UUID, "GPU behind 0"):
            raise alone.Busy("it is measured on by another")

    monkeypatch.setattr(local, "_lock", lock)
    monkeypatch.setattr(local, "_card", cells.look_at_gpu)
    slots, messages = _gpus(busy, "1"), []
    fleet = local.LocalFleet(slots, named=False, say=messages.append)
    fleet.close()
    assert [card.machine.environment.gpu_uuid for card in fleet.cards] == ["GPU behind 1"]
    assert messages == [f"skipped GPU {busy}: it is measured on by another"]
    with pytest.raises(alone.Busy):
        local.LocalFleet(slots)


# --- the command ------------------------------------------------------------------------------------------------------

COMMAND = ("--host", "builtin", "--device", "cpu", "--op", "vector_add", "--bursts", "1", "--samples", "1")
CELLS = ("--only", "torch", "--shapes", "N=5", "N=6")


@pytest.mark.usefixtures("warm_imports")
@pytest.mark.exhaustive  # a fleet measures above, and test_resume.py resumes
def test_the_command_measures_on_two_cards_and_resumes(tritonbench: Callable[..., Any], tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    arguments = (*COMMAND, *CELLS, "--gpus", "0,1", "--commit", "abcdef12", "--records", records)
    done = tritonbench(*arguments)
    assert "on 2 GPUs" in done.stdout.splitlines()[0], done.stderr
    lines = records.read_bytes().splitlines(keepends=True)
    assert [(r.status, r.message) for _, r in read(lines)] == [("ok", None)] * 2
    assert done.returncode == 0, done.stderr
    records.write_bytes(lines[0] + lines[1][:50])  # killed while it wrote
    done = tritonbench(*arguments, "--resume")
    assert "1 cell already measured\n" in done.stdout
    again = records.read_bytes().splitlines(keepends=True)
    assert again[0] == lines[0]
    assert len({resume.key_of_cell(r.cell) for _, r in read(again)}) == len(again) == 2


def test_a_fleets_run_resumes_on_other_cards_but_not_with_other_software(
    make: Callable[..., Record], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    from datetime import UTC, datetime

    from groupbench.tracker.facts.record import encode

    measured = Environment(device="cuda", gpu="H", gpu_uuid="GPU-a", torch="2.13", host="one")
    record = make()
    run = msgspec.structs.replace(record.run, started=datetime.now(UTC))
    path.write_bytes(encode(msgspec.structs.replace(record, environment=measured, run=run)))
    elsewhere = msgspec.structs.replace(measured, gpu_uuid="GPU-b", host="two")
    resumed = resume.go_on(path, run.commit, elsewhere, None, fleet=True)
    assert resumed is not None and len(resumed[1]) == 1
    with pytest.raises(resume.CannotResume):
        resume.go_on(path, run.commit, elsewhere, None)
    with pytest.raises(resume.CannotResume, match="torch"):
        resume.go_on(path, run.commit, msgspec.structs.replace(elsewhere, torch="2.14"), None, fleet=True)
