"""Pack samples and telemetry, which would otherwise dominate a point's space.

Forty latencies around one level share the sign, the exponent and the first mantissa bits. The rest is noise and does
not compress. So a block stores the minimum integer, a bit width, and each difference from the minimum in that many
bits. Positive float32 values sort like their bit patterns, which makes them such integers without loss. If a clock has
a fixed tick (32 ns for CUDA events, 10 ns, 1 ns), tick counts are shorter still. Unpacking restores every bit. The
first byte names the method, so better methods can be added later.

Points are packed together, since those with equally many samples share arrays: alone, each takes ten times as long.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.record import Telemetry


class DamagedError(StoreError, ValueError):
    """A column's bytes are damaged."""


_ZLIB, _BITS, _TICKS = 1, 2, 3
_JSON, _COLUMNS = range(2)

TICK_NS = (32, 10, 1)
"""Clock ticks to try. Append only: packed data refers to them by position."""

THROTTLE = (
    "ApplicationsClocksSetting",
    "SwPowerCap",
    "HwSlowdown",
    "SyncBoost",
    "SwThermalSlowdown",
    "HwThermalSlowdown",
    "HwPowerBrakeSlowdown",
    "DisplayClockSetting",
)
"""Throttle reasons stored as one bit each. Append only; any other reason is stored as text."""

_LARGEST_TICK = 1 << 40  # larger counts of ticks, and telemetry with larger values, are not packed as integers
_MOST_SAMPLES = 1 << 28  # samples of a point, so that a damaged length does not exhaust memory
_PACKED_AT_ONCE = 1 << 15  # values to pack or unpack at once; a multiple of 8, so that chunks end on a byte
_WITHOUT_ARRAY = 200  # values that are unpacked faster without an array
_ONE_BYTE = [bytes([value]) for value in range(128)]
_ZLIB_FROM = 256  # number of samples from which zlib may be shorter than bit packing

Bursts = Sequence[Sequence[float]]


def flatten(bursts: Bursts) -> NDArray[np.float32]:
    """Return every sample in order, as float32."""
    return np.array([ms for burst in bursts for ms in burst], dtype="<f4")


def pack_samples(points: Sequence[Bursts]) -> list[bytes]:
    """Return each point's positive samples, rounded to float32 and packed."""
    packed = [b""] * len(points)
    for places in _alike(tuple(map(len, bursts)) for bursts in points):
        head = _head([len(burst) for burst in points[places[0]]])
        samples = np.array([[ms for burst in points[place] for ms in burst] for place in places], dtype="<f4")
        for place, ways in zip(places, _packed_each_way(samples, head), strict=True):
            packed[place] = min(ways, key=len)
    return packed


def _head(lengths: list[int]) -> bytes:
    """Return the burst count and the lengths as bytes."""
    alike = len(set(lengths)) == 1
    return _varint(2 * len(lengths) + alike) + b"".join(map(_varint, lengths[:1] if alike else lengths))


def _packed_each_way(samples: NDArray[np.float32], head: bytes) -> list[list[bytes]]:
    """Return each row, packed by every lossless method."""
    ways = [[bytes([_BITS]) + head + block] for block in _pack_rows(samples.view("<u4").astype(np.int64))]
    places = np.arange(len(samples))
    for position, step in enumerate(TICK_NS):
        ticks = np.rint(samples[places].astype(np.float64) * 1e6 / step)
        exact = ((ticks < _LARGEST_TICK) & (_of_ticks(ticks, step) == samples[places])).all(axis=1)
        for place, block in zip(places[exact].tolist(), _pack_rows(ticks[exact].astype(np.int64)), strict=True):
            ways[place].append(bytes([_TICKS]) + head + bytes([position]) + block)
        places = places[~exact]  # a shorter tick only multiplies the counts
    if samples.shape[1] >= _ZLIB_FROM:
        for way, row in zip(ways, samples, strict=True):
            planes = row.view(np.uint8).reshape(-1, 4).T.tobytes()
            way.append(bytes([_ZLIB]) + head + zlib.compress(planes, 6))
    return ways


def unpack_samples(packed: bytes) -> tuple[tuple[float, ...], ...]:
    """Return the bursts packed by `pack_samples`. Raises DamagedError."""
    flat, counts = sample_array(packed)
    values, bursts, start = flat.tolist(), [], 0
    for count in counts:
        bursts.append(tuple(values[start : start + count]))
        start += count
    return tuple(bursts)


def _decompressed(body: bytes, size: int) -> bytes:
    """Return the decompressed bytes, up to one more than `size`: a few kB may stand for gigabytes."""
    return zlib.decompressobj().decompress(body, size + 1)


