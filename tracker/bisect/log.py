"""The log of a search, as JSON lines: a header with the search, then every comparison.

A search asks the same questions if it gets the same findings. So to continue it, the findings are replayed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.bisect.history import BisectError
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.record import UNREADABLE
from groupbench.tracker.text.files import append_whole

VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):  # earlier logs have a direction
    """The search of a log. The findings are valid for no other search."""

    bisect: int = VERSION
    repository: str
    good: str  # full hashes
    bad: str
    cell: dict[str, Any]  # operator, backend, shape, dtype, mode, seed, device, plugins, timing
    metric: str
    all: bool
    confidence: float
    paths: tuple[str, ...] = ()
    bench: dict[str, Any] = {}  # settings of the comparison: min_effect, budget, python, only_changed, those of Recipe

    @property
    def identity(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


def bench_of(**settings: Any) -> dict[str, Any]:
    """Return settings for `Header.bench`: those that are set, as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items() if value}


class LogError(BisectError):
    """A log cannot be read, or is of another search."""


class UnwrittenError(BisectError):
    """A finished comparison cannot be written to the log."""

    exit_code = ExitCode.INCOMPLETE


class LogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One comparison."""

    base: str
    head: str
    why: str
    budget: float
    finding: AbFinding


class Log:
    """A search's earlier findings, and the file to which new ones are added.

    Args:
        path: The file; it is created with the folder if necessary.
        resume: Read the findings in the file; otherwise it must not exist, unless `replace` is set.
        replace: Overwrite an existing file.

    Raises BisectError if the file is not a log, or belongs to another search.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool, replace: bool = False) -> None:
        self.path = path
        self.replayed = 0
        self._entries: list[LogEntry] = []
        if resume:
            logged, self._entries, whole = _read(path)
            if logged != header:
                fields = [name for name in header.__struct_fields__ if getattr(logged, name) != getattr(header, name)]
                one = fields[0]
                raise LogError(
                    f"{path} belongs to another search: its {one} is {getattr(logged, one)}, not "
                    f"{getattr(header, one)}; continue that search with --resume alone, or give another --log"
                )
            with path.open("r+b") as torn:
                torn.truncate(whole)  # drop a line that was being written when the search was stopped
        else:
            if path.exists() and not replace:
                raise BisectError(f"{path} exists: continue its search with --resume, or give another --log")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            append_whole(path, msgspec.json.encode(header) + b"\n", UnwrittenError)

    def replay(self, question: ComparisonRequest) -> AbFinding | None:
        """Return the earlier run's next finding, or None after the last. Raises BisectError if it does not fit."""
        if self.replayed >= len(self._entries):
            return None
        entry = self._entries[self.replayed]
        if (entry.base, entry.head, entry.why, entry.budget) != (
            question.base,
            question.head,
            question.why,
            question.budget,
        ):
            raise LogError(
                f"{self.path} has {entry.base[:10]} against {entry.head[:10]}, but the search asks for "
                f"{question.base[:10]} against {question.head[:10]}: the history or the program changed; start again "
                "without --resume"
            )
        self.replayed += 1
        return entry.finding

    def add(self, question: ComparisonRequest, finding: AbFinding) -> None:
        """Append a finding to the file at once, before an interrupt can lose it. Raises UnwrittenError."""
        entry = LogEntry(
            base=question.base, head=question.head, why=question.why, budget=question.budget, finding=finding
        )
        append_whole(self.path, msgspec.json.encode(entry) + b"\n", UnwrittenError)


def read_header(path: Path) -> Header:
    """Return a log's header. Raises BisectError."""
    return _read(path)[0]


def newest(folder: Path) -> Path:
    """Return the newest log. Raises BisectError if the folder has no log."""
    logs = sorted(folder.glob("bisect-*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise BisectError(f"no search to resume in {folder}; give --log FILE, or GOOD and BAD")
    return logs[-1]


def _read(path: Path) -> tuple[Header, list[LogEntry], int]:
    """Return (header, entries, complete lines' size in bytes). Raises BisectError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].splitlines()
    try:
        if not lines:
            raise msgspec.ValidationError("it has no first line")
        header = msgspec.json.decode(lines[0], type=Header)
        if header.bisect != VERSION:
            raise msgspec.ValidationError(f"its version is {header.bisect}, this program's is {VERSION}")
        return header, [msgspec.json.decode(line, type=LogEntry) for line in lines[1:]], whole
    except UNREADABLE as error:
        raise LogError(f"{path} is not the log of a search: {error}") from error
