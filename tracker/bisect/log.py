"""The log of a search: JSON lines, what it belongs to first, then every comparison. A search goes on from it.

The search asks the same questions for the same answers, so replaying the answers brings it to where it stopped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.bisect.history import BisectError
from groupbench.tracker.bisect.search import Finding, Question
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.files import append_whole

VERSION = 1


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a log belongs to: findings of anything else are no findings of this."""

    bisect: int = VERSION
    repository: str
    good: str  # full hashes
    bad: str
    cell: dict[str, Any]  # operator, backend, shape, dtype, mode, seed, device, plugins
    metric: str
    direction: str
    all: bool
    confidence: float
    paths: tuple[str, ...] = ()
    package: str | None = None  # whose releases are searched, in the place of commits
    releases: tuple[str, ...] = ()  # versions, the oldest first
    bench: dict[str, Any] = {}  # settings of the comparison: min_effect, budget, python, only_changed, those of Recipe

    @property
    def identity(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


class UnwrittenError(BisectError):
    """A comparison that was made and cannot be kept."""

    exit_code = ExitCode.INCOMPLETE


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One comparison."""

    base: str
    head: str
    why: str
    budget: float
    finding: Finding


class Log:
    """Findings of an earlier run of the same search, and where those of this one go.

    path    the file; made with its folder where there is none
    resume  take what is in it; else it must not exist, unless `replace` says that it may be overwritten

    Raises BisectError where the file is no log, or one of something else.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool, replace: bool = False) -> None:
        self.path = path
        self.replayed = 0
        self._entries: list[Entry] = []
        if resume:
            found, self._entries, whole = _read(path)
            if found != header:
                fields = [name for name in header.__struct_fields__ if getattr(found, name) != getattr(header, name)]
                one = fields[0]
                raise BisectError(
                    f"{path} is of another search: its {one} is {getattr(found, one)}, not {getattr(header, one)}; "
                    "--resume alone goes on with it, another --log starts anew"
                )
            with path.open("r+b") as torn:
                torn.truncate(whole)  # a line that was being written when the search was stopped
        else:
            if path.exists() and not replace:
                raise BisectError(f"{path} exists: --resume goes on with it, another --log starts anew")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            append_whole(path, msgspec.json.encode(header) + b"\n", UnwrittenError)

    def known(self, question: Question) -> Finding | None:
        """The finding at this place of an earlier run; None once it has none left."""
        if self.replayed >= len(self._entries):
            return None
        entry = self._entries[self.replayed]
        if (entry.base, entry.head, entry.why, entry.budget) != (
            question.base,
            question.head,
            question.why,
            question.budget,
        ):
            raise BisectError(
                f"{self.path} holds {entry.base[:10]} against {entry.head[:10]} where the search asks for "
                f"{question.base[:10]} against {question.head[:10]}: the history or the program changed; start anew"
            )
        self.replayed += 1
        return entry.finding

    def add(self, question: Question, finding: Finding) -> None:
        """Kept at once: the next line may never be reached."""
        entry = Entry(base=question.base, head=question.head, why=question.why, budget=question.budget, finding=finding)
        append_whole(self.path, msgspec.json.encode(entry) + b"\n", UnwrittenError)


def read_header(path: Path) -> Header:
    """What a log is of. Raises BisectError."""
    return _read(path)[0]


def newest(folder: Path) -> Path:
    """The log that was written to last. Raises BisectError where there is none."""
    logs = sorted(folder.glob("bisect-*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise BisectError(f"there is no search to resume in {folder}; give --log FILE, or GOOD and BAD")
    return logs[-1]


def _read(path: Path) -> tuple[Header, list[Entry], int]:
    """(header, entries, bytes of whole lines)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BisectError(f"cannot read {path}: {error.strerror}") from error
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].splitlines()
    try:
        if not lines:
            raise msgspec.ValidationError("it has no first line")
        header = msgspec.json.decode(lines[0], type=Header)
        if header.bisect != VERSION:
            raise msgspec.ValidationError(f"its version is {header.bisect}, this program's is {VERSION}")
        return header, [msgspec.json.decode(line, type=Entry) for line in lines[1:]], whole
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BisectError(f"{path} is no log of a search: {error}") from error