def sample_array(packed: bytes) -> tuple[NDArray[np.float32], list[int]]:
    """Return (all samples, burst lengths). Raises DamagedError for bytes not made by `pack_samples`."""
    try:
        counts, at = _burst_lengths(packed)
        n, method, body = sum(counts), packed[0], packed[at:]
        if n > _MOST_SAMPLES:
            raise DamagedError("samples are damaged")
        if method == _ZLIB:
            flat = np.frombuffer(_decompressed(body, 4 * n), dtype=np.uint8).reshape(4, -1).T.copy().view("<f4").ravel()
        elif method == _BITS:
            flat = _unpack_all(body, 0, n).astype("<u4").view("<f4")
        elif method == _TICKS:
            flat = _of_ticks(_unpack_all(body, 1, n), TICK_NS[body[0]])
        else:
            raise DamagedError(f"samples are packed by unknown method {method}")
    except DamagedError:
        raise
    except (IndexError, ValueError, zlib.error, OverflowError, MemoryError) as error:
        raise DamagedError("samples are damaged") from error
    if len(flat) != n:
        raise DamagedError("samples are damaged")
    return flat, counts


def burst_lengths(packed: bytes) -> list[int]:
    return _burst_lengths(packed)[0]


def pack_telemetry(points: Sequence[Sequence[Telemetry]]) -> list[bytes]:
    """Return each point's telemetry by burst, packed as one integer column per field.

    It is packed as JSON if a value does not fit, or if only some bursts have a field.
    """
    packed = [b""] * len(points)
    for places in _alike(map(len, points)):
        try:
            columns = _packed_columns([points[place] for place in places])
        except OverflowError:  # an integer that no float can hold
            columns = [None] * len(places)
        for place, blocks in zip(places, columns, strict=True):
            bursts = points[place]
            if blocks is None:
                packed[place] = bytes([_JSON]) + msgspec.json.encode(bursts)
            else:
                present = sum(1 << field for field in blocks)
                packed[place] = bytes([_COLUMNS]) + _varint(len(bursts)) + bytes([present]) + b"".join(blocks.values())
    return packed


def _packed_columns(points: Sequence[Sequence[Telemetry]]) -> list[dict[int, bytes] | None]:
    """Return each point's packed columns by field, or None if they would lose information.

    All points have equally many bursts. Raises OverflowError.
    """
    columns: list[dict[int, bytes]] = [{} for _ in points]
    lossy: set[int] = set()
    for field, (name, scale) in enumerate(_TELEMETRY_FIELDS):
        values = np.array([[getattr(burst, name) for burst in bursts] for bursts in points], dtype=np.float64)
        with np.errstate(over="ignore"):  # an infinite value does not fit
            whole = np.rint(values * scale)
        negative_zero = np.signbit(values) & (values == 0)
        fits = ((whole / scale == values) & (np.abs(whole) < _LARGEST_TICK) & ~negative_zero).all(axis=1)
        absent = np.isnan(values).all(axis=1)
        lossy.update(np.flatnonzero(~fits & ~absent).tolist())
        packed = fits & ~absent
        blocks = _pack_rows(whole[packed].astype(np.int64))
        for place, block in zip(np.flatnonzero(packed).tolist(), blocks, strict=True):
            columns[place][field] = block
    for place, bursts in enumerate(points):
        if any(burst.throttle for burst in bursts):
            reasons = _reasons(bursts)
            if reasons is None:
                lossy.add(place)
            else:
                columns[place][len(_TELEMETRY_FIELDS)] = _pack_rows(np.array([reasons]))[0]
    return [None if place in lossy else by_field for place, by_field in enumerate(columns)]


def _reasons(bursts: Sequence[Telemetry]) -> list[int] | None:
    """Return each burst's throttle reasons as bits, or None if one is unknown or not in order."""
    bits = [[THROTTLE.index(reason) if reason in THROTTLE else -1 for reason in burst.throttle] for burst in bursts]
    if any(each != sorted(set(each)) or -1 in each for each in bits):
        return None
    return [sum(1 << bit for bit in each) for each in bits]


