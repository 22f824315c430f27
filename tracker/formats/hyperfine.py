"""Read hyperfine's `--export-json`: a command is an operator, its parameters the shape, its runs one burst.

Times are wall-clock seconds. If a run ended with an error, which `--ignore-failure` allows, the result is wrong. The
file has neither commit, date nor machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import LONGEST_NAME
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, numbered, read_runs
from groupbench.tracker.formats.values import convert, load_json, read_bytes

TITLE = "hyperfine JSON"


class HyperfineResult(msgspec.Struct):
    command: str
    mean: float | None = None
    median: float | None = None
    times: list[float] | None = None
    exit_codes: list[int | None] | None = None
    parameters: dict[str, Any] = {}


class HyperfineDocument(msgspec.Struct):
    results: list[HyperfineResult]


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and b'"results"' in head and b'"command"' in head and b'"stddev"' in head


def read(path: Path, options: Options) -> Iterator[Read]:
    return read_runs([_HyperfineReader(read_bytes(path), options)])


class _HyperfineReader(Reader):
    name = "hyperfine"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options) -> None:
        content = load_json(data)
        self.document = convert(content, HyperfineDocument)
        loose = {name: value for name, value in content.items() if name != "results"}
        super().__init__(data, options, loose)

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        names = ((one, one.command, ",".join(f"{k}={v}" for k, v in one.parameters.items())) for one in self.results)
        for one, command, shape in numbered(names):
            cell = self.cell(command[:LONGEST_NAME], self.name, shape)
            middle = one.mean if one.median is None else one.median
            seconds = one.times or ([] if middle is None else [middle])
            failed = [code for code in one.exit_codes or [] if code != 0]
            if not seconds:
                yield ImportedResult(cell, status="error", message="hyperfine gave no time")
            elif failed:
                message = f"{len(failed)} of {len(one.exit_codes or [])} runs failed, with exit code {failed[0]}"
                yield ImportedResult(cell, [[second * 1e3 for second in seconds]], "wrong", message)
            else:
                yield ImportedResult(cell, [[second * 1e3 for second in seconds]])

    @property
    def results(self) -> list[HyperfineResult]:
        return self.document.results
