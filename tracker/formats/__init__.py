"""Read files of other benchmarks as records. Each format is a module with two functions:

    recognise(head, path)   return whether a file that begins with `head` has this format; a folder has an empty head
    read(path, options)     yield its records, a LeftOut for each result that no record can hold, a Merged for each
                            column that may distinguish the rows of one cell, and a Noted for the whole file;
                            raise FormatError, which names the line or key

They share `common.Reader`: a format tells it where in the file a run, an environment and the results are.

Facts that a file lacks (commit, date, hardware) come from `Options`. Nothing is invented: if a required fact is missing
from both, the file is refused. Text instead of a number, an empty cell or a zero becomes a status.
"""

from __future__ import annotations

import codecs
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Cell, Commit, Environment, Record, Run
from groupbench.tracker.formats.common import LeftOut, Merged, Noted, Options, Read
from groupbench.tracker.formats.values import FormatError
from groupbench.tracker.text.wording import no_such

if TYPE_CHECKING:
    from groupbench.tracker.store.checked import Hashed

__all__ = ["FORMATS", "FormatError", "Loaded", "Options", "load"]

NAMES_IN_NOTE = 3
"""Names in a note, for each reason."""

NAMED = 300
"""Most characters quoted from an unknown file."""

_MOST_VALID = 1 << 17
"""Largest number of valid parts that are kept."""

HEAD_BYTES = 64 * 1024
"""Bytes at the start of a file by which its format is recognised."""


class UnknownFormat(FormatError):
    """A file has no known format."""


class Format(Protocol):
    TITLE: str

    def recognise(self, head: bytes, path: Path) -> bool: ...

    def read(self, path: Path, options: Options) -> Iterator[Read]: ...


FORMATS = {
    "records": "records",
    "tritonbench-json": "tritonbench_json",
    "helion": "helion",
    "v3": "v3",
    "nvbench": "nvbench",
    "google-benchmark": "google_benchmark",
    "pytest-benchmark": "pytest_benchmark",
    "asv": "asv",
    "github-action-benchmark": "github_action",
    "hyperfine": "hyperfine",
    "sglang": "sglang",
    "vllm": "vllm",
    "bencher": "bencher",
    "tritonbench-csv": "tritonbench_csv",
    "csv": "plain_csv",
}
"""Name on the command line: module here. They are tried in this order; plain CSV, which matches most, comes last."""


@dataclass
class Summary:
    """The number of results in one or several files, and the remarks on them."""

    titles: Counter[str] = field(default_factory=Counter)  # files by format
    results: int = 0
    failed: int = 0  # results without a correct value
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)  # by reason and name
    merged: dict[str, None] = field(default_factory=dict)  # columns of `Merged`
    notes: dict[str, Noted] = field(default_factory=dict)  # by text

    def add(self, other: Summary) -> None:
        self.titles += other.titles
        self.results += other.results
        self.failed += other.failed
        self.left_out += other.left_out
        self.merged |= other.merged
        self.notes = other.notes | self.notes

    @property
    def losses(self) -> str:
        """The results left out, by reason and name: "4 of unit bytes (peakmem_sum), 1 without a time (BM_Sort)"."""
        counts: Counter[str] = Counter()
        names: dict[str, list[str]] = {}
        for (reason, name), count in self.left_out.items():
            counts[reason] += count
            names.setdefault(reason, []).append(name)
        return ", ".join(f"{count:,} {reason} ({_few(names[reason])})" for reason, count in counts.items())


@dataclass(frozen=True)
class Loaded:
    """The content of a file."""

    records: tuple[Record, ...]
    summary: Summary


def _few(names: list[str]) -> str:
    more = len(names) - NAMES_IN_NOTE
    return ", ".join(names[:NAMES_IN_NOTE]) + (f", and {more:,} more" if more > 0 else "")


def described() -> list[tuple[str, str, str]]:
    """Return name, title and the first sentence of the description of each format."""
    modules = {name: importlib.import_module(f"{__name__}.{module}") for name, module in FORMATS.items()}
    texts = {name: " ".join((module.__doc__ or "").split("\n\n")) for name, module in modules.items()}
    return [(name, modules[name].TITLE, " ".join(text.split())) for name, text in texts.items()]


def load(path: Path, format_name: str | None = None, options: Options = Options()) -> Loaded:  # noqa: B008
    """Return the records of a file. Raises IngestError, with a one-line message, if any part of it is invalid."""
    with one_line(path):
        loaded = read(path, format_name, options)
        checked(loaded.records)
    return loaded


@contextmanager
def one_line(name: object) -> Iterator[None]:
    """Raise whatever reading a file may raise as IngestError with a one-line message that begins with its name."""
    try:
        yield
    except FormatError as error:
        raise IngestError(f"{name}: {error.message}") from error
    except (OSError, ValueError, OverflowError) as error:  # text that is not Unicode, a number that is too long
        raise IngestError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError as error:
        raise IngestError(f"{name}: is nested too deeply") from error


