"""Latency protocols: their labels, which identify series, and the timers."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from groupbench.operators.errors import UsageError
from groupbench.operators.measure import protocol
from groupbench.operators.measure.protocol import QUEUE, CpuTimer, GpuTimer, Protocol, Watch

LABELS = {
    "default": (Protocol(), "cooled"),
    "bursts are not in it": (Protocol(bursts=40, samples=3), "cooled"),
    "rest is": (Protocol(idle_s=1.5), "cooled+idle=1.5s"),
    "no rest is": (Protocol(idle_s=0), "cooled+idle=0s"),
    "a CUDA graph is": (Protocol(cudagraph=True), "cooled+cudagraph"),
    "a test alone is": (Protocol(test_only=True), "cooled+test-only"),
    "sustained": (Protocol("sustained"), "sustained"),
    "sustained on a CUDA graph": (Protocol("sustained", cudagraph=True), "sustained+cudagraph"),
    "all": (Protocol(idle_s=2, cudagraph=True), "cooled+idle=2s+cudagraph"),
}


@pytest.mark.parametrize(("protocol", "label"), LABELS.values(), ids=LABELS)
def test_label(protocol: Protocol, label: str) -> None:
    assert protocol.label == label


BAD = {
    "name": {"name": "hot"},
    "bursts": {"bursts": 0},
    "samples": {"samples": -1},
    "idle": {"idle_s": -0.1},
    "an hour and more": {"idle_s": 3601.0},
    "nan": {"idle_s": float("nan")},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_bad_values_are_usage_errors(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(Protocol(), **fields)  # type: ignore[arg-type]


class Clock:
    """A callable that advances a fake clock by its duration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.calls, self.seconds = 100.0, 0, seconds
        monkeypatch.setattr(protocol, "_now", lambda: self.now)

    def __call__(self) -> None:
        self.calls += 1
        self.now += self.seconds


def test_cpu_timer_takes_the_requested_samples_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Clock(monkeypatch, 0.001)
    timer = CpuTimer(run, Protocol(samples=7), interpreted=False)
    assert run.calls == 0
    assert timer.burst() == pytest.approx([1.0] * 7)
    assert run.calls == 8
    assert timer.enqueue_ms is None


def test_cpu_timer_ends_a_long_burst_early(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Clock(monkeypatch, 0.1)
    assert len(CpuTimer(run, Protocol(samples=100), interpreted=False).burst()) == 3
    run = Clock(monkeypatch, 10)
    assert CpuTimer(run, Protocol(samples=100), interpreted=False).burst() == pytest.approx([10_000])


def test_an_interpreted_kernel_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Clock(monkeypatch, 0.001)
    assert CpuTimer(run, Protocol(samples=100), interpreted=True).burst() == pytest.approx([1.0])
    assert run.calls == 1


def test_no_sample_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(CpuTimer(Clock(monkeypatch, 0), Protocol(), interpreted=False).burst()) > 0


class IdleEvent:
    """An event of a GPU that has not started the burst, and whose calls take 0.5 ms."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Any) -> float:
        return 0.5


def test_a_burst_measures_the_host_time_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    cuda = SimpleNamespace(set_stream=nothing, _sleep=nothing, synchronize=nothing, Event=IdleEvent)
    timer = object.__new__(GpuTimer)
    monkeypatch.setattr(protocol, "torch", SimpleNamespace(cuda=cuda, Tensor=SimpleNamespace(zero_=nothing)))
    timer.flush_buffer = SimpleNamespace(numel=lambda: QUEUE.flush_bytes, element_size=lambda: 1)  # type: ignore[assignment]
    timer.protocol, timer.stream, timer.enqueue_ms, timer._host_s = Protocol(samples=8, warmups=1), None, 0.02, []
    clock = Clock(monkeypatch, 0)
    host_ms = iter([9.0, 0.03, 5.0, 0.02, 0.03, 0.04, 0.03, 0.02, 0.03])  # a warm-up first

    collects: list[bool] = []

    def run() -> None:
        collects.append(gc.isenabled())
        clock.now += next(host_ms) / 1e3

    timer.run = run
    watch = SimpleNamespace(before=nothing, warm=nothing, after=lambda out: collects.append(gc.isenabled()))
    assert timer.burst(watch) == [0.5] * 8  # type: ignore[arg-type]
    assert collects == [True, *[True, False] * 8] and gc.isenabled(), "its callbacks could compute outside of calls"
    assert timer.burst_enqueue_ms == pytest.approx(0.03), "the lower quartile, which a stall of the host does not raise"


class Events:
    """A substitute for torch with CUDA's events, which take no time."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(Event=lambda enable_timing: self, synchronize=lambda: None)

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 8.0


class Noting(Watch):
    """A watch that notes its hooks in the list of calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def before(self) -> None:
        self.log.append("before")

    def after(self, out: object) -> None:
        self.log.append("after")


def test_inputs_move_before_one_of_the_calls_in_a_row_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "torch", Events())
    timer = object.__new__(GpuTimer)
    log: list[str] = []
    timer.stream, timer.run = None, lambda: log.append("call")
    places = set()
    for _ in range(50):
        log.clear()
        assert timer.witness(4, Noting(log)) == [pytest.approx(2.0, abs=1)] * 4
        assert log.count("call") == 4 and log.count("before") == log.count("after") == 1
        place = log.index("before")
        assert log[place : place + 3] == ["before", "call", "after"]
        places.add(place)
    assert places == {1, 2, 3}
