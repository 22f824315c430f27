"""The record: one measured cell as one line of JSON, the only thing that measuring and tracking share.

A GPU machine writes records and needs nothing but msgspec for it; any other machine reads them back, checked
field by field, and stores them. Units are in the names: `_ms` milliseconds, `_mhz`, `_w` watts, `_c` degrees
Celsius, `_mib` mebibytes. Times of day are UTC.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

import msgspec

SCHEMA = 1
"""Version of the record. A reader refuses any other, naming both."""

Status = Literal["ok", "wrong", "error", "oom", "timeout", "unavailable", "skipped"]
"""What became of a cell, apart from any value:

ok           measured, and accurate within the tolerance table
wrong        ran, but its output is not: see `accuracy` and `message`
error        raised, or its process died
oom          ran out of memory
timeout      gave no answer within the time limit
unavailable  cannot run here, and says why
skipped      was planned and not reached (interrupted, out of budget)
"""

Timing = Literal["gpu", "cpu", "interpreted"]
"""gpu: device time between two events. cpu: wall time. interpreted: Triton's interpreter, never a speed."""

STATUSES: tuple[str, ...] = get_args(Status)

PACKAGE = "package "
"""With what a setting's name begins that holds the version of a package which only some backends need."""

Utc = Annotated[datetime, msgspec.Meta(tz=True)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
ShapeText = Annotated[str, msgspec.Meta(min_length=1, max_length=20_000)]  # may list the rows of every group


_SIGNED = frozenset({"seed", "temperature_c", "config", "dims"})
"""Fields in which a number may be below zero; of sizes, others' `dim=-1`. The rest count something, or measure it."""

_LARGEST_SHARE = 1 + 1e-5
"""A mean of ones in fp32 may come out at 1.0000001."""

_MINUS = re.compile(rb"-(?<=[\s:,[]-)\d")
"""Of every number below zero in JSON. Most lines hold none, and are not searched field by field.

It begins with a character, which the search runs ahead to; with the class before it each byte would be tried.
"""

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""As JSON spells it; after a backslash that is itself escaped, the same letters are text."""


class RecordError(ValueError):
    """A line that is no record: says what is wrong with it, and where in the object."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Strict: an unknown field is a newer writer or a typing error, not something to drop.

    Each subclass says `frozen=True` again, which type checkers want to see.
    """


class Commit(_Struct, frozen=True):
    """The state of the code that was measured. All but the hash may be unknown (a copied tree)."""

    hash: Name
    parents: tuple[str, ...] = ()
    branch: str | None = None
    dirty: bool = False  # the tree differed from the commit
    time: Utc | None = None  # committer's time
    author: str | None = None
    subject: str | None = None


class Run(_Struct, frozen=True):
    """One invocation: all its records carry the same `run`."""

    id: Name  # unique, made by the writer
    started: Utc
    commit: Commit
    trigger: str = "manual"  # manual, nightly, ab, ...
    plan: str | None = None  # name of the plan that said what to measure; a plan's runs are expected to match
    command: str | None = None


class Environment(_Struct, frozen=True):
    """Where it ran. Which of these fields make two environments unlike is declared in `environment_identity`."""

    device: Literal["cuda", "cpu"]
    gpu: str | None = None  # model, as the driver names it
    gpu_uuid: str | None = None
    gpu_memory_mib: int | None = None
    sm_count: int | None = None
    driver: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None
    max_sm_clock_mhz: int | None = None
    cpu: str | None = None
    cpu_count: int | None = None
    cpu_threads: int | None = None  # that torch computes with, where the device is the cpu
    memory_mib: int | None = None
    os: str | None = None
    host: str | None = None  # machine name
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    helion: str | None = None
    tritonbench: str | None = None
    groupbench: str | None = None
    settings: dict[str, str] = {}  # environment variables and flags that change what is measured; versions by PACKAGE


class Cell(_Struct, frozen=True):
    """What was measured: the identity of a series but for the hardware."""

    operator: Name
    backend: Name
    shape: ShapeText  # canonical text that names the whole problem
    dtype: Name  # fp16, bf16, fp32, ...
    mode: Name = "fwd"
    host: Name = "builtin"  # builtin, tritonbench
    protocol: Name = "cooled"  # how latency was taken; unlike protocols are never compared
    seed: Int64 = 0
    dims: dict[str, Int64] = {}  # the problem's sizes by letter, for filters: G, M, N, K
    flops: Int64 | None = None  # of real rows
    min_bytes: Int64 | None = None  # each input read once, each output written once


class Telemetry(_Struct, frozen=True):
    """The GPU beside one burst."""

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()  # active reasons, as NVML names them


class Latency(_Struct, frozen=True):
    """Time of one call, every sample kept, by burst. The burst is the unit: samples of one are not independent."""

    timing: Timing
    bursts_ms: tuple[tuple[float, ...], ...]
    telemetry: tuple[Telemetry, ...] = ()  # one for each burst, or none
    prepare_ms: float | None = None  # packing, compiling, tuning: before the clock starts
    enqueue_ms: float | None = None  # host time to launch one call


class Accuracy(_Struct, frozen=True):
    """The output against a reference in higher precision. None where the value is not a finite number."""

    rms: float | None = None  # ‖out - ref‖ / ‖ref‖
    max_abs: float | None = None
    worst_block_rms: float | None = None  # the largest relative RMS of any row and any 64 x 64 block
    mismatch: float | None = None  # share of elements outside the tolerance table
    unwritten: float | None = None  # share that still held the NaN put there beforehand
    repeatable: bool | None = None  # two runs agreed bit by bit
    first_bad: tuple[int, ...] | None = None  # coordinates of the first element outside


class Kernel(_Struct, frozen=True):
    """A kernel that the call launched: a compiled one, or one of a library, of which the name alone is known."""

    name: str
    hash: str | None = None  # of its machine-independent code, line numbers left out
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    config: dict[str, Any] = {}
    external: bool = False  # of a library, or a copy or fill of memory; it has no hash
    launches: int | None = None  # in one call
    arch: str | None = None  # what it was compiled for: sm_90a
    occupancy: float | None = None  # share of an SM's warps that can be resident at once
    counted_in: Literal["sass", "ptx"] | None = None  # what `counts` were counted in
    counts: dict[str, Int64] = {}  # instructions by kind: "wgmma m64n256k16", "TMA load", "local store", ...


class Code(_Struct, frozen=True):
    """The code of a compiled kernel at each step from its source, where the step was kept."""

    hash: Name  # the kernel's
    name: Name
    source: str | None = None  # Python
    ttgir: str | None = None
    ptx: str | None = None
    cubin: bytes | None = None  # machine code


class Record(_Struct, frozen=True):
    """One cell of one run."""

    schema: int
    run: Run
    environment: Environment
    cell: Cell
    status: Status
    message: str | None = None  # why the status is not ok
    baseline: bool = False  # other backends' speed-up is over this one
    latency: Latency | None = None
    accuracy: Accuracy | None = None
    kernels: tuple[Kernel, ...] = ()
    duration_s: float | None = None  # wall time the cell took, all in but its process's start
    code: tuple[Code, ...] = ()  # of its kernels, on its way to where it is kept; it is no part of a stored line
    metrics: dict[Name, float] = {}  # further values by the names that `metrics.METRICS` explains


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record as one line, newline included."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes | str) -> Record:
    """The record of one line.

    Raises RecordError: not JSON, not of this schema version, a field of the wrong type, or values that
    contradict each other.
    """
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        version = _schema_of(line)
        if version is not None and version != SCHEMA:
            raise RecordError(f"record schema {version}; this groupbench reads schema {SCHEMA}") from error
        raise RecordError(str(error)) from error
    text = line if isinstance(line, bytes) else line.encode()
    if b"\\u0000" in text and _NUL.search(text):  # the search alone takes as long as all the rest
        raise RecordError("text with a NUL character, which no database keeps")
    _check(record)
    for name in _below_zero(record) if _MINUS.search(text) else ():
        raise RecordError(f"{name} holds a number below zero")
    return record


def read(lines: Iterable[bytes]) -> Iterator[tuple[int, Record]]:
    """(line number from 1, record) of a stream; blank lines are passed over.

    Raises RecordError with the line's number in front.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, decode(line)
        except RecordError as error:
            raise RecordError(f"line {number}: {error}") from error


def _schema_of(line: bytes | str) -> int | None:
    class Version(msgspec.Struct):
        schema: int

    try:
        return msgspec.json.decode(line, type=Version).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _check(record: Record) -> None:
    """What types alone do not say."""
    if record.schema != SCHEMA:
        raise RecordError(f"record schema {record.schema}; this groupbench reads schema {SCHEMA}")
    latency = record.latency
    if latency is not None:
        if not latency.bursts_ms or not all(latency.bursts_ms):
            raise RecordError("latency.bursts_ms holds no sample or an empty burst")
        if not all(0 < min(burst) <= max(burst) < math.inf for burst in latency.bursts_ms):  # JSON has no NaN
            raise RecordError("latency.bursts_ms holds a sample that is not a positive number")
        if latency.telemetry and len(latency.telemetry) != len(latency.bursts_ms):
            raise RecordError("latency.telemetry is not one for each burst")
    elif record.status == "ok" and (record.accuracy is None or record.accuracy == Accuracy()):
        raise RecordError("status is ok, but nothing was measured: neither latency nor accuracy")
    if record.status != "ok" and not record.message:
        raise RecordError(f"status is {record.status} without a message")
    for name in ("mismatch", "unwritten"):
        share = getattr(record.accuracy, name, None)
        if share is not None and share > _LARGEST_SHARE:
            raise RecordError(f"accuracy.{name} is {share:g}, and a share is 1 at most")
    if "" in record.cell.dims:
        raise RecordError("cell.dims holds a size without a name")


def _below_zero(part: Any) -> Iterator[str]:
    """Names of the fields that hold a number below zero where none can be."""
    if isinstance(part, msgspec.Struct):
        part = {name: getattr(part, name) for name in part.__struct_fields__ if name not in _SIGNED}
    for name, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, int | float):
            if value < 0:
                yield str(name)
        elif isinstance(value, msgspec.Struct | dict | tuple):
            yield from (f"{name}.{below}" for below in _below_zero(value))
