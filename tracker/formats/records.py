"""groupbench's own records as JSON lines, which contain the run, the environment and the commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker.facts.record import Record, RecordError
from groupbench.tracker.facts.record import read as read_lines
from groupbench.tracker.formats.common import Options
from groupbench.tracker.formats.values import FormatError

TITLE = "groupbench records"


def recognise(head: bytes, path: Path) -> bool:
    first = head.lstrip().split(b"\n", 1)[0]
    return first.startswith(b"{") and re.match(rb'\{\s*"schema"\s*:\s*\d+\s*,', first) is not None


def read(path: Path, options: Options) -> Iterator[Record]:
    """Yield the records as `groupbench ingest` reads them. The options have no effect: records are complete."""
    with path.open("rb") as lines:
        try:
            for _, record in read_lines(lines):
                yield record
        except RecordError as error:
            raise FormatError(str(error)) from error
