"""Measuring on several cards of a host: the choice of cards, and recovery when a process dies."""

from __future__ import annotations

import os
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

from groupbench.operators import alone, resume
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import drive, host, local, slots
from groupbench.operators.fleet.drive import NotReached, WorkerDied
from groupbench.operators.fleet.local import Slot
from groupbench.tracker.facts.record import Environment, Record, decode, encode
from groupbench.tracker.tools.device_lock import HELD, lock_file

sys.path.append(str(Path(__file__).parents[1]))
import fleet_cells as cells

# --- the driver -------------------------------------------------------------------------------------------------------


class Scripted(drive.Fleet):
    """A fleet whose futures have the outcomes that a test passes."""

    def __init__(self, *outcomes: object) -> None:
        super().__init__([cells.card("a")])
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

    def run_on(self, card: Any, batch: Any) -> list[Record]:
        raise NotImplementedError

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
    chosen = slots.choose(",".join(map(str, range(number))), "cpu")
    chosen = [Slot(s.name, s.device, {"CUDA_VISIBLE_DEVICES": s.name}, s.processors) for s in chosen]
    return list(
        drive.records(
            local.LocalFleet(chosen, measure=measure, look=cells.look_at_slot, **options), cells.work(8), Progress()
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
    fleet = local.LocalFleet(slots.choose("0", "cpu"))
    records = list(drive.records(fleet, cells.work(1), Progress()))
    assert [r.status for r in records] == ["ok", "ok"]
    assert all(r.latency is not None and r.latency.timing == "cpu" for r in records)


def test_a_client_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, fleet_cells as cells; from groupbench.operators.fleet import local, slots\n"
        "if __name__ == '__main__':\n"
        "    fleet = local.LocalFleet(slots.choose('0', 'cpu'), measure=cells.hangs, look=cells.look_at_slot)\n"
        "    fleet.submit(cells.work(1))\n"
        "    print(*fleet._processes['cpu 0'].pool._processes, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = tmp_path / "client.py"
    path.write_text(script)
    client = subprocess.Popen([sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


GPUS = {"all": ("all", ["4", "5", "GPU-abc", "7"]), "some, as CUDA counts them": ("0,2", ["4", "GPU-abc"])}


@pytest.mark.parametrize(("gpus", "expected"), GPUS.values(), ids=GPUS)
def test_gpus_are_numbered_among_the_visible_ones(gpus: str, expected: list[str], four: None) -> None:
    chosen = slots.choose(gpus, "cuda")
    assert [dict(slot.variables) for slot in chosen] == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]
    shares = [processor for slot in chosen for processor in slot.processors]
    assert len(shares) == len(set(shares))


@pytest.mark.parametrize("gpus", ["4", "a", "-1", "", "0,", "0 1"])
def test_unknown_gpus_are_refused(gpus: str, four: None) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        slots.choose(gpus, "cuda")


@pytest.mark.parametrize(("visible", "here"), [("3", "1 GPU here"), ("3,4", "2 GPUs here")])
def test_the_error_for_a_gpu_number_counts_the_gpus(visible: str, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=f"GPU 7 does not exist: {here}, numbered from 0"):
        slots.choose("7", "cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_named_twice_is_refused(device: str, four: None) -> None:
    with pytest.raises(UsageError, match=r"^--gpus 1,0,2,00 names 0 twice"):
        slots.choose("1,0,2,00", device)


@pytest.mark.parametrize("gpus", ["all", "0"])
def test_no_gpu_is_visible(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=f"^--gpus {gpus}: no GPU is visible.* --device cpu"):
        slots.choose(gpus, "cuda")


@pytest.mark.parametrize("gpus", [None, "0,1"])
def test_workers_use_cpus_only_on_request(gpus: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a host without a GPU
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(slots, "examine", cells.look_at_slot)
    with pytest.raises(UsageError, match="torch sees no GPU here; use --device cpu"):
        local.look(gpus, "auto")
    chosen = [slot for slot, _ in local.look(gpus, "cpu")]
    assert [slot.name for slot in chosen] == [f"cpu {n}" for n in (gpus or "0").split(",")]


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
    held: list[int] = []
    monkeypatch.setattr(alone, "_HELD", held)
    yield
    for handle in held:
        os.close(handle)


@pytest.mark.usefixtures("locks")
def test_a_card_is_locked_unless_its_nightly_run_holds_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    slots.lock("GPU-x")
    with pytest.raises(alone.Busy, match="GPU-x"):
        slots.lock("GPU-x")
    monkeypatch.setenv(HELD, str(lock_file("GPU-x")))
    slots.lock("GPU-x")


UUID = "GPU-90cf6f3e-c184-4377-2a0a-53ea40627005"


def _gpus(*names: str) -> list[Slot]:
    return [Slot(name, "cuda", {}) for name in names]


def test_a_gpu_is_locked_before_it_is_opened_if_its_name_tells_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that judges computes on it from then on, which would disturb another run's measurement."""
    locked: list[str | None] = []
    monkeypatch.setattr(slots, "lock", locked.append)
    monkeypatch.setattr(slots, "examine", cells.look_at_gpu)
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

    monkeypatch.setattr(slots.ctypes, "CDLL", library)
    slots.keep_open()
    assert begun == [0] * installed


@pytest.mark.parametrize("busy", [UUID, "0"])
def test_a_busy_card_is_skipped_with_a_message_unless_it_was_named(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(uuid: str | None) -> None:
        if uuid in (UUID, "GPU behind 0"):
            raise alone.Busy("it is measured on by another")

    monkeypatch.setattr(slots, "lock", lock)
    monkeypatch.setattr(slots, "examine", cells.look_at_gpu)
    chosen, messages = _gpus(busy, "1"), []
    fleet = local.LocalFleet(chosen, named=False, say=messages.append)
    fleet.close()
    assert [card.machine.environment.gpu_uuid for card in fleet.cards] == ["GPU behind 1"]
    assert messages == [f"skipped GPU {busy}: it is measured on by another"]
    with pytest.raises(alone.Busy):
        local.LocalFleet(chosen)


# --- the command ------------------------------------------------------------------------------------------------------


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
