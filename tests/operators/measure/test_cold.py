"""First results of new processes, on fake processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from groupbench.operators.measure import cold
from groupbench.operators.measure.costs import Costs
from groupbench.operators.measure.wire import Failure, Job, Request

JOBS = [Job("grouped_gemm", name, "G=1,M_g=8,N=8,K=8", "bf16", "cuda") for name in ("a", "b", "c", "fails")]
WAIT_S = 20.0


class Process:
    """A substitute for a worker. The process of the backend `fails` cannot make its inputs."""

    started: list[Process]
    opening = most_opening = 0

    def __init__(self, device: str, timeout_s: float) -> None:
        self.backend, self.closed, self.killed = "", False, threading.Event()
        Process.started.append(self)

    def ask(self, request: Request) -> object:
        if request.verb == "adopt":
            self.backend = request.arguments[0].backend
            Process.opening += 1
            Process.most_opening = max(Process.most_opening, Process.opening)
        if request.verb == "load":
            Process.opening -= 1
            return Failure("error", "why") if self.backend == "fails" else None
        return self.first() if request.verb == "first" else None

    def first(self) -> object:
        return Costs({"compile_ms": float(ord(self.backend))})

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Process]]:
    Process.started, Process.opening, Process.most_opening = [], 0, 0
    monkeypatch.setattr(cold, "Worker", Process)
    monkeypatch.setattr(cold.os, "sched_getaffinity", lambda pid: range(64))
    yield Process


def test_each_job_gets_the_costs_of_its_own_process(processes: type[Process]) -> None:
    *measured, none = cold.first_results(JOBS, 1.0, 8)
    assert [metrics["compile_ms"] for metrics in measured] == [97, 98, 99]
    assert all(metrics["first_result_ms"] > 0 for metrics in measured)
    assert none == {}
    assert all(process.closed for process in processes.started)
    assert cold.first_results([], 1.0, 8) == []


def test_a_process_compiles_while_the_next_one_opens_the_gpu(
    processes: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [threading.Event() for _ in JOBS]
    load = Process.ask

    def ask(self: Process, request: Request) -> object:
        if request.verb == "load":
            opened[processes.started.index(self)].set()
        return load(self, request)

    def first(self: Process) -> object:
        return Costs({"overlaps": float(opened[processes.started.index(self) + 1].wait(WAIT_S))})

    monkeypatch.setattr(Process, "ask", ask)
    monkeypatch.setattr(Process, "first", first)
    *measured, _ = cold.first_results(JOBS, 1.0, 8)
    assert [metrics["overlaps"] for metrics in measured] == [1.0, 1.0, 1.0]
    assert processes.most_opening == 1, "the driver would let one wait for the other"


@pytest.mark.parametrize(
    ("device", "cores", "room", "expected"),
    [("cuda", 64, 8, 3), ("cuda", 8, 8, 2), ("cuda", 64, 0, 1), ("cuda", 2, 8, 1), ("cpu", 64, 8, 1)],
)
def test_as_many_overlap_as_cores_and_memory_allow(
    device: str, cores: int, room: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold.os, "sched_getaffinity", lambda pid: range(cores))
    assert cold._at_once(device, room) == expected


def test_an_interrupt_ends_the_processes(processes: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    second = threading.Event()

    def first(self: Process) -> object:
        if self.backend == "a":
            assert second.wait(WAIT_S)
            raise KeyboardInterrupt
        second.set()
        assert self.killed.wait(WAIT_S), "the interrupt would wait for this process"
        return Failure("error", "killed")

    monkeypatch.setattr(Process, "first", first)
    monkeypatch.setattr(cold, "MOST_AT_ONCE", 2)
    with pytest.raises(KeyboardInterrupt):
        cold.first_results(JOBS, 1.0, 8)
    assert all(process.closed and process.killed.is_set() for process in processes.started)