def read(path: Path, format_name: str | None, options: Options) -> Loaded:
    """Return the records of a file, which `checked` has not seen. `one_line` turns its exceptions into IngestError."""
    form = _find(path, format_name, options)
    try:
        results = tuple(form.read(path, options))
    except FormatError as error:
        raise _misread(form, path, error) from error
    records = tuple(result for result in results if isinstance(result, Record))
    summary = Summary(
        Counter([form.TITLE]),
        len(records),
        sum(record.status != "ok" for record in records),
        Counter((result.reason, result.name) for result in results if isinstance(result, LeftOut)),
        {result.column: None for result in results if isinstance(result, Merged)},
        {result.text: result for result in reversed(results) if isinstance(result, Noted)},
    )
    if not records:
        raise FormatError(f"contains no results{f'; left out: {summary.losses}' if summary.left_out else ''}")
    return Loaded(records, summary)


def _find(path: Path, name: str | None, options: Options) -> Format:
    if name is None and options.mapping:
        name = "csv"
    if name is not None:
        if name not in FORMATS:
            raise FormatError(no_such("no format", name, FORMATS))
        return _module(name)
    head = _head(path)
    if not path.is_dir() and not head.strip():
        raise UnknownFormat("is empty")
    form = _recognised(head, path)
    if form is not None:
        return form
    advice = f"name it with --format ({', '.join(FORMATS)})"
    if _looks_like_csv(head, path):
        columns = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
        advice = f"map a CSV's columns with --map latency_ms=COLUMN,operator=COLUMN,... (its header is {columns[:200]})"
        missing = [name for name in ("commit", "date") if getattr(options, name) is None]
        advice += "".join(f"; map {name} too, or give --{name}" for name in missing)
    raise UnknownFormat(f"has no known format; {advice}")


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)


def _recognised(head: bytes, path: Path) -> Format | None:
    return next((form for form in map(_module, FORMATS) if form.recognise(head, path)), None)


def _misread(form: Format, path: Path, error: FormatError) -> FormatError:
    """Return the error for a file that a format cannot read, with what the file is if it has another one."""
    head = _head(path)
    if form.recognise(head, path):
        return error
    real = _recognised(head, path)
    if real is None:
        return FormatError(f"does not look like {form.TITLE}: {error.message[:NAMED]}")
    return FormatError(f"looks like {real.TITLE}, not like {form.TITLE}; omit --format")


def _looks_like_csv(head: bytes, path: Path) -> bool:
    first = head.split(b"\n", 1)[0]
    return path.suffix.lower() in (".csv", ".tsv") or (first.count(b",") > 0 and first.lstrip()[:1] not in b"{[")


def _module(name: str) -> Format:
    module: Format = importlib.import_module(f"{__name__}.{FORMATS[name]}")
    return module


def checked(records: Iterable[Record]) -> list[Hashed]:
    """Check that the store accepts every record and no two contradict each other, and hash them. Raises FormatError."""
    from groupbench.tracker.store.checked import hashed

    seen: dict[tuple[str, str], int] = {}
    pairs = []
    for one, latency in hashed(_storable(records), "the file"):
        content = one.values["content"]
        if seen.setdefault((one.run.id, one.identity), content) != content:
            raise FormatError(
                f"{_place(one.number, one.cell)}: contradicts an earlier result of the same run and series"
            )
        pairs.append((one, latency))
    return pairs


_SMALL = {
    "run": Run(id="-", started=datetime(2000, 1, 1, tzinfo=UTC), commit=Commit(hash="-")),
    "environment": Environment(device="cpu"),
    "cell": Cell(operator="-", backend="-", shape="-", dtype="-"),
}
_valid: dict[int, Run | Environment | Cell] = {}
"""Parts of valid records by id(). Records share them, also those of other files: each is checked once."""


def _storable(records: Iterable[Record]) -> Iterator[tuple[int, Record]]:
    from groupbench.tracker.facts.record import RecordError, decode, encode
    from groupbench.tracker.store.checked import unstorable_parts, unstorable_result

    for number, record in enumerate(records, 1):
        parts = record.run, record.environment, record.cell
        known = _valid.keys() >= set(map(id, parts))
        try:
            decode(encode(msgspec.structs.replace(record, **_SMALL) if known else record))
            problem = (None if known else unstorable_parts(record.run, record.cell)) or unstorable_result(record)
        except RecordError as error:
            problem = str(error)
        if problem:
            raise FormatError(f"{_place(number, record.cell)}: {problem}")
        if not known:
            if len(_valid) >= _MOST_VALID:
                _valid.clear()
            _valid.update((id(part), part) for part in parts)
        yield number, record


def _place(number: int, cell: Cell) -> str:
    return f"result {number} ({cell.operator} {cell.backend} {cell.shape})"
