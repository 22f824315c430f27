"""A fleet behind a Dask scheduler: its workers, started by their command, and recovery from crashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask_engine
import pytest
from dask_engine import Engine

from groupbench.operators.errors import UsageError
from groupbench.operators.executor import Progress
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import drive, worker
from groupbench.operators.fleet.batch import Card
from groupbench.operators.fleet.drive import NotReached

pytest.importorskip("distributed", reason="NOT TESTED: fleets behind Dask. pip install 'groupbench[dask]'")

from distributed.comm import CommClosedError

from groupbench.operators.fleet import dask

HERE = Path(__file__).parents[1]
sys.path.append(str(HERE))
import fleet_cells as cells  # noqa: E402


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, warm_imports: dict[str, str]) -> Iterator[Engine]:
    """Start a scheduler and two workers by their commands."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("engine")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), warm_imports["PYTHONPATH"]]))
        patch.setenv("FLEET_MARK", str(folder / "mark"))
        with dask_engine.engine() as started:
            yield started


def measure(engine: Engine, kind: Callable[..., Any], number: int = 8, **options: Any) -> list[Any]:
    fleet = dask.DaskFleet(engine.address, "cpu", measure=kind, look=cells.look, **options)
    return list(drive.records(fleet, cells.work(number), Progress()))


def test_a_batch_whose_worker_dies_is_measured_again(engine: Engine) -> None:
    records = measure(engine, cells.dies_once)
    assert [r.status for r in records] == ["ok"] * 16
    assert len({(r.cell.shape, r.cell.backend) for r in records}) == 16


def test_a_batch_that_kills_two_workers_is_an_error_that_names_them(engine: Engine) -> None:
    engine.start()
    records = measure(engine, cells.dies)
    failed = [r for r in records if r.status != "ok"]
    assert len(records) == 16
    assert {(r.cell.shape, r.status) for r in failed} == {("G=1,M_g=3,N=256,K=256", "error")}
    assert all("its worker died on " in (r.message or "") for r in failed)


def test_hardware_that_no_worker_has_is_refused(engine: Engine) -> None:
    engine.start()
    with pytest.raises(UsageError, match=r"--hardware NVIDIA H100\*: no worker has such a GPU; they have "):
        dask.DaskFleet(engine.address, "cpu", "NVIDIA H100*", look=cells.look)


def test_cpu_workers_are_refused_if_the_client_needs_gpus(engine: Engine) -> None:
    engine.start()
    with pytest.raises(UsageError, match=rf"the workers of {engine.address} are CPUs: --device cpu measures on them"):
        dask.DaskFleet(engine.address, "cuda")


