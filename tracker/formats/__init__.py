"""Files of other benchmarks' results, read as records. One module a format, each with two functions:

    recognise(head, path)   whether a file that begins like this is of the format; a folder has an empty head
    read(path, options)     its records, and what no record can hold; raises FormatError, which names the line or key

`common.Reader` has what they share: a format says where a run, an environment and the results are in its file.

What a file does not say (commit, date, hardware) comes from `Options`. Nothing is invented: a file that needs a fact
that neither has is refused, and text where a number belongs, an empty cell or a zero becomes a status.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from groupbench.tracker.errors import IngestError
from groupbench.tracker.formats.common import LeftOut, Options
from groupbench.tracker.formats.values import FormatError
from groupbench.tracker.record import Record

__all__ = ["FORMATS", "FormatError", "Loaded", "Options", "load"]

HEAD = 64 * 1024
"""Bytes that a format is recognised by."""


class Format(Protocol):
    TITLE: str

    def recognise(self, head: bytes, path: Path) -> bool: ...

    def read(self, path: Path, options: Options) -> Iterator[Record | LeftOut]: ...


FORMATS = {
    "records": "records",
    "tritonbench-json": "tritonbench_json",
    "v3": "v3",
    "google-benchmark": "google_benchmark",
    "pytest-benchmark": "pytest_benchmark",
    "asv": "asv",
    "tritonbench-csv": "tritonbench_csv",
    "csv": "plain_csv",
}
"""Name on the command line: module here. Asked in this order; plain CSV, which anything may be, comes last."""


@dataclass(frozen=True)
class Loaded:
    """What a file held."""

    title: str  # of its format
    records: tuple[Record, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def losses(self) -> str:
        """What was left out, by reason and name: "4 of unit bytes (peakmem_sum), 1 without a time (BM_Sort)"."""
        counts = Counter(one.reason for one in self.left_out)
        names = {reason: {one.name: None for one in self.left_out if one.reason == reason} for reason in counts}
        return ", ".join(f"{count} {reason} ({', '.join(names[reason])})" for reason, count in counts.items())


def load(path: Path, format_name: str | None = None, options: Options = Options()) -> Loaded:  # noqa: B008
    """Return the records of a file. Raises IngestError with one line: nothing of the file is to be used then."""
    try:
        form = _find(path, format_name, options)
        results = tuple(form.read(path, options))
        records = tuple(result for result in results if isinstance(result, Record))
        loaded = Loaded(form.TITLE, records, tuple(result for result in results if isinstance(result, LeftOut)))
        if not records:
            raise FormatError(f"holds no result{f'; left out: {loaded.losses}' if results else ''}")
        _check(records)
    except FormatError as error:
        raise IngestError(f"{path}: {error.message}") from error
    except (OSError, ValueError, OverflowError) as error:  # a text that is no Unicode, a number too long
        raise IngestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError as error:
        raise IngestError(f"{path}: is nested too deeply") from error
    return loaded


def _find(path: Path, name: str | None, options: Options) -> Format:
    if name is None and options.mapping:
        name = "csv"
    if name is not None:
        if name not in FORMATS:
            raise FormatError(f"no format {name!r}; known: {', '.join(FORMATS)}")
        return _module(name)
    head = b""
    if not path.is_dir():
        with path.open("rb") as file:
            head = file.read(HEAD)
        if not head.strip():
            raise FormatError("is empty")
    for known in FORMATS:
        form = _module(known)
        if form.recognise(head, path):
            return form
    how = f"name it by --format ({', '.join(FORMATS)})"
    if _looks_like_csv(head, path):
        columns = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
        how = f"map the columns of a CSV by --map latency_ms=COLUMN,operator=COLUMN,... (its header is {columns[:200]})"
    raise FormatError(f"is of no known format; {how}")


def _looks_like_csv(head: bytes, path: Path) -> bool:
    first = head.split(b"\n", 1)[0]
    return path.suffix.lower() in (".csv", ".tsv") or (first.count(b",") > 0 and first.lstrip()[:1] not in b"{[")


def _module(name: str) -> Format:
    module: Format = importlib.import_module(f"{__name__}.{FORMATS[name]}")
    return module


def _check(records: tuple[Record, ...]) -> None:
    """Raise FormatError where the store would refuse a record, or two contradict each other."""
    from groupbench.tracker.identity import series_identity
    from groupbench.tracker.record import RecordError, decode, encode
    from groupbench.tracker.store.checked import unstorable
    from groupbench.tracker.store.points import content_of

    seen: dict[tuple[str, str], object] = {}
    for number, record in enumerate(records, 1):
        cell = record.cell
        named = f"result {number} ({cell.operator} {cell.backend} {cell.shape})"
        try:
            decode(encode(record))
        except RecordError as error:
            raise FormatError(f"{named}: {error}") from error
        problem = unstorable(record)
        if problem:
            raise FormatError(f"{named}: {problem}")
        content = content_of(record)
        if seen.setdefault((record.run.id, series_identity(record)), content) != content:
            raise FormatError(f"{named}: contradicts an earlier result of the same run and series")
