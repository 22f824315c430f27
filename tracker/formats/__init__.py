"""Read files of other benchmarks as records. Each format is a module with two functions:

    recognise(head, path)   return whether a file that begins with `head` has this format; a folder has an empty head
    read(path, options)     yield its records, a LeftOut for each result that no record can hold, and a Merged for each
                            column that may distinguish the rows of one cell;
                            raise FormatError, which names the line or key

They share `common.Reader`: a format tells it where in the file a run, an environment and the results are.

Facts that a file lacks (commit, date, hardware) come from `Options`. Nothing is invented: if a required fact is missing
from both, the file is refused. Text instead of a number, an empty cell or a zero becomes a status.
"""

from __future__ import annotations

import codecs
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Record
from groupbench.tracker.formats.common import LeftOut, Merged, Options
from groupbench.tracker.formats.values import FormatError
from groupbench.tracker.text.wording import no_such

__all__ = ["FORMATS", "FormatError", "Loaded", "Options", "load"]

HEAD = 64 * 1024
"""Bytes at the start of a file by which its format is recognised."""


class Format(Protocol):
    TITLE: str

    def recognise(self, head: bytes, path: Path) -> bool: ...

    def read(self, path: Path, options: Options) -> Iterator[Record | LeftOut | Merged]: ...


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
"""Name on the command line: module here. They are tried in this order; plain CSV, which matches most, comes last."""


@dataclass(frozen=True)
class Loaded:
    """The content of a file."""

    title: str  # of the file's format
    records: tuple[Record, ...]
    left_out: tuple[LeftOut, ...] = ()
    merged: tuple[str, ...] = ()  # columns of `Merged`

    @property
    def losses(self) -> str:
        """The results left out, by reason and name: "4 of unit bytes (peakmem_sum), 1 without a time (BM_Sort)"."""
        counts = Counter(one.reason for one in self.left_out)
        names = {reason: {one.name: None for one in self.left_out if one.reason == reason} for reason in counts}
        return ", ".join(f"{count} {reason} ({', '.join(names[reason])})" for reason, count in counts.items())


def load(path: Path, format_name: str | None = None, options: Options = Options()) -> Loaded:  # noqa: B008
    """Return the records of a file. Raises IngestError, with a one-line message, if any part of it is invalid."""
    try:
        form = _find(path, format_name, options)
        results = tuple(form.read(path, options))
        records = tuple(result for result in results if isinstance(result, Record))
        left_out = tuple(result for result in results if isinstance(result, LeftOut))
        merged = tuple(result.column for result in results if isinstance(result, Merged))
        loaded = Loaded(form.TITLE, records, left_out, merged)
        if not records:
            raise FormatError(f"contains no results{f'; left out: {loaded.losses}' if results else ''}")
        _check(records)
    except FormatError as error:
        raise IngestError(f"{path}: {error.message}") from error
    except (OSError, ValueError, OverflowError) as error:  # text that is not Unicode, a number that is too long
        raise IngestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError as error:
        raise IngestError(f"{path}: is nested too deeply") from error
    return loaded


def _find(path: Path, name: str | None, options: Options) -> Format:
    if name is None and options.mapping:
        name = "csv"
    if name is not None:
        if name not in FORMATS:
            raise FormatError(no_such("no format", name, FORMATS))
        return _module(name)
    head = b""
    if not path.is_dir():
        with path.open("rb") as file:
            head = file.read(HEAD).removeprefix(codecs.BOM_UTF8)
        if not head.strip():
            raise FormatError("is empty")
    for candidate in FORMATS:
        form = _module(candidate)
        if form.recognise(head, path):
            return form
    advice = f"name it with --format ({', '.join(FORMATS)})"
    if _looks_like_csv(head, path):
        columns = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
        advice = f"map a CSV's columns with --map latency_ms=COLUMN,operator=COLUMN,... (its header is {columns[:200]})"
    raise FormatError(f"has no known format; {advice}")


def _looks_like_csv(head: bytes, path: Path) -> bool:
    first = head.split(b"\n", 1)[0]
    return path.suffix.lower() in (".csv", ".tsv") or (first.count(b",") > 0 and first.lstrip()[:1] not in b"{[")


def _module(name: str) -> Format:
    module: Format = importlib.import_module(f"{__name__}.{FORMATS[name]}")
    return module


def _check(records: tuple[Record, ...]) -> None:
    """Check that the store accepts every record and no two contradict each other. Raises FormatError."""
    from groupbench.tracker.facts.identity import series_identity
    from groupbench.tracker.facts.record import RecordError, decode, encode
    from groupbench.tracker.store.checked import unstorable
    from groupbench.tracker.store.points import content_of

    seen: dict[tuple[str, str], object] = {}
    for number, record in enumerate(records, 1):
        cell = record.cell
        where = f"result {number} ({cell.operator} {cell.backend} {cell.shape})"
        try:
            decode(encode(record))
        except RecordError as error:
            raise FormatError(f"{where}: {error}") from error
        problem = unstorable(record)
        if problem:
            raise FormatError(f"{where}: {problem}")
        content = content_of(record)
        if seen.setdefault((record.run.id, series_identity(record)), content) != content:
            raise FormatError(f"{where}: contradicts an earlier result of the same run and series")
