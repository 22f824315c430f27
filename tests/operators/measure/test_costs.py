"""Costs of a call besides latency, on fake devices and counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.measure import costs
from groupbench.operators.measure.costs import (
    MIB,
    Held,
    building,
    eager_ms,
    energy,
    idle_watts,
    kept,
    outside,
    workspace_mib,
)


class Device:
    """A caching allocator, on a device that other processes use too."""

    def __init__(self, inputs: int) -> None:
        self.live = self.highest = inputs
        self.foreign = 0
        self.outputs: list[int] = []

    def take(self, size: int) -> None:
        self.live += size
        self.highest = max(self.highest, self.live)

    def allocated(self) -> int:
        return self.live

    def reset_peak(self) -> None:
        self.highest = self.live

    def peak(self) -> int:
        return self.highest

    def reserved(self) -> int:
        return self.live

    def used(self) -> int:
        return self.live + self.foreign

    def synchronize(self) -> None:
        pass


class Out:
    """An output, whose memory is freed with the last reference to it."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        device.take(size)

    def __del__(self) -> None:
        self.device.live -= self.size


def call(device: Device, output: int, workspace: int) -> Callable[[], Any]:
    def run() -> Any:
        out = Out(device, output)
        device.take(workspace)
        device.live -= workspace
        return out

    return run


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_workspace_excludes_inputs_and_the_output(inputs: int, output: int, workspace: int) -> None:
    device = Device(inputs * MIB)
    assert workspace_mib(call(device, output * MIB, workspace * MIB), device) == workspace


def test_an_output_kept_between_calls_is_not_a_workspace() -> None:
    device = Device(0)
    out = Out(device, 64 * MIB)
    assert workspace_mib(lambda: out, device) == 0


def test_a_workspace_outside_torchs_allocator_is_measured() -> None:
    device = Device(0)

    def run() -> None:
        device.foreign = 64 * MIB

    assert workspace_mib(lambda: None, device) == 0
    used = itertools.count()
    device.used = lambda: 64 * MIB if next(used) else 0  # type: ignore[method-assign]
    assert workspace_mib(run, device) == 64


def test_memory_that_prepare_keeps_is_counted_inside_and_outside_torchs_allocator() -> None:
    before = Held(tensors=100 * MIB, outside=600 * MIB)
    after = Held(tensors=108 * MIB, outside=2648 * MIB)
    assert kept(before, after) == {"kept_mib": 8, "kept_outside_mib": 2048}
    assert kept(after, before) == {"kept_mib": 0, "kept_outside_mib": 0}, "another process may have freed memory"


def test_memory_outside_torchs_allocator_is_all_that_torch_has_not_reserved() -> None:
    device = Device(64 * MIB)
    device.foreign = 10 * MIB
    assert outside(device) == 10 * MIB


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, clock.busy_until

    def query(self) -> bool:
        self.clock.now += 1e-6
        return self.clock.now >= self.at

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class Clock:
    """The time of the host and the GPU, with queued calls and a slow energy counter that moves in steps."""

    launch_s = 2e-6

    def __init__(self, watts: float, tick_s: float = 0.05, call_s: float = 0.001, read_s: float = 0.005) -> None:
        self.watts, self.tick_s, self.call_s, self.read_s = watts, tick_s, call_s, read_s
        self.now = self.busy_until = self.waited = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += self.launch_s
        self.waited += max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.busy_until, self.now) + self.call_s

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def joules(self) -> float:
        self.now += self.read_s
        return self.watts * (self.now // self.tick_s) * self.tick_s

    def event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def make(*args: Any, **options: Any) -> Clock:
        made = Clock(*args, **options)
        monkeypatch.setattr(costs, "_now", made)
        return made

    return make


@pytest.mark.parametrize(
    ("watts", "tick_s", "call_s"),
    [
        pytest.param(700.0, 0.05, 0.001, id="1 ms"),
        pytest.param(350.0, 0.1, 0.00002, id="20 us, a slow counter"),
        pytest.param(500.0, 0.02, 0.02, id="20 ms"),
    ],
)
def test_energy_is_power_times_the_time_of_a_call(
    watts: float, tick_s: float, call_s: float, clock: Callable[..., Clock]
) -> None:
    made = clock(watts, tick_s, call_s)
    result = energy(made.run, 1e3 * call_s, made.joules, made.event, made.synchronize)
    expected = {"energy_j": watts * call_s, "power_w": watts}
    assert result == pytest.approx(expected, rel=0.01), "by the GPU's clock, whatever the host is doing"
    assert made.waited < 0.001, "the GPU is never idle, however long a reading takes"
    ticks_s = (costs.LOADS.least_ticks + 1) * max(tick_s, 0.1)
    assert made.now < costs.LOADS.warm_s + ticks_s + 0.1, "no longer than its ticks take"


def test_a_call_that_keeps_the_host_busy_longer_than_the_gpu_has_an_energy(clock: Callable[..., Clock]) -> None:
    made = clock(300.0, 0.1, 5e-6)
    made.launch_s = 2e-5
    result = energy(made.run, 0.02, made.joules, made.event, made.synchronize)
    assert result["energy_j"] == pytest.approx(300.0 * 2e-5, rel=0.3), "with the readings, during which the GPU is idle"
    assert made.now < costs.LOADS.warm_s + 2 * costs.LOADS.span_s + 0.2


def test_a_counter_that_does_not_move_gives_no_energy(clock: Callable[..., Clock]) -> None:
    made = clock(0.0)
    assert energy(made.run, 1.0, made.joules, made.event, made.synchronize) == {}
    assert idle_watts(made.joules, made.sleep) is None


def test_idle_power(clock: Callable[..., Clock]) -> None:
    made = clock(70.0)
    assert idle_watts(made.joules, made.sleep) == pytest.approx(70.0, rel=0.1)


class Times:
    total = 250_000


def test_compile_and_tuning_times_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    heard: list[bool] = []
    before = lambda **event: heard.append(event["cache_hit"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", before)

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        listener(cache_hit=False)
        return [1.0]

    def listener(cache_hit: bool) -> None:
        event = {"src": None, "metadata": {}, "metadata_group": {}, "times": Times(), "cache_hit": cache_hit}
        triton.knobs.compilation.listener(**event)

    monkeypatch.setattr(Autotuner, "_bench", bench)
    with building() as times:
        listener(cache_hit=True)
        assert times.metrics == {}
        listener(cache_hit=False)
        assert times.metrics == {"compile_ms": 250}
        Autotuner._bench(None, config=None)  # type: ignore[arg-type]
    assert times.metrics == {"compile_ms": 500, "tune_ms": 0}
    assert Autotuner._bench is bench
    assert triton.knobs.compilation.listener is before
    assert heard == [True, False, False]


def test_a_loop_waits_only_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, host, device = [0.0], 0.002, 0.005  # seconds that a call takes on the host, and on the GPU
    done = [0.0]

    def run() -> None:
        now[0] += host
        done[0] = max(done[0], now[0]) + device

    def synchronize() -> None:
        now[0] = max(now[0], done[0])

    monkeypatch.setattr("groupbench.operators.measure.costs._now", lambda: now[0])
    assert eager_ms(run, 5.0, synchronize) == pytest.approx(5.2, abs=0.05)  # the GPU waits for the first call alone
    host, device = 0.005, 0.001
    assert eager_ms(run, 1.0, synchronize) == pytest.approx(5.05, abs=0.05)
