"""Write the newest latency of each series, for services that read one result of each benchmark.

Only latencies that measure speed are written. A series' name is its operator, backend, mode, dtype and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import msgspec
from sqlalchemy.orm import Session

from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.record import TIMED, Record
from groupbench.tracker.store.records import numbered_records
from groupbench.tracker.text.cells import json_for


def write_bencher(session: Session, file: IO[bytes]) -> int:
    """Write Bencher Metric Format: `latency` in ns, with the range of the bursts. Return the number of series."""
    content = {
        name: {
            "latency": {
                "value": bursts.median * 1e6,
                "lower_value": min(bursts.low, bursts.median) * 1e6,
                "upper_value": max(bursts.high, bursts.median) * 1e6,
            }
        }
        for name, bursts in _newest(session)
    }
    file.write(json_for(file, msgspec.json.format(msgspec.json.encode(content), indent=2)) + b"\n")
    return len(content)


def write_github_action(session: Session, file: IO[bytes]) -> int:
    """Write a list for the tool `customSmallerIsBetter` of github-action-benchmark. Return the number of series."""
    content = [
        {"name": name, "unit": "ms", "value": bursts.median, "range": f"± {bursts.half_spread * bursts.median:.3g}"}
        for name, bursts in _newest(session)
    ]
    file.write(json_for(file, msgspec.json.format(msgspec.json.encode(content), indent=2)) + b"\n")
    return len(content)


def _newest(session: Session) -> Iterator[tuple[str, Bursts]]:
    """Yield name and statistics of the newest timed point of each series, by name."""
    newest: dict[str, Record] = {}
    for _, record in numbered_records(session):
        if record.status != "ok" or record.latency is None or record.latency.timing not in TIMED:
            continue
        cell = record.cell
        name = f"{cell.operator}/{cell.backend}/{cell.mode}/{cell.dtype}/{cell.shape}"
        before = newest.get(name)
        if before is None or before.run.started <= record.run.started:
            newest[name] = record
    for name in sorted(newest):
        latency = newest[name].latency
        assert latency is not None
        yield name, Bursts.of(latency.bursts_ms)
