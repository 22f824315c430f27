"""Samples and telemetry as few bytes: what most of a point's space would go to.

Forty latencies around one level share sign, exponent and the first bits of the mantissa; the rest is noise that
no general compressor shortens. So a block of whole numbers is kept as its smallest, a width, and the difference
of each in that many bits. Positive float32 are ordered like their bit patterns, which makes them such whole
numbers without loss; and where a clock ticks in steps (32 ns for CUDA events, 10 ns, 1 ns) the count of ticks is
shorter still. Everything comes back bit by bit. The first byte names the method, so that a better one can be
added beside those that files hold already.
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
    """Bytes that are not what a column should hold."""


_ZLIB, _BITS, _TICKS = 1, 2, 3
_JSON, _COLUMNS = range(2)

TICK_NS = (32, 10, 1)
"""Steps that clocks are tried for. Append only: blobs name them by position."""

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
"""Reasons that take a bit. Append only; any other is kept as text."""

_LARGEST = 1 << 40  # numbers of telemetry beyond it stay text
_MOST = 1 << 28  # samples of a point; a damaged length must not take all memory
_CHUNK = 1 << 15  # values whose bits are spread out at once; a multiple of 8, so that chunks end on a byte
_FEW = 200
_ONE_BYTE = [bytes([value]) for value in range(128)]
_ZLIB_FROM = 256  # samples; fewer are never shorter under zlib than in bits

Bursts = Sequence[Sequence[float]]

Whole = list[int] | NDArray[np.int64]
"""Whole numbers: a list of few, which is quicker then, or an array."""


def flatten(bursts: Bursts) -> NDArray[np.float32]:
    """Every sample in order, as it is kept."""
    return np.array([ms for burst in bursts for ms in burst], dtype="<f4")


def pack_samples(bursts: Bursts, flat: NDArray[np.float32] | None = None) -> bytes:
    """Samples by burst, rounded to float32; all positive. `flat` is `flatten(bursts)`, where it is at hand."""
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
            break  # a shorter step is a multiple more ticks
    best = method + _pack_whole(whole, low, high)
    if len(flat) >= _ZLIB_FROM:
        planes = flat.view(np.uint8).reshape(-1, 4).T.tobytes()
        squeezed = bytes([_ZLIB]) + head + zlib.compress(planes, 6)
        best = min(best, squeezed, key=len)
    return best


def unpack_samples(packed: bytes, lengths: object = None) -> tuple[tuple[float, ...], ...]:
    """The bursts back. `lengths` is not needed: the bytes hold them."""
    flat, counts = sample_array(packed)
    values, bursts, start = flat.tolist(), [], 0
    for count in counts:
        bursts.append(tuple(values[start : start + count]))
        start += count
    return tuple(bursts)


def sample_array(packed: bytes) -> tuple[NDArray[np.float32], list[int]]:
    """(every sample, length of each burst). Raises DamagedError for bytes that `pack_samples` did not make."""
    try:
        counts, at = _burst_lengths(packed)
        n, method, body = sum(counts), packed[0], packed[at:]
        if n > _MOST:
            raise DamagedError("samples are damaged")
        if method == _ZLIB:
            flat = np.frombuffer(zlib.decompress(body), dtype=np.uint8).reshape(4, -1).T.copy().view("<f4").ravel()
        elif method == _BITS:
            flat = _unpack_all(body, 0, n).astype("<u4").view("<f4")
        elif method == _TICKS:
            flat = _of_ticks(_unpack_all(body, 1, n), TICK_NS[body[0]])
        else:
            raise DamagedError(f"samples are packed by method {method}, which this groupbench does not know")
    except DamagedError:
        raise
    except (IndexError, ValueError, zlib.error, OverflowError, MemoryError) as error:
        raise DamagedError("samples are damaged") from error
    if len(flat) != n:
        raise DamagedError("samples are damaged")
    return flat, counts


def burst_lengths(packed: bytes) -> list[int]:
    """How many samples each burst holds."""
    return _burst_lengths(packed)[0]


def pack_telemetry(bursts: Sequence[dict[str, Any]]) -> bytes:
    """Telemetry by burst, as builtins of `record.Telemetry`: a column of numbers a field, or JSON where one is odd."""
    plain = bytes([_JSON]) + msgspec.json.encode(bursts)
    columns: list[list[int]] = []
    try:
        for name, scale in _TELEMETRY_FIELDS:
            given = [burst[name] for burst in bursts if name in burst]
            if not given:
                columns.append([])
                continue
            if len(given) != len(bursts):
                return plain
            kinds = set(map(type, given))
            if scale == 1 and kinds == {int}:
                columns.append(given)
                continue
            whole = [round(value * scale) for value in given]
            back = [value / scale for value in whole] if scale > 1 else whole
            if back != given or kinds - {type(back[0])}:
                return plain
            if 0 in whole and str(back) != str(given):  # as text: -0.0 is not 0.0
                return plain
            columns.append(whole)
        reasons = [[THROTTLE.index(reason) for reason in burst.get("throttle", ())] for burst in bursts]
    except (ValueError, OverflowError):
        return plain
    if any(bits and bits != sorted(set(bits)) for bits in reasons):
        return plain
    columns.append([sum(1 << bit for bit in bits) for bits in reasons] if any(reasons) else [])
    ends = [(min(column), max(column)) if column else (0, 0) for column in columns]
    if any(low <= -_LARGEST or high >= _LARGEST for low, high in ends):
        return plain
    present = sum(1 << i for i, column in enumerate(columns) if column)
    body = b"".join(_pack_whole(column, *each) for column, each in zip(columns, ends, strict=True) if column)
    return bytes([_COLUMNS]) + _varint(len(bursts)) + bytes([present]) + body


def unpack_telemetry(packed: bytes) -> list[dict[str, Any]]:
    """What `pack_telemetry` was given. Raises DamagedError for other bytes."""
    try:
        if packed[0] == _JSON:
            return msgspec.json.decode(packed[1:])
        if packed[0] != _COLUMNS:
            raise DamagedError(f"telemetry is packed by method {packed[0]}, which this groupbench does not know")
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
    """(the smallest, the largest)."""
    return (min(values), max(values)) if isinstance(values, list) else (int(values.min()), int(values.max()))


def _ticks(flat: NDArray[np.float32], step: int) -> Whole | None:
    """The samples as counts of `step` nanoseconds, where that gives each of them back."""
    first = float(flat[0])
    if np.float32(round(first * 1e6 / step) * step / 1e6) != first:
        return None  # most sets of samples end here
    counted = np.rint(flat.astype(np.float64) * 1e6 / step)
    if not counted.max() < 2**40 or not (_of_ticks(counted, step) == flat).all():
        return None
    return _whole(counted.astype(np.int64))


def _of_ticks(ticks: NDArray[Any], step: int) -> NDArray[np.float32]:
    return (ticks.astype(np.float64, copy=False) * step / 1e6).astype("<f4")


def _pack_whole(values: Whole, low: int, high: int) -> bytes:
    """Smallest, width, then each one's difference from the smallest in `width` bits. `low` and `high` are the ends."""
    width = (high - low).bit_length()
    head = _varint(_signed(low)) + bytes([width])
    if width == 0:
        return head
    if isinstance(values, list) and len(values) <= _FEW:  # one long number: for few, quicker than arrays
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
    """Bytes that `_pack_whole` takes."""
    return max(1, (_signed(low).bit_length() + 6) // 7) + 1 + ((high - low).bit_length() * count + 7) // 8


def _signed(value: int) -> int:
    """A whole number as one that is not negative: the lowest bit is the sign."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unpack_all(packed: bytes, at: int, count: int) -> NDArray[np.int64]:
    """The values of a block that ends with the bytes. Raises IndexError where more follow."""
    values, end = _unpack_whole(packed, at, count)
    if end != len(packed):
        raise IndexError
    return values


def _unpack_whole(packed: bytes, at: int, count: int) -> tuple[NDArray[np.int64], int]:
    """(values, where the next begins)."""
    coded, at = _read_varint(packed, at)
    base = coded >> 1 if coded % 2 == 0 else -((coded + 1) >> 1)
    width, at = packed[at], at + 1
    end = at + (width * count + 7) // 8
    if width > 62 or end > len(packed):
        raise IndexError
    if width and packed[end - 1] & (1 << -width * count % 8) - 1:
        raise IndexError  # the last byte is filled up with zeros
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
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
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
