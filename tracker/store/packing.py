"""Pack samples and telemetry, which would otherwise take most of a point's space.

Forty latencies around one level share the sign, the exponent and the first bits of the mantissa. The rest is noise that
no general compressor shortens. So a block of integers is stored as its minimum, a bit width, and each difference from
the minimum in that many bits. Positive float32 values sort like their bit patterns, which makes them such integers
without loss. If a clock has a fixed tick (32 ns for CUDA events, 10 ns, 1 ns), tick counts are shorter still. Unpacking
restores every bit. The first byte names the method, so that better methods can be added later.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.errors import StoreError


class DamagedError(StoreError, ValueError):
    """The bytes of a column are damaged."""


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

_LARGEST = 1 << 40  # larger telemetry values are stored as text
_MOST = 1 << 28  # samples of a point, so that a damaged length does not exhaust memory
_CHUNK = 1 << 15  # values to unpack at once; a multiple of 8, so that chunks end on a byte
_FEW = 200
_ONE_BYTE = [bytes([value]) for value in range(128)]
_ZLIB_FROM = 256  # number of samples from which zlib may be shorter than bit packing

Bursts = Sequence[Sequence[float]]

Whole = list[int] | NDArray[np.int64]
"""Integers: a list if there are few, which is faster, or an array."""


def flatten(bursts: Bursts) -> NDArray[np.float32]:
    """Return every sample in order, as float32."""
    return np.array([ms for burst in bursts for ms in burst], dtype="<f4")


def pack_samples(bursts: Bursts, flat: NDArray[np.float32] | None = None) -> bytes:
    """Return positive samples by burst, rounded to float32 and packed. `flat` may pass `flatten(bursts)`."""
    flat = flatten(bursts) if flat is None else flat
    lengths = [len(burst) for burst in bursts]
    alike = len(set(lengths)) == 1
    head = _varint(2 * len(lengths) + alike) + b"".join(map(_varint, lengths[:1] if alike else lengths))

    whole, method = _whole(flat.view("<u4")), bytes([_BITS]) + head
    low, high = _ends(whole)
    for position, step in enumerate(TICK_NS):
        ticks = _ticks(flat, step)
        if ticks is not None:
            ends = _ends(ticks)
            if 1 + _packed_size(*ends, len(ticks)) < _packed_size(low, high, len(whole)):
                whole, method, (low, high) = ticks, bytes([_TICKS]) + head + bytes([position]), ends
            break  # a shorter tick only multiplies the counts
    best = method + _pack_whole(whole, low, high)
    if len(flat) >= _ZLIB_FROM:
        planes = flat.view(np.uint8).reshape(-1, 4).T.tobytes()
        squeezed = bytes([_ZLIB]) + head + zlib.compress(planes, 6)
        best = min(best, squeezed, key=len)
    return best


def unpack_samples(packed: bytes, lengths: object = None) -> tuple[tuple[float, ...], ...]:
    """Return the bursts that `pack_samples` packed. Raises DamagedError. `lengths` is ignored."""
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
    """Return (all samples, length of each burst). Raises DamagedError for bytes not made by `pack_samples`."""
    try:
        counts, at = _burst_lengths(packed)
        n, method, body = sum(counts), packed[0], packed[at:]
        if n > _MOST:
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
    """Return the number of samples of each burst."""
    return _burst_lengths(packed)[0]


def pack_telemetry(bursts: Sequence[dict[str, Any]]) -> bytes:
    """Return telemetry by burst, packed as one column of integers per field, or as JSON if a value does not fit.

    Each burst is a `record.Telemetry` as builtins.
    """
    try:
        columns = [_integers(bursts, name, scale) for name, scale in _TELEMETRY_FIELDS]
        columns.append(_reasons(bursts))
    except (ValueError, OverflowError):
        return bytes([_JSON]) + msgspec.json.encode(bursts)
    present = sum(1 << i for i, column in enumerate(columns) if column)
    body = b"".join(_pack_whole(column, min(column), max(column)) for column in columns if column)
    return bytes([_COLUMNS]) + _varint(len(bursts)) + bytes([present]) + body


def _integers(bursts: Sequence[dict[str, Any]], name: str, scale: int) -> list[int]:
    """Return a field of every burst as integers, times `scale`; empty if no burst has it.

    Raises ValueError or OverflowError if that loses information.
    """
    values = [burst[name] for burst in bursts if name in burst]
    if not values:
        return []
    if len(values) != len(bursts):
        raise ValueError(f"some bursts lack {name}")
    kinds = set(map(type, values))
    whole = values if scale == 1 and kinds == {int} else _scaled(values, scale, kinds)
    if min(whole) <= -_LARGEST or max(whole) >= _LARGEST:
        raise OverflowError(f"{name} is too large")
    return whole


def _scaled(values: list[Any], scale: int, kinds: set[type]) -> list[int]:
    whole = [round(value * scale) for value in values]
    back = [value / scale for value in whole] if scale > 1 else whole
    if back != values or kinds - {type(back[0])}:
        raise ValueError(f"not all values are multiples of 1 / {scale}")
    if 0 in whole and str(back) != str(values):  # compare as text, because -0.0 == 0.0
        raise ValueError("a value is a negative zero")
    return whole


def _reasons(bursts: Sequence[dict[str, Any]]) -> list[int]:
    """Return the reasons to throttle of every burst as bits; empty if no burst has one. Raises ValueError."""
    reasons = [[THROTTLE.index(reason) for reason in burst.get("throttle", ())] for burst in bursts]
    if any(bits and bits != sorted(set(bits)) for bits in reasons):
        raise ValueError("throttle is not in order")
    return [sum(1 << bit for bit in bits) for bits in reasons] if any(reasons) else []


def unpack_telemetry(packed: bytes) -> list[dict[str, Any]]:
    """Return the telemetry that `pack_telemetry` packed. Raises DamagedError for other bytes."""
    try:
        if packed[0] == _JSON:
            return msgspec.json.decode(packed[1:])
        if packed[0] != _COLUMNS:
            raise DamagedError(f"telemetry is packed by unknown method {packed[0]}")
        return _unpack_columns(packed)
    except DamagedError:
        raise
    except (IndexError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedError("telemetry is damaged") from error


def _unpack_columns(packed: bytes) -> list[dict[str, Any]]:
    count, at = _read_varint(packed, 1)
    if count > _MOST:
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


def _whole(values: NDArray[Any]) -> Whole:
    return values.tolist() if len(values) <= _FEW else values.astype(np.int64)


def _ends(values: Whole) -> tuple[int, int]:
    """Return (minimum, maximum)."""
    return (min(values), max(values)) if isinstance(values, list) else (int(values.min()), int(values.max()))


def _ticks(flat: NDArray[np.float32], step: int) -> Whole | None:
    """Return the samples as counts of `step` nanoseconds, or None if that loses information."""
    first = float(flat[0])
    if np.float32(round(first * 1e6 / step) * step / 1e6) != first:
        return None  # the usual case
    counted = np.rint(flat.astype(np.float64) * 1e6 / step)
    if not counted.max() < 2**40 or not (_of_ticks(counted, step) == flat).all():
        return None
    return _whole(counted.astype(np.int64))


def _of_ticks(ticks: NDArray[Any], step: int) -> NDArray[np.float32]:
    return (ticks.astype(np.float64, copy=False) * step / 1e6).astype("<f4")


def _pack_whole(values: Whole, low: int, high: int) -> bytes:
    """Return minimum, width and each difference from the minimum in `width` bits. `low` and `high` are the ends."""
    width = (high - low).bit_length()
    head = _varint(_signed(low)) + bytes([width])
    if width == 0:
        return head
    if isinstance(values, list) and len(values) <= _FEW:  # one large integer is faster than arrays for few values
        joined = 0
        for value in values:
            joined = joined << width | (value - low)
        size = width * len(values)
        return head + (joined << -size % 8).to_bytes((size + 7) // 8, "big")
    offsets = np.asarray(values, dtype=np.int64) - low
    shifts = np.arange(width - 1, -1, -1)
    parts = [head]
    for start in range(0, len(offsets), _CHUNK):
        bits = (offsets[start : start + _CHUNK, None] >> shifts) & 1
        parts.append(np.packbits(bits.astype(np.uint8)).tobytes())
    return b"".join(parts)


def _packed_size(low: int, high: int, count: int) -> int:
    """Return the number of bytes that `_pack_whole` returns."""
    return max(1, (_signed(low).bit_length() + 6) // 7) + 1 + ((high - low).bit_length() * count + 7) // 8


def _signed(value: int) -> int:
    """Return an integer encoded as a non-negative one, with the sign in the lowest bit."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unpack_all(packed: bytes, at: int, count: int) -> NDArray[np.int64]:
    """Return the values of a block at the end of the bytes. Raises IndexError for trailing bytes."""
    values, end = _unpack_whole(packed, at, count)
    if end != len(packed):
        raise IndexError
    return values


def _unpack_whole(packed: bytes, at: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Return (values, start of the next block)."""
    coded, at = _read_varint(packed, at)
    base = coded >> 1 if coded % 2 == 0 else -((coded + 1) >> 1)
    width, at = packed[at], at + 1
    end = at + (width * count + 7) // 8
    if width > 62 or end > len(packed):
        raise IndexError
    if width and packed[end - 1] & (1 << -width * count % 8) - 1:
        raise IndexError  # padding bits must be zero
    if count <= _FEW:
        joined = int.from_bytes(packed[at:end], "big") >> -width * count % 8
        mask = (1 << width) - 1
        few = [(joined >> width * place & mask) + base for place in range(count - 1, -1, -1)]
        return np.array(few, dtype=np.int64), end
    raw = np.frombuffer(packed, dtype=np.uint8, count=end - at, offset=at)
    weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
    parts = []
    for start in range(0, count, _CHUNK):
        n = min(_CHUNK, count - start)
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
    """Return an integer in seven bits per byte, lowest first; the highest bit marks that more bytes follow."""
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