def test_workers_without_a_plugin_are_refused(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client can import the plugin, but the workers cannot."""
    engine.start()
    (tmp_path / "only_here.py").write_text("BACKENDS = []")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = (
        r"^worker .* and 1 more: plugin 'only_here.BACKENDS' does not load: ModuleNotFoundError.*; start workers in "
    )
    with pytest.raises(UsageError, match=message):
        dask.DaskFleet(engine.address, "cpu", look=cells.look, plugins=("only_here.BACKENDS",))
    dask.DaskFleet(engine.address, "cpu", look=cells.look, plugins=("faulty_backends.BACKENDS",)).close()


# --- without a scheduler ----------------------------------------------------------------------------------------------


class Client:
    """A client of which `submit` returns the futures of a test."""

    status = "running"

    def __init__(self, *futures: Any) -> None:
        self.futures = list(futures)

    def submit(self, *arguments: Any, **options: Any) -> Any:
        return self.futures.pop(0)


class Outcome:
    """A future that does not answer in time as often as a test demands."""

    def __init__(self, status: str, late: int = 0, error: Exception | None = None) -> None:
        self.status, self.late, self.error = status, late, error

    def result(self, timeout: float) -> list[Any]:
        self.late -= 1
        if self.late >= 0:
            raise TimeoutError("not fetched")
        if self.error is not None:
            raise self.error
        return ["a record"]

    def exception(self) -> Exception | None:
        return self.error


def records_of(future: Outcome) -> Any:
    return dask.ScheduledFleet(Client(future)).run_on(card("a"), cells.work(1)[0])


def test_a_finished_batch_that_is_slow_to_fetch_is_waited_for() -> None:
    assert records_of(Outcome("pending", 1)) == ["a record"]
    assert records_of(Outcome("finished", 3)) == ["a record"]


def test_a_batch_that_raises_a_time_out_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError, match="of the batch"):
        records_of(Outcome("error", 0, TimeoutError("of the batch")))


def test_a_batch_that_fails_while_its_result_times_out_keeps_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError, match="of the batch"):
        records_of(Outcome("error", 1, ZeroDivisionError("of the batch")))


def test_a_connection_that_breaks_skips_a_batch_even_if_the_client_has_not_noticed() -> None:
    fleet = dask.ScheduledFleet(Client(Outcome("pending", 0, CommClosedError("the stream is closed"))))
    for _ in range(2):  # the next batch is not sent at all
        with pytest.raises(NotReached, match="the scheduler is gone"):
            fleet.run_on(card("a"), cells.work(1)[0])


def usable(*cards: Card, hardware: str | None = None) -> list[str]:
    return [card.name for card in dask._usable({c.name: c for c in cards}, hardware, "tcp://head:8786")]


def card(name: str, cpu: str = "a CPU", code: str | None = None) -> Card:
    return Card(name, cells.machine(cpu), batches.code() if code is None else code)


def test_cards_of_one_kind_and_this_code_are_used() -> None:
    assert usable(card("b"), card("a")) == ["a", "b"]
    assert usable(card("a", "X 1"), card("b", "Y 1"), hardware="X*") == ["a"]
    with pytest.raises(
        UsageError, match=r"on each host, run: python -m groupbench\.operators\.fleet\.worker tcp://head:8786"
    ):
        usable()
    with pytest.raises(UsageError, match="X, Y; choose one with --hardware"):
        usable(card("a", "X"), card("b", "Y"))
    with pytest.raises(UsageError, match="different code on worker b and 1 more;"):
        usable(card("a"), card("b", code="x"), card("c", code="x"))


def test_a_workers_resources_name_its_model_and_itself() -> None:
    from groupbench.operators.fleet.slots import Slot

    options = worker.options(Slot("3", "cuda", {"CUDA_VISIBLE_DEVICES": "3"}), card("GPU-a", "NVIDIA H100 80GB HBM3"))
    assert options["resources"] == {"GPU": 1, "NVIDIA H100 80GB HBM3": 1, options["name"]: 1}
    assert options["env"] == {"CUDA_VISIBLE_DEVICES": "3", "GROUPBENCH_SLOT": '["cuda", []]'}
    assert options["nthreads"] == 1


def test_only_workers_for_the_device_are_used() -> None:
    devices = {"tcp://a:1": "cuda", "tcp://b:1": "cpu", "tcp://c:1": "cuda"}
    assert dask._for_device(devices, "cuda", "tcp://head:8786") == ["tcp://a:1", "tcp://c:1"]
    assert dask._for_device(devices, "cpu", "tcp://head:8786") == ["tcp://b:1"]
    assert dask._for_device({}, "cuda", "tcp://head:8786") == []
    with pytest.raises(UsageError, match=r"are GPUs: omit --device cpu .*worker tcp://head:8786 --device cpu$"):
        dask._for_device({"tcp://a:1": "cuda"}, "cpu", "tcp://head:8786")


def test_a_worker_reports_the_device_it_was_started_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert dask.device_here() == "cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dask.device_here() == "cpu"


ADDRESSES = {
    "no port": ("nonsense", "missing port"),
    "no text": ("", "missing port"),
    "another scheme": ("udp://a:1", "unknown address scheme 'udp'"),
    "no number": ("tcp://a:x", "'x'"),
    "port 0": ("tcp://a:0", "port 0 is not"),
    "a port too large": ("a:99999", "port 99999 is not"),
    "no host": ("tcp://:8786", "the host is missing"),
    "of this process alone": ("inproc://x/1", "inproc"),
}


@pytest.mark.parametrize(("address", "reason"), ADDRESSES.values(), ids=ADDRESSES)
def test_an_address_is_checked_before_a_client_is_made(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    def client(*args: Any, **options: Any) -> None:
        pytest.fail("a client was made, which takes 30 s to close")

    monkeypatch.setattr(distributed, "Client", client)
    with pytest.raises(UsageError, match=r"is not a scheduler's address .*pass one such as tcp://head:8786") as caught:
        dask.DaskFleet(address, "cpu")
    assert reason in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://head:8786", "head:8786", "tls://10.0.0.1:1", "tcp://[::1]:65535"])
def test_valid_addresses_are_accepted(address: str) -> None:
    dask.check_address(address)


def worker_command(*arguments: str) -> tuple[int, str]:
    """Run the workers' command as on a host without a GPU. Return the exit code and standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "groupbench.operators.fleet.worker", *arguments],
        capture_output=True,
        text=True,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
    )
    return done.returncode, done.stderr


def test_the_worker_command_without_a_gpu_suggests_the_cpu() -> None:
    code, errors = worker_command("tcp://127.0.0.1:1")
    assert (code, errors.count("\n")) == (2, 1)
    assert "torch sees no GPU here; use --device cpu" in errors


def test_a_second_worker_on_one_host_says_why_it_cannot_start(engine: Engine) -> None:
    engine.start()
    code, errors = worker_command(engine.address, "--device", "cpu")
    assert code == 2
    assert re.match(rf"groupbench: {engine.address} already has a worker \S+-cpu-0: stop that one on ", errors), errors


def test_the_workers_help_explains_gpus_on_a_cpu() -> None:
    command = [sys.executable, "-m", "groupbench.operators.fleet.worker", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "on a CPU, 0,1 starts two workers as a trial [0]" in " ".join(text.split())


def test_bad_gpu_numbers_are_a_usage_error_before_dask_is_imported() -> None:
    code = (
        "import sys; from groupbench.operators.fleet.worker import main\n"
        "try: main()\n"
        "finally: print(sorted({'dask', 'distributed', 'torch'}.intersection(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "tcp://127.0.0.1:1", "--gpus", "a", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr == "groupbench: --gpus 'a' is neither all nor numbers joined by commas\n"