def unpack_telemetry(packed: bytes) -> list[dict[str, Any]]:
    """Return the telemetry packed by `pack_telemetry`. Raises DamagedError for other bytes."""
    try:
        if packed[0] == _JSON:
            return msgspec.json.decode(packed[1:], type=list[dict[str, Any]])
        if packed[0] != _COLUMNS:
            raise DamagedError(f"telemetry is packed by unknown method {packed[0]}")
        return _unpack_columns(packed)
    except DamagedError:
        raise
    except (IndexError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedError("telemetry is damaged") from error


def _unpack_columns(packed: bytes) -> list[dict[str, Any]]:
    count, at = _read_varint(packed, 1)
    if count > _MOST_SAMPLES:
        raise IndexError
    mask, at = packed[at], at + 1
    bursts: list[dict[str, Any]] = [{} for _ in range(count)]
    for i, (name, scale) in enumerate((*_TELEMETRY_FIELDS, ("throttle", 1))):
        if not mask >> i & 1:
            continue
        values, at = _unpack_whole(packed, at, count)
        for burst, value in zip(bursts, values.tolist(), strict=True):
            if name != "throttle":
                burst[name] = value / scale if scale > 1 else value
            elif value:
                burst[name] = [reason for bit, reason in enumerate(THROTTLE) if value >> bit & 1]
    if at != len(packed) or mask >> len(_TELEMETRY_FIELDS) + 1:
        raise IndexError
    return bursts


_TELEMETRY_FIELDS = (("sm_clock_mhz", 1), ("temperature_c", 1), ("power_w", 1000))


def _of_ticks(ticks: NDArray[Any], step: int) -> NDArray[np.float32]:
    return (ticks.astype(np.float64, copy=False) * step / 1e6).astype("<f4")


def _alike(keys: Iterable[Hashable]) -> Iterable[list[int]]:
    listed = list(keys)
    return grouped(range(len(listed)), listed.__getitem__).values()


def _pack_rows(rows: NDArray[np.int64]) -> list[bytes]:
    """Return each row as a block: minimum, width, and each difference from the minimum in `width` bits."""
    if not rows.size:
        return []
    low = rows.min(axis=1)
    offsets = rows - low[:, None]
    widths = np.frexp(offsets.max(axis=1).astype(np.float64))[1]  # the exponent is the number of bits
    packed = [
        _varint(_signed(least)) + bytes([width]) for least, width in zip(low.tolist(), widths.tolist(), strict=True)
    ]
    for width in set(widths.tolist()) - {0}:
        places = np.flatnonzero(widths == width)
        shifts = np.arange(width - 1, -1, -1)
        for start in range(0, rows.shape[1], _PACKED_AT_ONCE):
            bits = (offsets[places, start : start + _PACKED_AT_ONCE, None] >> shifts) & 1
            joined = np.packbits(bits.astype(np.uint8).reshape(len(places), -1), axis=1)
            size, joined_bytes = joined.shape[1], joined.tobytes()
            for number, place in enumerate(places.tolist()):
                packed[place] += joined_bytes[number * size : (number + 1) * size]
    return packed


def _signed(value: int) -> int:
    """Return an integer encoded as a non-negative one, with the sign in the lowest bit."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unpack_all(packed: bytes, at: int, count: int) -> NDArray[np.int64]:
    """Return a block's values from the end of the bytes. Raises IndexError for trailing bytes."""
    values, end = _unpack_whole(packed, at, count)
    if end != len(packed):
        raise IndexError
    return values


def _unpack_whole(packed: bytes, at: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Return (values, next block's start)."""
    coded, at = _read_varint(packed, at)
    base = coded >> 1 if coded % 2 == 0 else -((coded + 1) >> 1)
    width, at = packed[at], at + 1
    end = at + (width * count + 7) // 8
    if width > 62 or end > len(packed):
        raise IndexError
    if width and packed[end - 1] & (1 << -width * count % 8) - 1:
        raise IndexError  # padding bits must be zero
    if count <= _WITHOUT_ARRAY:
        joined = int.from_bytes(packed[at:end], "big") >> -width * count % 8
        mask = (1 << width) - 1
        few = [(joined >> width * place & mask) + base for place in range(count - 1, -1, -1)]
        return np.array(few, dtype=np.int64), end
    raw = np.frombuffer(packed, dtype=np.uint8, count=end - at, offset=at)
    weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
    parts = []
    for start in range(0, count, _PACKED_AT_ONCE):
        n = min(_PACKED_AT_ONCE, count - start)
        bits = np.unpackbits(raw[start * width // 8 :], count=n * width).reshape(n, width)
        parts.append(bits @ weights)
    return np.concatenate(parts) + base, end


def _burst_lengths(packed: bytes) -> tuple[list[int], int]:
    coded, at = _read_varint(packed, 1)
    count, alike = coded >> 1, coded & 1
    if count > 8 * len(packed) and not alike:
        raise IndexError
    if alike:
        length, at = _read_varint(packed, at)
        return [length] * count, at
    lengths = []
    for _ in range(count):
        length, at = _read_varint(packed, at)
        lengths.append(length)
    return lengths, at


def _varint(value: int) -> bytes:
    """Return an integer in seven bits per byte, lowest first; the highest bit marks further bytes."""
    if value < 128:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(packed: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = packed[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
