"""Read github-action-benchmark's `data.js`, and the lists that its custom tools read.

Each entry is a run: a suite at a commit. A benchmark is an operator, the suite the backend. A rate of calls
(`iter/sec`, `ops/ms`) becomes the time of one call. A value of another unit becomes a metric. Its direction is that of
the tool (`customBiggerIsBetter`), or of the unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from groupbench.tracker.facts.metrics import Better
from groupbench.tracker.facts.record import Run
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, distinct, read_runs
from groupbench.tracker.formats.values import (
    convert,
    date_if_valid,
    from_timestamp,
    load_json,
    number_of,
    read_bytes,
)

TITLE = "github-action-benchmark"

_PREFIX = b"window.BENCHMARK_DATA"
_BETTER: dict[str, Better] = {"customBiggerIsBetter": "higher", "customSmallerIsBetter": "lower"}


class ActionCommit(msgspec.Struct):
    id: str
    message: str | None = None
    timestamp: str | None = None


class ActionBench(msgspec.Struct):
    name: str
    value: float | int | str | None = None
    unit: str = ""


class ActionEntry(msgspec.Struct):
    benches: list[ActionBench]
    commit: ActionCommit | None = None
    date: float | None = None  # when it was measured, in ms
    tool: str | None = None


class ActionData(msgspec.Struct):
    entries: dict[str, list[ActionEntry]]


def recognise(head: bytes, path: Path) -> bool:
    start = head.lstrip()
    if start.startswith(_PREFIX):
        return True
    if start.startswith(b"{"):
        return b'"entries"' in head and (b'"benches"' in head or b'"repoUrl"' in head)
    return start.startswith(b"[") and all(key in head for key in (b'"name"', b'"unit"', b'"value"'))


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    text = data.lstrip()
    if text.startswith(_PREFIX):
        text = text.partition(b"=")[2].strip().removesuffix(b";")
    content = load_json(text)
    if isinstance(content, list):
        benches = convert(content, list[ActionBench])
        return read_runs([_ActionReader(data, options, TITLE, ActionEntry(benches))])
    entries = convert(content, ActionData).entries
    return read_runs(
        _ActionReader(msgspec.json.encode(entry), options, suite, entry)  # a later file has the same runs and more
        for suite, runs in entries.items()
        for entry in runs
    )


class _ActionReader(Reader):
    name = "github-action-benchmark"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options, suite: str, entry: ActionEntry) -> None:
        super().__init__(data, options)
        self.suite = self.part = suite
        self.entry = entry

    def run(self) -> Run:
        commit = self.entry.commit
        return self.make_run(
            commit=commit.id if commit else None,
            date=None if self.entry.date is None else from_timestamp(self.entry.date / 1e3),
            committed=date_if_valid(commit.timestamp) if commit else None,
            subject=(commit.message or "").partition("\n")[0] if commit else None,
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        better = _BETTER.get(self.entry.tool or "", "neither")
        return distinct(
            self.measured(bench.name or "-", self.suite, "-", number_of(bench.value), _unit(bench), better)
            for bench in self.entry.benches
        )


def _unit(bench: ActionBench) -> str:
    """Return the unit. Old versions of the tool left the rest of Go's line in it: `ns/op\\t  4 B/op`."""
    return bench.unit.partition("\t")[0].strip()
