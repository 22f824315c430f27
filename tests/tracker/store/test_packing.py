"""Samples and telemetry as bytes and back."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import rarely
from hypothesis import given, settings
from hypothesis import strategies as st

from groupbench.tracker.facts.record import Telemetry
from groupbench.tracker.store.packing import (
    THROTTLE,
    burst_lengths,
    pack_samples,
    pack_telemetry,
    unpack_samples,
    unpack_telemetry,
)

quick = settings(deadline=None)


def as_kept(bursts: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(np.float32(ms)) for ms in burst) for burst in bursts)


def comes_back(bursts: Any) -> bytes:
    (packed,) = pack_samples([bursts])
    assert unpack_samples(packed) == as_kept(bursts)
    assert burst_lengths(packed) == [len(burst) for burst in bursts]
    return packed


samples = st.floats(1e-30, 1e30) | st.integers(1, 10**9).map(lambda ns: ns / 1e6) | st.sampled_from([0.1, 1.0, 3.4e38])


@quick
@given(st.lists(st.lists(samples, min_size=1, max_size=9), min_size=1, max_size=9))
def test_any_samples_come_back(bursts: list[list[float]]) -> None:
    comes_back(bursts)


@pytest.mark.parametrize("count", [1, 200, 201, *rarely(2, 199, 255, 256, 32767, 32768, 32769, 100_001)])
@pytest.mark.parametrize("tick", [None, 1, 10, 32], ids=str)
def test_every_way_of_packing(count: int, tick: int | None) -> None:
    ms = np.random.default_rng(count).normal(1, 0.01, count)
    comes_back([(ms if tick is None else np.rint(ms * 1e6 / tick) * tick / 1e6).tolist()])


@pytest.mark.parametrize("value", [1.0, 1e-30, 1e30, 0.073856, 1.1754944e-38])
def test_equal_samples_are_next_to_nothing(value: float) -> None:
    assert len(comes_back([[value] * 8] * 5)) < 15


def test_forty_samples_of_an_event_clock_are_short() -> None:
    """Multiples of 32 ns, as on an H100: 1 % around 1 ms is 11 bits a sample."""
    rng = np.random.default_rng(0)
    ticks = np.rint(rng.normal(1, 0.01, (4, 10)) * 31250)
    assert len(comes_back((ticks * 32 / 1e6).tolist())) < 70
    assert len(comes_back(rng.normal(1, 0.01, (4, 10)).tolist())) < 120


@pytest.mark.parametrize(
    "damage", [b"", b"\xff", b"\x09\x03\x01", b"\x02\x03\xff\xff\xff\xff\xff\x7f\x00\x00"], ids=repr
)
def test_other_bytes_are_an_error(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"samples are (damaged|packed by unknown method)"):
        unpack_samples(damage)


def test_a_few_bytes_do_not_become_gigabytes() -> None:
    one_sample = pack_samples([[[1.0]]])[0][1:3]  # one burst, of one sample
    bomb = b"\x01" + one_sample + zlib.compress(bytes(1 << 24))
    tracemalloc.start()
    with pytest.raises(ValueError, match="samples are damaged"):
        unpack_samples(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@quick
@given(st.binary(max_size=40))
def test_any_bytes_are_samples_or_an_error(damage: bytes) -> None:
    try:
        unpack_samples(damage)
    except ValueError as error:
        assert "samples are" in str(error)
    try:
        unpack_telemetry(damage)
    except ValueError as error:
        assert "telemetry is" in str(error)


bursts = st.fixed_dictionaries(
    {},
    optional={
        "sm_clock_mhz": st.integers(0, 2000) | st.integers(0, 2**63 - 1),
        "temperature_c": st.integers(-10, 100) | st.integers(-(2**70), 2**70),
        "power_w": st.integers(0, 700_000).map(lambda mw: mw / 1000) | st.floats(0, allow_infinity=False),
        "throttle": st.lists(st.sampled_from([*THROTTLE, "Another"]), min_size=1, max_size=3),
    },
)


@quick
@given(st.lists(bursts, max_size=4))
def test_any_telemetry_comes_back(telemetry: list[dict[str, Any]]) -> None:
    (packed,) = pack_telemetry([msgspec.convert(telemetry, list[Telemetry])])
    back = unpack_telemetry(packed)
    assert [str(sorted(burst.items())) for burst in back] == [str(sorted(burst.items())) for burst in telemetry]


@quick
@given(st.lists(st.lists(st.lists(samples, min_size=1, max_size=3), min_size=1, max_size=2), max_size=6))
def test_samples_of_many_points_are_packed_as_those_of_each(points: list[list[list[float]]]) -> None:
    assert pack_samples(points) == [packed for bursts in points for packed in pack_samples([bursts])]


@quick
@given(st.lists(st.lists(bursts, max_size=3), max_size=6))
def test_telemetry_of_many_points_is_packed_as_that_of_each(points: list[list[dict[str, Any]]]) -> None:
    records = msgspec.convert(points, list[list[Telemetry]])
    assert pack_telemetry(records) == [packed for bursts in records for packed in pack_telemetry([bursts])]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("huge", [{"temperature_c": 10**400}, {"power_w": 1e308}], ids=str)
def test_a_huge_value_comes_back(huge: dict[str, Any]) -> None:
    packed = pack_telemetry([[msgspec.convert(huge, Telemetry)], [Telemetry(sm_clock_mhz=1980)]])
    assert [unpack_telemetry(each) for each in packed] == [[huge], [{"sm_clock_mhz": 1980}]]


def test_telemetry_of_a_gpu_is_short() -> None:
    telemetry = [
        Telemetry(sm_clock_mhz=1755 + i, temperature_c=45, power_w=412.345 + i, throttle=("SwPowerCap",))
        for i in range(4)
    ]
    assert len(pack_telemetry([telemetry])[0]) < 32
